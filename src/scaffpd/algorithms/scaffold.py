r"""SCAFFOLD: local steps corrected by control variates, so that clients do not drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020, Algorithm 1.

Round r, with S a uniformly random set of clients (c_i = c = 0 at the start of every run):
    y_i ← y_i − η_ℓ (g_i(y_i) − c_i + c), K times from y_i = x                      x, c down
    c_i⁺ = g_i(x)  (option I)   or   c_i − c + (x − y_i)/(K η_ℓ)  (option II)
    x ← x + (η_g/|S|) Σ_{i∈S} (y_i − x)                                             Δy_i up
    c ← c + (1/N) Σ_{i∈S} (c_i⁺ − c_i)                                              Δc_i up

With weights p_i in the place of 1/N, p_i/Σ_S p takes the place of 1/|S|; c = Σ p_i c_i at all times. In option II
Σ p_i Δc_i follows from Σ p_i Δy_i, which has gone up already: it costs nothing. All clients make the same K steps,
whatever their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scaffpd.algorithms.base import GRADIENTS, UPDATES, AveragingMethod, ServerState, begin, moved
from scaffpd.errors import unknown
from scaffpd.federation import Federation, Memory, Vector
from scaffpd.privacy.accountant import ReleaseCounts

OPTIONS = ("I", "II")
VARIATES = 0  # what a round's minibatches of option I are for


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(ServerState):
    """Adds the control variates.

    Attributes:
        prior: p_i.
        variate: c, the server's.
        variates: c_i, the clients'.
    """

    prior: Vector
    variate: Tensor
    variates: Memory


@dataclass(frozen=True, kw_only=True)
class Scaffold(AveragingMethod):
    """SCAFFOLD; see `AveragingMethod` for the other arguments. As published, all clients count alike.

    Args:
        option: how clients renew c_i: "I" by another gradient at x, "II" from their local steps.
    """

    published: ClassVar[str] = "SCAFFOLD"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, UPDATES})
    keeps_vectors: ClassVar[bool] = True

    option: str = "II"
    weights: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.option not in OPTIONS:
            raise unknown("option", self.option, OPTIONS)

    def releases(self, rounds: int) -> ReleaseCounts:
        """With option I another gradient, which comes with its loss."""
        more = ReleaseCounts.points(rounds, self.batch_size) if self.option == "I" else ReleaseCounts()
        return super().releases(rounds) + more

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> ScaffoldState:
        """All control variates are zero."""
        x, losses, samples = begin(federation, x0)
        prior, rate = self._prior(federation, samples), self._rate(federation)
        return ScaffoldState(
            x=x, weights=prior, losses=losses, seed=seed, local_rate=rate,
            prior=prior, variate=torch.zeros_like(x), variates=federation.memory(),
        )  # fmt: skip

    def round(self, federation: Federation, state: ScaffoldState) -> ScaffoldState:
        """Corrected local steps of some clients; then x, c and their c_i."""
        clients, p = self._participants(state, state.prior)
        weights, share = p / p.sum(), float(p.sum())
        c, variates, r = state.variate, state.variates, state.rounds + 1
        if self.option == "I":
            at = federation.gradients(state.x, self.batch_size, (state.seed, r, VARIATES), clients, alone=False)
        updates = federation.local_updates(state.x, variates, c, self._plan(state), clients)
        d = updates.sum(weights)
        if self.option == "I":
            renewed, change = variates.replaced(at), at.sum(p) - variates.sum(p)
        else:
            scale = 1 / (self.local_steps * state.local_rate)
            renewed = variates.plus(-1.0, c, clients).plus(scale, updates)
            change = share * (scale * d - c)
        x = state.x - self.server_rate * d
        return moved(federation, state, x, weights, variate=c + change, variates=renewed)
