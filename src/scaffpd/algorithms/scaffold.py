r"""SCAFFOLD: local steps corrected by control variates, so that clients do not drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020, Algorithm 1.

Round r, with S a uniformly random set of clients (c_i = c = 0 at the start of every run):
    y_i ← y_i − η_ℓ (g_i(y_i) − c_i + c), K times from y_i = x                      x, c down
    c_i⁺ = g_i(x)  (option I)   or   c_i − c + (x − y_i)/(K η_ℓ)  (option II)
    x ← x + (η_g/|S|) Σ_{i∈S} (y_i − x)                                             Δy_i up
    c ← c + (1/N) Σ_{i∈S} (c_i⁺ − c_i)                                              Δc_i up

With weights p_i in the place of 1/N, p_i/Σ_S p takes the place of 1/|S|; c = Σ p_i c_i at all times. In option II
Σ p_i Δc_i follows from Σ p_i Δy_i, which has gone up already: it costs nothing. All clients make the same K steps,
whatever their size.

ProxSkip (Scaffnew): local steps that provably save communication.

K. Mishchenko, G. Malinovsky, S. Stich, P. Richtárik,
"ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication Acceleration! Finally!", 2022, Algorithm 2.

Every iteration, with h_i = 0 at the start (so that Σ p_i h_i = 0 always):
    x̂_i = x_i − γ (g_i(x_i) − h_i)
    with probability p, one coin for all:   x = Σ p_i x̂_i,   h_i ← h_i + (p/γ)(x − x̂_i),   x_i = x
    otherwise x_i = x̂_i

A round here is everything up to and including a communication: a Geometric(p) number of local steps, 1/p on average.
1/p = √κ balances the two and gives O(√κ log 1/ε) rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import (
    GRADIENTS,
    UPDATES,
    Algorithm,
    AveragingMethod,
    LocalMethod,
    ServerState,
    begin,
    client_weights,
    moved,
)
from scaffpd.errors import unknown
from scaffpd.federation import Federation, Memory, Vector
from scaffpd.privacy.accountant import ReleaseCounts

OPTIONS = ("I", "II")
COIN = 2  # what a round's random numbers are for
UNKNOWN_CONDITION = 10  # local steps where κ is not known: no strong convexity
VARIATES = 0  # what a round's minibatches of option I are for


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(ServerState):
    """Adds the control variates.

    Attributes:
        prior: p_i.
        variate: c, the server's.
        variates: c_i, the clients'.
    """

    prior: Vector
    variate: Tensor
    variates: Memory


@dataclass(frozen=True, kw_only=True)
class Scaffold(AveragingMethod):
    """SCAFFOLD; see `AveragingMethod` for the other arguments. As published, all clients count alike.

    Args:
        option: how clients renew c_i: "I" by another gradient at x, "II" from their local steps.
    """

    published: ClassVar[str] = "SCAFFOLD"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, UPDATES})
    keeps_vectors: ClassVar[bool] = True

    option: str = "II"
    weights: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.option not in OPTIONS:
            raise unknown("option", self.option, OPTIONS)

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count, with option I, another gradient, which comes with its loss."""
        more = (
            ReleaseCounts.points(rounds, self.batch_size) if self.option == "I" else ReleaseCounts()
        )
        return super().releases(rounds) + more

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> ScaffoldState:
        """Set all control variates to zero."""
        known, _ = self._first(federation, seed, x0)
        return ScaffoldState(
            **known, variate=torch.zeros_like(known["x"]), variates=federation.memory()
        )

    def round(self, federation: Federation, state: ScaffoldState) -> ScaffoldState:
        """Let some clients make corrected local steps; then renew x, c and their c_i."""
        clients, p = self._participants(state, state.prior)
        weights = p / p.sum()
        share = float(p.sum())
        c = state.variate
        variates = state.variates
        r = state.rounds + 1
        if self.option == "I":
            at = federation.gradients(
                state.x, self.batch_size, (state.seed, r, VARIATES), clients, alone=False
            )
        updates = federation.local_updates(state.x, variates, c, self._plan(state), clients)
        d = updates.sum(weights)
        if self.option == "I":
            renewed = variates.replaced(at)
            change = at.sum(p) - variates.sum(p)
        else:
            scale = 1 / (self.local_steps * self._eta(state))
            renewed = variates.plus(-1.0, c, clients).plus(scale, updates)
            change = share * (scale * d - c)
        x = state.x - self.server_rate * d
        return moved(federation, state, x, weights, variate=c + change, variates=renewed)


@dataclass(frozen=True, kw_only=True)
class ProxSkipState(ServerState):
    """Adds the clients' shifts.

    Attributes:
        expected_steps: 1/p.
        shifts: h_i.
    """

    expected_steps: int
    shifts: Memory


@dataclass(frozen=True, kw_only=True)
class ProxSkip(LocalMethod):
    """ProxSkip, with all clients in every round.

    Args:
        local_steps: 1/p, the *expected* number of local steps per round; left out, √κ for κ = max L_i / min μ_i.
        batch_size: samples per local gradient; `None` uses all of them.
        local_rate: γ; left out, 1/max_i L_i.
        weights: "uniform" counts clients alike, as published; "samples" by their n_i.
    """

    published: ClassVar[str] = "ProxSkip"
    keeps_vectors: ClassVar[bool] = True

    local_steps: int | None = None  # type: ignore[assignment]
    weights: str = "uniform"

    def releases(self, rounds: int) -> ReleaseCounts:
        """Refuse: the number of local steps is drawn, and not known beforehand."""
        return Algorithm.releases(self, rounds)

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> ProxSkipState:
        """Set all shifts to zero."""
        x, losses, samples = begin(federation, x0)
        steps = self._balanced(federation) if self.local_steps is None else self.local_steps
        return ProxSkipState(
            x=x,
            weights=client_weights(self.weights, samples),
            losses=losses,
            seed=seed,
            local_rate=self._rate(federation),
            expected_steps=steps,
            shifts=federation.memory(),
        )

    def round(self, federation: Federation, state: ProxSkipState) -> ProxSkipState:
        """Make local steps until the coin says communicate, and communicate."""
        random = np.random.default_rng([state.seed, state.rounds + 1, COIN])
        plan = replace(self._plan(state), steps=int(random.geometric(1 / state.expected_steps)))
        updates = federation.local_updates(state.x, state.shifts, None, plan)
        d = updates.sum(state.weights)
        scale = 1 / (state.expected_steps * self._eta(state))  # p/γ, on x − x̂_i = d_i − d
        shifts = state.shifts.plus(scale, updates).plus(-scale, d)
        return moved(federation, state, state.x - d, state.weights, shifts=shifts)

    def _balanced(self, federation: Federation) -> int:
        known = federation.constants()
        mu = float(known.strong_convexity.min())
        return (
            max(1, round(float(np.sqrt(known.smoothness.max() / mu))))
            if mu > 0
            else UNKNOWN_CONDITION
        )
