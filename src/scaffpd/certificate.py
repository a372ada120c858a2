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
from scaffpd.objectives.base import Objective


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
    precision: float = float(np.finfo(np.float64).eps),
) -> Certificate:
    """Bound the duality gap at (x, λ).

    Args:
        objective: (Λ, ψ).
        losses: L_i = f_i(x).
        weights: λ.
        gradient: ‖Σ λ_i ∇f_i(x)‖².
        strong_convexity: μ_i.
        precision: the machine epsilon of the number format in which the losses were computed.
    """
    nothing = Certificate(np.inf, np.inf, np.inf, np.inf)
    if not (np.all(np.isfinite(losses)) and np.isfinite(gradient)):
        return nothing
    # On the simplex a common shift of the losses changes nothing but the rounding: centre them.
    centred = losses - weights @ losses / weights.sum() if objective.simplex else losses
    best, penalty = objective.support(centred), objective.value(weights)
    dual = best - float(weights @ centred) + penalty
    modulus = float(weights @ strong_convexity)
    primal = gradient / (2 * modulus) if modulus > 0 else np.inf
    size = float(np.abs(losses).max()) * max(1.0, float(weights.sum())) + abs(penalty)
    floor = 8 * precision * size
    gap = max(dual, 0.0) + primal + floor
    return Certificate(gap, dual, primal, floor) if np.isfinite(gap) else nothing


def no_certificate(exact: bool, constants: Constants, weights: Vector) -> str | None:
    """Why nothing can be proven, in a sentence; `None` where it can."""
    if not constants.convex:
        return "the losses are not known to be convex."
    if not exact:
        return "losses and gradients come from minibatches (full_gradients=False)."
    if not weights @ constants.strong_convexity > 0:
        return "no loss is strongly convex; give the model l2 > 0."
    return None
