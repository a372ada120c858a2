"""The Jacobian of the proximal step: properties that it has everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from objective_cases import ALL, steps


@pytest.mark.parametrize("kind", ALL)
@given(step=steps())
@settings(deadline=None, max_examples=10, derandomize=True)
def test_jacobian_is_symmetric_between_zero_and_sigma(kind, step):
    objective = step.objective(kind)
    jacobian = objective.prox_step(step.losses, step.old, step.sigma).jacobian() / step.sigma
    assert jacobian.shape == (len(step.losses), len(step.losses))
    np.testing.assert_array_equal(jacobian, jacobian.T)
    values = np.linalg.eigvalsh(jacobian)
    assert values.min() >= -1e-14
    assert values.max() <= 1.0 + 1e-14
    if objective.simplex:  # weights keep summing to one
        np.testing.assert_allclose(jacobian.sum(axis=0), 0.0, atol=1e-13)
