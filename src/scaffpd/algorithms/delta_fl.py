r"""Δ-FL: FedAvg among the clients in the tail of the losses.

Y. Laguel, K. Pillutla, J. Malick, Z. Harchaoui,
"A Superquantile Approach to Federated Learning with Heterogeneous Devices", 2021, Algorithm 1
(and Pillutla et al., "Federated Learning with Superquantile Aggregation for Heterogeneous Data", 2023).

Round r, with conformity level θ:
    S: clients drawn uniformly;  F_i = f_i(x) over all samples, i ∈ S               x down; F_i up
    Q = the (1 − θ)-quantile of F_i, i ∈ S, with weights p_i;   S' = {i ∈ S : F_i ≥ Q}
    FedAvg's step among S'                                                          x − u_i up

It aims at the superquantile (CVaR) of the losses; θ = 1 is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scaffpd.algorithms.base import LOSSES, UPDATES
from scaffpd.algorithms.fed_avg import FedAvg, FedAvgState
from scaffpd.errors import InputError, real
from scaffpd.federation import Federation, Vector

TIE = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaFL(FedAvg):
    """Δ-FL; the other arguments are those of `FedAvg`.

    Args:
        tail: θ in (0, 1]; a round serves the worst clients that together weigh more than θ, usually one more than a
            share θ of them.
    """

    published: ClassVar[str] = "Δ-FL"
    questions: ClassVar[frozenset[str]] = frozenset({LOSSES, UPDATES})
    strengths: ClassVar[tuple[str, ...]] = ("tail",)

    tail: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < real("DeltaFL", "tail", self.tail) <= 1:
            raise InputError(f"DeltaFL needs 0 < tail <= 1, got {self.tail!r}.")

    def round(self, federation: Federation, state: FedAvgState) -> FedAvgState:
        """The losses of some clients; FedAvg's step among those that are served worst."""
        clients, p = self._participants(state, state.prior)
        losses = federation.losses(state.x, clients=clients)
        level = quantile(losses[clients], p[clients], 1 - self.tail)
        tail = clients[losses[clients] >= level - TIE * abs(level)]  # equal up to rounding is equal
        return self._average(federation, state, tail, np.where(np.isin(np.arange(len(p)), tail), p, 0))


def quantile(values: Vector, weights: Vector, level: float) -> float:
    """The smallest value v with P(values ≤ v) ≥ level; rounding in the weights' sum does not move it."""
    order = np.argsort(values)
    mass = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.argmax(mass >= level - 1e-12)])
