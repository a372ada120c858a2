r"""FedProx: FedAvg whose clients are held back by a proximal term.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith,
"Federated Optimization in Heterogeneous Networks", 2020, Algorithm 2.

Clients minimise h_i(u; x^r) = f_i(u) + (μ/2)‖u − x^r‖², here by J gradient steps:
    u_i ← u_i − η_ℓ (g_i(u_i) + μ (u_i − x^r))

The paper draws devices with probability p_i and averages them alike; here, as in `FedAvg`, they are drawn uniformly and
averaged by p_i, so that μ = 0 is FedAvg to the last digit and the two differ in nothing but μ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from scaffpd.algorithms.base import safe_rate
from scaffpd.algorithms.fed_avg import FedAvg
from scaffpd.errors import InputError, real
from scaffpd.federation import Federation


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedProx; the other arguments are those of `FedAvg`.

    Args:
        mu: μ >= 0, the pull back to the round's start.
    """

    published: ClassVar[str] = "FedProx"
    strengths: ClassVar[tuple[str, ...]] = ("mu",)

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= real("FedProx", "mu", self.mu) < float("inf"):
            raise InputError(f"FedProx needs mu >= 0 and finite, got {self.mu!r}.")

    def automatic(self, federation: Federation) -> dict[str, float]:
        """1/(max_i L_i + μ): the smoothness of h_i."""
        return {"local_rate": 1 / (1 / safe_rate(federation, self.batch_size) + self.mu)}

    def _rate(self, federation: Federation) -> float:
        return self.automatic(federation)["local_rate"] if self.local_rate is None else float(self.local_rate)

    def _extra(self) -> dict[str, Any]:
        return {"prox": self.mu}
