"""Nash bargaining: every client must gain over its loss without the federation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.errors import InputError
from scaffpd.objectives.base import (
    OUT_OF_REACH,
    Objective,
    ProxStep,
    Scale,
    Vector,
    above,
    finite_vector,
    inner,
    roundings,
)


class Nash(Objective):
    r"""Λ = {λ > 0}, ψ(λ) = Σ_i λ_i b_i − p_i − p_i log(λ_i/p_i):  min_x −Σ p_i log(b_i − f_i(x)).

    The bargaining solution of Nash (1950, "The bargaining problem") with the losses b as
    disagreement point; in federated learning Zhang, Malekmohammadi, Chen and Yu (2022,
    "Proportional fairness in federated learning"). Its optimum guarantees every client a loss below
    b_i, and that no other model raises the gains b_i − f_i by a positive percentage on
    (prior-weighted) average.

    Args:
        b: the loss of each client without taking part: one number for all, or one per client.
        prior: bargaining power p, 1/N each if not given.
    """

    simplex = False
    parameter = "b"
    meaning = "b is the loss that a client could fall back to"
    b: float | Vector

    def __init__(self, b: float | ArrayLike, prior: ArrayLike | None = None) -> None:
        if isinstance(b, int | float | np.number):
            self.b = float(finite_vector("Nash", "b", [float(b)])[0])
        else:
            self.b = finite_vector("Nash", "b", b).copy()
        super().__init__(prior)

    def levels(self, n: int) -> Vector:
        if isinstance(self.b, float):
            return np.full(n, self.b)
        if len(self.b) != n:
            raise InputError(
                "nash-length", f"Nash has b for {len(self.b)} clients, but there are {n}."
            )
        return self.b

    def _value(self, weights: Vector) -> float:
        p = self.weights(len(weights))
        b = self.levels(len(weights))
        if weights.min() <= 0.0:
            return float("inf")
        return float(np.sum(weights * b - p - p * np.log(weights / p)))

    def _maximizer(self, losses: Vector) -> Vector:
        """Return λ_i = p_i/(b_i − L_i); where a loss is not below b there is no maximum."""
        self.check(losses, range(len(losses)))
        return self.weights(len(losses)) / (self.levels(len(losses)) - losses)

    def _support(self, losses: Vector) -> float:
        gain = self.levels(len(losses)) - losses
        if gain.min() <= 0.0:
            return float("inf")
        return -inner(self.weights(len(losses)), np.log(gain))

    def _ceiling(self, losses: Vector) -> float:
        """Bound the support with every gain rounded down."""
        gain = np.nextafter(self.levels(len(losses)) - losses, -np.inf)
        if gain.min() <= 0.0:
            return float("inf")
        return above(-self.weights(len(losses)) * np.log(gain), more=2 * roundings(len(losses)) + 8)

    def _cost(self, weights: Vector) -> float:
        p = self.weights(len(weights))
        b = self.levels(len(weights))
        if weights.min() <= 0.0:
            return float("inf")
        ratio = np.log(weights / p)
        sizes = np.abs(weights * b) + p * (2.0 + np.abs(ratio))
        return above(weights * b - p - p * ratio, sizes, 2 * roundings(len(p)) + 8)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        """Return λ = (k + √(k² + 4σp))/2 with k = l − σ(b − s), and d = σλ/√(k² + 4σp).

        If k < 0 the other form of the root avoids cancellation.
        """
        p = self.weights(len(s))
        k = old + sigma * (s - self.levels(len(s)))
        root = np.hypot(k, 2.0 * np.sqrt(sigma * p))
        weights = np.where(k > 0.0, 0.5 * (k + root), 2.0 * sigma * p / (root + np.abs(k)))
        return ProxStep(weights, sigma * (weights / root), np.empty((0, len(weights))))

    @property
    def separable(self) -> bool:
        """Whether b is one number, which clients know."""
        return isinstance(self.b, float)

    def _penalties(self, weights: Vector, p: Vector) -> Vector:
        found = weights * self.b - p - p * np.log(np.where(weights > 0.0, weights, p) / p)
        return np.asarray(found)

    def _conjugate(self, t: Vector, p: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return λ_i = p_i/(b − L_i); where L_i is not below b, φ_i is out of reach."""
        gain = self.b - t
        usable = gain > 0.0
        weights = np.where(usable, p / np.where(usable, gain, 1.0), 0.0)
        value = np.where(usable, -p * np.log(np.where(usable, gain, 1.0)), OUT_OF_REACH)
        return value, weights, np.zeros(len(p)), np.zeros(len(p))

    def curvature(self, weights: Vector) -> float:
        """Return min_i p_i/λ_i²."""
        with np.errstate(divide="ignore", over="ignore"):
            return float(np.min(self.weights(len(weights)) / weights**2))

    def start(self, losses: Vector) -> Vector:
        """Return the maximizer for gains b_i − L_i raised to a thousandth of the largest."""
        gain = self.levels(len(losses)) - losses
        if gain.max() <= 0.0:
            raise InputError(
                "nash-without-start",
                "Nash cannot start because no client's loss is below b: raise b.",
            )
        raised: Vector = np.maximum(gain, 1e-3 * gain.max())
        return self.weights(len(losses)) / raised

    def check(self, losses: Vector, names: Sequence[object]) -> None:
        """Refuse a loss that is not below b, naming its client."""
        b = self.levels(len(losses))
        worst = int(np.argmax(losses - b))
        if losses[worst] >= b[worst]:
            raise InputError(
                "nash-loss-too-large",
                f"Nash needs every loss below b, but client {names[worst]} has loss "
                f"{losses[worst]:.6g} and b = {b[worst]:.6g}: raise b, or leave that client out.",
            )
