r"""FedAvg: average the models that clients reach on their own.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, Algorithm 1.

Round r, with S a uniformly random set of clients and p_i = n_i/n (or 1/N):
    u_i ← u_i − η_ℓ g_i(u_i), J times from u_i = x^r                                x down; u_i up
    x^{r+1} = x^r − η_g Σ_{i∈S} p_i (x^r − u_i) / Σ_{i∈S} p_i

Clients that differ pull in different directions, so that with J > 1 the fixed point is not the optimum (client drift).

FedProx: FedAvg whose clients are held back by a proximal term.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith,
"Federated Optimization in Heterogeneous Networks", 2020, Algorithm 2.

Clients minimise h_i(u; x^r) = f_i(u) + (μ/2)‖u − x^r‖², here by J gradient steps:
    u_i ← u_i − η_ℓ (g_i(u_i) + μ (u_i − x^r))

The paper draws devices with probability p_i and averages them alike; here, as in `FedAvg`, they are drawn uniformly and
averaged by p_i, so that μ = 0 is FedAvg to the last digit and the two differ in nothing but μ.

Δ-FL: FedAvg among the clients in the tail of the losses.

Y. Laguel, K. Pillutla, J. Malick, Z. Harchaoui,
"A Superquantile Approach to Federated Learning with Heterogeneous Devices", 2021, Algorithm 1
(and Pillutla et al., "Federated Learning with Superquantile Aggregation for Heterogeneous Data", 2023).

Round r, with conformity level θ:
    S: clients drawn uniformly;  F_i = f_i(x) over all samples, i ∈ S               x down; F_i up
    Q = the (1 − θ)-quantile of F_i, i ∈ S, with weights p_i;   S' = {i ∈ S : F_i ≥ Q}
    FedAvg's step among S'                                                          x − u_i up

It aims at the superquantile (CVaR) of the losses; θ = 1 is FedAvg.

q-FFL: fair resource allocation, by steps whose length follows from q and the losses.

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

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.base import (
    LOSSES,
    SIZES,
    UPDATES,
    Algorithm,
    AveragingMethod,
    ServerState,
    moved,
    safe_rate,
)
from scaffpd.errors import InputError
from scaffpd.federation import Federation, LocalPlan, Vector
from scaffpd.privacy.accountant import ReleaseCounts

TIE = 1e-6
TINY = 1e-300  # a loss of zero has no q−1 st power


@dataclass(frozen=True, kw_only=True)
class FedAvgState(ServerState):
    """Adds p_i, what clients count for, and how many local steps each makes.

    Attributes:
        prior: p_i.
        steps: J_i.
    """

    prior: Vector
    steps: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FedAvg(AveragingMethod):
    """FedAvg; see `AveragingMethod` for the other arguments.

    Args:
        local_epochs: E passes over a client's rows in place of `local_steps`: J_i = E n_i/b, rounded, and at least 1.
    """

    published: ClassVar[str] = "FedAvg"

    local_epochs: float | None = None

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count those of J local steps; epochs follow from a client's rows and are not known beforehand."""
        return (
            super().releases(rounds)
            if self.local_epochs is None
            else Algorithm.releases(self, rounds)
        )

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> FedAvgState:
        """Look up the rate and the weights; nothing else is needed."""
        known, samples = self._first(federation, seed, x0)
        return FedAvgState(**known, steps=self._steps(samples))

    def round(self, federation: Federation, state: FedAvgState) -> FedAvgState:
        """Let some clients make local steps, and average them."""
        clients, p = self._participants(state, state.prior)
        return self._average(federation, state, clients, p)

    def _average(
        self, federation: Federation, state: FedAvgState, clients: Any, p: Vector
    ) -> FedAvgState:
        """Take the step that these clients' local work makes together."""
        weights = p / p.sum()
        plan = self._work(state, clients)
        d = federation.local_updates(state.x, None, None, plan, clients).sum(
            self._shares(state, weights)
        )
        return moved(federation, state, weights=weights, **self._stepped(state, d))

    def _shares(self, state: FedAvgState, weights: Vector) -> Vector:
        """Return what x − u_i of every client counts for."""
        return weights

    def _stepped(self, state: FedAvgState, d: Tensor) -> dict[str, Any]:
        """Return the new x, and whatever else of the state the server's step changes."""
        return {"x": state.x - self.server_rate * d}

    def _steps(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return J_i."""
        if self.local_epochs is None:
            return np.full(len(samples), self.local_steps)
        batch = samples if self.batch_size is None else np.minimum(self.batch_size, samples)
        return np.maximum(1, np.rint(self.local_epochs * samples / batch)).astype(np.int64)

    def _work(self, state: FedAvgState, clients: Any) -> LocalPlan:
        """Return the local plan of these clients."""
        plan = self._plan(state, **self._extra())
        each = tuple(int(number) for number in state.steps[clients])
        return plan if set(each) == {plan.steps} else replace(plan, steps=max(each), each=each)

    def _extra(self) -> dict[str, Any]:
        """Return what a relative of FedAvg adds to the local plan."""
        return {}


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedProx; the other arguments are those of `FedAvg`.

    Args:
        mu: μ >= 0, the pull back to the round's start.
    """

    published: ClassVar[str] = "FedProx"
    strengths: ClassVar[tuple[str, ...]] = ("mu",)

    mu: float = 0.1

    def automatic(self, federation: Federation) -> dict[str, float]:
        """Return 1/(max_i L_i + μ): one over the smoothness of h_i."""
        return {"local_rate": 1 / (1 / safe_rate(federation, self.batch_size) + self.mu)}

    def _rate(self, federation: Federation) -> float:
        return (
            self.automatic(federation)["local_rate"]
            if self.local_rate is None
            else float(self.local_rate)
        )

    def _extra(self) -> dict[str, Any]:
        return {"prox": self.mu}


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

    def round(self, federation: Federation, state: FedAvgState) -> FedAvgState:
        """Ask some clients for losses, and take FedAvg's step among those that are served worst."""
        clients, p = self._participants(state, state.prior)
        losses = federation.losses(state.x, clients=clients)
        level = quantile(losses[clients], p[clients], 1 - self.tail)
        tail = clients[losses[clients] >= level - TIE * abs(level)]  # equal up to rounding is equal
        return self._average(
            federation, state, tail, np.where(np.isin(np.arange(len(p)), tail), p, 0)
        )


def quantile(values: Vector, weights: Vector, level: float) -> float:
    """Return the smallest value v with P(values ≤ v) ≥ level; rounding in the weights' sum does not move it."""
    order = np.argsort(values)
    mass = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.argmax(mass >= level - 1e-12)])


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

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> FedAvgState:
        """Begin as FedAvg does; refuse negative losses."""
        state = super().init(federation, seed, x0)
        if np.any(state.losses < 0):
            name = federation.names[int(state.losses.argmin())]
            raise InputError(
                "qffl-losses-client", f"QFFL needs losses >= 0; that of client {name!r} is not."
            )
        return state

    def round(self, federation: Federation, state: FedAvgState) -> FedAvgState:
        """Let some clients make local steps, weighted by F^q, with the step length that q asks for."""
        clients, p = self._participants(state, state.prior)
        L = 1 / self._eta(state)
        F = federation.losses(state.x, clients=clients, alone=False)
        updates = federation.local_updates(state.x, None, None, self._work(state, clients), clients)
        weights, h = self._scaled(F[clients], L**2 * updates.norms()[clients], L)
        weights, h = (spread(clients, p[clients] * part, len(p)) for part in (weights, h))
        if not h.sum() > 0:  # nobody has a loss: all is done
            return moved(federation, state, state.x, state.prior)
        x = state.x - self.server_rate * updates.sum(L * weights / h.sum())
        return moved(federation, state, x, weights / weights.sum())

    def _scaled(self, F: Vector, squares: Vector, L: float) -> tuple[Vector, Vector]:
        """Return F^q and h, both over max F^q, so that nothing overflows; a client without loss has neither (q > 0)."""
        top = max(float(F.max()), TINY)
        power = (F / top) ** self.q
        return power, power * (self.q * squares / np.maximum(F, TINY) + L)


def spread(clients: NDArray[np.int64], values: Vector, n: int) -> Vector:
    """Return the clients' values in the order of all n clients, 0 for the others."""
    out = np.zeros(n)
    out[clients] = values
    return out
