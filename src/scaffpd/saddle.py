r"""A small saddle problem, solved to a proven accuracy.

    max_{λ∈Λ}  ⟨a, λ⟩ − ψ(λ) − ½‖Eλ‖²   =   min_z  support(a + Eᵀz) + ½‖z‖²,        z = −Eλ,

with E = F, or E = [F; diag w] for an r×N matrix F. Both sides are known at every (z, λ), and with v = a + Eᵀz

    gap(z, λ) = [support(v) − ⟨v, λ⟩ + ψ(λ)] + ½‖z + Eλ‖²

is their difference: two terms that are never negative, so nothing cancels. Two nested methods, each with a reason:

* proximal points in λ: λ⁺ = argmax ⟨a, λ⟩ − ψ(λ) − ½‖Eλ‖² − (π/2)‖λ − l‖² from l = λ, with π → 0, because support
  alone is not differentiable (π = 0 will do where every w_i > 0);
* a semismooth Newton method with line search for that step's dual,

      φ(u) = ½‖u‖² + max_{λ∈Λ} ⟨v, λ⟩ − ψ(λ) − ½ Σ w_i²λ_i² − (π/2)‖λ − l‖²,    v = a + Fᵀu,
      ∇φ = u + Fλ,    ∂²φ ∋ I + F P Fᵀ,    P = ∂λ/∂v:

  λ is a proximal step with σ_i = 1/(π + w_i²), so that w takes no part in the linear systems, which are r×r.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scaffpd.objectives.base import Objective, Vector
from scaffpd.objectives.inputs import LARGEST
from scaffpd.objectives.prox_step import ProxStep

Matrix = NDArray[np.float64]
EPSILON = float(np.finfo(np.float64).eps)
OUTER, NEWTON, ALL = 100, 100, 500  # proximal points; Newton steps for each of them, and for all
STALLED = 10  # proximal points without progress
FIRST, SLOW, FAST = 0.05, 3.0, 30.0  # π/coupling at first; π's decrease after many and after few Newton steps
SMALLEST, HIGHEST = 1e-30, 1e30  # π
DIGITS = 1e-13  # π/v below which a proximal step on the simplex loses digits of λ
INNER = 0.1  # error of a proximal point, as a share of its length or of the tolerance
SHORTEST = 1e-10  # line search


@dataclass(frozen=True)
class Saddle:
    """A solution and its proof.

    Attributes:
        weights: λ.
        z: the other player's answer.
        value: support(a + Eᵀz) + ½‖z‖², at most `gap` above the optimum.
        gap: the duality gap of (z, weights).
        iterations: Newton steps.
    """

    weights: Vector
    z: Vector
    value: float
    gap: float
    iterations: int


def solve_saddle(
    objective: Objective, a: Vector, E: Matrix, start: Vector, tol: float, diagonal: Vector | None = None
) -> Saddle:
    """The saddle point for losses a and coupling E, from the weights `start`, to a duality gap of `tol`.

    With `diagonal`, E has diag(diagonal) below it (and z that many more entries).

    The best pair found is returned; where rounding does not allow `tol`, its gap says so.
    """
    shift = float(start @ a / start.sum()) if objective.simplex else 0.0
    w = np.zeros(len(a)) if diagonal is None else diagonal
    with np.errstate(all="ignore"):  # what overflows is refused by the line search, or shows in the gap
        found = _Problem(objective, a - shift, E, w).solve(start, tol)
    z = found.z[: len(E)] if diagonal is None else found.z
    return replace(found, z=z, value=found.value + shift)


@dataclass(frozen=True)
class _Point:
    """u, λ(u), ψ(λ) and φ: its value, the size of the terms in it, and its gradient."""

    u: Vector
    step: ProxStep
    penalty: float
    value: float
    size: float
    gradient: Vector

    @property
    def weights(self) -> Vector:
        return self.step.weights


class _Problem:
    """The problem for losses a and E = [F; diag w]."""

    def __init__(self, objective: Objective, a: Vector, F: Matrix, w: Vector) -> None:
        self.objective, self.a, self.F, self.w = objective, a, F, w
        self.square, self.shared = w**2, float((w**2).min())
        self.reach = float(np.sqrt((F**2).sum(0).max()))

    def solve(self, start: Vector, tol: float) -> Saddle:
        """Proximal points until the gap is at most `tol`, or does not fall any more."""
        best = Saddle(start, np.zeros(len(self.F) + len(start)), np.inf, np.inf, 0)
        anchor, u, steps, stalled = start, -self.F @ start, 0, 0
        first, least = self._range(start, u)
        pi = max(first, least)
        for _ in range(OUTER):
            point, used, converged = self._minimise(u, anchor, pi, tol)
            if point is None and anchor is start and not self.objective.simplex:
                anchor, u = np.zeros(len(start)), np.zeros(len(u))  # nothing is too large there
                continue
            if point is None:
                break
            found, rounding = self._proof(point)
            moving = converged and np.abs(point.weights - anchor).max() > 1e-3 * point.weights.max()
            going = moving or found.gap < 0.5 * best.gap or best.gap == np.inf
            steps, stalled = steps + used, 0 if going else stalled + 1
            best = found if found.gap < best.gap else best
            if best.gap <= max(tol, rounding) or stalled == STALLED or steps >= ALL:
                break
            u, anchor = point.u, point.weights if converged else best.weights
            pi = pi / (FAST if used <= 1 else SLOW) if converged else min(10 * max(pi, self.shared), HIGHEST)
            pi = least if pi < max(least, 0.01 * self.shared) else pi
        return replace(best, iterations=steps)

    def _range(self, weights: Vector, u: Vector) -> tuple[float, float]:
        """The first π, from the most by which weight that moves to one client can change v; the last one."""
        F, v = self.F, self.a + u @ self.F - self.square * weights
        simplex = self.objective.simplex
        coupling = float(((F - F.mean(1, keepdims=True) if simplex else F) ** 2).sum(0).max())
        least = float(np.clip(DIGITS * np.ptp(v) if simplex else 0.0, SMALLEST, HIGHEST))
        return min(max(FIRST * coupling - self.shared, 0.0), HIGHEST), 0.0 if self.shared >= least else least

    def _proof(self, point: _Point) -> tuple[Saddle, float]:
        """The gap of z = (u, −w ∘ λ) and λ, and what of it may be rounding."""
        u, weights = point.u, point.weights
        z, v = np.concatenate([u, -self.w * weights]), self.a + u @ self.F - self.square * weights
        level = float(v @ weights) if self.objective.simplex else 0.0
        v = v - level  # on the simplex a common shift changes nothing but the rounding
        if not np.all(np.abs(v) <= LARGEST):
            return Saddle(weights, z, np.inf, np.inf, 0), 0.0
        top = self.objective.support(v)
        gap = max(top - float(v @ weights) + point.penalty, 0.0) + 0.5 * float(point.gradient @ point.gradient)
        value = top + level + 0.5 * float(z @ z)
        size = float((np.abs(self.a) + self.square * weights) @ weights) + abs(point.penalty)
        error = EPSILON * self.reach * float(weights.sum())
        rounding = 2 * EPSILON * size + 2 * error * (float(np.sqrt(u @ u)) + error)
        return Saddle(weights, z, value, gap if np.isfinite(gap) else np.inf, 0), rounding

    def _at(self, u: Vector, anchor: Vector, pi: float) -> _Point | None:
        """φ at u; `None` where numbers are too large."""
        v, total = self.a + u @ self.F, np.clip(pi + self.square, SMALLEST, HIGHEST)
        s = v - self.square * anchor
        if not np.all(np.abs(s) <= LARGEST):
            return None
        step = self.objective.prox_step(s, anchor, 1 / total)
        weights, away = step.weights, step.weights - anchor
        gain, penalty, square = float(v @ weights), self.objective.value(weights), float(u @ u)
        held = 0.5 * float(self.square @ weights**2) + 0.5 * pi * float(away @ away)
        size = abs(gain) + abs(penalty) + held + square
        if not np.isfinite(size):
            return None
        return _Point(u, step, penalty, gain - penalty - held + 0.5 * square, size, u + self.F @ weights)

    def _minimise(self, u: Vector, anchor: Vector, pi: float, tol: float) -> tuple[_Point | None, int, bool]:
        """Newton's method for φ, the number of its steps, and whether it came to an end."""
        point = self._at(u, anchor, pi)
        for used in range(NEWTON):
            if point is None:
                break
            away, rounding = point.weights - anchor, 4 * EPSILON * self.reach * float(point.weights.sum())
            enough = max(INNER * tol, INNER * pi * float(away @ away), rounding**2)
            if float(point.gradient @ point.gradient) <= enough:
                return point, used, True
            new = self._descend(point, anchor, pi)
            if new is None:
                return point, used, False
            point = new
        return point, NEWTON, False

    def _descend(self, point: _Point, anchor: Vector, pi: float) -> _Point | None:
        """The next point along Newton's direction d; `None` if there is none.

        φ is convex and its slope along d comes with its value, so a step that is too long is cut to where the secant of
        the slope vanishes. In the last digits of φ, the slope decides (Hager and Zhang 2005).
        """
        direction = self._newton(point)
        fall, length = -float(point.gradient @ direction), 1.0
        while fall > 0 and length > SHORTEST:
            new, shorter = self._at(point.u + length * direction, anchor, pi), 0.5
            if new is not None:
                slope = float(new.gradient @ direction)
                if new.value <= point.value - 1e-4 * length * fall:
                    return new
                if new.value <= point.value + 1e-14 * point.size and slope <= 0.5 * fall:
                    return new
                shorter = float(np.clip(fall / (fall + slope), 0.05, 0.7)) if slope > 0 else 0.5
            length *= shorter
        return None

    def _newton(self, point: _Point) -> Vector:
        """−(I + F P Fᵀ)⁻¹ ∇φ, over the clients whose weights can move."""
        root, Q = point.step.factors()
        free = root > 0
        G, Q = self.F[:, free] * root[free], Q[:, free]
        G = G - (G @ Q.T) @ Q
        try:
            direction = np.asarray(np.linalg.solve(np.eye(len(G)) + G @ G.T, -point.gradient), dtype=np.float64)
        except np.linalg.LinAlgError:
            return -point.gradient
        return direction if np.all(np.isfinite(direction)) else -point.gradient
