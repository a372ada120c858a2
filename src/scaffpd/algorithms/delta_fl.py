r"""Δ-FL: FedAvg among the clients in the tail of the losses.

Y. Laguel, K. Pillutla, J. Malick, Z. Harchaoui,
"A Superquantile Approach to Federated Learning with Heterogeneous Devices", 2021, Algorithm 1
(and Pillutla et al., "Federated Learning with Superquantile Aggregation", 2023).

Round r, with conformity level θ:
    S: clients drawn uniformly;  F_i = f_i(x) over all samples, i ∈ S          x down; F_i up
    Q = the (1 − θ)-quantile of F_i, i ∈ S, with weights p_i;   S' = {i ∈ S : F_i ≥ Q}
    FedAvg's step among S'                                                     x − u_i up

It aims at the superquantile (CVaR) of the losses; θ = 1 is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaffpd.algorithms.base import LOSSES, UPDATES, AveragingState
from scaffpd.algorithms.fed_avg import FedAvg
from scaffpd.errors import PART
from scaffpd.federation import Federation, Vector

TIE = 1e-6  # losses that differ by less than this share are equal: single precision has 1e-7


@dataclass(frozen=True, kw_only=True)
class DeltaFL(FedAvg):
    """Δ-FL; the other arguments are those of `FedAvg`.

    Args:
        tail: θ in (0, 1]; a round serves the worst clients that together count for more than θ,
            usually one more than a share θ of them.
    """

    published = "Δ-FL"
    questions = frozenset({LOSSES, UPDATES})
    strengths = ("tail",)
    ranges = (("tail", PART),)

    tail: float = 0.5

    def round(self, federation: Federation, state: AveragingState) -> AveragingState:
        clients, p = self._participants(state)
        losses = federation.losses(state.x, clients=clients)
        level = quantile(losses[clients], p[clients], 1 - self.tail)
        tail = clients[losses[clients] >= level - TIE * abs(level)]
        outside = ~np.isin(np.arange(len(p)), tail)
        return self._average(federation, state, tail, np.where(outside, 0, p))


def quantile(values: Vector, weights: Vector, level: float) -> float:
    """Return the smallest value v with P(values ≤ v) ≥ level.

    The weights' sum is rounded: a level that it misses by 1e-12 is reached.
    """
    order = np.argsort(values)
    mass = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.argmax(mass >= level - 1e-12)])
