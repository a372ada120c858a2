r"""FedProx: FedAvg whose clients are held back by a proximal term.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith,
"Federated Optimization in Heterogeneous Networks", 2020, Algorithm 2.

Clients minimise h_i(u; x^r) = f_i(u) + (μ/2)‖u − x^r‖², here by J gradient steps:
    u_i ← u_i − η_ℓ (g_i(u_i) + μ (u_i − x^r))

The paper draws devices with probability p_i and averages them alike; here, as in `FedAvg`, they are
drawn uniformly and averaged by p_i, so that μ = 0 is FedAvg to the last digit and the two differ in
nothing but μ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scaffpd.algorithms.base import AveragingState
from scaffpd.algorithms.fed_avg import FedAvg
from scaffpd.errors import NOT_NEGATIVE
from scaffpd.federation import Federation, LocalPlan


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedProx; the other arguments are those of `FedAvg`.

    Args:
        mu: μ >= 0, the pull back to the round's start.
        local_rate: left out, 1/(max_i L_i + μ).
    """

    published = "FedProx"
    strengths = ("mu",)
    ranges = (("mu", NOT_NEGATIVE),)

    mu: float = 0.1

    def _safe_rate(self, federation: Federation) -> float:
        return 1 / (1 / super()._safe_rate(federation) + self.mu)

    def _plan(self, state: AveragingState) -> LocalPlan:
        return replace(super()._plan(state), prox=self.mu)
