r"""Exact projections on the probability simplex Δ = {λ ≥ 0, Σ λ_i = 1}, weighted and capped.

The last rounding error is corrected in λ itself rather than in the multiplier ν, so that weights
sum to one up to a few units in the last place for arguments of any size.
"""

from __future__ import annotations

import numpy as np

from scaffpd.objectives.base import EPSILON, ProxStep, Scale, Vector, above, inner, roundings

UNEQUAL = 1e3  # ratio of rates in a projection above which a second pass is worth it


def normalised(weights: Vector) -> Vector:
    shares: Vector = weights / np.add.reduce(weights)
    return shares


def corrected(weights: Vector, slope: Vector, size: float) -> Vector:
    """Take the rounding error Σ λ_i − 1 off, in proportion to `slope` = −∂λ_i/∂ν, of sum `size`."""
    error = (np.add.reduce(weights) - 1.0) / size
    return normalised(np.maximum(weights - slope * error, 0.0))


def project_weighted(b: Vector, w: Vector) -> Vector:
    r"""Return argmin_{λ∈Δ} Σ_i λ_i²/(2w_i) − b_i λ_i  for w > 0, which is λ_i = w_i [b_i − ν]₊.

    Let S hold all active clients. Those with b_i ≤ ν_S = (Σ_{i∈S} w_i b_i − 1) / Σ_{i∈S} w_i are
    not active, and leaving them out raises ν_S, until none is left out (Michelot 1986): a few
    passes (at most N) in place of a sort.
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
    """Project b, given relative to a value near ν, by Newton's method on Σ w_i [b_i − ν]₊ = 1."""
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
    """Return differences to the largest entry of clients with long steps, whose digits matter."""
    shifted: Vector = z - z[share >= 0.5].max()
    return shifted


def project_capped(z: Vector, caps: Vector, w: Vector) -> tuple[Vector, float]:
    r"""Return argmin_λ Σ λ_i²/(2w_i) − z_i λ_i  s.t. 0 ≤ λ ≤ caps, Σ λ_i = 1, and its ν.

    λ_i = clip(w_i(z_i − ν), 0, caps_i); the caps, scaled up, if their sum is below one.

    The mass Σ clip(w(z − ν), 0, caps) falls with ν and bends only at z_i and z_i − caps_i/w_i:
    bisect over these 2N sorted points (each evaluation is O(N) and free of cancellation), then
    solve the linear piece.
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


def capped_step(weights: Vector, slope: Scale, caps: Vector | float = np.inf) -> ProxStep:
    """Return the same where d_i is zero unless λ_i lies strictly between zero and the cap."""
    free = (weights > 0.0) & (weights < caps)
    return simplex_step(weights, np.where(free, slope, 0.0))


def share_above(weights: Vector, caps: Vector) -> float:
    """Bound the share by which λ/Σλ may exceed caps that are a few roundings off."""
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
    r"""Bound max_{λ∈Δ, λ ≤ κ} ⟨L, λ⟩ − (ρ/2) Σ (λ_i − p_i)²/p_i from above, by weak duality.

    For every ν, ν + Σ_i max_{0≤l≤κ} (L_i − ν) l − (ρ/2)(l − p_i)²/p_i is a bound. That of the
    maximizer, here `weights`, is the smallest; neither needs accuracy.
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
