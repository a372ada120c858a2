r"""q-FFL: fair resource allocation, by steps whose length follows from q and the losses.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair Resource Allocation in Federated Learning", 2020,
Algorithm 1 (q-FedSGD) and Algorithm 2 (q-FedAvg); it minimises Σ p_k F_k^{q+1}/(q+1).

Round r, with L = 1/η_ℓ:
    F_k = f_k(x);  u_k ← u_k − η_ℓ g_k(u_k), J times from u_k = x                   x down
    Δw_k = L (x − u_k),   Δ_k = F_k^q Δw_k,   h_k = q F_k^{q−1} ‖Δw_k‖² + L F_k^q   Δ_k, h_k up
    x⁺ = x − Σ_{k∈S} p_k Δ_k / Σ_{k∈S} p_k h_k

J = 1 is q-FedSGD (Δw_k = ∇F_k), J > 1 q-FedAvg; q = 0 is FedAvg. F_k is the *mean* loss of client k at x, over
all of its samples whatever the minibatches of local steps are. As in
`FedAvg`, clients are drawn uniformly and counted by p_k (the paper draws by p_k and counts alike).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.base import LOSSES, SIZES, UPDATES, moved
from scaffpd.algorithms.fed_avg import FedAvg, FedAvgState
from scaffpd.errors import InputError, real
from scaffpd.federation import Federation, Vector

TINY = 1e-300  # a loss of zero has no q−1 st power


@dataclass(frozen=True, kw_only=True)
class QFFL(FedAvg):
    """q-FedSGD (`local_steps=1`) and q-FedAvg; see `AveragingMethod` for the other arguments.

    Args:
        q: q >= 0; 0 is the average loss, ∞ the worst.
    """

    published: ClassVar[str] = "q-FFL"
    questions: ClassVar[frozenset[str]] = frozenset({LOSSES, UPDATES, SIZES})
    strengths: ClassVar[tuple[str, ...]] = ("q",)

    q: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= real("QFFL", "q", self.q) < float("inf"):
            raise InputError(f"QFFL needs q >= 0 and finite, got {self.q!r}.")

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> FedAvgState:
        """As FedAvg; losses must not be negative."""
        state = super().init(federation, seed, x0)
        if np.any(state.losses < 0):
            name = federation.names[int(state.losses.argmin())]
            raise InputError(f"QFFL needs losses >= 0; that of client {name!r} is not.")
        return state

    def round(self, federation: Federation, state: FedAvgState) -> FedAvgState:
        """Local steps of some clients, weighted by F^q, with the step length that q asks for."""
        clients, p = self._participants(state, state.prior)
        L = 1 / state.local_rate
        F = federation.losses(state.x, clients=clients, alone=False)
        updates = federation.local_updates(state.x, None, None, self._plan(state), clients)
        weights, h = self._scaled(F[clients], L**2 * updates.norms()[clients], L)
        weights, h = (spread(clients, p[clients] * part, len(p)) for part in (weights, h))
        if not h.sum() > 0:  # nobody has a loss: all is done
            return moved(federation, state, state.x, state.prior)
        x = state.x - self.server_rate * updates.sum(L * weights / h.sum())
        return moved(federation, state, x, weights / weights.sum())

    def _scaled(self, F: Vector, squares: Vector, L: float) -> tuple[Vector, Vector]:
        """F^q and h, both over max F^q, so that nothing overflows; a client without loss has neither (q > 0)."""
        top = max(float(F.max()), TINY)
        power = (F / top) ** self.q
        return power, power * (self.q * squares / np.maximum(F, TINY) + L)


def spread(clients: NDArray[np.int64], values: Vector, n: int) -> Vector:
    """The clients' values in the order of all n clients, 0 for the others."""
    out = np.zeros(n)
    out[clients] = values
    return out
