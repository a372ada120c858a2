"""The χ² penalty: weights may leave the prior, at a quadratic price."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_losses, read_scale, read_step, read_weights
from scaffpd.objectives.prox_step import ProxStep
from scaffpd.objectives.simplex import in_simplex, inner, project_weighted, simplex_step


class ChiSquare(Objective):
    r"""Λ = the simplex, ψ(λ) = (ρ/2) Σ_i (λ_i − p_i)²/p_i.

    The penalised χ² divergence of distributionally robust optimisation (Levy, Carmon, Duchi and Sidford
    2020, "Large-scale methods for distributionally robust optimization"; Duchi and Namkoong 2021,
    "Learning models with uniform performance via distributionally robust optimization"). Its optimum
    guarantees the best trade between mean and spread: while no weight reaches zero, x minimises exactly
    Σ p_i f_i + Var_p(f)/(2ρ). ρ → ∞ is `Average` and ρ → 0 is `Agnostic`.

    Args:
        rho: the price ρ > 0 of leaving the prior, in units of the loss.
        prior: reference weights p, 1/N each if not given.
    """

    def __init__(self, rho: float, prior: Sequence[float] | ArrayLike | None = None) -> None:
        self.rho = read_scale("ChiSquare", "rho", rho)
        super().__init__(prior)

    def value(self, weights: ArrayLike) -> float:
        """(ρ/2) Σ (λ_i − p_i)²/p_i."""
        weights = read_weights(self, weights)
        p = self.weights(len(weights))
        return float(0.5 * self.rho * np.sum((weights - p) ** 2 / p))

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ lies in the simplex."""
        return in_simplex(read_weights(self, weights), tolerance)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> Vector:  # noqa: E741
        """λ_i = d_i [s_i + l_i/σ_i − ν]₊ with d_i = 1/(ρ/p_i + 1/σ_i) and ν such that Σ λ_i = 1."""
        s, old, sigma = read_step(self, s, l, sigma)
        return project_weighted(s - s.max() + old / sigma, self._rate(len(s), sigma))

    def maximizer(self, losses: ArrayLike) -> Vector:
        """λ_i = p_i [(L_i − ν)/ρ]₊ with ν such that Σ λ_i = 1."""
        losses = read_losses(self, losses)
        return project_weighted(losses, self.weights(len(losses)) / self.rho)

    def support(self, losses: ArrayLike) -> float:
        """⟨L, λ⟩ − ψ(λ) at the maximizer."""
        losses = read_losses(self, losses)
        weights, worst = self.maximizer(losses), losses.max()
        return float(worst + (inner(losses - worst, weights) - self.value(weights)))

    def prox_step(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> ProxStep:  # noqa: E741
        """d_i on the clients with weight, zero elsewhere."""
        weights = self.prox(s, l, sigma)
        return simplex_step(weights, np.where(weights > 0.0, self._rate(len(weights), sigma), 0.0))

    def strong_convexity(self, n: int) -> float:
        """ρ / max_i p_i."""
        return float(self.rho / self.weights(n).max())

    def _rate(self, n: int, sigma: ArrayLike) -> Vector:
        """1 / (ρ/p_i + 1/σ_i)."""
        p, sigma = self.weights(n), np.asarray(sigma, dtype=np.float64)
        return sigma * (p / (p + sigma * self.rho))
