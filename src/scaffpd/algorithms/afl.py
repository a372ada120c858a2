r"""AFL: agnostic federated learning, descent on the model and ascent on the clients' weights.

M. Mohri, G. Sivek, A. T. Suresh, "Agnostic Federated Learning", 2019, Figure 2 (Stochastic-AFL).

Round r, both steps from the same (x^r, λ^r):
    L_i = f_i(x^r);  u_i ← u_i − η_ℓ g_i(u_i), J times from u_i = x^r       x down; L_i, x − u_i up
    x^{r+1} = x^r − η_g Σ λ_i^r (x^r − u_i)
    λ^{r+1} = Π_Λ(λ^r + γ_λ L)    for other objectives: argmin_Λ ψ(λ) − ⟨L, λ⟩ + ‖λ − λ^r‖²/(2γ_λ)

J = 1 is the published method (x − u_i = η_ℓ ∇f_i); the Scaff-PD paper's experiments give it local
steps. Mohri et al. prove their rate for the mean of the iterates; the last one, which is returned,
usually does better. Off the simplex λ_i/Σ λ_j takes the place of λ_i in the model's step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from torch import Tensor

from scaffpd.algorithms.base import (
    GRADIENTS,
    LOSSES,
    NORMS,
    STEPS,
    UPDATES,
    LocalMethod,
    ServerState,
    begin,
    moved,
)
from scaffpd.algorithms.minimax import dual_step, safe_dual_rate
from scaffpd.errors import InputError
from scaffpd.federation import Federation
from scaffpd.federation.plans import ReleaseCounts
from scaffpd.objectives import Agnostic
from scaffpd.objectives.base import Objective


@dataclass(frozen=True, kw_only=True)
class DualState(ServerState):
    """Adds γ of the dual step."""

    dual_rate: float


@dataclass(frozen=True)
class DualMethod(LocalMethod[DualState]):
    """A method of plain local steps, whose server takes a proximal step for λ from their losses.

    The other arguments are those of `LocalMethod`; minibatches are of losses, too.

    Args:
        objective: (Λ, ψ); the published methods are for `Agnostic()`.
        server_rate: η_g, the factor on the averaged update.
        dual_rate: γ_λ; left out, 0.45/(K² η_g J η_ℓ) with K the coupling of x and λ at x⁰.
    """

    questions = frozenset({GRADIENTS, NORMS, LOSSES, UPDATES})
    knobs = ("local_rate", "dual_rate")

    objective: Objective = field(default_factory=Agnostic)
    server_rate: float = field(default=1.0, kw_only=True)
    dual_rate: float | None = field(default=None, kw_only=True)

    def asks(self, convex: bool = True) -> frozenset[str]:
        """Leave out gradients where the dual rate is given."""
        return self.questions - (frozenset() if self.dual_rate is None else {GRADIENTS, NORMS})

    def automatic(self, federation: Federation) -> dict[str, float]:
        rate = self._rate(federation)
        dual_rate = self._dual_rate(federation, federation.start(), rate)
        return {"local_rate": rate, "dual_rate": dual_rate}

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count local steps and a loss a round; and x⁰, where the dual rate is left out."""
        if not self.objective.simplex:
            raise InputError(
                "start-not-private",
                f"{type(self).__name__} starts from exact losses where weights are not on the "
                f"simplex: {self.objective!r} cannot be private with it; use ScaffPD.",
            )
        start = ReleaseCounts.points(1) if self.dual_rate is None else ReleaseCounts()
        return start + ReleaseCounts.over(
            self.batch_size, gradients=rounds * self.local_steps, losses=rounds
        )

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> DualState:
        self.objective.weights(len(federation.names))
        x, losses, _ = begin(federation, x0)
        if not (self.objective.simplex or federation.channel.here):  # λ⁰ goes by the losses
            losses = federation.losses(x)
        if np.isfinite(losses).all():
            self.objective.check(losses, federation.names)
        rate = self._rate(federation)
        return DualState(
            x=x,
            weights=self.objective.start(losses),
            losses=losses,
            seed=seed,
            local_rate=rate,
            dual_rate=self.dual_rate or self._dual_rate(federation, x, rate),
        )

    def _dual_rate(self, federation: Federation, x: Tensor, local_rate: float) -> float:
        at = federation.gradients(x)
        return safe_dual_rate(self.objective, at, self.server_rate * self.local_steps * local_rate)


@dataclass(frozen=True)
class AFL(DualMethod):
    """AFL, for any objective; see `DualMethod` for the arguments.

    Args:
        local_steps: J; 1 as published.
    """

    published = "AFL"

    local_steps: int = field(default=1, kw_only=True)

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count a loss and J local steps a round; the coupling at x⁰ has those of the first."""
        known = self.dual_rate is None and self.batch_size is None
        return super().releases(rounds) + ReleaseCounts(losses=-int(known))

    @classmethod
    def usual(
        cls, objective: Objective, local_steps: int, batch_size: int | None
    ) -> dict[str, Self]:
        """Return it as published, and with as many local steps as others (Scaff-PD's paper)."""
        several = cls(local_steps=local_steps, batch_size=batch_size)
        return {"AFL": cls(batch_size=batch_size), "AFL + local steps": several}

    def round(self, federation: Federation, state: DualState) -> DualState:
        share = state.weights / (float(state.weights.sum()) or 1.0)
        key = (state.seed, state.rounds + 1, STEPS)
        losses = federation.losses(state.x, self.batch_size, key, alone=False)
        updates = federation.local_updates(state.x, None, None, self._plan(state))
        x = state.x - self.server_rate * updates.sum(share)
        weights = dual_step(self.objective, losses, state.weights, state.dual_rate)
        return moved(federation, state, x, weights)
