"""scikit-learn's own checks of estimators that fit privately."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

import scaffpd as sp

ESTIMATORS = [
    sp.FairFederatedClassifier(epsilon=100, noise_seed=0),
    sp.FairFederatedRegressor(epsilon=100, noise_seed=0),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_in_private(estimator, check):
    check(estimator)
