"""The KL penalty: exponentially tilted losses."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlog1py, xlogy

from scaffpd.objectives import simplex
from scaffpd.objectives.base import (
    EPSILON,
    LEAST,
    Objective,
    ProxStep,
    Scale,
    Vector,
    above,
    inner,
    read_scale,
    roundings,
)
from scaffpd.objectives.chi_square import ChiSquare

BLOCK = 8192  # clients at a time, so that temporary arrays stay in the processor's cache


class Tilted(Objective):
    r"""Λ = the simplex, ψ(λ) = ρ Σ_i λ_i log(λ_i/p_i):  min_x ρ log Σ p_i exp(f_i(x)/ρ).

    "Tilted empirical risk minimization" with tilt t = 1/ρ (Li, Beirami, Sanjabi and Smith 2021).
    Its optimum guarantees a bound for every client: no client's loss exceeds the objective's value,
    which is the smallest possible, by more than ρ log(1/p_i). ρ → ∞ is `Average` and ρ → 0 is
    `Agnostic`.

    Args:
        rho: the penalty ρ > 0 on leaving the prior, in units of the loss.
        prior: reference weights p, 1/N each if not given.
    """

    parameter = "rho"
    symbol = "ρ"
    usual = ChiSquare.usual
    meaning = ChiSquare.meaning
    strengths = staticmethod(ChiSquare.strengths)

    def __init__(self, rho: float, prior: ArrayLike | None = None) -> None:
        self.rho = read_scale("Tilted", "rho", rho)
        super().__init__(prior)

    def _value(self, weights: Vector) -> float:
        """Return ρ Σ λ_i log(λ_i/p_i), with 0 log 0 = 0; +∞ if a weight is negative.

        The sum is over λ_i log(λ_i/p_i) − λ_i + p_i, the same on the simplex: no term is negative,
        and none cancels if λ is close to p.
        """
        if weights.min() < 0.0:
            return float("inf")
        entropy, change = self._terms(weights)
        return float(self.rho * np.sum(self.weights(len(weights)) * (entropy - change)))

    def _terms(self, weights: Vector) -> tuple[Vector, Vector]:
        """Return (λ_i/p_i) log(λ_i/p_i), and (λ_i − p_i)/p_i."""
        p = self.weights(len(weights))
        ratio = weights / p
        change = (weights - p) / p
        close = xlog1py(ratio, np.maximum(change, -0.5))
        return np.where(np.abs(change) < 0.5, close, xlogy(ratio, ratio)), change

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        """Solve λ_i + k_i log(λ_i/p_i) = l_i + σ_i(s_i − ν) with k_i = σ_iρ.

        So λ_i = k_i ω(x_i − n) with Wright's omega function ω, x = s/ρ + l/k + log(p/k), and n from
        Σ λ_i = 1.
        """
        top, share = simplex.relative(sigma, len(s))
        k = top * self.rho * share
        x = (s - s.max()) / self.rho + old / k + np.log(self.weights(len(s)) / share)
        weights = k * _omega_with_sum(simplex.measured(x, share), 1.0 / (top * self.rho), share)
        slope = share * (weights / (k + weights))
        return simplex.corrected(weights, slope, float(slope.sum()))

    def _maximizer(self, losses: Vector) -> Vector:
        """Return λ_i ∝ p_i exp(L_i/ρ)."""
        tilts = np.exp((losses - losses.max()) / self.rho)
        return simplex.normalised(self.weights(len(losses)) * tilts)

    def _support(self, losses: Vector) -> float:
        p = self.weights(len(losses))
        worst = losses.max()
        tilt = (losses - worst) / self.rho
        excess = inner(p, np.expm1(tilt))  # Σ p exp − 1, with all its digits for large ρ
        logarithm = np.log1p(excess) if excess > -0.5 else np.log(inner(p, np.exp(tilt)))
        return float(worst + self.rho * logarithm)

    def _ceiling(self, losses: Vector) -> float:
        """Bound the support, with every sum from above; (L_i − max L)/ρ = t is known up to ε|t|."""
        p = self.weights(len(losses))
        worst = float(losses.max())
        k = 2 * roundings(len(losses)) + 16
        tilt = (losses - worst) / self.rho
        excess = inner(p, np.expm1(tilt))
        if excess > -0.5:
            logarithm = float(np.log1p(excess * (1.0 - EPSILON * k)))
        else:
            terms = p * np.exp(tilt)
            logarithm = float(np.log(above(terms, terms * (1.0 - tilt), k)))
        rounding = 8.0 * EPSILON * (abs(worst) + self.rho * abs(logarithm)) + LEAST
        return worst + self.rho * logarithm + rounding

    def _cost(self, weights: Vector) -> float:
        """Bound ψ by ρ Σ (λ_i log(λ_i/p_i) − λ_i + p_i)/Σλ_i, no less than with λ/Σλ and p/Σp."""
        p = self.weights(len(weights))
        parts = self._terms(weights)
        terms = p * (parts[0] - parts[1])
        sizes = p * (np.abs(parts[0]) + np.abs(parts[1]))
        k = 2 * roundings(len(p)) + 16
        most = self.rho * max(above(terms, sizes), LEAST) * (1.0 + EPSILON * k)
        return most / min(float(weights.sum()), 1.0)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        weights = self._prox(s, old, sigma)
        steps = np.asarray(sigma, dtype=np.float64)
        return simplex.simplex_step(weights, steps * (weights / (weights + steps * self.rho)))

    separable = True

    def _penalties(self, weights: Vector, p: Vector) -> Vector:
        return np.asarray(self.rho * (xlogy(weights, weights / p) - weights + p))

    def _conjugate(self, t: Vector, p: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return λ_i = min(p_i exp(t_i/ρ), 1); no weight of the simplex is above one."""
        tilt = t / self.rho
        below = tilt < -np.log(p)
        weights = np.where(below, p * np.exp(np.where(below, tilt, 0.0)), 1.0)
        slope = np.where(below, weights / self.rho, 0.0)
        value = weights * t - self._penalties(weights, p)
        return value, weights, slope, weights / self.rho

    def strong_convexity(self, n: int) -> float:
        """Return ρ, because ψ'' = ρ/λ_i and λ_i ≤ 1 on the simplex."""
        return self.rho

    def curvature(self, weights: Vector) -> float:
        return float(self.rho / weights.max())


