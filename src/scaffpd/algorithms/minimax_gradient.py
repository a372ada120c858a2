r"""Minimax gradient: the server solves for λ exactly, from the clients' gradients at one point.

Y. Nesterov, "Introductory Lectures on Convex Optimization", 2004, section 2.3 (the gradient mapping of a maximum of
smooth functions), carried over to (Λ, ψ), with momentum, restarts and backtracking:

    λ = argmax_{λ∈Λ} ⟨L(y), λ⟩ − ψ(λ) − ‖Σ λ_i ∇f_i(y)‖² / (2 L̂ S)
    x^{r+1} = y − Σ λ_i ∇f_i(y) / (L̂ S)
    accepted where support(L(x^{r+1})) is at most the value of that model; else L̂ grows
    y = x^{r+1} + β (x^{r+1} − x^r)

No local steps; S = Σ λ_i (1 on the simplex). The server must see every client's own gradient: no secure sums here. Two
exchanges a round, at x^{r+1} for the certificate and at y.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from scaffpd.algorithms.base import MinimaxMethod, MinimaxState, compact, steepest
from scaffpd.federation import Federation, Gradients, Vector
from scaffpd.objectives.base import LARGEST
from scaffpd.privacy.accountant import ReleaseCounts
from scaffpd.saddle import solve_saddle

GROW, SHRINK = 1.6, 0.97  # of L̂ after a rejected and an accepted step
SLACK = 1e-14  # rounding in the acceptance test, and accuracy of the problem in λ


@dataclass(frozen=True, kw_only=True)
class MinimaxGradientState(MinimaxState):
    """`weights` are those of the last model.

    Attributes:
        y: where the next model is built.
        momentum: t of Nesterov's sequence.
        smoothness: L̂.
        total: S.
        at: the clients' answers at y; asked for anew when a run is resumed.
    """

    y: Tensor
    momentum: float
    smoothness: float
    total: float
    at: Gradients = field(repr=False, metadata={"transient": True})


@dataclass(frozen=True)
class MinimaxGradient(MinimaxMethod):
    """The minimax gradient method, without anything to tune.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
    """

    sees_vectors: ClassVar[bool] = True

    def releases(self, rounds: int) -> ReleaseCounts:
        """At most two points a round."""
        return ReleaseCounts.points(2 * rounds + 1)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> MinimaxGradientState:
        """The clients' answers at x⁰ = y."""
        x, constants, at = self._open(federation, x0)
        weights = self.objective.start(at.losses)
        total = float(weights.sum())
        steepest(constants.smoothness)
        smoothness = 0.5 * float(weights @ constants.smoothness) / total
        state = MinimaxGradientState(
            x=x, y=x, weights=weights, losses=at.losses, momentum=1.0, smoothness=smoothness, total=total,
            seed=seed, constants=constants, at=at,
        )  # fmt: skip
        return self._certified(state, at)

    def resume(self, federation: Federation, state: MinimaxGradientState) -> MinimaxGradientState:
        """Ask the clients for their answers at y again."""
        return replace(state, at=federation.gradients(state.y))

    def round(self, federation: Federation, state: MinimaxGradientState) -> MinimaxGradientState:
        """Solve the model at y, try its minimiser, extrapolate."""
        at, tau = state.at, 1 / (state.smoothness * state.total)
        scale = SLACK * max(1.0, float(np.abs(at.losses).max()))
        E = compact(at.each().double().mT * tau**0.5).cpu().numpy()
        weights = solve_saddle(self.objective, at.losses, E, state.weights, scale).weights
        c = at.sum(weights)
        x = state.y - tau * c
        here = federation.gradients(x)
        model = float(weights @ at.losses) - self.objective.value(weights) - tau / 2 * float(c @ c)
        state = replace(state, rounds=state.rounds + 1)
        if not self._descended(here.losses, model):
            return replace(state, accepted=False, smoothness=GROW * state.smoothness)
        beta, momentum = self._momentum(state, x)
        y = x if beta == 0 else x + beta * (x - state.x)
        at = here if beta == 0 else federation.gradients(y)
        total = state.total if self.objective.simplex else float(weights.sum())
        state = replace(
            state, x=x, y=y, weights=weights, losses=here.losses, momentum=momentum, at=at, total=total,
            smoothness=SHRINK * state.smoothness, accepted=True,
        )  # fmt: skip
        return self._certified(state, here)

    def _descended(self, losses: Vector, model: float) -> bool:
        if not np.all(np.abs(losses) < LARGEST / 4):
            return False
        return self.objective.support(losses) <= model + SLACK * max(1.0, abs(model))

    def _momentum(self, state: MinimaxGradientState, x: Tensor) -> tuple[float, float]:
        """β and the next t: Nesterov's, but no more than strong convexity asks for; begun anew where it points back."""
        t = 1.0 if float((state.y - x) @ (x - state.x)) > 0 else state.momentum
        following = (1 + np.sqrt(1 + 4 * t * t)) / 2
        q = np.sqrt(min(1.0, float(state.constants.strong_convexity.min()) / state.smoothness))
        return float(min((t - 1) / following, (1 - q) / (1 + q))), float(following)
