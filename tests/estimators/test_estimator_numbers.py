"""The numbers: against scikit-learn with one client, against `train` with several."""

from functools import partial

import numpy as np
import pytest
from estimator_tables import table
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

import scaffpd as sp

pytestmark = pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")

TIGHT = {"tol": 1e-12, "max_rounds": 500}


def near(a, b, tolerance=1e-6):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("classes", [2, 3])
def test_one_client_is_logistic_regression(classes):
    """C Σ ℓ + ½‖w‖² is (1/m) Σ ℓ + (l2/2)‖w‖² for l2 = 1/(C m)."""
    X, y, _, _ = table(classes=classes)
    X = StandardScaler().fit_transform(X)
    C = 0.7
    theirs = LogisticRegression(C=C, fit_intercept=False, tol=1e-12, max_iter=10_000).fit(X, y)
    ours = sp.FairFederatedClassifier(
        l2=1 / (C * len(X)), fit_intercept=False, standardise=False, **TIGHT
    ).fit(X, y)
    near(ours.coef_, theirs.coef_)
    near(ours.predict_proba(X), theirs.predict_proba(X))
    near(ours.decision_function(X), theirs.decision_function(X), 1e-5)
    assert (ours.predict(X) == theirs.predict(X)).all()
    assert ours.client_weights_ == {"all": 1.0}


def test_one_client_is_ridge():
    """‖Xw − y‖² + α‖w‖² is m times (1/m)‖Xw − y‖² + (l2/2)‖w‖² for α = l2 m/2; with mean 0, no
    intercept is shrunk.
    """
    X, _, y, _ = table()
    l2 = 0.3
    theirs = Ridge(alpha=l2 * len(X) / 2, tol=1e-12).fit(StandardScaler().fit_transform(X), y)
    ours = sp.FairFederatedRegressor(l2=l2, **TIGHT).fit(X, y)
    near(ours.coef_ * X.std(0), theirs.coef_)
    near(ours.predict(X), theirs.predict(StandardScaler().fit_transform(X)))
    assert ours.score(X, y) == pytest.approx(
        theirs.score(StandardScaler().fit_transform(X), y), abs=1e-6
    )


@pytest.mark.parametrize("classes", [2, 3])
def test_several_clients_are_the_cohort(classes):
    """Bit for bit the x of `train` on a cohort of the same rows, standardised."""
    X, y, _, clients = table(classes=classes)
    names = sorted(set(clients))
    labels = np.unique(y, return_inverse=True)[1]
    parts = [X[clients == name] for name in names]
    mean, deviation = sp.data.silos.standardiser(parts)
    pairs = [
        ((part - mean) / deviation, labels[clients == name])
        for part, name in zip(parts, names, strict=True)
    ]
    ridge = [0.02] * X.shape[1] + [1e-6]  # and hardly any on the intercept
    model = sp.Linear("softmax" if classes > 2 else "logistic", ridge, intercept=True)
    expected = sp.train(sp.fair(sp.CVaR(0.4)), sp.Cohort(pairs, model, names), tol=1e-9)
    ours = sp.FairFederatedClassifier(sp.CVaR(0.4), l2=0.02, tol=1e-9).fit(X, y, clients=clients)
    np.testing.assert_array_equal(ours.result_.x, expected.x)
    assert ours.client_weights_ == dict(zip(names, expected.weights.tolist(), strict=True))
    assert ours.certificate_ == expected.certificate <= 1e-9
    assert ours.n_rounds_ == ours.n_iter_ == expected.rounds == len(ours.history_) - 1
    weights, offset = model.reshape(expected.x, X.shape[1])
    near(
        ours.decision_function(X).reshape(len(X), -1),
        (X - mean) / deviation @ weights + offset,
        1e-9,
    )


@pytest.mark.parametrize("unit", [1e-13, 1e13])
def test_units_change_no_prediction(unit):
    X, y, t, clients = table()
    Z = X * np.append(unit, np.ones(X.shape[1] - 1))
    one, other = (
        sp.FairFederatedClassifier(l2=0.02).fit(rows, y, clients=clients) for rows in (X, Z)
    )
    near(other.predict_proba(Z), one.predict_proba(X), 1e-5)
    one, other = (
        sp.FairFederatedRegressor(l2=0.02).fit(X, goal, clients=clients) for goal in (t, t * unit)
    )
    near(other.predict(X) / unit, one.predict(X), 1e-5)


