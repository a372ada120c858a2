"""Agnostic federated learning: the worst client decides."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_step, read_vector
from scaffpd.objectives.simplex import in_simplex, project_weighted, simplex_jacobian


class Agnostic(Objective):
    r"""Λ = the simplex, ψ = 0:  min_x max_i f_i(x)  (Mohri, Sivek and Suresh 2019, "Agnostic federated learning").

    Its optimum guarantees the smallest possible worst loss: no model serves every client better than it serves its
    worst one, whatever mixture of the clients turns up later. The prior is only the start λ⁰ and shares out ties.
    """

    def value(self, weights: ArrayLike) -> float:
        """ψ(λ) = 0."""
        read_vector("Agnostic", "weights", weights)
        return 0.0

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ lies in the simplex."""
        return in_simplex(read_vector("Agnostic", "weights", weights), tolerance)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: float) -> Vector:  # noqa: E741
        """The projection of l + σs on the simplex."""
        s, l, sigma = read_step("Agnostic", s, l, sigma)  # noqa: E741
        self.weights(len(s))
        return project_weighted(l + sigma * (s - s.max()), np.ones(len(s)))

    def maximizer(self, losses: ArrayLike) -> Vector:
        """All weight on the clients with the largest loss, shared in proportion to the prior."""
        L = read_vector("Agnostic", "losses", losses)
        lam = np.where(L == L.max(), self.weights(len(L)), 0.0)
        return lam / lam.sum()

    def support(self, losses: ArrayLike) -> float:
        """max_i L_i."""
        L = read_vector("Agnostic", "losses", losses)
        self.weights(len(L))
        return float(L.max())

    def prox_jacobian(self, s: ArrayLike, l: ArrayLike, sigma: float) -> NDArray[np.float64]:  # noqa: E741
        """σ (I − 11ᵀ/k) on the k clients with weight, zero elsewhere."""
        return simplex_jacobian(np.where(self.prox(s, l, sigma) > 0.0, float(sigma), 0.0))
