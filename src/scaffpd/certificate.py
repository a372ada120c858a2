r"""A proof of how close to optimal a pair (x, λ) is, from numbers that the server has anyway.

With f_i μ_i-strongly convex, Φ(·, λ) = Σ λ_i f_i is (Σ λ_i μ_i)-strongly convex and

    min_y Φ(y, λ) ≥ Φ(x, λ) − ‖∇_x Φ(x, λ)‖² / (2 Σ λ_i μ_i).

Hence the duality gap of (x, λ), and with it the excess of x over the optimum, is at most

    gap(x, λ) ≤ [ support(L) − ⟨L, λ⟩ + ψ(λ) ] + ‖Σ λ_i ∇f_i(x)‖² / (2 Σ λ_i μ_i),

and on the simplex ‖x − x*‖² ≤ 2 gap / min_i μ_i. It holds at every x and every λ ∈ Λ, whatever produced them, but only
for full losses and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaffpd.federation import Constants, Vector
from scaffpd.objectives.base import LARGEST, Objective
from scaffpd.objectives.simplex import inner

EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Certificate:
    """A proven bound and its two parts.

    Attributes:
        gap: the duality gap is at most this; +∞ where nothing is proven.
        dual: how much another λ ∈ Λ would raise the objective at this x.
        primal: how much another x could lower it at this λ.
        floor: what rounding alone may contribute; no certificate can be smaller.
    """

    gap: float
    dual: float
    primal: float
    floor: float


def certify(
    objective: Objective,
    losses: Vector,
    weights: Vector,
    gradient: float,
    strong_convexity: Vector,
    rounding: tuple[Vector, Vector],
) -> Certificate:
    """Bound the duality gap at (x, λ).

    Args:
        objective: (Λ, ψ).
        losses: L_i = f_i(x).
        weights: λ.
        gradient: ‖Σ λ_i ∇f_i(x)‖.
        strong_convexity: μ_i.
        rounding: bounds on the rounding errors of each L_i and of each ∇f_i(x) (its norm).
    """
    nothing = Certificate(np.inf, np.inf, np.inf, np.inf)
    modulus = inner(weights, strong_convexity)
    known = all(bool(np.all(np.isfinite(bounds))) for bounds in rounding)  # of a silo that does not answer nothing is
    if not (known and np.all(np.abs(losses) < LARGEST / 4) and np.isfinite(gradient) and modulus > 0):
        return nothing
    # On the simplex a common shift of the losses changes nothing but the rounding: centre them.
    centred = losses - inner(weights, losses) / weights.sum() if objective.simplex else losses
    best, penalty = objective.support(centred), objective.value(weights)
    dual, primal = best - inner(weights, centred) + penalty, gradient**2 / (2 * modulus)
    total, error = max(1.0, float(weights.sum())), inner(weights, rounding[1])
    arithmetic = 8 * EPSILON * (float(np.abs(losses).max()) * total + abs(penalty))
    floor = arithmetic + 2 * total * float(rounding[0].max()) + (2 * gradient + error) * error / (2 * modulus)
    gap = max(dual, 0.0) + primal + floor
    return Certificate(gap, dual, primal, floor) if np.isfinite(gap) else nothing


def no_certificate(exact: bool, constants: Constants, weights: Vector) -> str | None:
    """Why nothing can be proven, in a sentence; `None` where it can."""
    if constants.noisy:
        return "losses and gradients carry noise, for privacy."
    if not constants.convex:
        return "the losses are not known to be convex."
    if not exact:
        return "losses and gradients come from minibatches (full_gradients=False)."
    if not weights @ constants.strong_convexity > 0:
        return "no loss is strongly convex; give the model l2 > 0."
    return None
