r"""SCAFFOLD: local steps corrected by control variates, so that clients do not drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020, Algorithm 1.

Round r, with S a uniformly random set of clients (c_i = c = 0 at the start of every run):
    y_i ← y_i − η_ℓ (g_i(y_i) − c_i + c), K times from y_i = x                 x, c down
    c_i⁺ = c_i − c + (x − y_i)/(K η_ℓ)                                         (option II)
    x ← x + (η_g/|S|) Σ_{i∈S} (y_i − x)                                        Δy_i up
    c ← c + (1/N) Σ_{i∈S} (c_i⁺ − c_i)

With weights p_i in the place of 1/N, p_i/Σ_S p takes the place of 1/|S|; c = Σ p_i c_i at all
times. Σ p_i Δc_i follows from Σ p_i Δy_i, which has gone up already: it costs nothing.
All clients make the same K steps, whatever their size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scaffpd.algorithms.base import MEMORY, AveragingMethod, AveragingState, moved
from scaffpd.federation import Federation, Memory


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(AveragingState):
    """Adds the control variates: c, the server's, and c_i, the clients'."""

    variate: Tensor
    variates: Memory


@dataclass(frozen=True, kw_only=True)
class Scaffold(AveragingMethod[ScaffoldState]):
    """SCAFFOLD; see `AveragingMethod` for the arguments. As published, clients count alike."""

    published = "SCAFFOLD"
    needs = frozenset({MEMORY})

    weights: str = "uniform"

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> ScaffoldState:
        state = self._begin(federation, seed, x0)
        zero = torch.zeros_like(state.x)
        return ScaffoldState(**vars(state), variate=zero, variates=federation.memory())

    def round(self, federation: Federation, state: ScaffoldState) -> ScaffoldState:
        clients, p = self._participants(state)
        weights = p / p.sum()
        c = state.variate
        updates = federation.local_updates(state.x, state.variates, c, self._plan(state), clients)
        d = updates.sum(weights)
        scale = 1 / (self.local_steps * state.local_rate)
        renewed = state.variates.plus(-1.0, c, clients).plus(scale, updates)
        change = float(p.sum()) * (scale * d - c)
        state = replace(state, variate=c + change, variates=renewed)
        return moved(federation, state, state.x - self.server_rate * d, weights)
