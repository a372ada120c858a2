"""`FairFederatedSurvival` after scikit-survival's conventions."""

import numpy as np
import pytest
from sklearn.base import clone

from cases.refusals import refuses
from scaffpd.estimators import FairFederatedSurvival


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    X = random.standard_normal((150, 3)) * [1, 10, 0.1]
    site = np.array(["a", "b", "c"])[np.arange(150) % 3]
    own = random.exponential(np.exp(-X @ [0.8, 0.05, 0.0])) * (1 + np.arange(150) % 3)
    left = random.exponential(3, 150)
    y = np.array(
        list(zip(own <= left, np.minimum(own, left), strict=True)),
        dtype=[("event", bool), ("time", float)],
    )
    return X, y, site


def test_coefficients_curves_and_scores(rows):
    X, y, site = rows
    model = FairFederatedSurvival().fit(X, y, clients=site)
    assert model.certificate_ < 1e-6
    assert model.coef_[0] == pytest.approx(0.8, abs=0.3)
    assert model.score(X, y, clients=site) > 0.65
    assert set(model.client_scores_) == {"a", "b", "c"}
    risk = model.predict(X)
    np.testing.assert_allclose(risk, X @ model.coef_)
    curves = model.predict_survival_function(X[:4], clients=site[:4])
    for z, who, curve in zip(risk, site, curves, strict=False):
        expected = np.exp(-model.baselines_[who](1.5) * np.exp(z))
        assert curve(1.5) == pytest.approx(expected)
        assert curve(0.0) == 1.0
        assert (np.diff(curve.values) <= 0).all()
    pairs = np.column_stack([y["time"], y["event"]])
    again = clone(model).fit(X, pairs, clients=site)
    np.testing.assert_array_equal(again.coef_, model.coef_)
    own = FairFederatedSurvival(personal=True).fit(X, y, clients=site)
    assert set(own.client_coef_) == {"a", "b", "c"}


def test_one_client_is_scikit_survivals_model(rows):
    from sksurv import linear_model as linear

    X, y, _ = rows
    ours = FairFederatedSurvival(l2=1e-9, tol=1e-8, objective="average")
    ours.fit(X, y, clients=np.zeros(150))
    theirs = linear.CoxPHSurvivalAnalysis(ties="efron", tol=1e-12).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)
    assert ours.score(X, y) == pytest.approx(theirs.score(X, y))
    other = theirs.predict_survival_function(X[:3])
    for a, b in zip(ours.predict_survival_function(X[:3]), other, strict=True):
        np.testing.assert_allclose(a(b.x), b.y, atol=1e-5)


def test_what_is_no_time_is_refused(rows):
    X, y, site = rows
    with refuses("survival-target"):
        FairFederatedSurvival().fit(X, y["time"], clients=site)
    with refuses("private-cox"):
        FairFederatedSurvival(epsilon=1.0, l2=0.1).fit(X, y, clients=site)
    with refuses("cox-intercept"):
        FairFederatedSurvival(fit_intercept=True).fit(X, y, clients=site)
