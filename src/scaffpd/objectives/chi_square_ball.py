"""The χ² ball: weights within a distance of the prior."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.objectives import simplex
from scaffpd.objectives.base import EPSILON, Objective, ProxStep, Scale, Vector, inner, read_scale


class ChiSquareBall(Objective):
    r"""Λ = {λ in the simplex, Σ_i (λ_i − p_i)²/p_i ≤ δ}, ψ = 0.

    The χ² uncertainty set of distributionally robust optimisation (Duchi and Namkoong 2019,
    "Variance-based regularization with convex objectives"; Levy, Carmon, Duchi and Sidford 2020).
    Its optimum guarantees the smallest mean loss under the worst mixture of clients within distance
    δ of the prior; while no weight reaches zero that is Σ p_i f_i + √(δ Var_p(f)).

    Args:
        delta: the radius δ > 0; from 1/min_i p_i − 1 on, the ball contains the simplex
            (`Agnostic`).
        prior: reference weights p, 1/N each if not given.
    """

    parameter = "delta"
    symbol = "δ"
    usual = 0.5
    meaning = "δ is how far weights may be from all alike: 0 is the average"
    strengths = staticmethod(
        lambda losses, points: np.geomspace(0.01, 0.9, points) * (len(losses) - 1)
    )

    def __init__(self, delta: float, prior: ArrayLike | None = None) -> None:
        self.delta = read_scale("ChiSquareBall", "delta", delta)
        super().__init__(prior)

    def largest(self, n: int) -> float:
        """Return max_i p_i + √(δ p_i (1 − p_i)), the farthest along one client, or 1."""
        p = self.weights(n)
        return min(float(np.max(p + np.sqrt(self.delta * p * (1.0 - p)))), 1.0)

    def _maximizer(self, losses: Vector) -> Vector:
        """Return λ_i = p_i [1 + t(L_i − ν)]₊ with the largest t that keeps λ in the ball."""
        return _farthest(losses, self.weights(len(losses)), self.delta)[0]

    def _ceiling(self, losses: Vector) -> float:
        """Bound the support by the ball's dual: its multiplier κ = 1/t is ρ, and adds κδ/2."""
        p = self.weights(len(losses))
        top = float(losses.max())
        weights, t = _farthest(losses, p, self.delta)
        if not 0.0 < t < np.inf:
            return top
        room = 0.5 * self.delta / t
        above = simplex.dual_above(losses, weights, p, 1.0 / t) + room
        return min(top, above + 4.0 * EPSILON * (abs(top) + room))

    def _stretch(self, weights: Vector) -> float:
        """Return the distance beyond √δ: (1 − t)λ + tp is inside, with ≥ 1 − t of ⟨λ, f⟩."""
        far = simplex.distance_above(weights, self.weights(len(weights))) / self.delta
        return max(float(np.sqrt(far)) * (1.0 + 4.0 * EPSILON) - 1.0, 0.0)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        """Return λ_i = [s_i + l_i/σ_i − ν]₊/(1/σ_i + κ/p_i), with κ = 0 inside the ball.

        d_i = 1/(1/σ_i + κ/p_i) on the clients with weight; on the sphere, its normal λ/p is a
        second constraint.
        """
        weights, kappa = self._project(s, old, sigma)
        p = self.weights(len(s))
        top, share = simplex.relative(sigma, len(s))
        slope = np.where(weights > 0.0, top * (p * share / (p + kappa * share)), 0.0)
        normals = [np.ones(len(p)), weights / p]
        return ProxStep(weights, slope, np.stack(normals if kappa > 0.0 else normals[:1]))

    def _project(self, s: Vector, old: Vector, sigma: float | Vector) -> tuple[Vector, float]:
        """Return λ of the proximal step and the multiplier κ of the ball, times max_i σ_i."""
        p = self.weights(len(s))
        top, share = simplex.relative(sigma, len(s))
        z = old / share + top * (s - s.max())
        weights = simplex.project_weighted(z, share)
        if np.sum((weights - p) ** 2 / p) <= self.delta:
            return weights, 0.0
        if p.min() == p.max() and share.min() == 1.0:
            # λ = p [1 + t(z − ν)]₊ with t = 1/(p + κ), as in the support
            weights, t = _farthest(z, p, self.delta)
            return weights, max(1.0 / t - float(p[0]), 0.0)
        return _on_sphere(simplex.measured(z, share), p, share, self.delta)


