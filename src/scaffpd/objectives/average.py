"""The plain average: no robustness at all, and one end of every other objective's range."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.objectives.base import Objective, ProxStep, Vector, read_losses, read_step, read_weights
from scaffpd.objectives.simplex import inner


class Average(Objective):
    r"""Λ = {p}, ψ = 0:  min_x Σ p_i f_i(x).

    The objective of federated averaging (McMahan, Moore, Ramage, Hampson and Agüera y Arcas 2017).
    Its optimum guarantees the smallest prior-weighted mean loss, and nothing for any single client.
    """

    def value(self, weights: ArrayLike) -> float:
        """ψ(λ) = 0."""
        read_weights(self, weights)
        return 0.0

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ = p up to `tolerance`."""
        weights = read_weights(self, weights)
        return bool(np.max(np.abs(weights - self.weights(len(weights)))) <= tolerance)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> Vector:  # noqa: E741
        """The prior p: there is no other weight to choose."""
        s, _, _ = read_step(self, s, l, sigma)
        return self.weights(len(s)).copy()

    def maximizer(self, losses: ArrayLike) -> Vector:
        """The prior p."""
        return self.weights(len(read_losses(self, losses))).copy()

    def support(self, losses: ArrayLike) -> float:
        """Σ p_i L_i."""
        losses = read_losses(self, losses)
        worst = losses.max()
        return float(worst + inner(losses - worst, self.weights(len(losses))))

    def prox_step(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> ProxStep:  # noqa: E741
        """Zero: the step never moves."""
        weights = self.prox(s, l, sigma)
        return ProxStep(weights, np.zeros(len(weights)), np.empty((0, len(weights))))
