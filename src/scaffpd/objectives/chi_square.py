"""The χ² penalty: weights may leave the prior, at a quadratic price."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import positive
from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_step, read_vector
from scaffpd.objectives.simplex import in_simplex, project_weighted, simplex_jacobian


class ChiSquare(Objective):
    r"""Λ = the simplex, ψ(λ) = (ρ/2) Σ_i (λ_i − p_i)²/p_i  (Levy, Carmon, Duchi and Sidford 2020; Duchi and Namkoong 2021).

    Its optimum guarantees the smallest mean-plus-variance loss: while no weight reaches zero the objective is exactly
    Σ p_i f_i + Var_p(f)/(2ρ), so ρ → ∞ is `Average` and ρ → 0 is `Agnostic`.

    Args:
        rho: the price ρ > 0 of leaving the prior, in units of the loss.
        prior: reference weights p, 1/N each if not given.
    """

    def __init__(self, rho: float, prior: Sequence[float] | ArrayLike | None = None) -> None:
        self.rho = positive("ChiSquare", "rho", rho)
        super().__init__(prior)

    def value(self, weights: ArrayLike) -> float:
        """(ρ/2) Σ (λ_i − p_i)²/p_i."""
        lam = read_vector("ChiSquare", "weights", weights)
        p = self.weights(len(lam))
        return float(0.5 * self.rho * np.sum((lam - p) ** 2 / p))

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ lies in the simplex."""
        return in_simplex(read_vector("ChiSquare", "weights", weights), tolerance)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: float) -> Vector:  # noqa: E741
        """λ_i = [(l_i + σs_i − ν) / (1 + σρ/p_i)]₊ with ν such that Σ λ_i = 1."""
        s, l, sigma = read_step("ChiSquare", s, l, sigma)  # noqa: E741
        return project_weighted(l + sigma * (s - s.max()), self._slope(len(s), sigma))

    def maximizer(self, losses: ArrayLike) -> Vector:
        """λ_i = p_i [(L_i − ν)/ρ]₊ with ν such that Σ λ_i = 1."""
        L = read_vector("ChiSquare", "losses", losses)
        return project_weighted(L, self.weights(len(L)) / self.rho)

    def support(self, losses: ArrayLike) -> float:
        """⟨L, λ⟩ − ψ(λ) at the maximizer."""
        L = read_vector("ChiSquare", "losses", losses)
        lam, worst = self.maximizer(L), L.max()
        return float(worst + ((L - worst) @ lam - self.value(lam)))

    def prox_jacobian(self, s: ArrayLike, l: ArrayLike, sigma: float) -> NDArray[np.float64]:  # noqa: E741
        """diag(d) − ddᵀ/Σd with d_i = 1/(ρ/p_i + 1/σ) on the clients with weight."""
        lam = self.prox(s, l, sigma)
        return simplex_jacobian(np.where(lam > 0.0, sigma * self._slope(len(lam), sigma), 0.0))

    def strong_convexity(self, n: int) -> float:
        """ρ / max_i p_i."""
        return float(self.rho / self.weights(n).max())

    def _slope(self, n: int, sigma: float) -> Vector:
        """1/(1 + σρ/p_i)."""
        p = self.weights(n)
        return p / (p + sigma * self.rho)
