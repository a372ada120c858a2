"""scikit-learn's own checks of estimators that fit privately."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import scaffpd as sp

REASON = "with epsilon, weights of rows are refused: the steepness would follow from the records"
WEIGHTED = (
    *(f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")),
    *(
        f"check_sample_weights_{kind}"
        for kind in ("pandas_series", "not_an_array", "list", "shape", "not_overwritten")
    ),
)


def refused(estimator):
    """What private estimators cannot pass; `test_weights_of_rows_are_refused_in_private` has the
    sentence.
    """
    return dict.fromkeys(WEIGHTED, REASON)


@pytest.mark.sample(11)
@pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")
@parametrize_with_checks(
    [sp.FairFederatedClassifier(epsilon=100, noise_seed=0)], expected_failed_checks=refused
)
def test_scikit_learn_in_private(estimator, check):
    check(estimator)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*got no clients:UserWarning")
@parametrize_with_checks(
    [sp.FairFederatedRegressor(epsilon=100, noise_seed=0)], expected_failed_checks=refused
)
def test_scikit_learn_on_private_regression(estimator, check):
    check(estimator)
