"""Weights of rows, counts, and data frames with columns of categories."""

import numpy as np
import pandas as pd
import pytest

import scaffpd as sp
from scaffpd.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*got no clients")


def table(rows=240, seed=0):
    random = np.random.default_rng(seed)
    X = random.standard_normal((rows, 3))
    clients = random.integers(0, 3, rows)
    z = X @ [1.0, -1.0, 0.5] + 0.8 * clients - 0.5
    return X, z + random.standard_normal(rows), clients, random.integers(0, 4, rows)


@pytest.mark.parametrize("kind", ["classes", "three classes", "numbers", "counts"])
def test_whole_weights_are_repeated_rows(kind):
    X, z, clients, w = table()
    y = {
        "classes": z > 0,
        "three classes": np.digitize(z, [-0.5, 1]),
        "counts": np.round(np.exp(z / 2)),
        "numbers": z,
    }[kind]
    make = sp.FairFederatedClassifier if "classes" in kind else sp.FairFederatedRegressor
    settings = {"objective": "cvar", "l2": 0.01, "tol": 1e-8} | (
        {"loss": "poisson"} if kind == "counts" else {}
    )
    weighted = make(**settings).fit(X, y, clients=clients, sample_weight=2.5 * w)
    repeated = make(**settings).fit(
        np.repeat(X, w, 0), np.repeat(y, w), clients=np.repeat(clients, w)
    )
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(weighted.intercept_, repeated.intercept_, rtol=1e-5, atol=1e-7)
    assert weighted.certificate_ <= 1e-8
    for name in ("client_scores_", "client_losses_", "client_weights_"):
        assert getattr(weighted, name) == pytest.approx(
            getattr(repeated, name), rel=1e-5, abs=1e-7
        ), name
    plain = make(**settings).fit(X, y, clients=clients)
    assert np.abs(plain.coef_ - weighted.coef_).max() > 1e-3


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lambda w, c: np.where(c == 1, 0, w), "All rows of client '1' have weight zero"),
        (lambda w, c: w - 1, "weights of rows are >= 0"),
        (lambda w, c: w[:-1], "sample_weight"),
        (lambda w, c: np.full(len(w), np.nan), "NaN"),
    ],
)
def test_weights_that_are_refused(weights, words):
    X, z, clients, w = table()
    with pytest.raises(ValueError, match=words):
        sp.FairFederatedRegressor().fit(X, z, clients=clients, sample_weight=weights(w, clients))


def test_counts_are_predicted_by_their_mean():
    X, z, clients, _ = table(600)
    z = z / np.abs(z).max()
    y = np.random.default_rng(1).poisson(np.exp(z))
    model = sp.FairFederatedRegressor("average", loss="poisson").fit(X, y, clients=clients)
    assert model.predict(X).min() > 0
    np.testing.assert_allclose(model.predict(X), np.exp(X @ model.coef_ + model.intercept_))
    assert model.score(X, y) > 0.02
    logs = np.random.default_rng(2).normal(1.0, 0.5, len(y))
    exposed = np.random.default_rng(1).poisson(np.exp(z + logs))
    more = sp.FairFederatedRegressor("average", loss="poisson").fit(
        X, exposed, clients=clients, offset=logs
    )
    np.testing.assert_allclose(more.coef_, model.coef_, atol=0.1)
    np.testing.assert_allclose(more.predict(X, offset=logs), np.exp(logs) * more.predict(X))
    with pytest.raises(InputError, match="offset needs a finite number"):
        more.fit(X, exposed, clients=clients, offset=logs[:-1])
    with pytest.raises(InputError, match="offset needs loss"):
        sp.FairFederatedRegressor().fit(X, y, clients=clients, offset=logs)
    with pytest.raises(InputError, match="takes counts >= 0"):
        model.fit(X, y - 3, clients=clients)
    with pytest.raises(InputError, match="did you mean 'poisson'"):
        sp.FairFederatedRegressor(loss="poison").fit(X, y)


def test_a_column_of_categories_is_named_with_what_to_do():
    X, z, clients, _ = table()
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(
        town=pd.Categorical(np.where(z > 0, "x", "y"))
    )
    for column in (frame.town, frame.town.astype(str), pd.Categorical(clients)):
        with pytest.raises(InputError, match=r"Column .town. holds .*make_column_transformer"):
            sp.FairFederatedClassifier().fit(frame.assign(town=column), z > 0, clients=clients)
    mixed = frame.drop(columns="town").astype(object)
    fitted = sp.FairFederatedClassifier().fit(mixed, z > 0, clients=clients)
    assert fitted.n_features_in_ == 3
    assert fitted.feature_names_in_.tolist() == ["a", "b", "c"]
