r"""Exact projections on the probability simplex Δ = {λ ≥ 0, Σ λ_i = 1}, weighted and capped, in O(N log N).

The last rounding error is corrected in λ itself rather than in the multiplier ν, so that weights sum to
one up to a few units in the last place however large the arguments are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scaffpd.objectives.base import Vector

EPSILON = float(np.finfo(np.float64).eps)


def inner(a: Vector, b: Vector) -> float:
    """⟨a, b⟩, summed pairwise: more exact than a BLAS product, and never waiting for its threads."""
    return float(np.sum(a * b))


def in_simplex(weights: Vector, tolerance: float) -> bool:
    """Whether λ ∈ Δ up to `tolerance` in every entry and in the sum."""
    return bool(weights.min() >= -tolerance and abs(weights.sum() - 1.0) <= tolerance)


def normalised(weights: Vector) -> Vector:
    """λ / Σ λ_i."""
    shares: Vector = weights / weights.sum()
    return shares


def corrected(weights: Vector, slope: Vector) -> Vector:
    """Take the rounding error Σ λ_i − 1 back from the clients in proportion to `slope`, their −∂λ_i/∂ν."""
    error = (weights.sum() - 1.0) / slope.sum()
    return normalised(np.maximum(weights - slope * error, 0.0))


def project_weighted(b: Vector, w: Vector) -> Vector:
    r"""argmin_{λ∈Δ} Σ_i λ_i²/(2w_i) − b_i λ_i  for w > 0, which is λ_i = w_i [b_i − ν]₊.

    Sorted by b, the clients with b_i > ν are the first k, and ν_k = (Σ_{i≤k} w_i b_i − 1) / Σ_{i≤k} w_i
    (Held, Wolfe and Crowder 1974; Duchi et al. 2008 for w = 1).
    """
    b = b - b.max()  # now ν < 0, nothing cancels in Σ w b − 1, and the largest entry is always active
    order = np.argsort(-b)
    ranked, rate = b[order], w[order]
    nu = (np.cumsum(rate * ranked) - 1.0) / np.cumsum(rate)
    active = b > nu[np.flatnonzero(ranked > nu)[-1]]
    slope = np.where(active, w, 0.0)
    level = (inner(slope, b) - 1.0) / slope.sum()
    return corrected(slope * np.maximum(b - level, 0.0), slope)


def project_capped(z: Vector, caps: Vector) -> Vector:
    r"""argmin_λ ½‖λ − z‖² subject to 0 ≤ λ ≤ caps, Σ λ_i = 1: λ_i = clip(z_i − ν, 0, caps_i), if Σ caps ≥ 1.

    The mass Σ clip(z − ν, 0, caps) falls with ν and bends only at z_i and z_i − caps_i: bisect over these 2N
    sorted points (each evaluation is O(N) and free of cancellation), then solve the linear piece.
    """
    if caps.sum() <= 1.0 + 4.0 * EPSILON:
        return normalised(caps)
    bends = np.sort(np.concatenate([z, z - caps]))
    low, high = 0, len(bends) - 1  # the mass is Σ caps > 1 at the first bend, 0 at the last
    while high - low > 1:
        middle = (low + high) // 2
        enough = np.clip(z - bends[middle], 0.0, caps).sum() >= 1.0
        low, high = (middle, high) if enough else (low, middle)
    free = np.count_nonzero((z >= bends[high]) & (z - caps <= bends[low]))
    level = bends[low] + (np.clip(z - bends[low], 0.0, caps).sum() - 1.0) / max(free, 1)
    weights = np.clip(z - level, 0.0, caps)
    inside = (weights > 0.0) & (weights < caps)
    if inside.any():
        weights[inside] -= (weights.sum() - 1.0) / np.count_nonzero(inside)
    projected: Vector = np.clip(weights, 0.0, caps)
    return projected


def simplex_jacobian(slope: Vector) -> NDArray[np.float64]:
    """diag(d) − ddᵀ/Σd, which is ∂λ/∂s where λ_i = h_i(s_i − ν) sums to one and d_i = h_i'; zero if d is."""
    total = float(slope.sum())
    normal = slope / np.sqrt(total) if total > 0.0 else slope
    jacobian: NDArray[np.float64] = np.diag(slope) - np.outer(normal, normal)
    return jacobian
