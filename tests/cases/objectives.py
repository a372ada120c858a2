"""Whether λ ∈ Λ, from the table in the docstring of `scaffpd.objectives`."""

import numpy as np

import scaffpd as sp


def contains(objective, weights, tolerance=1e-9):
    """Return whether λ ∈ Λ up to `tolerance`; Nash's Λ is open."""
    λ = np.asarray(weights, dtype=float)
    p = objective.weights(len(λ))
    if isinstance(objective, sp.Nash):
        return bool(λ.min() > 0)
    inside = λ.min() >= -tolerance
    if objective.simplex:
        inside &= abs(λ.sum() - 1) <= tolerance
    match objective:
        case sp.Average():
            inside &= np.abs(λ - p).max() <= tolerance
        case sp.CVaR():
            inside &= np.all(λ <= p / objective.alpha + tolerance)
        case sp.ChiSquareBall():
            inside &= ((λ - p) ** 2 / p).sum() <= objective.delta + tolerance
        case sp.ChiSquare() if objective.cap is not None:
            inside &= λ.max() <= objective.cap + tolerance
    return bool(inside)
