"""What a user may get wrong, and the one sentence that comes of it."""

import numpy as np
import pytest
from estimator_tables import table

import scaffpd as sp
from cases.refusals import refuses

pytestmark = pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")

X, Y, TARGETS, CLIENTS = table()
ROWS = len(X)


def with_missing(value):
    clients = CLIENTS.astype(object)
    clients[7] = value
    return clients


@pytest.mark.parametrize(
    ("code", "clients"),
    [
        ("client-missing", with_missing(None)),
        ("client-missing", with_missing(np.nan)),
        ("client-missing", with_missing(np.datetime64("NaT", "ns"))),
        ("client-missing", ["a", float("nan")] * (ROWS // 2)),
        ("client-missing", np.where(np.arange(ROWS) == 3, np.nan, 1.0)),
        ("clients-not-a-column", "hospital"),
        ("clients-not-a-column", 3),
        ("clients-not-a-column", np.ones((ROWS, 2))),
        ("clients-not-a-column", [["a"]] * ROWS),
        ("clients-length", CLIENTS[:-1]),
        ("client-name-twice", ["1", 1] * (ROWS // 2)),
    ],
)
def test_clients(code, clients):
    with refuses(code):
        sp.FairFederatedClassifier().fit(X, Y, clients=clients)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"objective": "chi-square!"}, "Unknown objective 'chi-square!': did you mean 'ChiSquare'"),
        ({"objective": sp.Agnostic}, "objective must be one such as ChiSquare"),
        ({"objective": sp.Average(prior=[1, 2])}, "Average has a prior for 2 clients"),
        ({"l2": "much"}, "Linear needs a number for l2, got 'much'."),
        ({"tol": 0}, "FairFederatedRegressor needs tol > 0 and finite, got 0."),
        ({"max_rounds": 0}, "FairFederatedRegressor needs a whole number max_rounds >= 1, got 0."),
        ({"algorithm": "ScaffPD"}, "as ScaffPD does; 'ScaffPD' does not."),
        ({"algorithm": sp.FedAvg}, "as ScaffPD does; FedAvg does not."),
        ({"algorithm": lambda _: sp.FedAvg()}, "tol needs a certificate, and there is none"),
        ({"algorithm": sp.ScaffPD(sp.Average())}, "algorithm must take an objective"),
        ({"random_state": -1}, "train needs a whole number seed >= 0, got -1."),
    ],
)
def test_parameters(parameters, sentence):
    with pytest.raises(sp.InputError, match=sentence):
        sp.FairFederatedRegressor(**parameters).fit(X, TARGETS, clients=CLIENTS)


def test_labels_and_numbers():
    with pytest.raises(sp.InputError, match="there is only one class here: 'ash'"):
        sp.FairFederatedClassifier().fit(X, ["ash"] * ROWS)
    with pytest.raises(sp.InputError, match="Column 1 has values too large to be standardised"):
        sp.FairFederatedRegressor().fit(
            np.column_stack([X[:, 0], np.full(ROWS, 1e300) * X[:, 1]]), TARGETS
        )
    with pytest.raises(sp.InputError, match="tol needs a certificate, and there is none:"):
        sp.FairFederatedClassifier(l2=0, fit_intercept=False, algorithm=sp.ScaffPD).fit(X, Y)
    with pytest.raises(sp.InputError, match="score takes sample_weight or clients, not both"):
        sp.FairFederatedClassifier().fit(X, Y).score(
            X, Y, sample_weight=np.ones(ROWS), clients=CLIENTS
        )


def test_a_constant_column_and_a_constant_target_are_no_mistake():
    constant = np.column_stack([X, np.full(ROWS, 3.0)])
    model = sp.FairFederatedRegressor().fit(constant, np.full(ROWS, 5.0), clients=CLIENTS)
    np.testing.assert_allclose(model.predict(constant), 5.0)
    assert model.score_by_client(constant, np.full(ROWS, 5.0), CLIENTS)["lima"] == pytest.approx(1)
