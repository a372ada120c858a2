r"""q-FFL: fair resource allocation, by steps whose length follows from q and the losses.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair Resource Allocation in Federated Learning", 2020,
Algorithm 1 (q-FedSGD) and Algorithm 2 (q-FedAvg); it minimises Σ p_k F_k^{q+1}/(q+1).

Round r, with L = 1/η_ℓ:
    F_k = f_k(x);  u_k ← u_k − η_ℓ g_k(u_k), J times from u_k = x              x down
    Δw_k = L (x − u_k),   Δ_k = F_k^q Δw_k,
    h_k = q F_k^{q−1} ‖Δw_k‖² + L F_k^q                                        Δ_k, h_k up
    x⁺ = x − Σ_{k∈S} p_k Δ_k / Σ_{k∈S} p_k h_k

J = 1 is q-FedSGD (Δw_k = ∇F_k), J > 1 q-FedAvg; q = 0 is FedAvg. F_k is the *mean* loss of client k
at x, over all of its samples whatever the minibatches of local steps are. As in `FedAvg`, clients
are drawn uniformly and counted by p_k (the paper draws by p_k and counts alike).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from scaffpd.algorithms.base import LOSSES, SIZES, UPDATES, AveragingState, moved
from scaffpd.algorithms.fed_avg import FedAvg
from scaffpd.errors import NOT_NEGATIVE
from scaffpd.federation import Federation
from scaffpd.objectives import QFair
from scaffpd.objectives.base import LEAST


@dataclass(frozen=True, kw_only=True)
class QFFL(FedAvg):
    """q-FedSGD (`local_steps=1`) and q-FedAvg; the other arguments are those of `FedAvg`.

    Args:
        q: q >= 0; 0 is the average loss, ∞ the worst.
    """

    published = "q-FFL"
    questions = frozenset({LOSSES, UPDATES, SIZES})
    strengths = ("q",)
    ranges = (("q", NOT_NEGATIVE),)

    q: float = 1.0

    @property
    def positive(self) -> bool:
        return self.q > 0

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> AveragingState:
        state = super().init(federation, seed, x0)
        if self.positive:
            QFair(1).check(state.losses, federation.names)
        return state

    def round(self, federation: Federation, state: AveragingState) -> AveragingState:
        clients, p = self._participants(state)
        L = 1 / state.local_rate
        F = federation.losses(state.x, clients=clients, alone=False)
        updates = federation.local_updates(state.x, None, None, self._plan(state), clients)
        # Clients that are not asked have p_i = 0, and NaN in place of numbers.
        F = np.where(p > 0, F, 0.0)
        squares = np.where(p > 0, L**2 * updates.norms(), 0.0)
        # Both F^q and h are over max F^q, so that nothing overflows; a client without loss has
        # neither (q > 0).
        # a loss of zero has no q−1 st power
        power = (F / max(float(F.max()), LEAST)) ** self.q
        weights = p * power
        h = weights * (self.q * squares / np.maximum(F, LEAST) + L)
        if not h.sum() > 0:  # nobody has a loss: all is done
            return moved(federation, state, state.x, state.prior)
        x = state.x - self.server_rate * updates.sum(L * weights / h.sum())
        return moved(federation, state, x, weights / weights.sum())
