r"""Exact projections on the probability simplex Δ = {λ ≥ 0, Σ λ_i = 1}, weighted and capped, by a sort or a few passes.

The last rounding error is corrected in λ itself rather than in the multiplier ν, so that weights sum to
one up to a few units in the last place for arguments of any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import xlogy

from scaffpd.objectives.base import EPSILON as EPSILON
from scaffpd.objectives.base import LEAST, ProxStep, Vector, above, roundings
from scaffpd.objectives.base import inner as inner

UNEQUAL = 1e3  # ratio of rates in a projection above which a second pass is worth it


def in_simplex(weights: Vector, tolerance: float) -> bool:
    """Return whether λ ∈ Δ up to `tolerance` in every entry and in the sum."""
    return bool(weights.min() >= -tolerance and abs(weights.sum() - 1.0) <= tolerance)


def normalised(weights: Vector) -> Vector:
    """Return λ / Σ λ_i."""
    shares: Vector = weights / np.add.reduce(weights)
    return shares


def corrected(weights: Vector, slope: Vector, size: float) -> Vector:
    """Subtract the rounding error Σ λ_i − 1 from the clients in proportion to `slope` (of sum `size`), −∂λ_i/∂ν."""
    error = (np.add.reduce(weights) - 1.0) / size
    return normalised(np.maximum(weights - slope * error, 0.0))


def project_weighted(b: Vector, w: Vector) -> Vector:
    r"""Return argmin_{λ∈Δ} Σ_i λ_i²/(2w_i) − b_i λ_i  for w > 0, which is λ_i = w_i [b_i − ν]₊.

    Let S hold all active clients. Those with b_i ≤ ν_S = (Σ_{i∈S} w_i b_i − 1) / Σ_{i∈S} w_i are not active, and
    leaving them out raises ν_S, until none is left out (Michelot 1986): a few passes (at most N) in place of a sort.
    """
    given = b
    top = np.maximum.reduce(b)
    left = len(b)
    b = b - top  # now ν < 0, nothing cancels in Σ w b − 1, and the largest entry is always active
    slope = w
    size = float(np.add.reduce(w))
    level = (inner(w, b) - 1.0) / size
    while 0 < (active := int(np.count_nonzero(above := b > level))) < left:
        slope = w * above
        left = active
        size = float(np.add.reduce(slope))
        level = (inner(slope, b) - 1.0) / size
    if -level * size > UNEQUAL and -level * np.maximum.reduce(slope) > UNEQUAL:
        # relative to the largest entry, the others have lost too many digits
        return project_weighted_from(given - (top + level), w)
    return corrected(slope * np.maximum(b - level, 0.0), slope, size)


def project_weighted_from(b: Vector, w: Vector) -> Vector:
    """Project b that is relative to a value close to ν, by Newton's method on Σ w_i [b_i − ν]₊ = 1."""
    for _ in range(20):
        slope = np.where(b > 0.0, w, 0.0)
        size = float(slope.sum())
        excess = (inner(slope, b) - 1.0) / size
        if not abs(excess) * slope.max() > 4.0 * EPSILON:
            break
        b = b - excess
    return corrected(slope * np.maximum(b, 0.0), slope, size)


def relative(sigma: float | Vector, n: int) -> tuple[float, Vector]:
    """Return σ̄ = max_i σ_i and σ_i/σ̄ for `n` clients."""
    top = float(np.max(sigma))
    return top, sigma / top * np.ones(n)


def measured(z: Vector, share: Vector) -> Vector:
    """Return differences to the largest entry of the clients with long steps, whose digits matter."""
    shifted: Vector = z - z[share >= 0.5].max()
    return shifted


def project_capped(z: Vector, caps: Vector, w: Vector) -> tuple[Vector, float]:
    r"""Return argmin_λ Σ λ_i²/(2w_i) − z_i λ_i  s.t. 0 ≤ λ ≤ caps, Σ λ_i = 1: λ_i = clip(w_i(z_i − ν), 0, caps_i).

    Return ν too. If Σ caps < 1, return the caps, scaled up; then ν has no meaning.

    The mass Σ clip(w(z − ν), 0, caps) falls with ν and bends only at z_i and z_i − caps_i/w_i: bisect over these
    2N sorted points (each evaluation is O(N) and free of cancellation), then solve the linear piece.
    """
    if caps.sum() <= 1.0 + 4.0 * EPSILON:
        return normalised(caps), 0.0
    full = z - caps / w
    bends = np.sort(np.concatenate([z, full]))
    # the mass is Σ caps > 1 at the first bend, 0 at the last
    low = 0
    high = len(bends) - 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = np.clip(w * (z - bends[middle]), 0.0, caps).sum() >= 1.0
        low, high = (middle, high) if enough else (low, middle)
    free = float(w[(z >= bends[high]) & (full <= bends[low])].sum())
    level = bends[low] + (np.clip(w * (z - bends[low]), 0.0, caps).sum() - 1.0) / (free or 1.0)
    weights = np.clip(w * (z - level), 0.0, caps)
    inside = (weights > 0.0) & (weights < caps)
    if inside.any():
        weights[inside] -= (weights.sum() - 1.0) * (w[inside] / w[inside].sum())
    return np.clip(weights, 0.0, caps), float(level)


