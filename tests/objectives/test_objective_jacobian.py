"""The Jacobian of the proximal step: finite differences where it exists, properties everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from objective_cases import ALL, Step, build, steps


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ALL)
def test_jacobian_is_the_derivative_of_prox(kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    n = int(random.integers(2, 8))
    losses = random.exponential(size=n)
    old = random.dirichlet(np.ones(n))
    prior = random.uniform(0.2, 1.0, n) if seed % 2 else None
    sigma = 10.0 ** random.uniform(-1.5, 1.0)
    objective = build(kind, 10.0 ** random.uniform(-1.0, 0.5), losses, prior)
    h = 1e-6 / max(sigma, 1.0)
    sides = [
        [objective.prox(losses + d * h * e, old, sigma) for d in (1.0, -1.0)] for e in np.eye(n)
    ]
    slopes = np.array([(up - down) / (2.0 * h) for up, down in sides]).T
    jacobian = objective.prox_step(losses, old, sigma).jacobian()
    np.testing.assert_allclose(jacobian, slopes, atol=3e-8 * max(1.0, sigma) ** 2, rtol=1e-6)


@pytest.mark.parametrize("kind", ALL)
@given(step=steps())
@settings(deadline=None, max_examples=10, derandomize=True)
def test_jacobian_is_symmetric_between_zero_and_sigma(kind: str, step: Step) -> None:
    objective = step.objective(kind)
    jacobian = objective.prox_step(step.losses, step.old, step.sigma).jacobian() / step.sigma
    assert jacobian.shape == (len(step.losses), len(step.losses))
    np.testing.assert_array_equal(jacobian, jacobian.T)
    values = np.linalg.eigvalsh(jacobian)
    assert values.min() >= -1e-14
    assert values.max() <= 1.0 + 1e-14
    if objective.simplex:  # weights keep summing to one
        np.testing.assert_allclose(jacobian.sum(axis=0), 0.0, atol=1e-13)
