"""Agnostic federated learning: the worst client decides."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.objectives.base import Objective, ProxStep, Vector, read_losses, read_step, read_weights
from scaffpd.objectives.simplex import in_simplex, normalised, project_weighted, simplex_step


class Agnostic(Objective):
    r"""Λ = the simplex, ψ = 0:  min_x max_i f_i(x).

    "Agnostic federated learning" (Mohri, Sivek and Suresh 2019). Its optimum guarantees the smallest
    possible worst loss, and with it the best bound on the loss under every mixture of the clients that
    may turn up later. The prior does not enter Λ: it is the start λ⁰, and shares out ties.
    """

    def value(self, weights: ArrayLike) -> float:
        """ψ(λ) = 0."""
        read_weights(self, weights)
        return 0.0

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ lies in the simplex."""
        return in_simplex(read_weights(self, weights), tolerance)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> Vector:  # noqa: E741
        """λ_i = σ_i [s_i + l_i/σ_i − ν]₊ with ν such that Σ λ_i = 1: for one σ, the projection of l + σs."""
        s, old, sigma = read_step(self, s, l, sigma)
        return project_weighted(s - s.max() + old / sigma, sigma * np.ones(len(s)))

    def maximizer(self, losses: ArrayLike) -> Vector:
        """All weight on the clients with the largest loss, shared in proportion to the prior."""
        losses = read_losses(self, losses)
        return normalised(np.where(losses == losses.max(), self.weights(len(losses)), 0.0))

    def support(self, losses: ArrayLike) -> float:
        """max_i L_i."""
        return float(read_losses(self, losses).max())

    def prox_step(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> ProxStep:  # noqa: E741
        """d_i = σ_i on the clients with weight, zero elsewhere."""
        weights = self.prox(s, l, sigma)
        return simplex_step(weights, np.where(weights > 0.0, sigma, 0.0))
