"""The proximal step and the support function: optimal by definition, feasible to rounding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import ALL, ON_SIMPLEX, optimality_error, steps

from cases.objectives import contains
from scaffpd.objectives import ChiSquare, ChiSquareBall, CVaR, Nash

each = pytest.mark.parametrize("kind", ALL)
quick = settings(deadline=None, max_examples=8, derandomize=True)


def assert_feasible(objective, lam):
    assert lam.dtype == np.float64
    assert np.all(np.isfinite(lam))
    assert np.all(lam >= 0.0)
    assert contains(objective, lam, 1e-12)
    if objective.simplex:
        assert abs(lam.sum() - 1.0) <= 1e-15
    if isinstance(objective, CVaR):
        assert np.all(lam <= objective.caps(len(lam)) * (1.0 + 1e-15))
    if isinstance(objective, ChiSquare) and objective.cap is not None:
        assert np.all(lam <= objective.cap * (1.0 + 1e-15))
    if isinstance(objective, ChiSquareBall):
        p = objective.weights(len(lam))
        root = np.sqrt(np.sum((lam - p) ** 2 / p))
        assert root <= np.sqrt(objective.delta) * (1.0 + 1e-13) + 1e-15 * np.sum(lam / np.sqrt(p))


@each
@given(step=steps())
@quick
def test_prox_is_optimal_and_feasible(kind, step):
    objective = step.objective(kind)
    lam = objective.prox(step.losses, step.old, step.sigma)
    assert_feasible(objective, lam)
    assert optimality_error(objective, step.losses, step.old, step.sigma, lam) <= 1e-12


@each
@given(step=steps(exponent=2.0))
@quick
def test_moreau_identity_ties_prox_to_support(kind, step):
    """λ = prox_σ(s, l) if and only if λ attains the support function at s − (λ − l)/σ."""
    objective = step.objective(kind)
    lam = objective.prox(step.losses, step.old, step.sigma)
    at = step.losses - (lam - step.old) / step.sigma
    attained = at @ lam - objective.value(lam)
    scale = np.abs(at) @ lam + abs(objective.value(lam)) + np.max(np.abs(at)) + 1.0
    if isinstance(objective, Nash):
        scale *= 1.0 + np.max(
            np.abs(objective.levels(len(lam))) / np.min(objective.levels(len(lam)) - at)
        )
    assert objective.support(at) == pytest.approx(attained, rel=0, abs=1e-11 * scale)


@pytest.mark.parametrize("kind", ON_SIMPLEX)
@given(step=steps(exponent=2.0), shift=st.sampled_from([-(2.0**40), -1.0, 2.0**10, 2.0**40]))
@quick
def test_a_common_shift_of_losses_changes_nothing(kind, step, shift):
    losses = np.round(step.losses * 2.0**10) / 2.0**10  # then losses + shift has no rounding error
    objective = step.objective(kind)
    lam = objective.prox(losses, step.old, step.sigma)
    np.testing.assert_array_equal(objective.prox(losses + shift, step.old, step.sigma), lam)
    np.testing.assert_array_equal(objective.maximizer(losses + shift), objective.maximizer(losses))
    assert objective.support(losses + shift) == pytest.approx(
        objective.support(losses) + shift, rel=1e-14, abs=1e-12
    )


@each
@given(step=steps())
@quick
def test_support_is_attained_at_the_maximizer(kind, step):
    objective = step.objective(kind)
    best = objective.maximizer(step.losses)
    assert contains(objective, best, 1e-12) or kind == "QFair"
    attained = step.losses @ best - objective.value(best)
    scale = np.abs(step.losses) @ best + abs(objective.value(best)) + np.max(np.abs(step.losses))
    scale += 1e-12
    if isinstance(objective, Nash):  # Σ λb − Σ λL cancels
        scale += np.abs(objective.levels(len(best))) @ best
    assert isinstance(objective.support(step.losses), float)
    assert objective.support(step.losses) == pytest.approx(attained, rel=0, abs=1e-13 * scale)
