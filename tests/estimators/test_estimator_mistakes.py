"""What a user may get wrong, and the one sentence that comes of it."""

from __future__ import annotations

import numpy as np
import pytest
from estimator_tables import table

import scaffpd as sp

pytestmark = pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")

X, Y, TARGETS, CLIENTS = table()
ROWS = len(X)


def with_missing(value):
    clients = CLIENTS.astype(object)
    clients[7] = value
    return clients


@pytest.mark.parametrize(
    ("parameters", "clients", "sentence"),
    [
        ({}, with_missing(None), "clients has a missing value (row 7): every row needs a client"),
        ({}, with_missing(np.nan), "clients has a missing value (row 7)"),
        ({}, with_missing(np.datetime64("NaT", "ns")), "clients has a missing value (row 7)"),
        ({}, ["a", float("nan")] * (ROWS // 2), "clients has a missing value (row 1)"),
        ({}, np.where(np.arange(ROWS) == 3, np.nan, 1.0), "clients has a missing value (row 3)"),
        (
            {},
            "hospital",
            "clients must have one value per row, got 'hospital': pass the column itself.",
        ),
        ({}, 3, "clients must have one value per row, got 3."),
        (
            {},
            CLIENTS[:-1],
            f"There are {ROWS} rows but {ROWS - 1} values in clients: give one client per row.",
        ),
        (
            {},
            np.ones((ROWS, 2)),
            f"clients must have one value per row, got an array of shape ({ROWS}, 2).",
        ),
        ({}, [["a"]] * ROWS, "clients must be names or numbers, one per row."),
        ({}, ["1", 1] * (ROWS // 2), "Two clients are named '1'; names must differ."),
        (
            {"objective": "chi-square!"},
            None,
            "Unknown objective 'chi-square!': did you mean 'ChiSquare'?",
        ),
        ({"objective": sp.Agnostic}, None, "objective must be one such as ChiSquare(rho=0.1)"),
        (
            {"objective": sp.Average(prior=[1, 2])},
            CLIENTS,
            "Average has a prior for 2 clients, but there are 4.",
        ),
        ({"l2": "much"}, None, "Linear needs a number for l2, got 'much'."),
        ({"tol": 0}, None, "{} needs tol > 0 and finite, got 0."),
        ({"max_rounds": 0}, None, "{} needs a whole number max_rounds >= 1, got 0."),
        (
            {"algorithm": "ScaffPD"},
            None,
            "algorithm must take an objective, as ScaffPD does; 'ScaffPD' does not.",
        ),
        (
            {"algorithm": sp.FedAvg},
            None,
            "algorithm must take an objective, as ScaffPD does; FedAvg does not.",
        ),
        (
            {"algorithm": sp.FedAvg(local_steps=2)},
            None,
            "tol needs a certificate, and there is none: FedAvg",
        ),
        (
            {"algorithm": sp.ScaffPD(sp.Average()), "objective": sp.Agnostic()},
            None,
            "The algorithm brings its own objective: leave objective out, or pass algorithm=ScaffPD.",
        ),
        ({"random_state": -1}, None, "train needs a whole number seed >= 0, got -1."),
    ],
)
@pytest.mark.parametrize("kind", [sp.FairFederatedClassifier, sp.FairFederatedRegressor])
def test_one_sentence(kind, parameters, clients, sentence):
    y = Y if kind is sp.FairFederatedClassifier else TARGETS
    with pytest.raises(sp.InputError) as caught:
        kind(**parameters).fit(X, y, clients=clients)
    assert str(caught.value).startswith(sentence.format(kind.__name__))
    assert "\n" not in str(caught.value)


def test_labels_and_numbers():
    with pytest.raises(sp.InputError, match="there is only one class here: 'ash'"):
        sp.FairFederatedClassifier().fit(X, ["ash"] * ROWS)
    with pytest.raises(sp.InputError, match="Column 1 has values too large to be standardised"):
        sp.FairFederatedRegressor().fit(
            np.column_stack([X[:, 0], np.full(ROWS, 1e300) * X[:, 1]]), TARGETS
        )
    with pytest.raises(sp.InputError, match="tol needs a certificate, and there is none:"):
        sp.FairFederatedClassifier(l2=0).fit(X, Y)
    with pytest.raises(sp.InputError, match="score takes sample_weight or clients, not both"):
        sp.FairFederatedClassifier().fit(X, Y).score(
            X, Y, sample_weight=np.ones(ROWS), clients=CLIENTS
        )


def test_a_constant_column_and_a_constant_target_are_no_mistake():
    constant = np.column_stack([X, np.full(ROWS, 3.0)])
    model = sp.FairFederatedRegressor().fit(constant, np.full(ROWS, 5.0), clients=CLIENTS)
    np.testing.assert_allclose(model.predict(constant), 5.0)
    assert model.score_by_client(constant, np.full(ROWS, 5.0), CLIENTS)["lima"] == pytest.approx(1)
