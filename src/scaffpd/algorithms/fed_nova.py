r"""FedNova: clients make different numbers of local steps, and none of them counts for more because of it.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor,
"Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020, Algorithm 1.

Round r, with S a uniformly random set of clients and p_i as in FedAvg, here divided by their sum over S:
    u_i ← u_i − η (g_i(u_i) + μ (u_i − x)), τ_i times from u_i = x                  x, τ_i down; x − u_i up
    d_i = (x − u_i)/(η ‖a_i‖₁),    ‖a_i‖₁ = Σ_{k<τ_i} (1 − ημ)^k  (τ_i where μ = 0)
    x⁺ = x − η_g τ_eff η Σ_{i∈S} p_i d_i,    τ_eff = Σ_{i∈S} p_i ‖a_i‖₁

FedAvg adds up x − u_i, in which a client of τ_i steps counts τ_i times: it minimises Σ p_i τ_i f_i. With equal τ_i the
two are the same method. As in FedAvg, clients drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.base import WEIGHTS, Algorithm
from scaffpd.algorithms.fed_avg import FedAvgState, FedProx
from scaffpd.errors import InputError, count, unknown
from scaffpd.federation import Vector
from scaffpd.privacy.accountant import ReleaseCounts


@dataclass(frozen=True, kw_only=True)
class FedNova(FedProx):
    """FedNova; see `AveragingMethod` for the other arguments.

    Args:
        local_steps: J, the mean of all τ_i.
        work: "samples" lets every client make the same number of passes over its rows, as published:
            τ_i = J n_i/n̄, rounded, and at least 1. "uniform" is J for all; or give a whole number for each client.
        mu: μ >= 0, the pull back to the round's start.
    """

    published: ClassVar[str] = "FedNova"
    strengths: ClassVar[tuple[str, ...]] = ()

    work: str | Sequence[int] = "samples"
    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.work, str):
            if self.work not in WEIGHTS:
                raise unknown("work", self.work, WEIGHTS)
            return
        if not isinstance(self.work, Sequence) or not self.work:
            raise InputError(
                "fednova-work-samples",
                f'FedNova needs work="samples", "uniform" or a whole number per client, got {self.work!r}.',
            )
        object.__setattr__(
            self, "work", tuple(count("FedNova", "work", number) for number in self.work)
        )

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count the most local steps of a client; those of "samples" are not known beforehand."""
        if self.work == "samples":
            return Algorithm.releases(self, rounds)
        most = self.local_steps if isinstance(self.work, str) else max(self.work)
        return super(FedProx, replace(self, local_steps=most, work="uniform")).releases(rounds)

    def _shares(self, state: FedAvgState, weights: Vector) -> Vector:
        """Return τ_eff p_i/‖a_i‖₁: the average of what each client does in one step, τ_eff times."""
        keep = 1 - self._eta(state) * self.mu
        lengths: Any = state.steps if keep == 1 else (1 - keep**state.steps) / (1 - keep)
        shares: Vector = float(weights @ lengths) * weights / lengths
        return shares

    def _steps(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.local_epochs is not None or self.work == "uniform":
            return super()._steps(samples)
        if self.work == "samples":
            rounded: NDArray[np.int64] = np.rint(
                self.local_steps * samples / samples.mean()
            ).astype(np.int64)
            return np.maximum(1, rounded)
        if len(self.work) != len(samples):
            raise InputError(
                "fednova-local-steps",
                f"FedNova has the local steps of {len(self.work)} clients in work=, but there are {len(samples)}.",
            )
        return np.array(self.work, dtype=np.int64)
