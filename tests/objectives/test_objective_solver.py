"""The support function against CVXPY with Clarabel, which knows nothing of our formulas."""

import warnings

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from objective_cases import ALL, steps

from scaffpd.objectives import ChiSquare, ChiSquareBall, CVaR, Nash, QFair, Tilted


def model(objective, n):
    """λ, ψ(λ) and Λ in CVXPY's language."""
    lam = cp.Variable(n)
    p = objective.weights(n)
    simplex = [lam >= 0, cp.sum(lam) == 1]
    match objective:
        case ChiSquare():
            below = [] if objective.cap is None else [lam <= objective.cap]
            return (
                lam,
                0.5 * objective.rho * cp.sum_squares((lam - p) / np.sqrt(p)),
                [*simplex, *below],
            )
        case ChiSquareBall():
            ball = cp.sum_squares((lam - p) / np.sqrt(p)) <= objective.delta
            return lam, cp.Constant(0.0), [*simplex, ball]
        case CVaR():
            return lam, cp.Constant(0.0), [*simplex, lam <= p / objective.alpha]
        case Tilted():
            return lam, objective.rho * cp.sum(cp.rel_entr(lam, p)), simplex
        case QFair():
            q = objective.q
            return (
                lam,
                q / (q + 1) * cp.sum(cp.multiply(p, cp.power(lam / p, (q + 1) / q))),
                [lam >= 0],
            )
        case Nash():
            cost = lam @ objective.levels(n) - 1.0 - p @ cp.log(lam) + np.sum(p * np.log(p))
            return lam, cost, []
    return lam, cp.Constant(0.0), [lam == p] if type(objective).__name__ == "Average" else simplex


def solve(problem):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        value = float(problem.solve(solver=cp.CLARABEL))
    assume(problem.status == cp.OPTIMAL)  # else it says itself that it cannot tell
    assume(
        np.isfinite(value)
    )  # Clarabel may end a rounding error outside, where CVXPY calls KL infinite
    return value


def simplified(step, kind):
    objective = step.objective(kind)
    if isinstance(
        objective, QFair
    ):  # exponents that a second-order or power cone expresses exactly
        return QFair(float([0.5, 1.0, 2.0, 3.0][int(10 * step.sigma) % 4]), step.prior)
    return objective


@pytest.mark.parametrize("kind", ALL)
@given(step=steps(clients=6, exponent=0.7))
@settings(deadline=None, max_examples=5, derandomize=True)
def test_support_agrees_with_an_interior_point_solver(kind, step):
    objective = simplified(step, kind)
    lam, psi, members = model(objective, len(step.losses))
    theirs = solve(cp.Problem(cp.Maximize(step.losses @ lam - psi), members))
    assert objective.support(step.losses) == pytest.approx(theirs, rel=2e-6, abs=2e-6)
