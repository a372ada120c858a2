r"""Exact projections on the probability simplex Δ = {λ ≥ 0, Σ λ_i = 1}, plain, weighted and capped, in O(N log N).

Every function first shifts its argument so that the entries that decide the answer are the small ones, and corrects the
last rounding error in λ itself rather than in the multiplier: sums come out as one to a few units in the last place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def in_simplex(weights: Vector, tolerance: float) -> bool:
    """Whether λ ∈ Δ up to `tolerance` in every entry and in the sum."""
    return bool(weights.min() >= -tolerance and abs(weights.sum() - 1.0) <= tolerance)


def project_weighted(b: Vector, w: Vector) -> Vector:
    r"""argmin_{λ∈Δ} Σ_i λ_i²/(2w_i) − b_i λ_i  for w > 0, which is λ_i = w_i [b_i − ν]₊.

    Sorted by b, the clients with b_i > ν are the first k, and ν_k = (Σ_{i≤k} w_i b_i − 1) / Σ_{i≤k} w_i
    (Held, Wolfe and Crowder 1974; Duchi et al. 2008 for w = 1).
    """
    b = b - b.max()  # now ν < 0, nothing cancels in Σ w b − 1, and the largest entry is always active
    order = np.argsort(-b)
    ranked = b[order]
    nu = (np.cumsum(w[order] * ranked) - 1.0) / np.cumsum(w[order])
    last = np.flatnonzero(ranked > nu)[-1]
    active = b > nu[last]
    level = (np.sum(w[active] * b[active]) - 1.0) / np.sum(w[active])
    return renormalised(np.where(active, np.maximum(w * (b - level), 0.0), 0.0), np.where(active, w, 0.0))


def project_capped(z: Vector, caps: Vector) -> Vector:
    r"""argmin_λ ½‖λ − z‖²  subject to  0 ≤ λ ≤ caps, Σ λ_i = 1  (needs Σ caps ≥ 1): λ_i = clip(z_i − ν, 0, caps_i).

    The mass Σ clip(z − ν, 0, caps) falls with ν and bends only at z_i and z_i − caps_i: bisect over these 2N sorted
    breakpoints (each evaluation is O(N) and free of cancellation), then solve the linear piece.
    """
    if caps.sum() <= 1.0 + 4 * np.finfo(float).eps:
        return caps / caps.sum()
    breaks = np.sort(np.concatenate([z, z - caps]))
    low, high = 0, len(breaks) - 1  # the mass is Σ caps > 1 at the first, 0 at the last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if np.clip(z - breaks[middle], 0.0, caps).sum() >= 1.0 else (low, middle)
    free = (z >= breaks[high]) & (z - caps <= breaks[low])
    level = breaks[low] + (np.clip(z - breaks[low], 0.0, caps).sum() - 1.0) / max(np.count_nonzero(free), 1)
    weights = np.clip(z - level, 0.0, caps)
    inside = (weights > 0.0) & (weights < caps)
    if inside.any():
        weights[inside] -= (weights.sum() - 1.0) / np.count_nonzero(inside)
    return np.clip(weights, 0.0, caps)


def renormalised(weights: Vector, slope: Vector) -> Vector:
    """Spread the rounding error of Σ λ_i − 1 over the clients in proportion to `slope` = −∂λ_i/∂ν."""
    weights = np.maximum(weights - slope * ((weights.sum() - 1.0) / slope.sum()), 0.0)
    return weights / weights.sum()


def simplex_jacobian(slope: Vector) -> Vector:
    r"""diag(d) − d dᵀ/Σd: how λ_i = h_i(s_i − ν) with Σ λ_i = 1 moves with s, where d_i = h_i' (zeros if no client is free)."""
    total = slope.sum()
    return np.diag(slope) - (np.outer(slope, slope / total) if total > 0 else 0.0)
