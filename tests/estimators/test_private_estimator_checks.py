"""scikit-learn's own checks of estimators that fit privately."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import scaffpd as sp


@pytest.mark.sample(18)
@pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")
@parametrize_with_checks([sp.FairFederatedClassifier(epsilon=100, noise_seed=0)])
def test_scikit_learn_in_private(estimator, check):
    check(estimator)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")
@parametrize_with_checks([sp.FairFederatedRegressor(epsilon=100, noise_seed=0)])
def test_scikit_learn_on_private_regression(estimator, check):
    check(estimator)
