"""The support function: attained at the maximizer, best of all weights, convex and monotone in the
losses.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import ALL, Step, powers, steps, vectors

from cases.objectives import contains
from scaffpd.objectives import Nash

each = pytest.mark.parametrize("kind", ALL)
quick = settings(deadline=None, max_examples=7, derandomize=True)


def size(objective, losses: np.ndarray) -> float:
    best = objective.maximizer(losses)
    return float(
        np.abs(losses) @ best + abs(objective.value(best)) + np.max(np.abs(losses)) + 1e-12
    )


@each
@given(step=steps())
@quick
def test_support_is_attained_at_the_maximizer(kind: str, step: Step) -> None:
    objective = step.objective(kind)
    best = objective.maximizer(step.losses)
    assert contains(objective, best, 1e-12) or kind == "QFair"
    attained = step.losses @ best - objective.value(best)
    scale = size(objective, step.losses)
    if isinstance(objective, Nash):  # Σ λb − Σ λL cancels
        scale += np.abs(objective.levels(len(best))) @ best
    assert isinstance(objective.support(step.losses), float)
    assert objective.support(step.losses) == pytest.approx(attained, rel=0, abs=1e-13 * scale)


@each
@given(step=steps(exponent=2.0), data=st.data())
@quick
def test_no_other_weight_does_better(kind: str, step: Step, data: st.DataObject) -> None:
    objective = step.objective(kind)
    n = len(step.losses)
    anywhere = data.draw(vectors(n, st.floats(-2.0, 2.0)))
    other = objective.prox(anywhere, step.old, data.draw(powers(-1, 3)))
    below = step.losses @ other - objective.value(other)
    assert below <= objective.support(step.losses) + 1e-12 * (
        size(objective, step.losses) + abs(below) + 1.0
    )


@each
@given(step=steps(exponent=2.0), data=st.data())
@quick
def test_support_is_convex_and_monotone(kind: str, step: Step, data: st.DataObject) -> None:
    objective = step.objective(kind)
    n = len(step.losses)
    lower = step.losses - data.draw(vectors(n, st.floats(0.0, 3.0))) * data.draw(powers(-6, 2))
    high = objective.support(step.losses)
    low = objective.support(lower)
    middle = objective.support(0.5 * (step.losses + lower))
    rounding = 1e-12 * (size(objective, step.losses) + size(objective, lower))
    if isinstance(objective, Nash):
        rounding *= 1.0 + np.max(np.abs(objective.levels(n))) / np.min(
            objective.levels(n) - step.losses
        )
    assert low <= high + rounding
    assert middle <= 0.5 * (high + low) + rounding


@each
@given(step=steps(exponent=2.0))
@quick
def test_maximizer_is_a_subgradient_of_the_support_function(kind: str, step: Step) -> None:
    """support(L') ≥ support(L) + ⟨λ(L), L' − L⟩: the envelope theorem that lets x follow Σ λ_i
    ∇f_i.
    """
    objective = step.objective(kind)
    other = step.losses - np.linspace(0.0, 1.0, len(step.losses))
    tangent = objective.support(step.losses) + objective.maximizer(step.losses) @ (
        other - step.losses
    )
    rounding = 1e-12 * (size(objective, step.losses) + size(objective, other) + abs(tangent))
    if isinstance(objective, Nash):
        rounding *= 1.0 + np.max(np.abs(objective.levels(len(other)))) / np.min(
            objective.levels(len(other)) - step.losses
        )
    assert objective.support(other) >= tangent - rounding
