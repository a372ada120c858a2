"""What joining says of four hospitals, held against scikit-learn and the corrected t-test by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss

import scaffpd as sp
from scaffpd.study.joining import AVERAGE, FAIR

L2 = 0.03
RHO = 0.1


def with_ones(X):
    return np.column_stack([X, np.ones(len(X))])


def fitted_by_sklearn(clients):
    """argmin (1/N) Σ_i mean log-loss of i + (l2/2)‖x‖², the intercept in x: all rows at once, weighted."""
    A = np.concatenate([with_ones(X) for X, _ in clients])
    y = np.concatenate([labels for _, labels in clients])
    weights = np.concatenate(
        [np.full(len(labels), 1 / (len(clients) * len(labels))) for _, labels in clients]
    )
    # scikit-learn minimises C Σ weight · loss + ½‖x‖²
    return LogisticRegression(
        C=1 / L2, fit_intercept=False, solver="newton-cholesky", tol=1e-12
    ).fit(A, y, weights)


@pytest.fixture(scope="module")
def found():
    silos = sp.data.heart_disease(test_fraction=0.3)
    model = sp.Linear("logistic", L2, intercept=True)
    several = [
        sp.joining(
            silos.train,
            silos.test,
            model,
            sp.ChiSquare(RHO),
            names=silos.names,
            strength=100.0,
            splits=k,
        )
        for k in (1, 3)
    ]
    return silos, *several


def test_the_average_model_is_scikit_learns(found):
    silos, first, _ = found
    model = fitted_by_sklearn(silos.train)
    k = first.models.index(AVERAGE)
    for i, (X, y) in enumerate(silos.test):
        assert first.score[k, i] == pytest.approx(
            accuracy_score(y, model.predict(with_ones(X))), abs=1e-12
        )
        assert first.loss[k, i] == pytest.approx(
            log_loss(y, model.predict_proba(with_ones(X))), abs=1e-3
        )


def test_intervals_over_splits_are_those_of_the_corrected_t_test(found):
    """sd·√(1/J + n₂/n₁) over J = 3 splits: with ρ = 0.1 the fair model's change of accuracy, hospital by hospital."""
    silos, first, mean = found
    held, trained = (sum(len(y) for _, y in part) for part in (silos.test, silos.train))
    tables = mean.errors.tables[:, [mean.models.index(AVERAGE), mean.models.index(FAIR)]]
    changes = tables[:, 0] - tables[:, 1]
    halves = student.ppf(0.975, 2) * changes.std(0, ddof=1) * np.sqrt(1 / 3 + held / trained)
    for i, one in enumerate(np.eye(4)):
        change, half, _ = mean.change(FAIR, AVERAGE, lambda _, one=one: one)
        assert (change, half) == pytest.approx((changes[:, i].mean(), halves[i]))
    np.testing.assert_allclose(1 - tables[0, 0], first.score[first.models.index(AVERAGE)])
