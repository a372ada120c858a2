"""Objectives whose clients can find their own weights, from one threshold that is common to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import xlogy

from scaffpd.objectives.rounding import EPSILON, LEAST, Vector


@dataclass(frozen=True)
class Separable:
    r"""Objective whose clients can find their own weights: ψ(λ) = Σ ψ_i(λ_i) on Σ λ_i = 1, low_i ≤
    λ_i ≤ high_i.

        ψ_i(l) = (q_i/2)(l − p_i)² + b_i l,    or, with a tilt ρ > 0,    ρ (l log(l/p_i) − l + p_i)
        + b_i l.

    Given one threshold ν for all, and the penalty δ on leaving a centre m, client i knows

        λ_i(ν) = argmax_{low_i ≤ l ≤ high_i} (L_i − ν) l − ψ_i(l) − (δ/2)(l − m_i)²

    from its own loss alone. Σ λ_i(ν) falls with ν; where it is one, λ(ν) is prox_{1/δ}(L, m), the
    maximizer for δ = 0. Every ν bounds the support: support(L) ≤ ν + Σ ψ_i*(L_i − ν) with ψ_i*(t) =
    max_l t l − ψ_i(l).

    Attributes:
        price: q_i.
        prior: p_i.
        low: the smallest weight of a client.
        high: the largest weight of a client.
        offset: b_i.
        tilt: ρ, or 0.
        capped: whether weights that are scaled up may leave Λ.
    """

    price: Vector
    prior: Vector
    low: Vector
    high: Vector
    offset: Vector
    tilt: float = 0.0
    capped: bool = False

    @classmethod
    def of(
        cls,
        prior: Vector,
        price: float | Vector = 0.0,
        low: float | Vector = 0.0,
        high: float | Vector = 1.0,
        tilt: float = 0.0,
    ) -> Separable:
        """Construct one; numbers are the same for all clients. No weight on the simplex exceeds
        one.
        """
        capped = bool(np.any(np.asarray(high) < 1.0))
        price, low, high, offset = (
            np.broadcast_to(v, prior.shape) for v in (price, low, np.minimum(high, 1.0), 0.0)
        )
        return cls(price, prior, low, high, offset, tilt, capped)

    @property
    def curved(self) -> bool:
        """Return whether ψ itself makes λ a smooth function of the losses, so that no centre is
        needed.
        """
        return self.tilt > 0 or bool(np.all((self.price > 0) | (self.low == self.high)))

    def only(self, chosen: Sequence[int] | slice) -> Separable:
        """Select some of the clients."""
        price = self.price[chosen]
        prior = self.prior[chosen]
        low = self.low[chosen]
        return Separable(
            price, prior, low, self.high[chosen], self.offset[chosen], self.tilt, self.capped
        )

    def weights(self, losses: Vector, nu: float, delta: float, centre: Vector) -> Vector:
        """Return λ_i(ν)."""
        t = losses - self.offset - nu
        if self.tilt > 0:
            return np.minimum(self.prior * np.exp(np.minimum(t / self.tilt, 700.0)), self.high)
        pull = self.price * self.prior + delta * centre + t
        curve = self.price + delta
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            free = np.where(
                curve > 0, pull / np.maximum(curve, LEAST), np.where(t > 0, np.inf, -np.inf)
            )
        return np.clip(free, self.low, self.high)

    def conjugate(self, losses: Vector, nu: float, delta: float, centre: Vector) -> Vector:
        """Return max_l (L_i − ν) l − ψ_i(l) − (δ/2)(l − m_i)², from above."""
        t = losses - self.offset - nu
        best = self.weights(losses, nu, delta, centre)
        gained = t * best
        paid = self._penalty(best) + 0.5 * delta * (best - centre) ** 2
        size = (
            np.abs(gained) + np.abs(paid) + (np.abs(losses) + np.abs(self.offset) + abs(nu)) * best
        )
        return gained - paid + 32 * EPSILON * size + LEAST

    def _penalty(self, weights: Vector) -> Vector:
        """Return ψ_i(λ_i) without the offset."""
        if self.tilt > 0:
            entropy: Vector = self.tilt * (
                xlogy(weights, weights / self.prior) - weights + self.prior
            )
            return entropy
        return 0.5 * self.price * (weights - self.prior) ** 2

    def moment(self, weights: Vector) -> Vector:
        """Return the terms of ψ(λ/S) for any S: λ_i log(λ_i/p_i), or q_i λ_i²."""
        moment: Vector = (
            xlogy(weights, weights / self.prior) if self.tilt > 0 else self.price * weights**2
        )
        return moment

    def cost(self, moment: float, mass: float) -> float:
        """Bound ψ(λ/S) from above, for S = Σ λ_i, from Σ of the moments; the offset is subtracted
        from the losses.
        """
        if self.tilt > 0:
            terms = [moment / mass, -math.log(mass)]
            return self.tilt * (sum(terms) + 16 * EPSILON * sum(map(abs, terms)))
        # q_i p_i is the same for all
        square = moment / mass**2
        rho = float(self.price[0] * self.prior[0])
        return 0.5 * (square - rho) + 16 * EPSILON * (square + rho)
