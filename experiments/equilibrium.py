"""Weights that answer losses on held-out rows: an equilibrium of two players."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from experiments.excess import Excess
from scaffpd.objectives import Objective
from scaffpd.objectives.base import Vector, inner

TURNS = 60
IDLE = 12
LEAST_SHARE = 0.05
Model = TypeVar("Model")


def equilibrium(
    objective: Objective,
    clients: int,
    solve: Callable[[Excess], tuple[Model, Vector, Vector, Vector]],
    tol: float,
) -> tuple[Model | None, float, int]:
    r"""Let λ maximise over losses h_i(x) on held-out rows, while x minimises Σ λ_i f_i over
    training rows.

    The two players have different losses, so there is no saddle point, but an equilibrium, at which
    the levels are b = f(x) − h(x), for then λ maximises ⟨f(x) − b, λ⟩ − ψ(λ) = ⟨h(x), λ⟩ − ψ(λ).
    For given levels x and λ are those of a convex problem, with its certificate, which bounds how
    much another x could lower Σ λ_i f_i; the levels follow,

        b ← b + s (f(x) − h(x) − b),      s = 1, or less if the last step was too long,

    until no other λ would gain more than `tol`: support(h) − ⟨h, λ⟩ + ψ(λ), or twelve steps gain
    nothing. If h = f nothing changes: b = 0.

    Args:
        objective: (Λ, ψ).
        clients: N.
        solve: from the objective with levels, a model, λ, f(x) and h(x).
        tol: largest remaining gain of λ.

    Returns:
        The best model, the remaining gain of λ there, and the number of calls of `solve`.
    """
    best: tuple[Model | None, float] = (None, np.inf)
    levels = np.zeros(clients)
    share = 1.0
    last = np.inf
    turns = 0
    found = 0
    while turns < min(TURNS, found + IDLE) and not best[1] <= tol:
        model, weights, losses, aside = solve(Excess(objective, levels))
        gain = objective.support(aside) - inner(aside, weights) + objective.value(weights)
        turns += 1
        if best[0] is None or gain < best[1]:
            best = (model, gain)
            found = turns
        share = min(1.0, 1.2 * share) if gain < last else max(LEAST_SHARE, 0.5 * share)
        levels = levels + share * (losses - aside - levels)
        last = gain
    return *best, turns
