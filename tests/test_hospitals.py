"""What joining says of four hospitals, held against scikit-learn and a corrected t-test by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss

import scaffpd as sp
from scaffpd.study.gains import AVERAGE

L2 = 0.03
RHO = 0.1


def with_ones(X):
    return np.column_stack([X, np.ones(len(X))])


def fitted_by_sklearn(clients):
    """argmin (1/N) Σ_i mean log-loss of i + (l2/2)‖x‖², the intercept in x: all rows at once,
    weighted.
    """
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
    model = sp.Personal(sp.Linear("logistic", L2, intercept=True), 100.0)
    return silos, sp.joining(silos.train, silos.test, model, sp.ChiSquare(RHO), names=silos.names)


def test_the_average_model_is_scikit_learns(found):
    silos, first = found
    model = fitted_by_sklearn(silos.train)
    k = first.models.index(AVERAGE)
    for i, (X, y) in enumerate(silos.test):
        assert first.score[k, i] == pytest.approx(
            accuracy_score(y, model.predict(with_ones(X))), abs=1e-12
        )
        assert first.loss[k, i] == pytest.approx(
            log_loss(y, model.predict_proba(with_ones(X))), abs=1e-3
        )
