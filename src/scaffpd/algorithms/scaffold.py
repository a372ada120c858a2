r"""SCAFFOLD: local steps corrected by control variates, so that clients do not drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020, Algorithm 1.

Round r, with S a uniformly random set of clients (c_i = c = 0 at the start of every run):
    y_i ← y_i − η_ℓ (g_i(y_i) − c_i + c), K times from y_i = x                 x, c down
    c_i⁺ = g_i(x)  (option I)   or   c_i − c + (x − y_i)/(K η_ℓ)  (option II)
    x ← x + (η_g/|S|) Σ_{i∈S} (y_i − x)                                        Δy_i up
    c ← c + (1/N) Σ_{i∈S} (c_i⁺ − c_i)                                         Δc_i up

With weights p_i in the place of 1/N, p_i/Σ_S p takes the place of 1/|S|; c = Σ p_i c_i at all
times. In option II Σ p_i Δc_i follows from Σ p_i Δy_i, which has gone up already: it costs nothing.
All clients make the same K steps, whatever their size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from scaffpd.algorithms.base import (
    GRADIENTS,
    MEMORY,
    UPDATES,
    AveragingMethod,
    AveragingState,
    moved,
)
from scaffpd.errors import unknown
from scaffpd.federation import Federation, Memory
from scaffpd.federation.plans import ReleaseCounts

OPTIONS = ("I", "II")
VARIATES = 0  # purpose of a round's random numbers: the minibatches of option I


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(AveragingState):
    """Adds the control variates.

    Attributes:
        variate: c, the server's.
        variates: c_i, the clients'.
    """

    variate: Tensor
    variates: Memory


@dataclass(frozen=True, kw_only=True)
class Scaffold(AveragingMethod[ScaffoldState]):
    """SCAFFOLD; see `AveragingMethod` for the other arguments. As published, clients count alike.

    Args:
        option: how clients renew c_i: "I" by another gradient at x, "II" from their local steps.
    """

    published: ClassVar[str] = "SCAFFOLD"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, UPDATES})
    needs: ClassVar[frozenset[str]] = frozenset({MEMORY})

    option: str = "II"
    weights: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.option not in OPTIONS:
            raise unknown("option", self.option, OPTIONS)

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count, with option I, another gradient, which comes with its loss."""
        steps = super().releases(rounds)
        if self.option == "II":
            return steps
        return steps + ReleaseCounts.points(rounds, self.batch_size)

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> ScaffoldState:
        """Set all control variates to zero."""
        state = self._begin(federation, seed, x0)
        zero = torch.zeros_like(state.x)
        return ScaffoldState(**vars(state), variate=zero, variates=federation.memory())

    def round(self, federation: Federation, state: ScaffoldState) -> ScaffoldState:
        """Let some clients make corrected local steps; then renew x, c and their c_i."""
        clients, p = self._participants(state)
        weights = p / p.sum()
        c = state.variate
        variates = state.variates
        if self.option == "I":
            key = (state.seed, state.rounds + 1, VARIATES)
            at = federation.gradients(state.x, self.batch_size, key, clients, alone=False)
        updates = federation.local_updates(state.x, variates, c, self._plan(state), clients)
        d = updates.sum(weights)
        if self.option == "I":
            renewed = variates.replaced(at)
            change = at.sum(p) - variates.sum(p)
        else:
            scale = 1 / (self.local_steps * state.local_rate)
            renewed = variates.plus(-1.0, c, clients).plus(scale, updates)
            change = float(p.sum()) * (scale * d - c)
        state = replace(state, variate=c + change, variates=renewed)
        return moved(federation, state, state.x - self.server_rate * d, weights)
