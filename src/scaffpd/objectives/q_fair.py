"""q-fair federated learning: powers of the losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.errors import InputError
from scaffpd.objectives.base import (
    EPSILON,
    Objective,
    ProxStep,
    Scale,
    Vector,
    above,
    inner,
    read_scale,
    roundings,
    total,
)

TINY = float(np.finfo(np.float64).tiny)
HUGE = float(np.finfo(np.float64).max)


class QFair(Objective):
    r"""Λ = {λ ≥ 0}, ψ(λ) = Σ_i p_i (q/(q+1)) (λ_i/p_i)^{(q+1)/q}:  min_x Σ p_i f_i(x)^{q+1}/(q+1).

    The q-FFL of Li, Sanjabi, Beirami and Smith (2020, "Fair resource allocation in federated
    learning"), for losses f_i ≥ 0. Its optimum guarantees the smallest (q+1)-norm of the losses, so
    a client counts the more the worse it is served: q → 0 is `Average`, and q → ∞ tends to
    `Agnostic`.

    Args:
        q: the exponent q > 0.
        prior: reference weights p, 1/N each if not given.
    """

    simplex = False
    positive = True
    parameter = "q"
    symbol = "q"
    usual = 1.0
    meaning = "q is 0 for the average, and fairer the larger it is"
    strengths = staticmethod(lambda losses, points: np.geomspace(0.1, 5.0, points))

    def __init__(self, q: float, prior: ArrayLike | None = None) -> None:
        self.q = read_scale("QFair", "q", q)
        super().__init__(prior)

    def check(self, losses: Vector, names: Sequence[object]) -> None:
        if losses.min() < 0:
            raise InputError(
                "loss-below-zero",
                f"q-FFL needs losses >= 0, which client {names[int(losses.argmin())]!r} has not.",
            )

    def _value(self, weights: Vector) -> float:
        p = self.weights(len(weights))
        q = self.q
        if weights.min() < 0.0:
            return float("inf")
        with np.errstate(over="ignore"):
            return float(q / (q + 1.0) * inner(p, (weights / p) ** ((q + 1.0) / q)))

    def _maximizer(self, losses: Vector) -> Vector:
        """Return λ_i = p_i [L_i]₊^q."""
        with np.errstate(over="ignore"):
            return self.weights(len(losses)) * np.maximum(losses, 0.0) ** self.q

    def _support(self, losses: Vector) -> float:
        with np.errstate(over="ignore"):
            powers = np.maximum(losses, 0.0) ** (self.q + 1.0)
            return inner(self.weights(len(losses)), powers) / (self.q + 1.0)

    def _ceiling(self, losses: Vector) -> float:
        base = np.maximum(losses, 0.0)
        return self._powers_above(base, self.q + 1.0) / (self.q + 1.0) * (1.0 + 4.0 * EPSILON)

    def _cost(self, weights: Vector) -> float:
        p = self.weights(len(weights))
        q = self.q
        powers = self._powers_above(weights / p, (q + 1.0) / q)
        return powers * (q / (q + 1.0)) * (1.0 + 4.0 * EPSILON)

    def _powers_above(self, base: Vector, e: float) -> float:
        """Return Σ p_i b_iᵉ from above; ε of e and b changes bᵉ by the share ε e(1 + |log b|)."""
        p = self.weights(len(base))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            terms = p * base**e
            logarithm = np.where(base > 0.0, np.abs(np.log(base)), 0.0)
            amplified = e * total(terms * (roundings(len(p)) + 2.0 + 2.0 * logarithm))
            return above(terms, more=roundings(len(p)) + 8) + EPSILON * amplified

    separable = True

    def _penalties(self, weights: Vector, p: Vector) -> Vector:
        q = self.q
        return np.asarray(p * q / (q + 1.0) * (weights / p) ** ((q + 1.0) / q))

    def _conjugate(self, t: Vector, p: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return λ_i = p_i L_i^q, of the losses themselves."""
        weights = p * np.maximum(t, 0.0) ** self.q
        nothing = np.zeros(len(p))
        return weights * np.maximum(t, 0.0) / (self.q + 1.0), weights, nothing, nothing

    def strong_convexity(self, n: int) -> float:
        """Return 1/max_i p_i for q = 1, where ψ is quadratic; zero otherwise."""
        return float(1.0 / self.weights(n).max()) if self.q == 1.0 else 0.0

    def curvature(self, weights: Vector) -> float:
        """Return min_i (λ_i/p_i)^{1/q − 1} / (q p_i)."""
        p = self.weights(len(weights))
        with np.errstate(over="ignore", divide="ignore"):
            ratio = np.maximum(weights, 0.0) / p
            return float(np.min(ratio ** (1.0 / self.q - 1.0) / (self.q * p)))

    def start(self, losses: Vector) -> Vector:
        """Return the maximizer for losses of at least a thousandth of the largest, or of one."""
        top = float(losses.max())
        raised = np.maximum(losses, 1e-3 * top) if top > 0.0 else np.ones(len(losses))
        return np.clip(self._maximizer(raised), TINY, HUGE)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        """Return λ_i = p_i v_i with v_i^{1/q} + v_i p_i/σ = s_i + l_i/σ, or zero below zero.

        d_i = 1/(ψ''(λ_i) + 1/σ), zero if λ_i = 0. With y = log v and t = s + l/σ the equation is
        log(e^{y/q} + e^{y + log(p/σ)}) = log t: convex in y, with a slope between 1 and 1/q.
        Dropping one term leaves an error of at most log 2, so Newton's method, which descends from
        the smaller of the two single-term solutions, needs a handful of steps for any σ. If the
        power is the smaller term, λ = l + σ(s − v^{1/q}) has all digits, while e^y has lost those
        of y.
        """
        p = self.weights(len(s))
        q = self.q
        scaled = old + sigma * s  # σt
        served = scaled > 0.0
        log_t = np.log(np.where(served, scaled, 1.0)) - np.log(sigma)
        offset = np.log(p) - np.log(sigma)
        y = np.minimum(q * log_t, log_t - offset)
        for _ in range(30):
            power = y / q
            linear = y + offset
            e = np.exp(-np.abs(power - linear))
            share = np.where(power > linear, 1.0, e) / (1.0 + e)  # of the power in both terms
            slope = share / q + (1.0 - share)
            step = (np.maximum(power, linear) + np.log1p(e) - log_t) / slope
            y = y - step
            if np.max(np.abs(step)) <= 1e-9:  # the convergence is quadratic
                break
        weights = np.where(share < 0.5, scaled - sigma * np.exp(y / q), p * np.exp(y))
        moved = np.where(served, p * np.exp(y - log_t) / slope, 0.0)
        return ProxStep(np.where(served, weights, 0.0), moved, np.empty((0, len(weights))))
