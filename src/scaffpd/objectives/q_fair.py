"""q-fair federated learning: losses count with a power."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import positive
from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import read_step, read_vector


class QFair(Objective):
    r"""Λ = {λ ≥ 0}, ψ(λ) = Σ_i p_i (q/(q+1)) (λ_i/p_i)^{(q+1)/q}:  min_x Σ p_i f_i(x)^{q+1}/(q+1).

    q-FFL (Li, Sanjabi, Beirami and Smith 2020, "Fair resource allocation in federated learning"), for losses f_i ≥ 0.
    Its optimum guarantees the smallest (q+1)-norm of the losses: q → 0 is `Average`, and as q → ∞ it tends to `Agnostic`.

    Args:
        q: the exponent q > 0; larger values favour the worst-off clients more.
        prior: reference weights p, 1/N each if not given.
    """

    simplex: ClassVar[bool] = False

    def __init__(self, q: float, prior: Sequence[float] | ArrayLike | None = None) -> None:
        self.q = positive("QFair", "q", q)
        super().__init__(prior)

    def value(self, weights: ArrayLike) -> float:
        """Σ p_i (q/(q+1)) (λ_i/p_i)^{(q+1)/q}; +∞ if a weight is negative."""
        lam = read_vector("QFair", "weights", weights)
        p, q = self.weights(len(lam)), self.q
        if lam.min() < 0.0:
            return float("inf")
        with np.errstate(over="ignore"):
            return float(q / (q + 1.0) * (p @ (lam / p) ** ((q + 1.0) / q)))

    def contains(self, weights: ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether λ ≥ 0."""
        return bool(read_vector("QFair", "weights", weights).min() >= -tolerance)

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: float) -> Vector:  # noqa: E741
        """λ_i = p_i v_i with v_i^{1/q} + v_i p_i/σ = s_i + l_i/σ, or zero where the right side is not positive."""
        s, l, sigma = read_step("QFair", s, l, sigma)  # noqa: E741
        return self._solve(s, l, sigma)[0]

    def maximizer(self, losses: ArrayLike) -> Vector:
        """λ_i = p_i [L_i]₊^q."""
        L = read_vector("QFair", "losses", losses)
        with np.errstate(over="ignore"):
            return self.weights(len(L)) * np.maximum(L, 0.0) ** self.q

    def support(self, losses: ArrayLike) -> float:
        """Σ p_i [L_i]₊^{q+1}/(q+1)."""
        L = read_vector("QFair", "losses", losses)
        with np.errstate(over="ignore"):
            return float(self.weights(len(L)) @ np.maximum(L, 0.0) ** (self.q + 1.0) / (self.q + 1.0))

    def prox_jacobian(self, s: ArrayLike, l: ArrayLike, sigma: float) -> NDArray[np.float64]:  # noqa: E741
        """diag(1/(ψ''(λ_i) + 1/σ)), zero where λ_i = 0."""
        s, l, sigma = read_step("QFair", s, l, sigma)  # noqa: E741
        return np.diag(self._solve(s, l, sigma)[1])

    def strong_convexity(self, n: int) -> float:
        """1/max_i p_i for q = 1, where ψ is quadratic; zero otherwise."""
        return float(1.0 / self.weights(n).max()) if self.q == 1.0 else 0.0

    def curvature(self, weights: ArrayLike) -> float:
        """min_i (λ_i/p_i)^{1/q − 1} / (q p_i)."""
        lam = read_vector("QFair", "weights", weights)
        p = self.weights(len(lam))
        with np.errstate(over="ignore", divide="ignore"):
            return float(np.min((np.maximum(lam, 0.0) / p) ** (1.0 / self.q - 1.0) / (self.q * p)))

    def start(self, losses: ArrayLike) -> Vector:
        """The maximizer, with losses raised to at least a thousandth of the largest (all ones if none is positive)."""
        L = read_vector("QFair", "losses", losses)
        top = float(L.max())
        raised = np.maximum(L, 1e-3 * top) if top > 0.0 else np.ones(len(L))
        return np.clip(self.maximizer(raised), np.finfo(float).tiny, np.finfo(float).max)

    def _solve(self, s: Vector, l: Vector, sigma: float) -> tuple[Vector, Vector]:  # noqa: E741
        """λ and ∂λ/∂s of the proximal step.

        With y = log v the equation reads log(e^{y/q} + e^{y + log(p/σ)}) = log t: convex in y, with a slope between 1 and
        1/q. The smaller of the two single-term solutions is off by at most log 2, and Newton's method descends from there.
        """
        p, q = self.weights(len(s)), self.q
        scaled = l + sigma * s  # σt
        positive_part = scaled > 0.0
        log_t = np.log(np.where(positive_part, scaled, 1.0)) - np.log(sigma)
        offset = np.log(p) - np.log(sigma)
        y = np.minimum(q * log_t, log_t - offset)
        for _ in range(30):
            first, second = y / q, y + offset
            share = _sigmoid(first - second)  # of the first term in the sum of both
            slope = share / q + (1.0 - share)
            step = (np.logaddexp(first, second) - log_t) / slope
            y = y - step
            if np.all(np.abs(step) <= 4e-16 * np.maximum(np.abs(y), 1.0)):
                break
        lam = np.where(positive_part, np.exp(y + np.log(p)), 0.0)
        return lam, np.where(positive_part, np.exp(y + np.log(p) - log_t) / slope, 0.0)


def _sigmoid(x: Vector) -> Vector:
    """1/(1 + e^{−x}) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0.0, 1.0, e) / (1.0 + e)
