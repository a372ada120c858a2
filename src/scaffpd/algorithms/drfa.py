r"""DRFA: distributionally robust federated averaging.

Y. Deng, M. M. Kamani, M. Mahdavi,
"Distributionally Robust Federated Averaging", 2020, Algorithm 1 (and DRFA-Prox).

Stage s:
    D: m clients drawn by λ^s, with replacement;  t' uniform on {1, …, τ}, the same for all
    u_i ← u_i − η_ℓ g_i(u_i), τ times from u_i = x^s, for i ∈ D        x down; u_{i,τ}, u_{i,t'} up
    x^{s+1} = (1/m) Σ_D u_{i,τ};   x' = (1/m) Σ_D u_{i,t'}
    U: m clients drawn uniformly;  v_i = (N/m) f_i(x') for i ∈ U, else 0      x' down; f_i(x') up
    λ^{s+1} = Π_Λ(λ^s + τ γ v)    for other objectives: argmin_Λ ψ(λ) − ⟨v, λ⟩ + ‖λ − λ^s‖²/(2τγ)

With all clients in every round the averages are Σ λ_i u_i and v = L(x') exactly. Local steps are
not corrected: DRFA stops at the drift of its clients, whatever the number of stages. The published
method has no server rate (1 here); ours scales both averages. Off the simplex λ_i/Σ λ_j takes the
place of λ_i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.afl import DualMethod, DualState
from scaffpd.algorithms.base import CLIENTS, SNAPSHOT, check_participation, moved
from scaffpd.algorithms.minimax import dual_step
from scaffpd.federation import Federation, Vector

PLACE = 0  # purpose of a round's random numbers: the minibatches of losses


@dataclass(frozen=True)
class DRFA(DualMethod):
    """DRFA, and with a penalty DRFA-Prox; see `DualMethod` for the other arguments, J being τ.

    Args:
        clients_per_round: m; `None` lets everybody take part, with weights λ in place of draws.
        dual_rate: γ; left out, 0.45/(K² η_ℓ η_g τ²).
    """

    published = "DRFA"
    questions = DualMethod.questions | {SNAPSHOT}

    clients_per_round: int | None = field(default=None, kw_only=True)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> DualState:
        check_participation(self, self.clients_per_round, federation)
        return super().init(federation, seed, x0)

    def round(self, federation: Federation, state: DualState) -> DualState:
        random = np.random.default_rng([state.seed, state.rounds + 1, CLIENTS])
        clients, share = self._by_weight(state.weights, random)
        snapshot = int(random.integers(1, self.local_steps + 1))
        plan = replace(self._plan(state), snapshot=snapshot)
        updates = federation.local_updates(state.x, None, None, plan, clients)
        x = state.x - self.server_rate * updates.sum(share)
        middle = state.x - self.server_rate * updates.snapshot(share)
        # v, an unbiased estimate of L(x')
        n = len(state.weights)
        key = (state.seed, state.rounds + 1, PLACE)
        m = self.clients_per_round or n
        uniform = np.arange(n) if m == n else np.sort(random.choice(n, m, replace=False))
        losses = federation.losses(middle, self.batch_size, key, uniform)
        v = n / m * np.nan_to_num(losses, nan=0.0)
        weights = dual_step(self.objective, v, state.weights, self.local_steps * state.dual_rate)
        return moved(federation, state, x, weights)

    def _by_weight(
        self, weights: Vector, random: np.random.Generator
    ) -> tuple[NDArray[np.int64], Vector]:
        """Draw clients by λ, and return the share of each in the mean: how often it was drawn."""
        p = np.maximum(weights, 0) / np.maximum(weights, 0).sum()
        if self.clients_per_round is None:
            return np.flatnonzero(p > 0), p
        # Not `multinomial`: its draws change altogether when rounding moves a share of one half.
        times = np.bincount(random.choice(len(p), self.clients_per_round, p=p), minlength=len(p))
        return np.flatnonzero(times), times / self.clients_per_round

    def _dual_rate(self, federation: Federation, x: Tensor, local_rate: float) -> float:
        return super()._dual_rate(federation, x, local_rate) / self.local_steps
