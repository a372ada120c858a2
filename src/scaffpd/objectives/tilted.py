"""The KL penalty: exponentially tilted losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr

from scaffpd.errors import positive
from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_step, read_vector
from scaffpd.objectives.simplex import in_simplex, renormalised, simplex_jacobian


class Tilted(Objective):
    r"""Λ = the simplex, ψ(λ) = ρ Σ_i λ_i log(λ_i/p_i)  (Li, Beirami, Sanjabi and Smith 2021: TERM with tilt t = 1/ρ).

    Its optimum guarantees the smallest ρ log Σ p_i exp(f_i/ρ), a smooth stand-in for the worst loss that lies within
    ρ log(1/p_i) of f_i for every client i; ρ → ∞ is `Average`, ρ → 0 is `Agnostic`.

    Args:
        rho: the price ρ > 0 of leaving the prior, in units of the loss.
        prior: reference weights p, 1/N each if not given.
    """

    def __init__(self, rho: float, prior: Sequence[float] | ArrayLike | None = None) -> None:
        self.rho = positive("Tilted", "rho", rho)
        super().__init__(prior)

    def value(self, weights: ArrayLike) -> float:
        """ρ Σ λ_i log(λ_i/p_i), with 0 log 0 = 0; +∞ if a weight is negative."""
        lam = read_vector("Tilted", "weights", weights)
        return float(self.rho * np.sum(rel_entr(lam, self.weights(len(lam)))))

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ lies in the simplex."""
        return in_simplex(read_vector("Tilted", "weights", weights), tolerance)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: float) -> Vector:  # noqa: E741
        """λ_i + k log(λ_i/p_i) = l_i + σs_i − ν with k = σρ: λ_i = k ω((l_i + σs_i − ν)/k + log(p_i/k)), ω Wright's function."""
        s, l, sigma = read_step("Tilted", s, l, sigma)  # noqa: E741
        k = sigma * self.rho
        x = (s - s.max()) / self.rho + l / k + np.log(self.weights(len(s)))
        lam = k * _omega_with_sum(x - x.max(), 1.0 / k)
        return renormalised(lam, lam / (k + lam))

    def maximizer(self, losses: ArrayLike) -> Vector:
        """λ_i ∝ p_i exp(L_i/ρ)."""
        L = read_vector("Tilted", "losses", losses)
        lam = self.weights(len(L)) * np.exp((L - L.max()) / self.rho)
        return lam / lam.sum()

    def support(self, losses: ArrayLike) -> float:
        """ρ log Σ p_i exp(L_i/ρ)."""
        L = read_vector("Tilted", "losses", losses)
        p, worst = self.weights(len(L)), L.max()
        below = (L - worst) / self.rho
        excess = float(
            p @ np.expm1(below)
        )  # Σ p exp − 1, exact where ρ is large and the logarithm nearly zero
        return float(worst + self.rho * (np.log1p(excess) if excess > -0.5 else np.log(p @ np.exp(below))))

    def prox_jacobian(self, s: ArrayLike, l: ArrayLike, sigma: float) -> NDArray[np.float64]:  # noqa: E741
        """diag(d) − ddᵀ/Σd with d_i = 1/(ρ/λ_i + 1/σ)."""
        lam = self.prox(s, l, sigma)
        return simplex_jacobian(sigma * lam / (lam + sigma * self.rho))

    def strong_convexity(self, n: int) -> float:
        """ρ, because ψ'' = ρ/λ_i and λ_i ≤ 1 on the simplex."""
        self.weights(n)
        return self.rho

    def curvature(self, weights: ArrayLike) -> float:
        """ρ / max_i λ_i."""
        return float(self.rho / read_vector("Tilted", "weights", weights).max())


def _omega_with_sum(x: Vector, total: float) -> Vector:
    """ω(x − n) with n such that the sum is `total`; x has maximum zero.

    n lies between the values at which the largest entry alone, or N entries like it, would make up the total. Newton's
    method on log Σ ω(x − n) is exact where ω is an exponential (large σρ) and quadratic elsewhere; the bracket guards it.
    """
    each = total / len(x)
    low = -total - np.log(total)
    high = min(-each - np.log(each), float(np.log(np.sum(np.exp(x)) / total)))
    n = high
    for _ in range(100):
        omega = _omega(x - n)
        mass = float(omega.sum())
        low, high = (max(low, n), high) if mass >= total else (low, min(high, n))
        step = mass * np.log(mass / total) / float(np.sum(omega / (1.0 + omega)))
        previous, n = n, n + step
        if not low <= n <= high:
            n = 0.5 * (low + high)
        if abs(n - previous) <= 4e-16 * max(abs(n), 1.0):
            break
    return _omega(x - n)


def _omega(x: Vector) -> Vector:
    """Wright's omega function, ω + log ω = x, by Halley's method on u = log ω (u + e^u = x)."""
    large = x > 1.0
    u = np.where(large, np.log(np.maximum(x, 1.0)), np.minimum(x, 1.0) - np.log1p(np.exp(np.minimum(x, 1.0))))
    for _ in range(4):
        e = np.exp(u)
        residual, slope = u + e - x, 1.0 + e
        u = u - residual * slope / (slope * slope - 0.5 * residual * e)
    return np.where(large, x - u, np.exp(np.minimum(u, 1.0)))
