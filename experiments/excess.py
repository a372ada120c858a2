"""Excess losses: an objective of the clients' losses above their own levels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.objectives.base import (
    Objective,
    ProxStep,
    Scale,
    Vector,
    above,
    inner,
    roundings,
)


class Excess(Objective):
    r"""Any objective on f_i(x) − b_i in the place of f_i(x): ψ_b(λ) = ψ(λ) + ⟨b, λ⟩ on the same Λ.

    A loss has a part that no model removes, such as the noise of labels. By raw losses, the
    noisiest client gets the weight; by the excess over its own optimum, the client that a common
    model serves worst gets it. With these optima and `Agnostic()` it is minimax regret (Agarwal and
    Zhang 2022, "Minimax regret optimization for robust machine learning under distribution shift";
    Mo, Xu and Xue 2024).

    Args:
        objective: (Λ, ψ), such as `CVaR(0.2)`.
        offset: b, one number per client or one for all.
    """

    def __init__(self, objective: Objective, offset: float | ArrayLike) -> None:
        self.objective = objective
        self.offset = np.atleast_1d(np.asarray(offset, dtype=np.float64))

    @property
    def simplex(self) -> bool:  # type: ignore[override]
        """Same as the wrapped objective."""
        return self.objective.simplex

    @property
    def prior(self) -> Vector | None:  # type: ignore[override]
        """Same as the wrapped objective."""
        return self.objective.prior

    def levels(self, n: int) -> Vector:
        """Return b for `n` clients."""
        return np.broadcast_to(self.offset, n)

    def weights(self, n: int) -> Vector:
        """Return the prior p for `n` clients."""
        return self.objective.weights(n)

    def _value(self, weights: Vector) -> float:
        """Return ψ(λ) + ⟨b, λ⟩."""
        return self.objective._value(weights) + inner(self.levels(len(weights)), weights)

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        """Return prox_σ(s − b, l)."""
        return self.objective._prox(s - self.levels(len(s)), old, sigma)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        return self.objective._prox_step(s - self.levels(len(s)), old, sigma)

    def _maximizer(self, losses: Vector) -> Vector:
        return self.objective._maximizer(losses - self.levels(len(losses)))

    def _support(self, losses: Vector) -> float:
        """Return support(L − b)."""
        return self.objective._support(losses - self.levels(len(losses)))

    def _ceiling(self, losses: Vector) -> float:
        return self.objective._ceiling(np.nextafter(losses - self.levels(len(losses)), np.inf))

    def _cost(self, weights: Vector) -> float:
        terms = self.levels(len(weights)) * weights
        if self.simplex:
            terms = terms / weights.sum()
        terms = np.append(terms, self.objective._cost(weights))
        # a certificate knows the size of losses, and not of b, where λ is a little outside Λ
        outside = 2.0 * self._stretch(weights) * float(np.abs(self.offset).max())
        return above(terms, more=roundings(len(terms)) + 8) + outside

    def _stretch(self, weights: Vector) -> float:
        return self.objective._stretch(weights)

    def largest(self, n: int) -> float:
        """Same as the wrapped objective."""
        return self.objective.largest(n)

    def strong_convexity(self, n: int) -> float:
        """Same as the wrapped objective: ⟨b, λ⟩ is linear."""
        return self.objective.strong_convexity(n)

    def curvature(self, weights: Vector) -> float:
        """Same as the wrapped objective."""
        return self.objective.curvature(weights)

    def start(self, losses: Vector) -> Vector:
        """Return λ⁰ for the excess losses."""
        return self.objective.start(losses - self.levels(len(losses)))

    def check(self, losses: Vector, names: Sequence[object]) -> None:
        """Refuse excess losses that the objective is not defined for."""
        self.objective.check(losses - self.levels(len(losses)), names)
