"""As a scikit-learn user would: pipelines, searches, clients of every kind."""

import numpy as np
import pytest
import sklearn
from estimator_tables import table
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import (
    GridSearchCV,
    StratifiedKFold,
    cross_val_score,
)
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import scaffpd as sp
from cases.refusals import refuses

pytestmark = pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")

pandas = pytest.importorskip("pandas")


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def frame():
    X, y, targets, clients = table()
    columns = pandas.DataFrame(X, columns=[f"c{j}" for j in range(X.shape[1])])
    return (
        columns.assign(colour=np.array(["red", "green", "blue"])[np.arange(len(X)) % 3]),
        y,
        targets,
        clients,
    )


def test_a_pipeline_with_categories(routing):
    X, y, _, clients = frame()
    encode = ColumnTransformer(
        [
            ("numbers", StandardScaler(), [f"c{j}" for j in range(5)]),
            ("names", OneHotEncoder(sparse_output=False), ["colour"]),
        ]
    ).set_output(transform="pandas")
    model = sp.FairFederatedClassifier(l2=0.01).set_fit_request(clients=True)
    pipeline = Pipeline([("encode", encode), ("model", model)]).fit(X, y, clients=clients)
    assert pipeline["model"].clients_.tolist() == ["bonn", "lima", "oslo", "pisa"]
    assert pipeline["model"].feature_names_in_[-1] == "names__colour_red"
    assert pipeline["model"].n_features_in_ == 8
    assert pipeline.score(X, y) > 0.7
    assert pipeline.predict_proba(X[:3]).shape == (3, 2)


def test_a_grid_search_for_the_worst_served(routing):
    X, y, _, clients = table()
    model = (
        sp.FairFederatedClassifier().set_fit_request(clients=True).set_score_request(clients=True)
    )
    grid = {
        "model__objective": [sp.Average(), sp.ChiSquare(0.1), sp.Agnostic()],
        "model__l2": [0.01, 10.0],
    }
    pipeline = Pipeline([("scale", StandardScaler()), ("model", model)])
    search = GridSearchCV(pipeline, grid, cv=StratifiedKFold(3), error_score="raise").fit(
        X, y, clients=clients
    )
    assert search.best_params_["model__l2"] == 0.01
    assert search.best_estimator_["model"].clients_.tolist() == ["bonn", "lima", "oslo", "pisa"]
    folds = StratifiedKFold(3).split(X, y)
    byhand = [
        min(
            clone(pipeline)
            .set_params(**search.best_params_)
            .fit(X[a], y[a], clients=clients[a])[1]
            .score_by_client(StandardScaler().fit(X[a]).transform(X[b]), y[b], clients[b])
            .values()
        )
        for a, b in folds
    ]
    assert search.best_score_ == pytest.approx(np.mean(byhand))


def test_personal_models_are_scored_by_client_or_not_at_all(routing):
    X, y, _, clients = table()
    model = sp.FairFederatedClassifier(personal=True).set_fit_request(clients=True)
    given = {"cv": StratifiedKFold(3), "params": {"clients": clients}, "error_score": "raise"}
    with refuses("score-of-personal-models"):
        cross_val_score(model.set_score_request(clients=False), X, y, **given)
    scores = cross_val_score(model.set_score_request(clients=True), X, y, **given)
    assert len(scores) == 3
    a, b = next(StratifiedKFold(3).split(X, y))
    byhand = clone(model).fit(X[a], y[a], clients=clients[a])
    assert scores[0] == min(byhand.score_by_client(X[b], y[b], clients[b]).values())


@sklearn.config_context(enable_metadata_routing=False)
def test_without_routing_fit_takes_clients_directly():
    X, y, _, clients = table()
    assert len(sp.FairFederatedClassifier().fit(X, y, clients=clients).clients_) == 4
    assert (
        len(make_pipeline(StandardScaler(), sp.FairFederatedClassifier()).fit(X, y)[-1].clients_)
        == 1
    )
    pipeline = Pipeline([("scale", StandardScaler()), ("model", sp.FairFederatedClassifier())])
    assert len(pipeline.fit(X, y, model__clients=clients)[-1].clients_) == 4
    search = GridSearchCV(pipeline, {"model__l2": [0.01, 1.0]}, cv=2, error_score="raise")
    assert len(search.fit(X, y, model__clients=clients).best_estimator_[-1].clients_) == 4


