r"""A proof of how close to optimal (x, λ) is, from numbers that the server has.

With f_i μ_i-strongly convex, Φ(·, λ) = Σ λ_i f_i is (Σ λ_i μ_i)-strongly convex and

    min_y Φ(y, λ) ≥ Φ(x, λ) − ‖∇_x Φ(x, λ)‖² / (2 Σ λ_i μ_i).

Hence the duality gap of (x, λ), and with it the excess of x over the optimum, is at most

    gap(x, λ) ≤ [ support(L) − ⟨L, λ⟩ + ψ(λ) ] + ‖Σ λ_i ∇f_i(x)‖² / (2 Σ λ_i μ_i),

and on the simplex ‖x − x*‖² ≤ 2 gap / min_i μ_i. It holds at every x and every λ ∈ Λ, from any
method, but only for full losses and gradients.

**Rounding.** Clients send L̂_i and Σ λ_i ĉ_i with bounds e_i ≥ |L̂_i − f_i(x)| and ε_i on
‖ĉ_i − ∇f_i(x)‖. As Λ has no negative weights, support grows with every loss, so that with
g = ‖Σ λ_i ĉ_i‖

    F(x) − min F ≤ [ support(L̂ + e) − ⟨L̂ − e, λ⟩ + ψ(λ) ]
                   + (g + Σ λ_i ε_i)² / (2 Σ λ_i μ_i) + a,

where a bounds the arithmetic of the server. Theorem: the certificate is at least F(x) − min F for
the model's losses on the data, x and l2 as they are stored, exactly, if

* every addition, multiplication, division, square root and fused multiply-add in double precision
  errs by at most u = 2⁻⁵³ of its result, or by 2⁻¹⁰²² if that underflows, for sums in any order;
* exp, log, log1p, expm1 and powers err by at most 4 units in the last place;
* in single precision on a GPU the same holds with u = 2⁻²⁴, and a matrix unit that adds n products
  of halves errs by at most 17n/16 · 2⁻²³ times the sum of their sizes.

Nothing is assumed about the sizes or the signs of the numbers, about their errors being random, or
about the accuracy of any iterative method or decomposition: maxima come from weak duality, where
every multiplier proves a bound, and decompositions are multiplied out again. On the simplex the
weights are λ/Σλ and the prior is p/Σp; where rounding has left λ outside Λ by a share η, the bound
grows by η F, for losses that are not negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Constants, Vector
from scaffpd.objectives.base import LARGEST, Objective
from scaffpd.objectives.rounding import EPSILON, LEAST, inner, roundings, total

MOST = 0.1  # largest share of itself by which λ may be outside Λ
UNDERFLOW = 1.5e-154  # a number whose square underflows


@dataclass(frozen=True)
class Certificate:
    """A proven bound and its two parts.

    Attributes:
        gap: upper bound on the duality gap; +∞ if nothing is proven.
        dual: how much another λ ∈ Λ would raise the objective at this x.
        primal: how much another x could lower it at this λ.
        floor: possible contribution of rounding; no certificate can be smaller.
    """

    gap: float
    dual: float
    primal: float
    floor: float


NOTHING = Certificate(np.inf, np.inf, np.inf, np.inf)


def certify(
    objective: Objective,
    losses: Vector,
    weights: Vector,
    gradient: SupportsFloat,
    strong_convexity: Vector,
    rounding: tuple[Vector, Vector],
) -> Certificate:
    """Bound the duality gap at (x, λ).

    Args:
        objective: (Λ, ψ).
        losses: L_i = f_i(x).
        weights: λ.
        gradient: ‖Σ λ_i ∇f_i(x)‖, see `length`; a GPU is waited for only at the end.
        strong_convexity: μ_i.
        rounding: bounds on the rounding errors of each L_i and of each ∇f_i(x) (its norm).
    """
    if not all(bool(np.all(np.isfinite(bounds))) for bounds in rounding):
        return NOTHING  # a silo does not answer
    modulus = inner(weights, strong_convexity)
    error = inner(weights, rounding[1])
    if not (np.all(np.abs(losses) < LARGEST / 4) and modulus > 0) or weights.min() < 0:
        return NOTHING
    outside = objective._stretch(weights)
    if outside > MOST:
        return NOTHING
    dual, floor = _dual(objective, losses, weights, rounding[0])
    size = float(np.abs(losses).max() + rounding[0].max()) + objective._origin()
    # Square quotients: a square alone may underflow.
    mass = float(weights.sum()) if objective.simplex else 1.0
    room = (2 * modulus * mass) ** 0.5
    # `modulus`, `mass` and `error` are sums over clients, with one rounding per addition.
    wide = 1 + EPSILON * (2 * roundings(len(losses)) + 16)
    g = float(gradient)
    primal = (g / room) ** 2
    most = (g + error) / room * wide
    arithmetic = 4 * EPSILON * (abs(dual) + most**2) + LEAST
    floor += outside * size + max(most**2 - primal, 0.0) + arithmetic
    gap = max(dual, 0.0) + primal + floor
    return Certificate(gap, dual, primal, floor) if np.isfinite(gap) else NOTHING


def _dual(objective: Objective, losses: Vector, weights: Vector, e: Vector) -> tuple[float, float]:
    """Return support(L) − ⟨L, λ⟩ + ψ(λ), and a bound on its error."""
    mass = float(weights.sum()) if objective.simplex else 1.0
    # On the simplex a common shift of the losses changes nothing but the rounding: centre them.
    centred = losses - inner(weights, losses) / mass if objective.simplex else losses
    highest = np.nextafter(centred + (e + EPSILON * np.abs(centred)) * (1 + 4 * EPSILON), np.inf)
    best = objective._ceiling(highest)
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


def length(c: Tensor) -> SupportsFloat:
    """Bound ‖c‖ from above, for any format of c and any number of entries that have underflowed."""
    least = UNDERFLOW if c.dtype == torch.float64 else torch.finfo(c.dtype).tiny
    norm = c.double().norm()
    size: Tensor | float = norm if c.is_cuda else norm.item()
    return size * (1 + EPSILON * (len(c) + 4)) + 2 * math.sqrt(len(c)) * least


def no_certificate(exact: bool, constants: Constants, weights: Vector) -> str | None:
    """Return why nothing can be proven, in a sentence; `None` if it can."""
    if constants.noisy:
        return "losses and gradients carry noise, for privacy."
    if not constants.convex:
        return "the losses are not known to be convex."
    if not exact:
        return "losses and gradients come from minibatches (full_gradients=False)."
    if not weights @ constants.strong_convexity > 0:
        return "no loss is strongly convex; give the model l2 > 0."
    return None
