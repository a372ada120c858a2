r"""FedAvg: average the models that clients reach on their own.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, Algorithm 1.

Round r, with S a uniformly random set of clients and p_i = n_i/n (or 1/N):
    u_i ← u_i − η_ℓ g_i(u_i), J times from u_i = x^r                           x down; u_i up
    x^{r+1} = x^r − η_g Σ_{i∈S} p_i (x^r − u_i) / Σ_{i∈S} p_i

Clients that differ pull in different directions, so that with J > 1 the fixed point is not the
optimum (client drift).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.base import AveragingMethod, AveragingState, moved
from scaffpd.federation import Federation, Vector


@dataclass(frozen=True, kw_only=True)
class FedAvg(AveragingMethod[AveragingState]):
    """FedAvg; see `AveragingMethod` for the arguments."""

    published = "FedAvg"

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> AveragingState:
        return self._begin(federation, seed, x0)

    def round(self, federation: Federation, state: AveragingState) -> AveragingState:
        clients, p = self._participants(state)
        return self._average(federation, state, clients, p)

    def _average(
        self, federation: Federation, state: AveragingState, clients: NDArray[np.int64], p: Vector
    ) -> AveragingState:
        weights = p / p.sum()
        updates = federation.local_updates(state.x, None, None, self._plan(state), clients)
        return moved(federation, state, state.x - self.server_rate * updates.sum(weights), weights)
