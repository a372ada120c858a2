"""scikit-learn's own checks of an estimator, all of them: no exception is asked for."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import scaffpd as sp

ESTIMATORS = [
    sp.FairFederatedClassifier(),
    sp.FairFederatedRegressor(),
]


@pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")
@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.sample(15)
@pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")
@parametrize_with_checks(
    [sp.FairFederatedRegressor(sp.CVaR(0.5), standardise=False, fit_intercept=False)]
)
def test_scikit_learn_with_other_options(estimator, check):
    check(estimator)
