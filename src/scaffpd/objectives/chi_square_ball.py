"""The χ² ball: weights may leave the prior, but only so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import positive
from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_step, read_vector
from scaffpd.objectives.simplex import in_simplex, project_weighted


class ChiSquareBall(Objective):
    r"""Λ = {λ in the simplex, Σ_i (λ_i − p_i)²/p_i ≤ δ}, ψ = 0  (Duchi and Namkoong 2019; Levy et al. 2020).

    Its optimum guarantees the smallest mean loss over the worst mixture of clients within χ² distance δ of the prior:
    while no weight reaches zero that is Σ p_i f_i + √(δ Var_p(f)).

    Args:
        delta: the radius δ > 0 of the ball; from 1/min_i p_i − 1 on it contains the simplex, and this is `Agnostic`.
        prior: reference weights p, 1/N each if not given.
    """

    def __init__(self, delta: float, prior: Sequence[float] | ArrayLike | None = None) -> None:
        self.delta = positive("ChiSquareBall", "delta", delta)
        super().__init__(prior)

    def value(self, weights: ArrayLike) -> float:
        """ψ(λ) = 0."""
        read_vector("ChiSquareBall", "weights", weights)
        return 0.0

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ lies in the simplex and in the ball."""
        lam = read_vector("ChiSquareBall", "weights", weights)
        return in_simplex(lam, tolerance) and _distance(lam, self.weights(len(lam))) <= self.delta + tolerance

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: float) -> Vector:  # noqa: E741
        """The projection of z = l + σs on Λ: λ_i = p_i [z_i − ν]₊/(p_i + κ), with κ = 0 inside the ball."""
        return self._project(*read_step("ChiSquareBall", s, l, sigma))[0]

    def maximizer(self, losses: ArrayLike) -> Vector:
        """λ_i = p_i [1 + t(L_i − ν)]₊ with the largest t that keeps λ in the ball."""
        L = read_vector("ChiSquareBall", "losses", losses)
        return _farthest(L - L.max(), self.weights(len(L)), self.delta)[0]

    def support(self, losses: ArrayLike) -> float:
        """⟨L, λ⟩ at the maximizer."""
        L = read_vector("ChiSquareBall", "losses", losses)
        worst = L.max()
        return float(worst + (L - worst) @ self.maximizer(L))

    def prox_jacobian(self, s: ArrayLike, l: ArrayLike, sigma: float) -> NDArray[np.float64]:  # noqa: E741
        """D^½ (I − QQᵀ) D^½ on the clients with weight, D = diag(σp/(p + κ)), Q spanning D^½1 and, on the sphere, D^½(λ/p)."""
        s, l, sigma = read_step("ChiSquareBall", s, l, sigma)  # noqa: E741
        lam, kappa = self._project(s, l, sigma)
        p = self.weights(len(lam))
        root = np.where(lam > 0.0, np.sqrt(sigma * p / (p + kappa)), 0.0)
        normals = [root, root * (lam / p)] if kappa > 0.0 else [root]
        tangent = np.diag(root)
        for i, normal in enumerate(normals):
            for earlier in normals[:i]:
                normal = normal - earlier * (earlier @ normal)
            size = np.linalg.norm(normal)
            normals[i] = (
                normal / size if size > 1e-12 * np.linalg.norm(root * lam / p) else np.zeros(len(lam))
            )
            tangent = tangent - np.outer(normals[i], normals[i] @ tangent)
        return root[:, None] * (tangent + 0.0) if False else root[:, None] * tangent

    def _project(self, s: Vector, l: Vector, sigma: float) -> tuple[Vector, float]:  # noqa: E741
        """λ and the multiplier κ of the ball."""
        p, z = self.weights(len(s)), l + sigma * (s - s.max())
        lam = project_weighted(z, np.ones(len(z)))
        if _distance(lam, p) <= self.delta:
            return lam, 0.0
        if p.min() == p.max():
            lam, t = _farthest(z - z.max(), p, self.delta)
            return lam, max(1.0 / t - p[0], 0.0)
        return _root(z - z.max(), p, self.delta)


def _distance(lam: Vector, p: Vector) -> float:
    """Σ (λ_i − p_i)²/p_i."""
    return float(np.sum((lam - p) ** 2 / p))