def _farthest(x: Vector, p: Vector, delta: float) -> tuple[Vector, float]:
    r"""Return where the path λ(t) = p [1 + t(x − ν_t)]₊ leaves the ball, and t there, or ∞.

    While the k largest x have weight, λ_i = p_i (1/P + t(x_i − m)) and the distance is 1/P − 1 +
    t²V, where P, m and V are their total prior, weighted mean and weighted sum of squares about it.
    The k-th weight reaches zero at 1/t = P(m − x_k): the right k is the largest that meets the
    sphere before that.
    """
    scale = float(np.ptp(x))
    if scale == 0.0:
        return p.copy(), np.inf
    x = (x - x.max()) / scale
    order = np.argsort(-x)
    y = x[order]
    w = p[order]
    P = np.cumsum(w)
    M = np.cumsum(w * y)
    V = np.maximum(np.cumsum(w * y * y) - M * M / P, 0.0)
    room = delta - np.maximum(1.0 - P, 0.0) / P
    k = np.flatnonzero(room * (M - P * y) ** 2 <= V)[-1]
    active = x >= y[k]
    top = p[active].sum()
    rest = p[~active].sum()
    centred = np.where(active, x - inner(p[active], x[active]) / top, 0.0)
    variance = inner(p, centred**2)
    t = float(np.sqrt(max(delta - rest / top, 0.0) / variance)) if variance > 0.0 else np.inf
    step = p * centred * t if variance > 0.0 else np.zeros(len(x))
    return simplex.normalised(np.where(active, np.maximum(p / top + step, 0.0), 0.0)), t / scale


def _on_sphere(z: Vector, p: Vector, share: Vector, delta: float) -> tuple[Vector, float]:
    r"""Return λ_i = [z_i − ν]₊/(1/q_i + κ/p_i) with Σ λ_i = 1 and Σ (λ_i − p_i)²/p_i = δ, and κ.

    Use Newton's method on 1/√distance, which is nearly linear in κ (as in trust-region methods),
    within a bracket. Its upper end κ√δ ≤ √Var_p(z − p/q) is the variational inequality of λ, tested
    with p.
    """
    # the order of z alone decides which clients have weight, so one sort serves every κ
    order = np.argsort(-z)
    y = z[order]
    w = p[order]
    q = share[order]
    away = y - w / q
    low = 0.0
    high = float(np.sqrt(inner(w, (away - inner(w, away)) ** 2) / delta))
    kappa = high
    for _ in range(200):
        deviation, slope = _path(y, w, q, kappa)
        distance = float(np.sum(deviation**2 / w))
        low, high = (kappa, high) if distance > delta else (low, kappa)
        excess = 2.0 * distance * (np.sqrt(distance / delta) - 1.0)
        step = excess / -slope if slope < 0.0 else np.inf
        if abs(step) <= 4.0 * EPSILON * kappa or high - low <= 4.0 * EPSILON * high:
            break
        inside = low < kappa + step < high
        kappa = kappa + step if inside else float(np.sqrt(low * high)) if low > 0.0 else 0.01 * high
    weights = np.empty_like(p)
    weights[order] = np.maximum(w + deviation, 0.0)
    return simplex.normalised(weights), kappa


def _path(y: Vector, w: Vector, q: Vector, kappa: float) -> tuple[Vector, float]:
    """Return λ(κ) − p for sorted z, with all digits in a small ball, and d distance/dκ."""
    rate = w * q / (w + kappa * q)
    nu = (np.cumsum(rate * y) - 1.0) / np.cumsum(rate)
    k = int(np.flatnonzero(y > nu)[-1]) + 1
    p = w[:k]
    r = rate[:k]
    away = y[:k] - p / q[:k]
    mean = (inner(r, away) - w[k:].sum()) / r.sum()
    deviation = -w
    deviation[:k] = np.maximum(r * (away - mean), -p)
    pull = (p + deviation[:k]) * (r / p)
    return deviation, 2.0 * inner(deviation[:k] / p, r * (pull.sum() / r.sum()) - pull)