def test_a_method_by_name_reaches_the_same_point():
    X, y, _, clients = table()
    settings = {"l2": 0.05, "tol": 1e-9, "fit_intercept": False}
    base = sp.FairFederatedClassifier(**settings).fit(X, y, clients=clients)
    by_name = sp.FairFederatedClassifier(algorithm=sp.ScaffPD, max_rounds=5000, **settings)
    near(by_name.fit(X, y, clients=clients).coef_, base.coef_, 1e-3)
    ready = sp.FairFederatedClassifier(algorithm=sp.MinimaxNewton, **settings)
    np.testing.assert_array_equal(ready.fit(X, y, clients=clients).coef_, base.coef_)
    drawn = [
        sp.FairFederatedClassifier(
            algorithm=partial(sp.ScaffPD, batch_size=8), tol=None, max_rounds=3
        )
        .set_params(random_state=seed)
        .fit(X, y, clients=clients)
        .coef_
        for seed in (1, 1, 2, np.random.RandomState(1))
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("strength", [True, 30.0])
@pytest.mark.parametrize("classes", [None, 2, 3])
def test_personal_models_are_those_of_the_cohort(classes, strength):
    """Rows are answered by their clients' own models, those of strangers by the shared one."""
    X, labels, target, clients = table(classes=classes or 2)
    names = sorted(set(clients))
    y = target if classes is None else labels
    kind = sp.FairFederatedRegressor if classes is None else sp.FairFederatedClassifier
    ours = kind(personal=strength, l2=0.05).fit(X, y, clients=clients)
    parts = [X[clients == name] for name in names]
    mean, deviation = sp.data.silos.standardiser(parts)
    goal = (y - y.mean()) / y.std() if classes is None else np.unique(y, return_inverse=True)[1]
    pairs = [
        ((part - mean) / deviation, goal[clients == n])
        for part, n in zip(parts, names, strict=True)
    ]
    loss = {None: "squared", 2: "logistic", 3: "softmax"}[classes]
    model = sp.Linear(loss, [0.05] * X.shape[1] + [1e-6], intercept=True)
    personal = sp.Personal(model) if strength is True else sp.Personal(model, strength)
    cohort = sp.Cohort(pairs, personal, names)
    found = sp.train(sp.fair(sp.Average(prior=[len(p) for p in parts])), cohort, tol=1e-6)
    near(ours.result_.personal, found.personal, 1e-6)
    new = np.where(clients == names[0], "nowhere", clients)
    z = ours._linear(X, new).reshape(len(X), -1)
    for k, name in enumerate(names):
        x = found.x if k == 0 else found.personal[k]
        expected = model.outputs(x, pairs[k][0])
        if classes is None:
            expected = expected * y.std() + y.mean()
        near(z[clients == name], expected, 1e-6)
    assert (ours.predict(X) == ours.predict(X, np.full(len(X), "nowhere"))).all()
    own = ours.score_by_client(X, y, clients)
    assert own == pytest.approx(ours.client_scores_)
    assert np.mean(list(own.values())) > np.mean(
        list(kind(l2=0.05).fit(X, y, clients=clients).client_scores_.values())
    )


def test_a_ridge_by_evidence_is_that_of_the_cohort():
    X, _, y, clients = table()
    ours = sp.FairFederatedRegressor().fit(X, y, clients=clients)
    names = sorted(set(clients))
    Z = (X - X.mean(0)) / X.std(0)
    t = (y - y.mean()) / y.std()
    pairs = [(Z[clients == name], t[clients == name]) for name in names]
    cohort = sp.Cohort(pairs, sp.Linear("squared", "auto", intercept=True), names)
    found = sp.train(sp.fair(sp.ChiSquare(0.1)), cohort, tol=1e-6)
    near(ours.result_.x, found.x, 1e-9)
