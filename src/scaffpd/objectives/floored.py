"""A floor under every weight: part of an objective is the average, whatever losses anybody claims.

Across organisations weights follow from losses that nobody can check. With a floor c the objective
is (1 − c) times the given one and c times the average of the prior, so that client i has at least
c p_i: a claim moves no more than the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from scaffpd.errors import InputError, real
from scaffpd.objectives.base import (
    EPSILON,
    LEAST,
    Objective,
    ProxStep,
    Scale,
    Vector,
    above,
    inner,
    roundings,
)

DIGITS = 1e4  # a floor is rounded up to so many parts: it is read by people


class Floored(Objective):
    r"""Λ' = {(1 − c) λ + c p : λ ∈ Λ},  ψ'((1 − c) λ + c p) = (1 − c) ψ(λ).

    So max_{Λ'} ⟨L, l⟩ − ψ'(l) = (1 − c) [max_Λ ⟨L, λ⟩ − ψ(λ)] + c ⟨p, L⟩.

    Args:
        objective: (Λ, ψ) on the simplex.
        floor: c, from 0 to below 1.
    """

    def __init__(self, objective: Objective, floor: float) -> None:
        if not objective.simplex or not 0 <= real("Floored", "floor", floor) < 1:
            raise InputError(
                "floor-out-of-range",
                f"Floored needs an objective whose weights sum to one, and 0 <= floor < 1, got "
                f"{objective!r} and {floor!r}.",
            )
        self.objective = objective
        self.floor = float(floor)

    @property
    def prior(self) -> Vector | None:  # type: ignore[override]
        return self.objective.prior

    @property
    def rho(self) -> float:
        """ρ of the objective; zero without one."""
        return float(getattr(self.objective, "rho", 0.0))

    @property
    def strength(self) -> float | None:
        return self.objective.strength

    def with_strength(self, value: float) -> Self:
        return type(self)(self.objective.with_strength(value), self.floor)

    def weights(self, n: int) -> Vector:
        return self.objective.weights(n)

    def check(self, losses: Vector, names: Sequence[str]) -> None:
        self.objective.check(losses, names)

    def start(self, losses: Vector) -> Vector:
        return self._lifted(self.objective.start(losses))

    def _lifted(self, weights: Vector) -> Vector:
        return (1 - self.floor) * weights + self.floor * self.weights(len(weights))

    def _lowered(self, weights: Vector) -> Vector:
        """Return the λ that was lifted, which rounding may have moved below zero."""
        return self._without(weights, self.weights(len(weights)))

    def _without(self, weights: Vector, p: Vector) -> Vector:
        return np.maximum(weights - self.floor * p, 0.0) / (1 - self.floor)

    def _value(self, weights: Vector) -> float:
        return (1 - self.floor) * self.objective._value(self._lowered(weights))

    def _maximizer(self, losses: Vector) -> Vector:
        return self._lifted(self.objective._maximizer(losses))

    def _support(self, losses: Vector) -> float:
        mean = inner(self.weights(len(losses)), losses)
        return (1 - self.floor) * self.objective._support(losses) + self.floor * mean

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        """Return the objective's step from l̃ = (l − c p)/(1 − c) with σ̃ = σ/(1 − c)."""
        share = 1 - self.floor
        anchor = (old - self.floor * self.weights(len(s))) / share
        step = self.objective._prox_step(s, anchor, sigma / share)
        return ProxStep(self._lifted(step.weights), share * step.slope, step.normals)

    def _ceiling(self, losses: Vector) -> float:
        n = len(losses)
        mean = above(self.weights(n) * losses, more=roundings(n) + 8)
        fair = self.objective._ceiling(losses)
        slack = 4 * EPSILON * (abs(fair) + abs(mean)) + LEAST
        return (1 - self.floor) * fair + self.floor * mean + slack

    def _cost(self, weights: Vector) -> float:
        cost = (1 - self.floor) * self.objective._cost(self._lowered(weights / weights.sum()))
        return cost + 4 * EPSILON * abs(cost)

    def _stretch(self, weights: Vector) -> float:
        """Bound λ' ≤ (1 + η) times a weighting of Λ', for the λ that `_cost` is about."""
        n = len(weights)
        lowered = self._lowered(weights / weights.sum())
        mass = float(lowered.sum())
        outside = (1 + self.objective._stretch(lowered)) * max(mass, 1.0) - 1
        return outside + EPSILON * (2 * roundings(n) + 16)

    @property
    def separable(self) -> bool:
        return self.objective.separable

    def _least(self, p: Vector) -> Vector:
        return self.floor * p + (1 - self.floor) * self.objective._least(p)

    def _most(self, p: Vector) -> Vector:
        return (1 - self.floor) * self.objective._most(p) + self.floor * p

    def _penalties(self, weights: Vector, p: Vector) -> Vector:
        return (1 - self.floor) * self.objective._penalties(self._without(weights, p), p)

    def _conjugate(self, t: Vector, p: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return (1 − c) φ_i(t) + c p_i t, and its derivatives."""
        share = 1 - self.floor
        value, weights, slope, most = self.objective._conjugate(t, p)
        lifted = share * weights + self.floor * p
        return share * value + self.floor * p * t, lifted, share * slope, share * most

    def largest(self, n: int) -> float:
        top = float(self.weights(n).max())
        return (1 - self.floor) * self.objective.largest(n) + self.floor * top

    def strong_convexity(self, n: int) -> float:
        """Return μ_λ/(1 − c)."""
        return self.objective.strong_convexity(n) / (1 - self.floor)

    def curvature(self, weights: Vector) -> float:
        return self.objective.curvature(self._lowered(weights)) / (1 - self.floor)


def largest_share(objective: Objective, n: int, colluding: int) -> float:
    """Return the most that one of n clients has of a sum without t others, whatever these claim.

    One has κ at most, and the N − t − 1 that are left beside it have at least their least weights.
    """
    if not objective.simplex:
        return 1.0
    p = objective.weights(n)
    least = objective._least(p)
    top = np.full(n, objective.largest(n))
    if objective.separable:  # Average has one κ_i for each
        top = np.minimum(top, objective._most(p))
    return float(np.max(top / (top + _beside(least, colluding))))


def floor_of(objective: Objective, n: int, colluding: int, share: float) -> float:
    r"""Return c with which nobody has more than `share` = s of such a sum, rounded up.

    With κ the largest weight and P_i the N − t − 1 smallest p_j besides p_i added up,

        (1 − c) κ + c p_i ≤ s/(1 − s) · c P_i,    c = max_i κ / (κ − p_i + s/(1 − s) · P_i):

    .138 for three silos with the usual cap and .092 for four. It is 0 where Λ has such weights.
    """
    if share >= 1 or not objective.simplex or largest_share(objective, n, colluding) <= share:
        return 0.0
    p = objective.weights(n)
    top = objective.largest(n)
    odds = share / (1 - share)
    found = float(np.max(top / (top - p + odds * _beside(p, colluding))))
    return min(math.ceil(found * DIGITS), DIGITS - 1) / DIGITS


def _beside(weights: Vector, colluding: int) -> Vector:
    """Return for every client the N − t − 1 smallest weights of others, added up."""
    n = len(weights)
    others = [np.sort(np.delete(weights, i))[: n - colluding - 1] for i in range(n)]
    return np.array([part.sum() for part in others])
