"""The plain average: no robustness at all, and one end of every other objective's range."""

from __future__ import annotations

import numpy as np

from scaffpd.objectives.base import Objective, ProxStep, Scale, Vector


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
