"""The support function: attained at the maximizer."""

import numpy as np
import pytest
from hypothesis import given, settings
from objective_cases import ALL, steps

from cases.objectives import contains
from scaffpd.objectives import Nash

each = pytest.mark.parametrize("kind", ALL)
quick = settings(deadline=None, max_examples=7, derandomize=True)


def size(objective, losses):
    best = objective.maximizer(losses)
    return float(
        np.abs(losses) @ best + abs(objective.value(best)) + np.max(np.abs(losses)) + 1e-12
    )


@each
@given(step=steps())
@quick
def test_support_is_attained_at_the_maximizer(kind, step):
    objective = step.objective(kind)
    best = objective.maximizer(step.losses)
    assert contains(objective, best, 1e-12) or kind == "QFair"
    attained = step.losses @ best - objective.value(best)
    scale = size(objective, step.losses)
    if isinstance(objective, Nash):  # Σ λb − Σ λL cancels
        scale += np.abs(objective.levels(len(best))) @ best
    assert isinstance(objective.support(step.losses), float)
    assert objective.support(step.losses) == pytest.approx(attained, rel=0, abs=1e-13 * scale)
