r"""What minimax methods share: dual steps, and a proof of how close to optimal (x, λ) is.

With f_i μ_i-strongly convex, Φ(·, λ) = Σ λ_i f_i is (Σ λ_i μ_i)-strongly convex and

    min_y Φ(y, λ) ≥ Φ(x, λ) − ‖∇_x Φ(x, λ)‖² / (2 Σ λ_i μ_i).

Hence the duality gap of (x, λ), and with it the excess of x over the optimum, is at most

    gap(x, λ) ≤ [ support(L) − ⟨L, λ⟩ + ψ(λ) ] + ‖Σ λ_i ∇f_i(x)‖² / (2 Σ λ_i μ_i),

and on the simplex ‖x − x*‖² ≤ 2 gap / min_i μ_i. It holds at every x and every λ ∈ Λ, from any
method, but only for full losses and gradients.

**Ridges.** Where coordinates have ridges of their own (`Constants.ridge`), Φ(·, λ) bends by at
least D_j = Σ λ_i μ_i + (Σ λ_i)(ridge_j − min ridge) along coordinate j, and ½ Σ_j g_j²/D_j takes
the place of the last term, for g = Σ λ_i ∇f_i(x). That is the term above for g_j √(Σ λ_i μ_i / D_j)
in the place of g_j. With columns of different scales it is lower by up to the square of their
ratio. Clients bound the errors of gradients in the metric of the ridges, which is that of D up to a
factor.

**Rounding.** Clients send L̂_i and Σ λ_i ĉ_i with bounds e_i ≥ |L̂_i − f_i(x)| and ε_i on
‖ĉ_i − ∇f_i(x)‖. As Λ has no negative weights, support grows with every loss, so that with
g = ‖Σ λ_i ĉ_i‖

    F(x) − min F ≤ [ support(L̂ + e) − ⟨L̂ − e, λ⟩ + ψ(λ) ]
                   + (g + Σ λ_i ε_i)² / (2 Σ λ_i μ_i) + a,

where a bounds the arithmetic of the server. docs/mathematics.md has the theorem, and what it
assumes of a computer: nothing about the sizes or signs of numbers, or the accuracy of any iterative
method, for maxima come from weak duality, where every multiplier proves a bound. On the simplex the
weights are λ/Σλ and the prior is p/Σp; where rounding has left λ outside Λ by a share η, the bound
grows by η F, for losses that are not negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, NamedTuple, SupportsFloat, TypeVar

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import ERRORS, GRADIENTS, Algorithm, RunState, check_finite
from scaffpd.algorithms.concordant import Proof, proven
from scaffpd.federation import Constants, Federation, Gradients, Vector
from scaffpd.objectives.base import (
    EPSILON,
    LARGEST,
    LEAST,
    UNDERFLOW,
    Objective,
    inner,
    roundings,
    total,
)

MOST = 0.1  # largest share of itself by which λ may be outside Λ
TAKEN = 0.1  # share of a promise from which on a step is taken
SLACK = 64  # rounding in the acceptance test, in units of the number format
NEAR = 1e-6  # σ of a prox that is all but a projection


@dataclass(frozen=True, kw_only=True)
class MinimaxState(RunState):
    """Adds what a certificate is computed from: L_i and μ_i."""

    constants: Constants


@dataclass(frozen=True, kw_only=True)
class AnsweredState(MinimaxState):
    """Adds the clients' answers at x, which are asked for anew when a run is resumed."""

    at: Gradients = field(repr=False, metadata={"transient": True})


Proven = TypeVar("Proven", bound=MinimaxState)
Answered = TypeVar("Answered", bound=AnsweredState)


