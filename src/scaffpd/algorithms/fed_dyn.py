r"""FedDyn: a client's own linear term moves until the minimum of its local problem is that of the average.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama,
"Federated Learning Based on Dynamic Regularization", 2021, Algorithm 1.

Round r, with S a uniformly random set of clients (h_i = h = 0 at the start of every run, and p_i in place of 1/m):
    u_i ≈ argmin_u f_i(u) − ⟨h_i, u⟩ + (α/2)‖u − x‖², by J steps from x             x down; x − u_i up
    h_i ← h_i − α (u_i − x)
    h ← h − α Σ_{i∈S} p_i (u_i − x)
    x⁺ = Σ_{i∈S} p_i u_i / Σ_{i∈S} p_i − h/α

h = Σ p_i h_i at all times. Where nothing moves any more, u_i = x for all i, so that ∇f_i(x) = h_i, and h = 0: x is the
minimum of Σ p_i f_i, however roughly clients solve their problems. h_i stays with its client, and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scaffpd.algorithms.base import AveragingMethod, ServerState, moved, safe_rate
from scaffpd.errors import positive
from scaffpd.federation import Federation, Memory, Vector

PULL = 0.1  # α as a share of max_i L_i, where none is given


@dataclass(frozen=True, kw_only=True)
class FedDynState(ServerState):
    """Adds the linear terms.

    Attributes:
        alpha: α, given or automatic.
        prior: p_i.
        slope: h, the server's.
        slopes: h_i, the clients'.
    """

    alpha: float
    prior: Vector
    slope: Tensor
    slopes: Memory


@dataclass(frozen=True, kw_only=True)
class FedDyn(AveragingMethod):
    """FedDyn; see `AveragingMethod` for the other arguments. As published, all clients count alike.

    Args:
        alpha: α > 0, how strongly local problems hold on to x; left out, 0.1 max_i L_i.
        local_rate: left out, 1/(max_i L_i + α).
    """

    published: ClassVar[str] = "FedDyn"
    keeps_vectors: ClassVar[bool] = True
    knobs: ClassVar[tuple[str, ...]] = ("local_rate", "alpha")

    alpha: float | None = None
    weights: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            positive("FedDyn", "alpha", self.alpha)

    def automatic(self, federation: Federation) -> dict[str, float]:
        """Return α = 0.1 max_i L_i, and one over the smoothness of the local problems."""
        steep = 1 / safe_rate(federation, self.batch_size)
        alpha = PULL * steep if self.alpha is None else float(self.alpha)
        return {"local_rate": 1 / (steep + alpha), "alpha": alpha}

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> FedDynState:
        """Set all linear terms to zero."""
        found = self.automatic(federation)
        rate = found["local_rate"] if self.local_rate is None else float(self.local_rate)
        known, _ = self._first(federation, seed, x0, rate)
        slope = torch.zeros_like(known["x"])
        return FedDynState(**known, alpha=found["alpha"], slope=slope, slopes=federation.memory())

    def round(self, federation: Federation, state: FedDynState) -> FedDynState:
        """Let some clients solve their local problems; then renew h_i, h and x."""
        clients, p = self._participants(state, state.prior)
        weights = p / p.sum()
        alpha = state.alpha
        updates = federation.local_updates(
            state.x, state.slopes, None, self._plan(state, prox=alpha), clients
        )
        d = updates.sum(weights)
        slope = state.slope + alpha * float(p.sum()) * d
        x = state.x - self.server_rate * (d + slope / alpha)
        return moved(
            federation, state, x, weights, slope=slope, slopes=state.slopes.plus(alpha, updates)
        )
