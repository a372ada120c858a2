r"""FedOpt: the averaged update is a gradient for the server's own optimiser (FedAvgM, FedAdam, FedYogi).

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan,
"Adaptive Federated Optimization", 2021, Algorithm 2; FedAvgM is that of T. H. Hsu, H. Qi, M. Brown,
"Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019.

Round r, with local steps and p_i as in FedAvg, and all operations entry by entry:
    Δ = Σ_{i∈S} p_i (u_i − x) / Σ_{i∈S} p_i                                         x down; x − u_i up
    FedAvgM            m ← β m + Δ,                x ← x + η m
    FedAdam, FedYogi   m ← β₁ m + (1 − β₁) Δ,      x ← x + η m / (√v + τ)
    FedAdam            v ← β₂ v + (1 − β₂) Δ²
    FedYogi            v ← v − (1 − β₂) Δ² sign(v − Δ²)

m = 0 and v = τ² at the start, and neither is corrected for it. β = 0 makes FedAvgM FedAvg. Clients keep nothing, and
the server sees the sum alone, so all three work with secure sums. As in FedAvg, clients drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from scaffpd.algorithms.fed_avg import FedAvg, FedAvgState
from scaffpd.federation import Federation


@dataclass(frozen=True, kw_only=True)
class ServerOptimizerState(FedAvgState):
    """Adds what the server's optimiser remembers.

    Attributes:
        momentum: m.
        second: v; zero in FedAvgM, which has none.
    """

    momentum: Tensor
    second: Tensor


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server; see `AveragingMethod` for the other arguments.

    Args:
        server_rate: η.
        momentum: β in [0, 1).
    """

    published: ClassVar[str] = "FedAvgM"

    momentum: float = 0.9

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> ServerOptimizerState:
        """Begin as FedAvg does; the server remembers nothing."""
        state = super().init(federation, seed, x0)
        return ServerOptimizerState(
            **vars(state), momentum=torch.zeros_like(state.x), second=self._second(state.x)
        )

    def _stepped(self, state: FedAvgState, d: Tensor) -> dict[str, Any]:
        """Take the average as the server's gradient."""
        m, v, step = self._step(cast(ServerOptimizerState, state), -d)
        return {"x": state.x + self.server_rate * step, "momentum": m, "second": v}

    def _second(self, x: Tensor) -> Tensor:
        """Return v before the first round."""
        return torch.zeros_like(x)

    def _step(self, state: ServerOptimizerState, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return m, v and the step, to be multiplied with η."""
        m = self.momentum * state.momentum + delta
        return m, state.second, m


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedAvgM):
    """FedAvg with Adam at the server; see `AveragingMethod` for the other arguments.

    Args:
        server_rate: η: an entry of x moves by about so much in a round.
        momentum: β₁ in [0, 1).
        second_momentum: β₂ in [0, 1).
        adaptivity: τ > 0: entries whose updates are smaller than it are slowed down.
    """

    published: ClassVar[str] = "FedAdam"
    knobs: ClassVar[tuple[str, ...]] = ("local_rate", "server_rate")

    server_rate: float = 0.1
    second_momentum: float = 0.99
    adaptivity: float = 1e-3

    def _second(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.adaptivity**2)

    def _step(self, state: ServerOptimizerState, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.momentum * state.momentum + (1 - self.momentum) * delta
        v = self._variance(state.second, delta.square())
        return m, v, m / (v.sqrt() + self.adaptivity)

    def _variance(self, v: Tensor, squares: Tensor) -> Tensor:
        """Return the new v."""
        return self.second_momentum * v + (1 - self.second_momentum) * squares


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """FedAvg with Yogi at the server, whose v changes by as much as Δ² and no more; arguments as for `FedAdam`."""

    published: ClassVar[str] = "FedYogi"

    def _variance(self, v: Tensor, squares: Tensor) -> Tensor:
        return v - (1 - self.second_momentum) * squares * torch.sign(v - squares)
