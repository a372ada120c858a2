"""Conditional value at risk: the mean loss of the worst-off share of the clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.errors import PART, ranged
from scaffpd.objectives import simplex
from scaffpd.objectives.base import Objective, ProxStep, Scale, Vector, above, read_scale, roundings
from scaffpd.objectives.simplex import UNEQUAL


class CVaR(Objective):
    r"""Λ = {λ in the simplex, λ_i ≤ p_i/α}, ψ = 0.

    The conditional value at risk, or superquantile, of the clients' losses (Rockafellar and Uryasev
    2000, "Optimization of conditional value-at-risk"; Pillutla, Laguel, Malick and Harchaoui 2024,
    "Federated learning with superquantile aggregation for heterogeneous data"). Its optimum
    guarantees the smallest mean loss over the worst share α of the clients, by prior weight: α = 1
    is `Average`, and α ≤ min_i p_i is `Agnostic`.

    Args:
        alpha: the share 0 < α ≤ 1 of the clients that counts.
        prior: reference weights p, 1/N each if not given.
    """

    parameter = "alpha"
    symbol = "α"
    usual = 0.2
    meaning = "α is the share that counts, those served worst"
    strengths = staticmethod(
        lambda losses, points: np.geomspace(1.0, 1.0 / len(losses), points + 2)[1:-1]
    )

    def __init__(self, alpha: float, prior: ArrayLike | None = None) -> None:
        self.alpha = read_scale("CVaR", "alpha", alpha)
        ranged("CVaR", "alpha", alpha, PART, "alpha-out-of-range")
        super().__init__(prior)

    def caps(self, n: int) -> Vector:
        """Return the largest weight of every client: p_i/α, and at most one."""
        return np.minimum(self.weights(n) / self.alpha, 1.0)

    def largest(self, n: int) -> float:
        return float(self.caps(n).max())

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        """Return λ_i = clip(l_i + σ_i(s_i − ν), 0, p_i/α) with ν such that Σ λ_i = 1."""
        caps = self.caps(len(s))
        top, share = simplex.relative(sigma, len(s))
        # Relative to the quantile, ν stays of the size of l for any size of σs, and keeps its
        # digits. With unequal steps it may lie elsewhere, at one of the nearest s_i: the one from
        # which the weights sum to one.
        origin = self._quantile(s)
        weights, level = simplex.project_capped(old / share + top * (s - origin), caps, share)
        if abs(level) <= UNEQUAL:
            return weights
        others = np.unique(s)
        others = others[np.argsort(np.abs(others - (origin + level / top)))][:4]
        found = [weights]
        for other in others:
            found.append(simplex.project_capped(old / share + top * (s - other), caps, share)[0])
        return min(found, key=lambda weights: abs(float(weights.sum()) - 1.0))

    def _maximizer(self, losses: Vector) -> Vector:
        """Fill the largest losses up to their caps; the next, or tied ones, share the rest."""
        p = self.weights(len(losses))
        quantile = self._quantile(losses)
        weights = np.where(losses > quantile, p / self.alpha, 0.0)
        last = np.where(losses == quantile, p, 0.0)
        return simplex.normalised(weights + last * (max(1.0 - weights.sum(), 0.0) / last.sum()))

    def _ceiling(self, losses: Vector) -> float:
        """Return ν + Σ (p_i/α) [L_i − ν]₊ for ν the quantile; by weak duality, any ν is valid."""
        nu = self._quantile(losses)
        terms = self.weights(len(losses)) / self.alpha * np.maximum(losses - nu, 0.0)
        return above(np.append(terms, nu), more=roundings(len(losses)) + 8)

    def _stretch(self, weights: Vector) -> float:
        return simplex.share_above(weights, self.weights(len(weights)) / self.alpha)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        return simplex.capped_step(self._prox(s, old, sigma), sigma, self.caps(len(s)))

    def _quantile(self, losses: Vector) -> float:
        """Return the loss at which the clients, worst first, reach prior weight α."""
        order = np.argsort(-losses)
        mass = np.cumsum(self.weights(len(losses))[order])
        last = min(int(np.searchsorted(mass, self.alpha)), len(losses) - 1)
        return float(losses[order[last]])