def _omega_with_sum(x: Vector, total: float, q: Vector) -> Vector:
    """Return ω(x − n) with n such that Σ q_i ω(x_i − n) is `total` up to half the digits.

    n lies between the values at which the largest term alone, or N terms like it, would make up the
    total. Newton's method on log Σ q ω(x − n) is exact if ω is an exponential (large σρ). If it
    leaves the bracket, Newton's method on Σ q ω(x − n) itself, a convex function, climbs from the
    left.
    """
    alone = total / q
    equal = total / q / len(x)
    low = float(np.max(x - alone - np.log(alone)))
    top = float(x.max())
    high = float(np.max(x - equal - np.log(equal)))
    high = min(high, top + float(np.log(np.sum(q * np.exp(x - top))) - np.log(total)))
    n = high
    for _ in range(100):
        shifted = np.maximum(x - n, -700.0)  # below, ω is zero to three hundred digits
        omega = np.concatenate([_omega(shifted[i : i + BLOCK]) for i in range(0, len(x), BLOCK)])
        mass = np.sum(q * omega)
        slope = np.sum(q * omega / (1.0 + omega))
        low, high = (n, high) if mass >= total else (low, n)
        step = mass * np.log(mass / total) / slope
        if abs(step) <= max(1e-8, 4.0 * EPSILON * abs(n)):
            # the caller's correction of Σ λ is one more Newton step, with quadratic convergence
            break
        if not low < n + step < high:
            step = (mass - total) / slope if mass >= total else low - n
        n = n + step
    residual = shifted - omega - np.log(omega)  # a last step of Halley's method: all digits
    omega += omega * residual / (1.0 + omega - 0.5 * residual / (1.0 + omega))
    return omega


def _omega(x: Vector) -> Vector:
    """Compute Wright's omega function, ω + log ω = x, to eight digits.

    Use Winitzki's formula (2 %) and one fourth-order step of Fritsch, Shafer and Crowley: several
    times as fast as `scipy.special.wrightomega`, which would take most of a server's time.
    """
    a = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
    omega = a * (1.0 - np.log1p(a) / (2.0 + a))
    residual = x - omega - np.log(omega)
    slope = 1.0 + omega
    q = 2.0 * slope * (slope + residual / 1.5)
    refined: Vector = omega + omega * (residual / slope) * ((q - residual) / (q - 2.0 * residual))
    return refined