@pytest.mark.parametrize(
    "kind",
    [
        list,
        np.asarray,
        lambda c: np.asarray(c, dtype=object),
        pandas.Series,
        pandas.Categorical,
        lambda c: pandas.Series(c).astype("category").cat.add_categories("nobody"),
        lambda c: pandas.Series(c, index=range(1000, 1000 + len(c)), dtype="string"),
    ],
)
def test_names_of_every_kind(kind):
    X, y, _, clients = table()
    expected = sp.FairFederatedClassifier().fit(X, y, clients=clients)
    found = sp.FairFederatedClassifier().fit(X, y, clients=kind(list(clients)))
    np.testing.assert_array_equal(found.coef_, expected.coef_)
    assert found.client_weights_ == expected.client_weights_
    assert found.clients_.tolist() == ["bonn", "lima", "oslo", "pisa"]


def test_a_label_that_some_clients_have_never_seen():
    X, y, _, clients = table(classes=4)
    keep = ~((clients == "oslo") & (y != "ash")) & ~((clients == "pisa") & (y == "date"))
    X = X[keep]
    y = y[keep]
    clients = clients[keep]
    model = sp.FairFederatedClassifier(sp.Agnostic()).fit(X, y, clients=clients)
    assert model.classes_.tolist() == ["ash", "birch", "cedar", "date"]
    assert model.coef_.shape == (4, 5)
    assert model.intercept_.shape == (4,)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1)
    assert (model.predict(X) == model.classes_[model.decision_function(X).argmax(1)]).all()
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))


def test_scores_by_client():
    X, y, targets, clients = table()
    model = sp.FairFederatedClassifier().fit(X, y, clients=clients)
    by_client = model.score_by_client(X, y, clients)
    assert by_client == model.client_scores_
    assert by_client["lima"] == np.mean(model.predict(X[clients == "lima"]) == y[clients == "lima"])
    assert model.score(X, y, clients=clients) == min(by_client.values())  # a fifth of four is one
    assert model.score(X, y) == pytest.approx(
        np.mean(list(by_client.values()))
    )  # they have as many rows each
    ridge = sp.FairFederatedRegressor().fit(X, targets, clients=clients)
    counts = {name: (clients == name).sum() for name in ridge.client_scores_}
    mean = sum(counts[name] * score for name, score in ridge.client_scores_.items()) / len(X)
    assert ridge.score(X, targets) == pytest.approx(mean)
    assert ridge.score(X, targets, clients=clients) == min(ridge.client_scores_.values())
    many = np.arange(len(X)) % 11
    worst = sorted(ridge.score_by_client(X, targets, many).values())[:3]
    assert ridge.score(X, targets, clients=many) == pytest.approx(np.mean(worst))


def test_a_gap_that_is_not_reached_is_a_warning():
    X, y, _, clients = table()
    with pytest.warns(
        ConvergenceWarning, match=r"round limit after 1 round, certified gap .* larger max_rounds"
    ):
        model = sp.FairFederatedClassifier(max_rounds=1, tol=1e-12).fit(X, y, clients=clients)
    assert model.status_ == "round limit"
    assert model.predict(X).shape == y.shape
    sp.FairFederatedClassifier(max_rounds=1, tol=None, l2=0).fit(
        X, y, clients=clients
    )  # nothing asked, nothing said


def test_an_interrupt_is_not_swallowed(monkeypatch):
    """A search over a grid must end when it is told to; `train` alone returns what it has."""
    X, y, _, clients = table()

    def interrupted(self, federation, state):
        raise KeyboardInterrupt

    monkeypatch.setattr(sp.MinimaxNewton, "round", interrupted)
    model = sp.FairFederatedClassifier()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y, clients=clients)
    assert model.status_ == "interrupted"


def test_forgotten_clients_are_said():
    X, y, _, _ = table()
    with pytest.warns(
        UserWarning, match=r"FairFederatedClassifier.fit got no clients.*groups= does not reach fit"
    ):
        sp.FairFederatedClassifier().fit(X, y)


def test_objectives_have_names():
    X, y, _, site = table()
    by_name, by_hand = (
        sp.FairFederatedClassifier(goal).fit(X, y, clients=site) for goal in ("c-var", sp.CVaR(0.2))
    )
    np.testing.assert_array_equal(by_name.coef_, by_hand.coef_)