@dataclass(frozen=True)
class MinimaxMethod(Algorithm[Proven], Generic[Proven]):
    """An algorithm that asks all clients for their gradients at one point, which proves its worth.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
    """

    questions = frozenset({GRADIENTS, ERRORS})
    proves = True
    curved: ClassVar[bool] = False  # whether it knows Hessians, and proves without strong convexity

    objective: Objective

    @property
    def exact(self) -> bool:
        return True

    def uncertified(self, state: Proven) -> str | None:
        constants = state.constants
        if constants.noisy:
            return "losses and gradients carry noise, for privacy."
        if not constants.convex:
            return "the losses are not known to be convex."
        if not self.exact:
            return "losses and gradients come from minibatches (full_gradients=False)."
        if not (self.curved or state.weights @ constants.strong_convexity > 0):
            return "no loss is strongly convex; give the model l2 > 0."
        return None

    def _ask(self, federation: Federation, x: Tensor, seed: int, r: int) -> Gradients:
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
        proof = NOTHING
        if not self.uncertified(state):
            proof = self._proof(state.constants, state.losses, state.weights, at, c)
        return replace(state, certificate=proof.gap, floor=proof.floor)

    def _proof(
        self,
        constants: Constants,
        losses: Vector,
        weights: Vector,
        at: Gradients,
        c: Tensor | None,
        H: Tensor | None = None,
    ) -> Certificate:
        c = at.sum(weights) if c is None else c
        rounding = at.rounding()  # after the sum, whose own rounding is part of it
        short = shrinkage(constants, weights)
        errors = rounding[0], short.errors * rounding[1]
        size = length(c, short.factors)
        found = certify(self.objective, losses, weights, size, constants.strong_convexity, errors)
        known = bool(np.isfinite(rounding).all())
        if H is None or not known or found.gap <= 2 * found.floor < math.inf:
            return found
        mass = float(weights.sum()) if self.objective.simplex else 1.0
        g = c.double().cpu().numpy() / mass
        error = spread(constants) * inner(weights, rounding[1]) / mass
        # clients whose models are not exact err by less than their losses do
        inexact = math.sqrt(2 * inner(weights, rounding[0]) / mass)

        def width(root: Tensor) -> float:
            return at.width(root, weights / mass)

        single = c.dtype != torch.float64
        bound = proven(width, constants, H / mass, g, error, inexact, found.primal, single)
        if not bound.most < math.inf:
            return replace(found, flat=bound.flat)
        other = certify(self.objective, losses, weights, bound, constants.strong_convexity, errors)
        return min(found, other, key=lambda proof: proof.gap)


def spread(constants: Constants) -> Vector:
    """Return what an error e with ‖e/s‖ ≤ 1 in the metric of the ridges can be, by coordinate."""
    ridge = constants.ridge
    if ridge is None or not ridge.min() > 0:
        return np.ones(1)
    return np.asarray(np.sqrt(ridge / ridge.min()))


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
    return objective._prox(s, weights, rate) if sane else weights


@dataclass(frozen=True)
class Certificate:
    """A proven bound and its two parts."""

    gap: float  # upper bound on the duality gap; +∞ if nothing is proven
    dual: float  # how much another λ ∈ Λ would raise the objective at this x
    primal: float  # how much another x could lower it at this λ
    floor: float  # possible contribution of rounding; no certificate can be smaller
    flat: int = (
        -1
    )  # a coefficient on which the losses may not depend, so that Hessians prove nothing


NOTHING = Certificate(np.inf, np.inf, np.inf, np.inf)


