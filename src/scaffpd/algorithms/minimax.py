"""What minimax methods share: states that carry a proof, starts, and dual steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic

import numpy as np
from torch import Tensor
from typing_extensions import TypeVar

from scaffpd.algorithms.base import GRADIENTS, Algorithm, RunState, check_finite
from scaffpd.algorithms.certificate import certify, length, no_certificate
from scaffpd.federation import Constants, Federation, Gradients, Vector
from scaffpd.objectives.base import LARGEST, Objective

NEAR = 1e-6  # σ of a prox that is all but a projection


@dataclass(frozen=True, kw_only=True)
class MinimaxState(RunState):
    """Adds what a certificate is computed from.

    Attributes:
        constants: L_i and μ_i.
    """

    constants: Constants


@dataclass(frozen=True, kw_only=True)
class AnsweredState(MinimaxState):
    """Adds the clients' answers at x, which are not on disk.

    Attributes:
        at: the answers; asked for anew when a run is resumed.
    """

    at: Gradients = field(repr=False, metadata={"transient": True})


Proven = TypeVar("Proven", bound=MinimaxState, default=MinimaxState)
Answered = TypeVar("Answered", bound=AnsweredState)


@dataclass(frozen=True)
class MinimaxMethod(Algorithm[Proven], Generic[Proven]):
    """An algorithm that asks all clients for their gradients at one point, which proves its worth.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
    """

    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS})
    proves: ClassVar[bool] = True

    objective: Objective

    @property
    def exact(self) -> bool:
        """Return whether losses and gradients are over all samples, as a certificate needs."""
        return True

    def uncertified(self, state: Proven) -> str | None:
        """Say why nothing is proven about the result, or return `None`."""
        return no_certificate(self.exact, state.constants, state.weights)

    def _ask(self, federation: Federation, x: Tensor, seed: int, r: int) -> Gradients:
        """Ask the clients for their answers at x, for round r."""
        return federation.gradients(x)

    def _open(
        self, federation: Federation, x0: Tensor | None, seed: int = 0
    ) -> tuple[Tensor, Constants, Gradients]:
        """Return x⁰, the constants and the clients' answers there.

        Refuse a start from which nothing can come.
        """
        x = federation.start() if x0 is None else x0
        self.objective.weights(len(federation.names))
        constants = federation.constants()
        at = self._ask(federation, x, seed, 0)
        check_finite(at.losses, federation.names)
        self.objective.check(at.losses, federation.names)
        return x, constants, at

    def _certified(self, state: Proven, at: Gradients, c: Tensor | None = None) -> Proven:
        """Return the state with the proven gap of its (x, λ).

        Clients answered `at`, and c is Σ λ_i c_i, if known.
        """
        if self.uncertified(state):
            return replace(state, certificate=np.inf, floor=np.inf)
        c = at.sum(state.weights) if c is None else c
        mu = state.constants.strong_convexity
        rounding = at.rounding  # after the sum, whose own rounding is part of it
        proof = certify(self.objective, state.losses, state.weights, length(c), mu, rounding)
        return replace(state, certificate=proof.gap, floor=proof.floor)


def asked_again(federation: Federation, state: Answered) -> Answered:
    """Return a state that was read from disk with the clients' answers at its x."""
    return replace(state, at=federation.gradients(state.x))


def safe_dual_rate(objective: Objective, at: Gradients, primal_rate: float) -> float:
    """Return σ with σ τ K² < 1/2, for K² ≥ ‖∂(∇_x Φ)/∂λ‖² at x⁰.

    K² = Σ ‖c_i‖² − N‖c̄‖² on the simplex, where only differences of gradients matter, and Σ ‖c_i‖²
    elsewhere. The difference of two sums loses digits: it is at least 1e-12 of the first.
    """
    n = len(at.losses)
    coupling = float(at.norms().sum())
    if objective.simplex:
        mean = float(at.sum(np.full(n, 1 / n)).norm())
        coupling = max(coupling - n * mean**2, 1e-12 * coupling)
    return 0.45 / (coupling * primal_rate) if coupling * primal_rate > 0 else 1.0


def nearest(objective: Objective, weights: Vector, losses: Vector) -> Vector:
    """Return λ⁰ of a run that follows another: the point of Λ nearest to its λ.

    Off the simplex it is the usual start.
    """
    if not objective.simplex or len(weights) != len(losses) or abs(weights.sum() - 1) > 1e-9:
        return objective.start(losses)
    return objective.prox(np.zeros_like(weights), weights, NEAR)


def dual_step(objective: Objective, s: Vector, weights: Vector, rate: float) -> Vector:
    """Return prox_σ(s, λ), or λ itself where the losses are about to end the run."""
    sane = bool(np.all(np.abs(s) < LARGEST / 4))
    return objective.prox(s, weights, rate) if sane else weights
