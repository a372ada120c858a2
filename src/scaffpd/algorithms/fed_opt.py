r"""FedOpt: the averaged update is a gradient for an optimiser at the server.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan,
"Adaptive Federated Optimization", 2021, Algorithm 2; "momentum" is the FedAvgM of T. H. Hsu, H. Qi,
M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019.

Round r, with local steps and p_i as in FedAvg, and all operations entry by entry:
    Δ = Σ_{i∈S} p_i (u_i − x) / Σ_{i∈S} p_i                                  x down; x − u_i up
    "momentum"         m ← β₁ m + Δ,               x ← x + η m
    the others         m ← β₁ m + (1 − β₁) Δ,      x ← x + η m / (√v + τ)
    "adagrad"          v ← v + Δ²
    "adam"             v ← β₂ v + (1 − β₂) Δ²
    "yogi"             v ← v − (1 − β₂) Δ² sign(v − Δ²)

m = 0 and v = τ² at the start, and neither is corrected for it, as in the paper. "momentum" with
β₁ = 0 is FedAvg. Clients store nothing and the server sees the sum alone, so secure sums will do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scaffpd.algorithms.base import AveragingMethod, AveragingState, moved
from scaffpd.errors import BELOW_ONE, positive, unknown
from scaffpd.federation import Federation

OPTIMIZERS = ("momentum", "adagrad", "adam", "yogi")


@dataclass(frozen=True, kw_only=True)
class FedOptState(AveragingState):
    """Adds m and v, what the server's optimiser remembers."""

    momentum: Tensor
    second: Tensor


@dataclass(frozen=True, kw_only=True)
class FedOpt(AveragingMethod[FedOptState]):
    """FedAvgM, FedAdagrad, FedAdam or FedYogi; see `AveragingMethod` for the other arguments.

    Args:
        optimizer: "momentum", "adagrad", "adam" or "yogi".
        server_rate: η; of the adaptive ones about as much as an entry of x moves in a round.
        momentum: β₁ in [0, 1).
        second_momentum: β₂ in [0, 1).
        adaptivity: τ > 0: entries whose updates are smaller than it are slowed down.
    """

    published = "FedOpt"
    ranges = (("momentum", BELOW_ONE), ("second_momentum", BELOW_ONE))

    optimizer: str = "adam"
    server_rate: float = 0.1
    momentum: float = 0.9
    second_momentum: float = 0.99
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        positive(type(self).__name__, "adaptivity", self.adaptivity)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> FedOptState:
        state = self._begin(federation, seed, x0)
        second = torch.full_like(state.x, self.adaptivity**2)
        return FedOptState(**vars(state), momentum=torch.zeros_like(state.x), second=second)

    def round(self, federation: Federation, state: FedOptState) -> FedOptState:
        clients, p = self._participants(state)
        weights = p / p.sum()
        updates = federation.local_updates(state.x, None, None, self._plan(state), clients)
        delta = -updates.sum(weights)
        v = state.second
        squares = delta.square()
        new = 1 - self.second_momentum
        if self.optimizer == "adagrad":
            v = v + squares
        elif self.optimizer == "adam":
            v = self.second_momentum * v + new * squares
        elif self.optimizer == "yogi":
            v = v - new * squares * torch.sign(v - squares)
        plain = self.optimizer == "momentum"
        m = self.momentum * state.momentum + (1.0 if plain else 1 - self.momentum) * delta
        step = m if plain else m / (v.sqrt() + self.adaptivity)
        state = replace(state, momentum=m, second=v)
        return moved(federation, state, state.x + self.server_rate * step, weights)