def certify(
    objective: Objective,
    losses: Vector,
    weights: Vector,
    gradient: SupportsFloat | Proof,
    strong_convexity: Vector,
    rounding: tuple[Vector, Vector],
) -> Certificate:
    """Bound the duality gap at (x, λ).

    Args:
        objective: (Λ, ψ).
        losses: L_i.
        weights: λ.
        gradient: what `length` returns; a GPU is waited for only at the end. Or a proof without
            strong convexity.
        strong_convexity: μ_i.
        rounding: e_i and ε_i.
    """
    if not all(bool(np.all(np.isfinite(bounds))) for bounds in rounding):
        return NOTHING  # a silo does not answer
    modulus = inner(weights, strong_convexity)
    error = inner(weights, rounding[1])
    known = isinstance(gradient, Proof) or modulus > 0
    if not (np.all(np.abs(losses) < LARGEST / 4) and known) or weights.min() < 0:
        return NOTHING
    # rounding may have left λ a little outside Λ, where ⟨L, λ⟩ − ψ(λ) may exceed the support
    outside = objective._stretch(weights)
    if outside > MOST:
        return NOTHING
    dual, floor = _dual(objective, losses, weights, rounding[0])
    size = float(np.abs(losses).max() + rounding[0].max())
    # the bound as if nothing were rounded, and the one that holds: their difference is the floor
    if isinstance(gradient, Proof):
        primal, most = gradient.value, gradient.most
    else:
        # Square quotients: a square alone may underflow.
        mass = float(weights.sum()) if objective.simplex else 1.0
        room = (2 * modulus * mass) ** 0.5
        # `modulus`, `mass` and `error` are sums over clients, with one rounding per addition.
        wide = 1 + EPSILON * (2 * roundings(len(losses)) + 16)
        g = float(gradient)
        primal = (g / room) ** 2
        most = ((g + error) / room * wide) ** 2
    arithmetic = 4 * EPSILON * (abs(dual) + most) + LEAST
    floor += outside * size + max(most - primal, 0.0) + arithmetic
    gap = max(dual, 0.0) + primal + floor
    return Certificate(gap, dual, primal, floor) if np.isfinite(gap) else NOTHING


def _dual(objective: Objective, losses: Vector, weights: Vector, e: Vector) -> tuple[float, float]:
    """Return support(L) − ⟨L, λ⟩ + ψ(λ), and a bound on its error."""
    mass = float(weights.sum()) if objective.simplex else 1.0
    # On the simplex a common shift of the losses changes nothing but the rounding: centre them.
    centred = losses - inner(weights, losses) / mass if objective.simplex else losses
    # support grows with every loss, so the highest that the true losses may be bounds it from above
    highest = np.nextafter(centred + (e + EPSILON * np.abs(centred)) * (1 + 4 * EPSILON), np.inf)
    best = objective._ceiling(highest)
    # how much of that is rounding: without it, the two parts could not be separated
    raised = float(e.max()) if objective.simplex else best - objective._ceiling(centred)
    gained = weights * centred
    lost = weights * e
    k = EPSILON * (2 * roundings(len(losses)) + 16)
    arithmetic = k * (total(np.abs(gained)) + total(lost)) / mass
    penalty = objective._cost(weights)
    raised += total(lost) / mass + arithmetic
    dual = best - (total(gained) - total(lost)) / mass + penalty + arithmetic
    arithmetic = 4 * EPSILON * (abs(best) + abs(total(gained)) / mass + abs(penalty) + raised)
    return dual - raised, raised + arithmetic


class Shrinkage(NamedTuple):
    """How gradients and their errors count in the metric D; see "Ridges"."""

    factors: Vector | float  # √(Σ λ_i μ_i / D_j) ≤ 1 of every coordinate
    errors: float  # the most that √(ridge_j / min ridge) of them is, for errors in that metric


def shrinkage(constants: Constants, weights: Vector) -> Shrinkage:
    """Return both, from above."""
    ridge = constants.ridge
    modulus = inner(weights, constants.strong_convexity)
    if ridge is None or not modulus > 0 or not ridge.min() > 0:
        return Shrinkage(1.0, 1.0)
    D = modulus + total(weights) * (ridge - ridge.min())
    wide = 1 + EPSILON * (2 * roundings(len(weights)) + 16)
    factors = np.minimum(wide * np.sqrt(modulus / D), 1.0)
    return Shrinkage(factors, float((factors * np.sqrt(ridge / ridge.min())).max()) * wide)


def length(c: Tensor, shrinkage: Vector | float = 1.0) -> SupportsFloat:
    """Bound ‖c‖ from above, for any format of c and any number of entries that have underflowed.

    Every entry counts by its `shrinkage`.
    """
    least = UNDERFLOW if c.dtype == torch.float64 else torch.finfo(c.dtype).tiny
    size: Tensor | float
    if c.is_cuda:
        size = (c.double() * torch.as_tensor(shrinkage, device=c.device)).norm()
    else:
        size = float(np.linalg.norm(c.double().numpy() * shrinkage))
    return size * (1 + EPSILON * (len(c) + 4)) + 2 * math.sqrt(len(c)) * least
