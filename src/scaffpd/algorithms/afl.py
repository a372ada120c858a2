r"""AFL: agnostic federated learning, gradient descent on the model and ascent on the clients' weights.

M. Mohri, G. Sivek, A. T. Suresh, "Agnostic Federated Learning", 2019, Figure 2 (Stochastic-AFL).

Round r, both steps from the same (x^r, λ^r):
    L_i = f_i(x^r);  u_i ← u_i − η_ℓ g_i(u_i), J times from u_i = x^r               x down; L_i, x − u_i up
    x^{r+1} = x^r − η_g Σ λ_i^r (x^r − u_i)
    λ^{r+1} = Π_Λ(λ^r + γ_λ L)                       for other objectives: argmin_Λ ψ(λ) − ⟨L, λ⟩ + ‖λ − λ^r‖²/(2γ_λ)

J = 1 is the published method (x − u_i = η_ℓ ∇f_i); the Scaff-PD paper's experiments give it local steps. Mohri et al.
prove their rate for the mean of the iterates (`average=True`); the last iterate usually does better. Off the simplex
λ_i/Σ λ_j takes the place of λ_i in the model's step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from scaffpd.algorithms.base import (
    GRADIENTS,
    LOSSES,
    STEPS,
    UPDATES,
    LocalMethod,
    ServerState,
    begin,
    moved,
)
from scaffpd.algorithms.minimax import dual_step, safe_dual_rate
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Vector
from scaffpd.objectives import Agnostic
from scaffpd.objectives.base import Objective
from scaffpd.privacy.accountant import ReleaseCounts


class DualMethod(LocalMethod):
    """A method whose clients make plain local steps, while the server takes a proximal step for λ from their losses.

    Attributes:
        objective: (Λ, ψ).
        server_rate: η_g.
        dual_rate: γ of the step for λ; `None` for an automatic one.
    """

    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, LOSSES, UPDATES})
    knobs: ClassVar[tuple[str, ...]] = ("local_rate", "dual_rate")

    objective: Objective
    server_rate: float
    dual_rate: float | None

    def automatic(self, federation: Federation) -> dict[str, float]:
        """Return the rates that are used where none are given."""
        rate = self._rate(federation)
        return {
            "local_rate": rate,
            "dual_rate": self._dual_rate(federation, federation.start(), rate),
        }

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count local steps and a loss in every round; and the coupling at x⁰ where the dual rate is left out."""
        if not self.objective.simplex:
            raise InputError(
                "starts-exact-losses",
                f"{type(self).__name__} starts from exact losses where weights are not on the simplex: "
                f"{self.objective!r} cannot be private with it; use ScaffPD.",
            )
        start = ReleaseCounts.points(1) if self.dual_rate is None else ReleaseCounts()
        return start + ReleaseCounts.over(
            self.batch_size, gradients=rounds * self.local_steps, losses=rounds
        )

    def _first(self, federation: Federation, seed: int, x0: Tensor | None) -> dict[str, Any]:
        """Return what a state has before the first round; λ⁰ is the objective's prior."""
        self.objective.weights(len(federation.names))
        x, losses, _ = begin(federation, x0)
        self.objective.check(losses, federation.names)
        rate = self._rate(federation)
        dual_rate = (
            self._dual_rate(federation, x, rate) if self.dual_rate is None else self.dual_rate
        )
        weights = self.objective.start(losses)
        return {
            "x": x,
            "weights": weights,
            "losses": losses,
            "seed": seed,
            "local_rate": rate,
            "dual_rate": dual_rate,
        }

    def _dual_rate(self, federation: Federation, x: Tensor, local_rate: float) -> float:
        """Return 0.45/(K² η_g J η_ℓ), with K the coupling of x and λ at x⁰."""
        at = federation.gradients(x)
        return safe_dual_rate(self.objective, at, self.server_rate * self.local_steps * local_rate)


@dataclass(frozen=True, kw_only=True)
class DualState(ServerState):
    """Adds the dual step.

    Attributes:
        dual_rate: γ.
    """

    dual_rate: float


@dataclass(frozen=True, kw_only=True)
class AFLState(DualState):
    """Adds what the steps start from: (x, λ) themselves unless iterates are averaged.

    Attributes:
        iterate: x^r.
        multipliers: λ^r.
    """

    iterate: Tensor
    multipliers: Vector


@dataclass(frozen=True)
class AFL(DualMethod):
    """AFL, for any objective.

    Args:
        objective: (Λ, ψ); AFL's own is `Agnostic()`.
        local_steps: J; 1 as published.
        batch_size: samples per local gradient and per loss; `None` uses all of them.
        local_rate: η_ℓ; left out, 1/max_i L_i.
        server_rate: η_g.
        dual_rate: γ_λ; left out, 0.45/(K² η_g J η_ℓ) with K the coupling of x and λ at x⁰.
        average: whether the result is the mean of all iterates.
    """

    published: ClassVar[str] = "AFL"

    objective: Objective = field(default_factory=Agnostic)
    local_steps: int = field(default=1, kw_only=True)
    server_rate: float = field(default=1.0, kw_only=True)
    dual_rate: float | None = field(default=None, kw_only=True)
    average: bool = field(default=False, kw_only=True)

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count a loss and J local steps a round; those at x⁰ are known from the coupling there."""
        known = self.dual_rate is None and self.batch_size is None
        return super().releases(rounds) + ReleaseCounts(losses=-int(known))

    @classmethod
    def usual(
        cls, objective: Objective, local_steps: int, batch_size: int | None
    ) -> dict[str, Self]:
        """Return it as published, with one local step, and with as many as the others (the Scaff-PD paper's choice)."""
        several = cls(local_steps=local_steps, batch_size=batch_size)
        return {"AFL": cls(batch_size=batch_size), "AFL + local steps": several}

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> AFLState:
        """Let both players stand at (x⁰, λ⁰)."""
        known = self._first(federation, seed, x0)
        return AFLState(**known, iterate=known["x"], multipliers=known["weights"])

    def round(self, federation: Federation, state: AFLState) -> AFLState:
        """Take one step of both players."""
        r = state.rounds + 1
        total = float(state.multipliers.sum()) or 1.0
        losses = federation.losses(
            state.iterate, self.batch_size, (state.seed, r, STEPS), alone=False
        )
        updates = federation.local_updates(state.iterate, None, None, self._plan(state))
        x = state.iterate - self.server_rate * updates.sum(state.multipliers / total)
        weights = dual_step(self.objective, losses, state.multipliers, state.dual_rate)
        if not self.average:
            return moved(federation, state, x, weights, iterate=x, multipliers=weights)
        mean = state.x + (x - state.x) / r
        mean_weights = state.weights + (weights - state.weights) / r
        return moved(federation, state, mean, mean_weights, iterate=x, multipliers=weights)