def _farthest(x: Vector, p: Vector, delta: float) -> tuple[Vector, float]:
    r"""The end of the path λ(t) = p [1 + t(x − ν_t)]₊ on the sphere Σ (λ−p)²/p = δ, and its t (∞ at a corner); max x = 0.

    While the k largest x have weight, λ_i = p_i (1/P_k + t(x_i − m_k)) and the distance is 1/P_k − 1 + t²V_k, where P_k,
    m_k and P_k V_k are their total prior, mean and variance. The k-th weight reaches zero at 1/t = P_k(m_k − x_k).
    """
    order = np.argsort(-x)
    y, w = x[order], p[order]
    P, M = np.cumsum(w), np.cumsum(w * y)
    V = np.maximum(np.cumsum(w * y * y) - M * M / P, 0.0)
    room = delta - np.maximum(1.0 - P, 0.0) / P
    k = int(
        np.flatnonzero(room * (M - P * y) ** 2 <= V)[-1]
    )  # the sphere is met before the k-th weight is zero
    active = x >= y[k]
    P_k = p[active].sum()
    centred = np.where(active, x - np.sum(p[active] * x[active]) / P_k, 0.0)
    variance = float(np.sum(p * centred**2))
    left = max(delta - p[~active].sum() / P_k, 0.0)
    t = float(np.sqrt(left / variance)) if variance > 0.0 else np.inf
    lam = np.where(active, np.maximum(p / P_k + (p * centred * t if variance > 0.0 else 0.0), 0.0), 0.0)
    return lam / lam.sum(), t


def _root(z: Vector, p: Vector, delta: float) -> tuple[Vector, float]:
    r"""λ and κ > 0 with λ_i = p_i [z_i − ν]₊/(p_i + κ), Σ λ_i = 1 and Σ (λ−p)²/p = δ, for any prior.

    The order of z decides which weights are positive, whatever κ is: one sort serves all evaluations. The root is found by
    Newton's method on 1/distance (nearly linear in κ, as in trust-region methods), guarded by a bracket whose upper end is
    κ√δ ≤ √Var_p(z − p), the variational inequality between λ and p.
    """
    order = np.argsort(-z)
    y, w = z[order], p[order]
    offset = y - w
    low, high = 0.0, float(np.sqrt(np.sum(w * (offset - w @ offset) ** 2) / delta))
    kappa = high
    for _ in range(200):
        lam, excess, slope = _on_sphere(y, w, kappa, delta)
        low, high = (kappa, high) if excess > 0.0 else (low, kappa)
        distance = max(excess + delta, 1e-300)
        step = 2.0 * distance * (np.sqrt(distance / delta) - 1.0) / -slope if slope < 0.0 else np.inf
        previous, kappa = kappa, kappa + step
        if not low <= kappa <= high:
            kappa = np.sqrt(low * high) if low > 0.0 else 0.01 * high
        if abs(kappa - previous) <= 4e-16 * kappa or kappa == 0.0:
            break
    result = np.empty_like(lam)
    result[order] = lam
    return result / result.sum(), kappa


def _on_sphere(y: Vector, w: Vector, kappa: float, delta: float) -> tuple[Vector, float, float]:
    """λ(κ) for sorted z, its distance − δ, and the derivative of the distance by κ."""
    rate = w / (w + kappa)
    nu = (np.cumsum(rate * y) - 1.0) / np.cumsum(rate)
    k = int(np.flatnonzero(y > nu)[-1]) + 1
    top = slice(0, k)
    # λ − p rather than λ: a small ball keeps its digits.
    gap = y[top] - w[top]
    mean = (np.sum(rate[top] * gap) + w[k:].sum() * -1.0) / np.sum(rate[top])
    deviation = np.concatenate([np.maximum(rate[top] * (gap - mean), -w[top]), -w[k:]])
    lam = w + deviation
    pull = lam[top] / (w[top] + kappa)
    change = -(pull - rate[top] * (pull.sum() / rate[top].sum()))
    excess = float(np.sum(deviation**2 / w) - delta)
    return lam, excess, float(2.0 * np.sum(deviation[top] / w[top] * change))
