r"""ProxSkip (Scaffnew): local steps that provably save communication.

K. Mishchenko, G. Malinovsky, S. Stich, P. Richtárik, "ProxSkip: Yes! Local Gradient Steps Provably
Lead to Communication Acceleration! Finally!", 2022, Algorithm 2.

Every iteration, with h_i = 0 at the start (so that Σ p_i h_i = 0 always):
    x̂_i = x_i − γ (g_i(x_i) − h_i)
    with probability p, one coin for all:   x = Σ p_i x̂_i,   h_i ← h_i + (p/γ)(x − x̂_i),   x_i = x
    otherwise x_i = x̂_i

A round here is everything up to and including a communication: a Geometric(p) number of local
steps, 1/p on average. 1/p = √κ balances the two and gives O(√κ log 1/ε) rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from scaffpd.algorithms.base import (
    MEMORY,
    Algorithm,
    LocalMethod,
    ServerState,
    begin,
    client_weights,
    moved,
    steepest,
)
from scaffpd.federation import Federation, Memory
from scaffpd.federation.plans import ReleaseCounts

COIN = 2  # purpose of a round's random numbers
UNKNOWN_CONDITION = 10  # local steps where κ is not known: no strong convexity


@dataclass(frozen=True, kw_only=True)
class ProxSkipState(ServerState):
    """Adds 1/p and the clients' h_i."""

    expected_steps: int
    shifts: Memory


@dataclass(frozen=True, kw_only=True)
class ProxSkip(LocalMethod[ProxSkipState]):
    """ProxSkip, with all clients in every round; see `LocalMethod` for the other arguments.

    Args:
        local_steps: 1/p, the *expected* number of local steps per round; left out, √κ for
            κ = max L_i / min μ_i.
        weights: "uniform" counts clients alike, as published; "samples" by their n_i.
    """

    published = "ProxSkip"
    needs = frozenset({MEMORY})

    local_steps: int | None = None  # type: ignore[assignment]
    weights: str = "uniform"

    def measures(self, convex: bool = True) -> bool:
        return None in (self.local_rate, self.local_steps)

    def releases(self, rounds: int) -> ReleaseCounts:
        """Refuse: the number of local steps is drawn, and not known beforehand."""
        return Algorithm.releases(self, rounds)

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> ProxSkipState:
        x, losses, samples = begin(federation, x0)
        steps = self.local_steps
        if not steps:
            known = federation.constants()
            mu = float(known.strong_convexity.min())
            balanced = (
                float(np.sqrt(steepest(known.smoothness) / mu)) if mu > 0 else UNKNOWN_CONDITION
            )
            steps = max(1, round(balanced))
        return ProxSkipState(
            x=x,
            weights=client_weights(self.weights, samples),
            losses=losses,
            seed=seed,
            local_rate=self._rate(federation),
            expected_steps=steps,
            shifts=federation.memory(),
        )

    def round(self, federation: Federation, state: ProxSkipState) -> ProxSkipState:
        random = np.random.default_rng([state.seed, state.rounds + 1, COIN])
        plan = replace(self._plan(state), steps=int(random.geometric(1 / state.expected_steps)))
        updates = federation.local_updates(state.x, state.shifts, None, plan)
        d = updates.sum(state.weights)
        scale = 1 / (state.expected_steps * state.local_rate)  # p/γ, on x − x̂_i = d_i − d
        state = replace(state, shifts=state.shifts.plus(scale, updates).plus(-scale, d))
        return moved(federation, state, state.x - d, state.weights)
