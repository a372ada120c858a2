r"""Centralised references, with every client's full gradient: descent-ascent and extragradient.

Gradient descent-ascent is the simplest method for a saddle point.

K. J. Arrow, L. Hurwicz, H. Uzawa, "Studies in Linear and Non-Linear Programming", 1958; in the
proximal form it is one step of A. Nemirovski, "Prox-method with rate of convergence O(1/t)", 2004.

    x^{r+1} = x^r − τ Σ λ_i^r ∇f_i(x^r)
    λ^{r+1} = argmin_{λ∈Λ} ψ(λ) − ⟨L(x^r), λ⟩ + ‖λ − λ^r‖²/(2σ)

Both players move at once; without strong concavity the last iterate may circle. One exchange a
round.

Extragradient looks one step ahead, then steps from where it was with what it saw there.

G. M. Korpelevich, "The extragradient method for finding saddle points and other problems", 1976.

    x̄ = x^r − τ Σ λ_i^r ∇f_i(x^r),              λ̄ = prox_σ(L(x^r), λ^r)
    x^{r+1} = x^r − τ Σ λ̄_i ∇f_i(x̄),            λ^{r+1} = prox_σ(L(x̄), λ^r)

It converges where descent-ascent circles, for two exchanges a round.

Off the simplex (q-FFL, Nash) the model steps along Σ λ_i c_i / S with S = Σ λ_i, so that its step
length does not depend on S; on the simplex S = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from scaffpd.algorithms.base import steepest
from scaffpd.algorithms.minimax import (
    AnsweredState,
    MinimaxMethod,
    asked_again,
    dual_step,
    safe_dual_rate,
)
from scaffpd.federation import Constants, Federation, Gradients, Vector
from scaffpd.federation.plans import ReleaseCounts


@dataclass(frozen=True, kw_only=True)
class CentralState(AnsweredState):
    """Adds the rates.

    Attributes:
        server_rate: τ.
        dual_rate: σ.
    """

    server_rate: float
    dual_rate: float


@dataclass(frozen=True)
class CentralMethod(MinimaxMethod[CentralState]):
    """An algorithm that asks every client for its full gradient.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        server_rate: τ; left out, 1/(2 max_i L_i).
        dual_rate: σ; left out, 0.45/(K² τ) with K the coupling of x and λ at x⁰.
    """

    asks_losses: ClassVar[bool] = True
    knobs: ClassVar[tuple[str, ...]] = ("server_rate", "dual_rate")

    server_rate: float | None = field(default=None, kw_only=True)
    dual_rate: float | None = field(default=None, kw_only=True)

    def automatic(self, federation: Federation) -> dict[str, float]:
        """Return the rates that are used where none are given."""
        at = federation.gradients(federation.start())
        server_rate, dual_rate = self._rates(federation.constants(), at)
        return {"server_rate": server_rate, "dual_rate": dual_rate}

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count losses and gradients at every point."""
        return ReleaseCounts.points(rounds + 1)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> CentralState:
        """Ask at x⁰; λ⁰ is the objective's prior."""
        x, constants, at = self._open(federation, x0)
        server_rate, dual_rate = self._rates(constants, at)
        state = CentralState(
            x=x,
            weights=self.objective.start(at.losses),
            losses=at.losses,
            seed=seed,
            constants=constants,
            server_rate=server_rate,
            dual_rate=dual_rate,
            at=at,
        )
        return self._certified(state, at)

    def resume(self, federation: Federation, state: CentralState) -> CentralState:
        """Ask the clients for their answers at x again."""
        return asked_again(federation, state)

    def _rates(self, constants: Constants, at: Gradients) -> tuple[float, float]:
        tau = self.server_rate or 1 / (2 * steepest(constants.smoothness))
        return tau, self.dual_rate or safe_dual_rate(self.objective, at, tau)

    def _moved(
        self, federation: Federation, state: CentralState, x: Tensor, weights: Vector
    ) -> CentralState:
        at = federation.gradients(x)
        state = replace(
            state, x=x, weights=weights, losses=at.losses, at=at, rounds=state.rounds + 1
        )
        return self._certified(state, at)


def descent(at: Gradients, weights: Vector) -> Tensor:
    """Return Σ (λ_i/S) c_i with S = Σ λ_i, which is 1 on the simplex."""
    return at.sum(weights / (float(weights.sum()) or 1.0))


@dataclass(frozen=True)
class GradientDescentAscent(CentralMethod):
    """Simultaneous gradient descent-ascent; see `CentralMethod` for the arguments."""

    published: ClassVar[str] = "GDA"

    def round(self, federation: Federation, state: CentralState) -> CentralState:
        """Take one step of both players."""
        x = state.x - state.server_rate * descent(state.at, state.weights)
        weights = dual_step(self.objective, state.losses, state.weights, state.dual_rate)
        return self._moved(federation, state, x, weights)


@dataclass(frozen=True)
class Extragradient(CentralMethod):
    """The extragradient method; see `CentralMethod` for the arguments."""

    published: ClassVar[str] = "Extragradient"

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count two points a round."""
        return ReleaseCounts.points(2 * rounds + 1)

    def round(self, federation: Federation, state: CentralState) -> CentralState:
        """Take a trial step, and the step."""
        trial = state.x - state.server_rate * descent(state.at, state.weights)
        ahead = federation.gradients(trial)
        middle = dual_step(self.objective, state.losses, state.weights, state.dual_rate)
        x = state.x - state.server_rate * descent(ahead, middle)
        weights = dual_step(self.objective, ahead.losses, state.weights, state.dual_rate)
        return self._moved(federation, state, x, weights)
