"""The two ends of every range: the worst client decides, or all count by their prior alone."""

from __future__ import annotations

import numpy as np

from scaffpd.objectives.base import Objective, ProxStep, Scale, Vector
from scaffpd.objectives.simplex import in_simplex, normalised, project_weighted, simplex_step


class Agnostic(Objective):
    r"""Λ = the simplex, ψ = 0:  min_x max_i f_i(x).

    "Agnostic federated learning" (Mohri, Sivek and Suresh 2019). Its optimum guarantees the smallest
    possible worst loss, and with it the best bound on the loss under every mixture of the clients that
    may turn up later. The prior does not enter Λ: it is the start λ⁰, and shares out ties.
    """

    def _contains(self, weights: Vector, tolerance: float) -> bool:
        """Whether λ lies in the simplex."""
        return in_simplex(weights, tolerance)

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        """λ_i = σ_i [s_i + l_i/σ_i − ν]₊ with ν such that Σ λ_i = 1: for one σ, the projection of l + σs."""
        return project_weighted(s - s.max() + old / sigma, sigma * np.ones(len(s)))

    def _maximizer(self, losses: Vector) -> Vector:
        """All weight on the clients with the largest loss, shared in proportion to the prior."""
        return normalised(np.where(losses == losses.max(), self.weights(len(losses)), 0.0))

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        """d_i = σ_i on the clients with weight, zero elsewhere."""
        weights = self._prox(s, old, sigma)
        return simplex_step(weights, np.where(weights > 0.0, sigma, 0.0))


class Average(Objective):
    r"""Λ = {p}, ψ = 0:  min_x Σ p_i f_i(x).

    The objective of federated averaging (McMahan, Moore, Ramage, Hampson and Agüera y Arcas 2017).
    Its optimum guarantees the smallest prior-weighted mean loss, and nothing for any single client.
    """

    def _contains(self, weights: Vector, tolerance: float) -> bool:
        """Whether λ = p up to `tolerance`."""
        return bool(np.max(np.abs(weights - self.weights(len(weights)))) <= tolerance)

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        """The prior p: there is no other weight to choose."""
        return self.weights(len(s)).copy()

    def _maximizer(self, losses: Vector) -> Vector:
        """The prior p."""
        return self.weights(len(losses)).copy()

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        """Zero: the step never moves."""
        weights = self._prox(s, old, sigma)
        return ProxStep(weights, np.zeros(len(weights)), np.empty((0, len(weights))))