def simplex_step(weights: Vector, slope: Vector) -> ProxStep:
    """Return the step to λ_i = h_i(s_i − ν) with Σ λ_i = 1, of slope d_i = h_i'."""
    return ProxStep(weights, slope, np.ones((1, len(weights))))


def share_above(weights: Vector, caps: Vector) -> float:
    """Bound the share by which λ/Σλ may exceed its caps, which are known up to a few roundings of the prior."""
    ratio = float(np.max(weights / (caps * weights.sum())))
    return max(ratio * (1.0 + EPSILON * (2 * roundings(len(weights)) + 8)) - 1.0, 0.0)


def distance_above(weights: Vector, p: Vector) -> float:
    """Bound Σ (λ_i − p_i)²/p_i from above, both normalised."""
    weights = weights / weights.sum()
    away = np.abs(weights - p) + EPSILON * (roundings(len(p)) + 4) * (weights + p)
    return above(away**2 / p)


def dual_above(
    losses: Vector, weights: Vector, p: Vector, rho: float, caps: Vector | None = None
) -> float:
    r"""Bound max_{λ∈Δ, λ ≤ κ} ⟨L, λ⟩ − (ρ/2) Σ (λ_i − p_i)²/p_i from above, by weak duality: for every ν

        ν + Σ_i max_{0≤l≤κ} (L_i − ν) l − (ρ/2)(l − p_i)²/p_i

    is a bound, and the ν of the maximizer, here `weights`, gives the smallest. ν and the weights need no accuracy.
    """
    most = np.full(len(p), np.inf) if caps is None else caps
    free = (weights > 0.0) & (weights < most)
    full = weights >= most
    if free.any():
        held = float(p[~free].sum()) - float(most[full].sum())
        P = p[free].sum()
        nu = float((inner(p[free], losses[free]) - rho * held) / P)
    else:
        nu = float(np.min(losses[full] - rho * (most[full] / p[full] - 1.0)))
    t = losses - nu
    best = np.clip(p * (1.0 + t / rho), 0.0, most)
    inside = p * (t + t**2 / (2.0 * rho))
    terms = np.where(best <= 0.0, -0.5 * rho * p, inside)
    sizes = np.where(best <= 0.0, 0.5 * rho * p, p * np.abs(t) * (1.0 + np.abs(t) / (2.0 * rho)))
    if caps is not None:
        capped = best >= most
        terms = np.where(capped, t * most - 0.5 * rho * (most - p) ** 2 / p, terms)
        sizes = np.where(capped, np.abs(t) * most + rho * (most + p) ** 2 / p, sizes)
    return above(np.append(terms, nu), np.append(sizes, abs(nu)), 2 * roundings(len(p)) + 16)


@dataclass(frozen=True)
class Separable:
    r"""Objective whose clients can find their own weights: ψ(λ) = Σ ψ_i(λ_i) on Σ λ_i = 1, low_i ≤ λ_i ≤ high_i.

        ψ_i(l) = (q_i/2)(l − p_i)² + b_i l,    or, with a tilt ρ > 0,    ρ (l log(l/p_i) − l + p_i) + b_i l.

    Given one threshold ν for all, and the penalty δ on leaving a centre m, client i knows

        λ_i(ν) = argmax_{low_i ≤ l ≤ high_i} (L_i − ν) l − ψ_i(l) − (δ/2)(l − m_i)²

    from its own loss alone. Σ λ_i(ν) falls with ν; where it is one, λ(ν) is prox_{1/δ}(L, m), the maximizer for δ = 0.
    Every ν bounds the support: support(L) ≤ ν + Σ ψ_i*(L_i − ν) with ψ_i*(t) = max_l t l − ψ_i(l).

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
        cls, prior: Vector, price: Any = 0.0, low: Any = 0.0, high: Any = 1.0, tilt: float = 0.0
    ) -> Separable:
        """Construct one; numbers are the same for all clients. No weight on the simplex exceeds one."""
        price, low, high, offset = (
            np.broadcast_to(v, prior.shape) for v in (price, low, high, 0.0)
        )
        return cls(price, prior, low, np.minimum(high, 1.0), offset, tilt, bool(np.any(high < 1.0)))

    @property
    def curved(self) -> bool:
        """Return whether ψ itself makes λ a smooth function of the losses, so that no centre is needed."""
        return self.tilt > 0 or bool(np.all((self.price > 0) | (self.low == self.high)))

    def only(self, chosen: Any) -> Separable:
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
        """Bound ψ(λ/S) from above, for S = Σ λ_i, from Σ of the moments; the offset is subtracted from the losses."""
        if self.tilt > 0:
            terms = [moment / mass, -math.log(mass)]
            return self.tilt * (sum(terms) + 16 * EPSILON * sum(map(abs, terms)))
        # q_i p_i is the same for all
        square = moment / mass**2
        rho = float(self.price[0] * self.prior[0])
        return 0.5 * (square - rho) + 16 * EPSILON * (square + rho)
