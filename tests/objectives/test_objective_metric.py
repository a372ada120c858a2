"""Proximal steps with a step size for every client: Σ (λ_i − l_i)²/(2σ_i) in place of ‖λ −
l‖²/(2σ).
"""

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import ALL, build, powers, steps, vectors
from test_objective_solver import model, simplified, solve

from cases.objectives import contains

each = pytest.mark.parametrize("kind", ALL)
quick = settings(deadline=None, max_examples=8, derandomize=True)


def moreau_error(objective, s, old, sigma, lam):
    """How far λ is from attaining the support function at s − (λ − l)/σ, in units in the last place
    of its terms.
    """
    at = s - (lam - old) / sigma
    terms = np.abs(s) + (lam + old) / sigma
    if objective.simplex:
        at = at - at @ lam
    psi = objective.value(lam)
    return (objective.support(at) - at @ lam + psi) / (terms @ lam + abs(psi) + 1e-300)


@each
@given(step=steps(clients=6), data=st.data())
@quick
def test_the_step_is_optimal_and_feasible(kind, step, data):
    objective = step.objective(kind)
    n = len(step.losses)
    sigma = step.sigma * data.draw(vectors(n, powers(-3, 0)))
    lam = objective.prox(step.losses, step.old, sigma)
    assert np.all(lam >= 0)
    assert contains(objective, lam, 1e-12)
    if kind == "Nash":  # its support function is the more sensitive, the closer a loss is to b
        p = objective.weights(n)
        b = objective.levels(n)
        np.testing.assert_allclose(
            p / lam, b - step.losses + (lam - step.old) / sigma, rtol=1e-9, atol=1e-9 * b.max()
        )
    else:
        assert abs(moreau_error(objective, step.losses, step.old, sigma, lam)) <= 1e-11


@each
@given(step=steps())
@quick
def test_equal_steps_are_one_step(kind, step):
    objective = step.objective(kind)
    n = len(step.losses)
    one, many = (
        objective.prox_step(step.losses, step.old, s) for s in (step.sigma, np.full(n, step.sigma))
    )
    np.testing.assert_allclose(one.weights, many.weights, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(one.jacobian(), many.jacobian(), rtol=1e-13, atol=1e-15)


@each
@given(step=steps(clients=6, exponent=0.7), data=st.data())
@settings(deadline=None, max_examples=4, derandomize=True)
def test_the_step_agrees_with_an_interior_point_solver(kind, step, data):
    objective = simplified(step, kind)
    sigma = step.sigma * data.draw(vectors(len(step.losses), powers(-1, 0)))
    ours = objective.prox(step.losses, step.old, sigma)
    lam, psi, members = model(objective, len(ours))
    cost = psi - step.losses @ lam + cp.sum_squares((lam - step.old) / np.sqrt(2 * sigma))
    theirs = solve(cp.Problem(cp.Minimize(cost), members))
    mine = objective.value(ours) - step.losses @ ours + np.sum((ours - step.old) ** 2 / (2 * sigma))
    assert mine == pytest.approx(theirs, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("seed", range(8))
@each
def test_the_jacobian_is_the_derivative(kind, seed):
    random = np.random.default_rng(seed)
    n = int(random.integers(2, 8))
    losses = random.exponential(size=n)
    old = random.dirichlet(np.ones(n))
    prior = random.uniform(0.2, 1.0, n) if seed % 2 else None
    sigma = 10.0 ** random.uniform(-1.5, 1.0, n)
    objective = build(kind, 10.0 ** random.uniform(-1.0, 0.5), losses, prior)
    h = 1e-6 / max(sigma.max(), 1.0)
    sides = [
        [objective.prox(losses + d * h * e, old, sigma) for d in (1.0, -1.0)] for e in np.eye(n)
    ]
    slopes = np.array([(up - down) / (2.0 * h) for up, down in sides]).T
    step = objective.prox_step(losses, old, sigma)
    np.testing.assert_allclose(
        step.jacobian(), slopes, atol=3e-8 * max(1.0, sigma.max()) ** 2, rtol=1e-6
    )
    np.testing.assert_array_equal(step.weights, objective.prox(losses, old, sigma))
    assert np.all((step.slope >= 0) & (step.slope <= sigma * (1 + 1e-15)))


@each
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


@each
@pytest.mark.parametrize("n", [2, 7, 60])
@pytest.mark.parametrize("spread", [1e6, 1e12])
def test_steps_of_very_different_sizes(kind, n, spread):
    random = np.random.default_rng(n)
    for seed in range(6):
        losses = random.exponential(size=n) * 10.0 ** random.uniform(-4, 4)
        old = random.dirichlet(np.full(n, 0.3))
        prior = None if seed % 2 else 10.0 ** random.uniform(-3, 0, n)
        objective = build(kind, 10.0 ** random.uniform(-3, 3), losses, prior)
        sigma = spread ** random.uniform(-0.5, 0.5, n)
        lam = objective.prox(losses, old, sigma)
        assert contains(objective, lam, 1e-12)
        if objective.simplex:
            assert moreau_error(objective, losses, old, sigma, lam) <= 1e-10
