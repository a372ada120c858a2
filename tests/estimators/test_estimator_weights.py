"""Weights of rows and classes, counts, calibrated probabilities, and data frames with columns of categories."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, OneHotEncoder

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


def test_weights_of_one_client_are_those_of_scikit_learn():
    X, z, _, w = table()
    ours = sp.FairFederatedRegressor(l2=0.2, standardise=False, fit_intercept=False, tol=1e-10).fit(
        X, z, sample_weight=w
    )
    theirs = Ridge(alpha=0.1 * w.sum(), fit_intercept=False).fit(X, z, sample_weight=w)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-6)
    y = z > 1
    settings = {"standardise": False, "fit_intercept": False, "tol": 1e-10, "l2": 0.1}
    for weight in ("balanced", {True: 5.0}, {False: 0.5, True: 2.0}):
        ours = sp.FairFederatedClassifier(class_weight=weight, **settings).fit(
            X, y, sample_weight=w
        )
        factor = w * np.where(y, w.sum() / 2 / w[y].sum(), w.sum() / 2 / w[~y].sum())
        if weight != "balanced":
            factor = w * np.where(y, weight.get(True, 1.0), weight.get(False, 1.0))
        theirs = LogisticRegression(C=1 / (0.1 * factor.sum()), fit_intercept=False, tol=1e-10)
        np.testing.assert_allclose(
            ours.coef_, theirs.fit(X, y, sample_weight=factor).coef_, rtol=1e-4
        )


def test_balanced_classes_raise_the_rare_one():
    X, z, clients, _ = table()
    y = z > 2
    plain, even = (
        sp.FairFederatedClassifier(class_weight=w).fit(X, y, clients=clients)
        for w in (None, "balanced")
    )
    assert even.predict(X)[y].mean() > plain.predict(X)[y].mean() + 0.1


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"class_weight": "balance"}, "did you mean 'balanced'"),
        ({"class_weight": {"yes": 2}}, "none of the classes in y"),
        ({"class_weight": {True: -1.0}}, "weights of rows are >= 0"),
        ({"calibrate": "platt"}, "Unknown calibrate"),
        ({"calibrate": "sigmoid", "epsilon": 1.0}, "without noise"),
    ],
)
def test_settings_of_the_classifier_that_are_refused(settings, words):
    X, z, clients, _ = table()
    with pytest.raises(InputError, match=words):
        sp.FairFederatedClassifier(**settings).fit(X, z > 0, clients=clients)


def test_counts_are_predicted_by_their_mean():
    X, z, clients, _ = table(600)
    y = np.random.default_rng(1).poisson(np.logaddexp(0, z))
    model = sp.FairFederatedRegressor("average", loss="poisson").fit(X, y, clients=clients)
    assert model.predict(X).min() > 0
    np.testing.assert_allclose(
        model.predict(X), np.logaddexp(0, X @ model.coef_ + model.intercept_)
    )
    assert model.score(X, y) > 0.2
    held = (
        sp.FairFederatedRegressor("average", loss="poisson", held_out=0.3)
        .fit(X, y, clients=clients)
        .joining_
    )
    assert np.isfinite(held.score).all()
    with pytest.raises(InputError, match="takes counts >= 0"):
        model.fit(X, y - 3, clients=clients)
    with pytest.raises(InputError, match="did you mean 'poisson'"):
        sp.FairFederatedRegressor(loss="poison").fit(X, y)


@pytest.mark.parametrize("how", ["sigmoid", "isotonic"])
def test_calibrated_probabilities_are_true_at_every_client(how):
    """CVaR moves probabilities towards the worst client; on new rows, calibrated ones are those that are seen."""
    random = np.random.default_rng(4)

    def draw(rows):
        clients = random.integers(0, 3, rows)
        X = random.standard_normal((rows, 2))
        return (
            X,
            random.uniform(size=rows) < 1 / (1 + np.exp(-(X[:, 0] + 1.5 * clients - 2.5))),
            clients,
        )

    X, y, clients = draw(3000)
    new, truth, owner = draw(6000)
    plain = sp.FairFederatedClassifier("agnostic").fit(X, y, clients=clients)
    made = sp.FairFederatedClassifier("agnostic", calibrate=how).fit(X, y, clients=clients)
    np.testing.assert_array_equal(made.coef_, plain.coef_)

    def off(p):
        return max(abs(p[owner == k, 1].mean() - truth[owner == k].mean()) for k in range(3))

    per_client = made.predict_proba(new, clients=owner)
    np.testing.assert_allclose(per_client.sum(1), 1)
    assert off(per_client) < 0.04 < off(plain.predict_proba(new))
    together = made.predict_proba(new)
    assert abs(together[:, 1].mean() - truth.mean()) < 0.03
    np.testing.assert_array_equal(made.predict(new), together.argmax(1) == 1)
    unknown = made.predict_proba(new[:5], clients=["elsewhere"] * 5)
    np.testing.assert_allclose(unknown, together[:5])


def test_three_classes_are_calibrated_too():
    X, z, clients, w = table(600)
    y = np.digitize(z, [-0.5, 1])
    made = sp.FairFederatedClassifier(calibrate="sigmoid").fit(
        X, y, clients=clients, sample_weight=1 + w
    )
    p = made.predict_proba(X, clients=clients)
    np.testing.assert_allclose(p.sum(1), 1)
    assert (p.argmax(1) == y).mean() > 0.5


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


def test_a_search_over_the_objective_in_a_sparse_pipeline_with_routing():
    X, z, clients, w = table(180)
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(
        town=np.where(np.abs(z) > 1, "far", "near")
    )
    columns = make_column_transformer(
        (OneHotEncoder(), ["town"]), (MaxAbsScaler(), ["a", "b", "c"]), sparse_threshold=1.0
    )
    with sklearn.config_context(enable_metadata_routing=True):
        model = sp.FairFederatedClassifier("cvar", tol=1e-4).set_fit_request(sample_weight=True)
        model = model.set_score_request(sample_weight=True)
        name = "fairfederatedclassifier__objective__alpha"
        search = GridSearchCV(
            make_pipeline(columns, model), {name: [0.2, 0.5, 1.0]}, cv=GroupKFold(3)
        )
        search.fit(frame, z > 0, clients=clients, sample_weight=1.0 + w, groups=np.arange(180) % 6)
    assert search.best_params_[name] in (0.2, 0.5, 1.0)
    found = search.best_estimator_[-1]
    assert found.clients_.tolist() == [0, 1, 2]
    assert len(set(search.cv_results_["mean_test_score"])) > 1 or found.certificate_ <= 1e-4
    encode = make_column_transformer(
        (OneHotEncoder(sparse_output=False), ["town"]), remainder="passthrough"
    )
    framed = encode.set_output(transform="pandas").fit_transform(frame)
    assert (
        sp.FairFederatedClassifier().fit(framed, z > 0).feature_names_in_.tolist()
        == framed.columns.tolist()
    )
