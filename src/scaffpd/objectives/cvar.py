"""Conditional value at risk: the mean loss of the worst-off share of clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, positive
from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_step, read_vector
from scaffpd.objectives.simplex import in_simplex, project_capped, simplex_jacobian


class CVaR(Objective):
    r"""Λ = {λ in the simplex, λ_i ≤ p_i/α}, ψ = 0  (Rockafellar and Uryasev 2000; Pillutla et al. 2021, 2024: superquantile).

    Its optimum guarantees the smallest mean loss over the worst α share of the clients (by prior weight): α = 1 is
    `Average`, α ≤ min_i p_i is `Agnostic`.

    Args:
        alpha: the share 0 < α ≤ 1 of the clients that counts.
        prior: reference weights p, 1/N each if not given.
    """

    def __init__(self, alpha: float, prior: Sequence[float] | ArrayLike | None = None) -> None:
        self.alpha = positive("CVaR", "alpha", alpha)
        if self.alpha > 1.0:
            raise InputError(f"CVaR needs 0 < alpha <= 1, got {alpha!r}.")
        super().__init__(prior)

    def caps(self, n: int) -> Vector:
        """The largest weight p_i/α of every client (never above one)."""
        return np.minimum(self.weights(n) / self.alpha, 1.0)

    def value(self, weights: ArrayLike) -> float:
        """ψ(λ) = 0."""
        read_vector("CVaR", "weights", weights)
        return 0.0

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ lies in the simplex and below its caps."""
        lam = read_vector("CVaR", "weights", weights)
        return in_simplex(lam, tolerance) and bool(np.all(lam <= self.caps(len(lam)) + tolerance))

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: float) -> Vector:  # noqa: E741
        """λ_i = clip(l_i + σs_i − ν, 0, p_i/α) with ν such that Σ λ_i = 1."""
        s, l, sigma = read_step("CVaR", s, l, sigma)  # noqa: E741
        # Measured from the quantile, ν stays of the size of l however large σs is: nothing is lost to rounding.
        return project_capped(l + sigma * (s - self._quantile(s)), self.caps(len(s)))

    def maximizer(self, losses: ArrayLike) -> Vector:
        """Fill the largest losses up to their caps; what is left goes to the next one (ties share it by prior)."""
        L = read_vector("CVaR", "losses", losses)
        p, quantile = self.weights(len(L)), self._quantile(L)
        above, tied = L > quantile, L == quantile
        lam = np.where(above, p / self.alpha, 0.0)
        rest = max(1.0 - lam.sum(), 0.0)
        lam[tied] = p[tied] * (rest / p[tied].sum())
        return lam / lam.sum()

    def support(self, losses: ArrayLike) -> float:
        """The mean of the largest losses that have prior weight α together."""
        L = read_vector("CVaR", "losses", losses)
        worst = L.max()
        return float(worst + (L - worst) @ self.maximizer(L))

    def prox_jacobian(self, s: ArrayLike, l: ArrayLike, sigma: float) -> NDArray[np.float64]:  # noqa: E741
        """σ (I − 11ᵀ/k) on the k clients strictly between zero and their cap, zero elsewhere."""
        lam = self.prox(s, l, sigma)
        free = (lam > 0.0) & (lam < self.caps(len(lam)))
        return simplex_jacobian(np.where(free, float(sigma), 0.0))

    def _quantile(self, losses: Vector) -> float:
        """The loss at which the clients from the worst one down have prior weight α."""
        order = np.argsort(-losses)
        mass = np.cumsum(self.weights(len(losses))[order])
        return float(losses[order[min(int(np.searchsorted(mass, self.alpha)), len(losses) - 1)]])
