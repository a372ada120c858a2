"""Nash bargaining: every client must gain over what it has without the federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError
from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_step, read_vector


class Nash(Objective):
    r"""Λ = {λ > 0}, ψ(λ) = Σ_i λ_i b_i − p_i − p_i log(λ_i/p_i):  min_x −Σ p_i log(b_i − f_i(x)).

    The bargaining solution of Nash (1950) with the losses b as disagreement point, as in Zhang et al. (2022). Its optimum
    guarantees that every client does strictly better than b_i, and that no other model raises the gains b_i − f_i by more
    per cent on (prior-weighted) average.

    Args:
        b: the loss that each client has without taking part, one number for all or one per client; losses must stay below.
        prior: bargaining power p, 1/N each if not given.
    """

    simplex: ClassVar[bool] = False
    b: float | Vector

    def __init__(self, b: float | ArrayLike, prior: Sequence[float] | ArrayLike | None = None) -> None:
        level = read_vector("Nash", "b", np.atleast_1d(_numbers(b)))
        self.b = float(level[0]) if np.ndim(_numbers(b)) == 0 else level
        super().__init__(prior)

    def levels(self, n: int) -> Vector:
        """b for `n` clients."""
        if isinstance(self.b, float):
            return np.full(n, self.b)
        if len(self.b) != n:
            raise InputError(f"Nash has b for {len(self.b)} clients, but there are {n}.")
        return self.b

    def value(self, weights: ArrayLike) -> float:
        """Σ λ_i b_i − p_i − p_i log(λ_i/p_i); +∞ unless every weight is positive."""
        lam = read_vector("Nash", "weights", weights)
        p, b = self.weights(len(lam)), self.levels(len(lam))
        if lam.min() <= 0.0:
            return float("inf")
        return float(lam @ b - np.sum(p + p * np.log(lam / p)))

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether every weight is positive (Λ is open, so there is no tolerance to give)."""
        return bool(read_vector("Nash", "weights", weights).min() > 0.0)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: float) -> Vector:  # noqa: E741
        """λ_i = (k_i + √(k_i² + 4σp_i))/2 with k = l − σ(b − s)."""
        return self._solve(s, l, sigma)[0]

    def maximizer(self, losses: ArrayLike) -> Vector:
        """λ_i = p_i/(b_i − L_i); refused where a loss is not below b, because no maximum exists."""
        L = read_vector("Nash", "losses", losses)
        self.check(L, [str(i) for i in range(len(L))] if np.any(self.levels(len(L)) <= L) else [])
        return self.weights(len(L)) / (self.levels(len(L)) - L)

    def support(self, losses: ArrayLike) -> float:
        """−Σ p_i log(b_i − L_i), +∞ if a loss is not below b."""
        L = read_vector("Nash", "losses", losses)
        gain = self.levels(len(L)) - L
        return float("inf") if gain.min() <= 0.0 else float(-(self.weights(len(L)) @ np.log(gain)))

    def prox_jacobian(self, s: ArrayLike, l: ArrayLike, sigma: float) -> NDArray[np.float64]:  # noqa: E741
        """diag(1/(p_i/λ_i² + 1/σ)) = diag(σλ_i/√(k_i² + 4σp_i))."""
        lam, root = self._solve(s, l, sigma)
        return np.diag(sigma * (lam / root))

    def curvature(self, weights: ArrayLike) -> float:
        """min_i p_i/λ_i²."""
        lam = read_vector("Nash", "weights", weights)
        with np.errstate(divide="ignore", over="ignore"):
            return float(np.min(self.weights(len(lam)) / lam**2))

    def start(self, losses: ArrayLike) -> Vector:
        """The maximizer, with every gain b_i − L_i raised to at least a thousandth of the largest."""
        L = read_vector("Nash", "losses", losses)
        gain = self.levels(len(L)) - L
        if gain.max() <= 0.0:
            raise InputError(
                "Nash cannot start because no client's loss is below b: raise b or improve the first model."
            )
        return self.weights(len(L)) / np.maximum(gain, 1e-3 * gain.max())

    def check(self, losses: ArrayLike, names: Sequence[str]) -> None:
        """Refuse a loss that is not below b, naming its client."""
        L = read_vector("Nash", "losses", losses)
        b = self.levels(len(L))
        worst = int(np.argmax(L - b))
        if L[worst] >= b[worst]:
            raise InputError(
                f"Nash needs every loss below b, but client {names[worst]!r} has loss {L[worst]:.6g} >= b = {b[worst]:.6g}."
            )

    def _solve(self, s: ArrayLike, l: ArrayLike, sigma: float) -> tuple[Vector, Vector]:  # noqa: E741
        """λ and √(k² + 4σp); where k < 0 the other form of the root avoids cancellation."""
        s, l, sigma = read_step("Nash", s, l, sigma)  # noqa: E741
        p = self.weights(len(s))
        k = l + sigma * (s - self.levels(len(s)))
        root = np.hypot(k, 2.0 * np.sqrt(sigma * p))
        return np.where(k > 0.0, 0.5 * (k + root), 2.0 * sigma * p / (root + np.abs(k))), root


def _numbers(b: float | ArrayLike) -> NDArray[np.float64]:
    try:
        return np.asarray(b, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"Nash needs numbers in b, got {b!r}.") from None
