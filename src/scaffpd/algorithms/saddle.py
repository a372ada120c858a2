r"""A small saddle problem, solved to a proven accuracy.

    max_{λ∈Λ}  ⟨a, λ⟩ − ψ(λ) − ½‖Eλ‖² − ½ Σ w_i² (λ_i − l_i)²

for an r×N matrix E, with weights held near l by w. For any z ∈ R^r and λ ∈ Λ, with
v = a + Eᵀz − w² ∘ (λ − l),

    gap(z, λ) = [support(v) − ⟨v, λ⟩ + ψ(λ)] + ½‖z + Eλ‖²

bounds how far λ is from the best: two terms that are never negative, so nothing cancels. At the
optimum z = −Eλ. Two nested methods, each with a reason:

* proximal points in λ: λ⁺ = argmax of the same less (π/2)‖λ − k‖² from k = λ, with π → 0, because
  support alone is not differentiable (π = 0 is enough if every w_i > 0, or if ψ is as strongly
  curved as the first π);
* a semismooth Newton method with line search for that step's dual,

      φ(z) = ½‖z‖² + max_{λ∈Λ} ⟨a + Eᵀz, λ⟩ − ψ(λ) − ½ Σ w_i² (λ_i − l_i)² − (π/2)‖λ − k‖²,
      ∇φ = z + Eλ,    ∂²φ ∋ I + E P Eᵀ,    P = ∂λ/∂(Eᵀz):

  λ is a proximal step with σ_i = 1/(π + w_i²), so that w does not enter the linear systems, which
  are r×r.

Losses that are quadratic in z, each in its own way (`solve_quadratics`),

    min_z max_{λ∈Λ}  Σ λ_i q_i(z) − ψ(λ),    q_i(z) = a_i + ⟨e_i, z⟩ + ½zᵀH_iz,

are solved by a sequence of such problems, with all curvature in B(λ) = Σ λ_i H_i of the last λ:
Newton's method for the optimality conditions. A step that does not lower max_l ⟨q, l⟩ − ψ(l) is
repeated with more curvature. Here

    gap(z, λ) = [support(q) − ⟨q, λ⟩ + ψ(λ)] + ½ gᵀB(λ)⁻¹g,    g = Σ λ_i ∇q_i(z).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import lapack

from scaffpd.objectives.base import EPSILON, LARGEST, Matrix, Objective, ProxStep, Vector

# most proximal points; Newton steps for each of them, and for all
OUTER = 100
NEWTON = 100
ALL = 500
STALLED = 10  # proximal points without progress
FIRST = 0.05  # π at first, as a share of the coupling
# π falls by these factors after many and after few Newton steps, between these bounds
SLOW = 3.0
FAST = 30.0
SMALLEST = 1e-30
HIGHEST = 1e30
LEAST_HOLD = 1e-12  # of the largest w²
DIGITS = 1e-13  # π/v below which a proximal step on the simplex loses digits of λ
INNER = 0.1  # error of a proximal point, as a share of its length or of the tolerance
SHORTEST = 1e-10  # line search
STEPS = 40  # Newton steps for quadratic losses
ROUGH = 1e-3  # accuracy of each of them, as a share of the gap
# curvature that is added after a rejected step: from FIRST_MORE on by MORE, and less by LESS
MORE = 4.0
LESS = 8.0
FIRST_MORE = 0.1
NO_MORE = 0.01
# share of the trace of B: rounding in double precision, and the most that is added for it
TINY = 1e-15
COARSE = 1e-3


class Saddle(NamedTuple):
    """Solution with its proof."""

    weights: Vector  # λ
    z: Vector  # the minimising player's answer
    value: float  # an upper bound on the optimum, by at most `gap`
    gap: float  # the duality gap of (z, weights)
    iterations: int  # Newton steps


def solve_saddle(
    objective: Objective, a: Vector, E: Matrix, start: Vector, tol: float, w: Vector | None = None
) -> Saddle:
    """Find the saddle point for losses a and coupling E, to a duality gap of `tol`.

    It starts from the weights `start`, which with w are also the l of the penalty. The best pair
    found is returned; if rounding does not allow `tol`, its gap is larger.
    """
    objective.weights(len(a))
    # Overflows are rejected by the line search, or appear in the gap.
    with np.errstate(all="ignore"):
        square = np.zeros(len(a)) if w is None else w**2
        shift = level_of(objective, start, a)
        found = _SaddleProblem(objective, a - shift, E, start, square).solve(tol)
    return found._replace(value=found.value + shift)


def solve_quadratics(
    objective: Objective, a: Vector, E: Matrix, H: Matrix, start: Vector, share: float, least: float
) -> Saddle:
    """Find the saddle point for losses a_i + ⟨e_i, z⟩ + ½zᵀH_iz, from z = 0 and `start`.

    E is (r, N) and H (N, r, r). The gap is at most `share` of the decrease from z = 0, or `least`,
    if rounding allows.
    """
    objective.weights(len(a))
    with np.errstate(all="ignore"):
        shift = level_of(objective, start, a)
        found = _Quadratics(objective, a - shift, E, H).solve(start, share, least)
    return found._replace(value=found.value + shift)


def level_of(objective: Objective, weights: Vector, losses: Vector) -> float:
    """Return what to take off all losses: on the simplex a shift changes only the rounding."""
    return float(weights @ losses / np.add.reduce(weights)) if objective.simplex else 0.0


class _Iterate(NamedTuple):
    """z, λ(z), ψ(λ) and φ: its value, the size of its terms, and its gradient."""

    z: Vector
    step: ProxStep
    penalty: float
    value: float
    size: float
    gradient: Vector

    @property
    def weights(self) -> Vector:
        return self.step.weights


class _SaddleProblem:
    """Saddle problem for losses a, coupling E, and a penalty w² on the distance of λ from l."""

    def __init__(
        self, objective: Objective, a: Vector, E: Matrix, l: Vector, square: Vector
    ) -> None:
        self.objective = objective
        self.a = a
        self.E = E
        self.l = l
        self.square = square
        self.shared = float(np.minimum.reduce(square))
        self.held = bool(square.any())
        self.bends = 0.0 if self.held else objective.strong_convexity(len(a))
        self.squares = (E * E).sum(0)
        self.reach = float(np.maximum.reduce(self.squares)) ** 0.5

    def solve(self, tol: float) -> Saddle:
        anchor = self.l
        steps = 0
        stalled = 0
        pi = self._first()
        z = -self.E @ anchor
        best = Saddle(anchor, np.zeros(len(self.E)), np.inf, np.inf, 0)
        for _ in range(OUTER):
            point, used, converged = self._minimise(z, anchor, pi, tol)
            if point is None and anchor is self.l and not self.objective.simplex:
                # Off the simplex l may be so large that φ overflows; at zero it does not.
                anchor = np.zeros(len(anchor))
                z = np.zeros(len(z))
                continue
            if point is None:
                break
            found, rounding = self._proof(point, pi)
            moving = converged and np.abs(point.weights - anchor).max() > 1e-3 * point.weights.max()
            going = moving or found.gap < 0.5 * best.gap or best.gap == np.inf
            steps = steps + used
            stalled = 0 if going else stalled + 1
            best = found if found.gap < best.gap else best
            if best.gap <= max(tol, rounding) or stalled == STALLED or steps >= ALL:
                break
            z = point.z
            anchor = point.weights if converged else best.weights
            if converged:
                pi = pi / (FAST if used <= 1 else SLOW)
            else:
                pi = min(10 * max(pi, self.shared), HIGHEST)
            pi = self._last(pi, point)
        return best._replace(iterations=steps)

    def _first(self) -> float:
        """Return the first π, from the largest change of Eᵀz when weight moves to one client."""
        squares = self.squares
        if self.objective.simplex:
            E = self.E - self.E.mean(1, keepdims=True)
            squares = (E * E).sum(0)
        coupling = float(np.maximum.reduce(squares)) if len(self.E) else 0.0
        if self.bends > 0 and self.bends >= FIRST * coupling:
            return SMALLEST
        return min(
            max(FIRST * coupling - self.shared, 0.0 if self.shared > 0 else SMALLEST), HIGHEST
        )

    def _last(self, pi: float, point: _Iterate) -> float:
        """Return π, or the smallest useful one: below it, weights on the simplex lose digits."""
        v = self._forces(point)
        least = float(
            np.clip(DIGITS * np.ptp(v) if self.objective.simplex else 0.0, SMALLEST, HIGHEST)
        )
        least = 0.0 if self.shared >= least else least
        return least if pi < max(least, 0.01 * self.shared) else pi

    def _forces(self, point: _Iterate) -> Vector:
        """Return the v of (z, λ)."""
        v: Vector = self.a + point.z @ self.E
        return v - self.square * (point.weights - self.l) if self.held else v

    def _proof(self, point: _Iterate, pi: float) -> tuple[Saddle, float]:
        """Return the gap of (z, λ), and its possible rounding.

        With π = 0, λ is the maximiser of ⟨v, λ⟩ − ψ(λ), and the first part of the gap is zero.
        """
        z = point.z
        weights = point.weights
        v = self._forces(point)
        v = v - (float(v @ weights) if self.objective.simplex else 0.0)
        if not np.maximum.reduce(np.abs(v)) <= LARGEST:
            return Saddle(weights, z, np.inf, np.inf, 0), 0.0
        away = weights - self.l
        pulled = self.E @ weights
        known = pi == SMALLEST and self.bends > 0
        gap = 0.0 if known else self.objective._support(v) - float(v @ weights) + point.penalty
        gap = max(gap, 0.0) + 0.5 * float(point.gradient @ point.gradient)
        held = float(self.square @ away**2)
        below = float(self.a @ weights) - point.penalty - 0.5 * (float(pulled @ pulled) + held)
        terms = np.abs(self.a) + self.square * (np.abs(away) + weights)
        size = float(terms @ weights) + abs(point.penalty)
        error = EPSILON * self.reach * float(weights.sum())
        rounding = 2 * EPSILON * size + 2 * error * (float(np.sqrt(z @ z)) + error)
        return Saddle(weights, z, below + gap, gap if math.isfinite(gap) else np.inf, 0), rounding

    def _at(self, z: Vector, anchor: Vector, pi: float) -> _Iterate | None:
        """Return φ at z; `None` on overflow."""
        v = self.a + z @ self.E
        s = v
        total = np.asarray(min(max(pi, SMALLEST), HIGHEST))
        if self.held:
            s = v - self.square * (anchor - self.l)
            # beside a client that is held far more a weight would have no digits
            least = max(SMALLEST, LEAST_HOLD * float(np.maximum.reduce(self.square)))
            total = np.clip(pi + self.square, least, HIGHEST)
        if not np.maximum.reduce(np.abs(s)) <= LARGEST:
            return None
        step = self.objective._prox_step(s, anchor, 1 / total)
        weights = step.weights
        moved = step.weights - anchor
        gain = float(v @ weights)
        penalty = self.objective._value(weights)
        square = float(z @ z)
        held = 0.5 * pi * float(moved @ moved)
        if self.held:
            held += 0.5 * float(self.square @ (weights - self.l) ** 2)
        size = float(np.abs(v) @ weights) + abs(penalty) + held + square
        if not math.isfinite(size):
            return None
        return _Iterate(
            z, step, penalty, gain - penalty - held + 0.5 * square, size, z + self.E @ weights
        )

    def _minimise(
        self, z: Vector, anchor: Vector, pi: float, tol: float
    ) -> tuple[_Iterate | None, int, bool]:
        """Minimise φ by Newton's method; return the point, its steps, and whether it converged."""
        point = self._at(z, anchor, pi)
        for used in range(NEWTON):
            if point is None:
                break
            away = point.weights - anchor
            rounding = 4 * EPSILON * self.reach * float(point.weights.sum())
            enough = max(INNER * tol, INNER * pi * float(away @ away), rounding**2)
            if float(point.gradient @ point.gradient) <= enough:
                return point, used, True
            new = self._descend(point, anchor, pi)
            if new is None:
                return point, used, False
            point = new
        return point, NEWTON, False

    def _descend(self, point: _Iterate, anchor: Vector, pi: float) -> _Iterate | None:
        """Return the next point along Newton's direction d; `None` if there is none.

        φ is convex and its slope along d comes with its value, so a step that is too long is cut to
        where the secant of the slope vanishes. In the last digits of φ, the slope decides (Hager
        and Zhang 2005).
        """
        direction = self._newton(point)
        fall = -float(point.gradient @ direction)
        length = 1.0
        while fall > 0 and length > SHORTEST:
            new = self._at(point.z + length * direction, anchor, pi)
            shorter = 0.5
            if new is not None:
                slope = float(new.gradient @ direction)
                if new.value <= point.value - 1e-4 * length * fall:
                    return new
                if new.value <= point.value + 1e-14 * point.size and slope <= 0.5 * fall:
                    return new
                shorter = float(np.clip(fall / (fall + slope), 0.05, 0.7)) if slope > 0 else 0.5
            length *= shorter
        return None

    def _newton(self, point: _Iterate) -> Vector:
        """Return −(I + E P Eᵀ)⁻¹ ∇φ, over the clients whose weights can move."""
        root, Q = point.step.factors()
        G = self.E * root
        free = root > 0
        if 2 * np.count_nonzero(free) < len(root):  # else leaving clients out saves nothing
            G = G[:, free]
            Q = Q[:, free]
        if len(Q):
            G -= (G @ Q.T) @ Q
        B = G @ G.T
        B.flat[:: len(B) + 1] += 1.0
        direction: Vector
        _, direction, failed = lapack.dposv(B, point.gradient) if len(B) else (B, point.gradient, 0)
        return -direction if not failed and np.isfinite(direction).all() else -point.gradient


class _Place(NamedTuple):
    """z, the q_i and their gradients there, (N, r), and F = support(q)."""

    z: Vector
    losses: Vector
    slopes: Matrix
    value: float


class _Quadratics:
    """Saddle problem for losses q_i(z) = a_i + ⟨e_i, z⟩ + ½zᵀH_iz."""

    def __init__(self, objective: Objective, a: Vector, E: Matrix, H: Matrix) -> None:
        self.objective = objective
        self.a = a
        self.E = E
        self.H = H
        self.flat = H.reshape(len(a), -1)
        self.known: tuple[Vector, Matrix, Matrix] = (np.empty(0), E, E)  # the last λ, B(λ), factor
        self.ridge = TINY

    def solve(self, weights: Vector, share: float, least: float) -> Saddle:
        """Take Newton steps from z = 0, until the lowest F is close to the best lower bound."""
        here = lowest = self._at(np.zeros(len(self.E)))
        first = here.value
        more = 0.0
        used = 0
        gap = np.inf
        best = weights
        lower = self._below(here, weights)
        for _ in range(STEPS):
            tol = max(ROUGH * (lowest.value - lower), 0.1 * least)
            try:
                step = self._step(here, weights, more, tol)
            except np.linalg.LinAlgError:
                break
            there = self._at(here.z + step.z)
            weights = step.weights
            used = used + step.iterations
            bound = self._below(there, weights)
            promised = here.value - step.value
            fallen = here.value - there.value
            taken = fallen >= 0.1 * promised or there.value - bound < 0.5 * gap
            gap = min(gap, there.value - bound)
            best, lower = (weights, bound) if bound > lower else (best, lower)
            rounding = EPSILON * float(np.abs(there.losses) @ weights)
            # gradients fall further where values are alike but for rounding
            lowest = there if there.value < lowest.value + rounding else lowest
            if lowest.value - lower <= max(share * (first - lowest.value), least, rounding):
                break
            if not taken:
                more = max(MORE * more, FIRST_MORE)
                continue
            here = there
            if fallen > 0.75 * promised:
                more = 0.0 if more < NO_MORE else more / LESS
        return Saddle(best, lowest.z, lowest.value, max(lowest.value - lower, 0.0), used)

    def _at(self, z: Vector) -> _Place:
        bent = (self.H.reshape(-1, len(z)) @ z).reshape(len(self.a), len(z))
        losses = self.a + z @ self.E + 0.5 * (bent @ z)
        slopes = self.E.T + bent
        sane = bool(np.maximum.reduce(np.abs(losses)) <= LARGEST)
        return _Place(z, losses, slopes, self.objective._support(losses) if sane else np.inf)

    def _bend(self, weights: Vector) -> tuple[Matrix, Matrix]:
        """Return B(λ), with a regulariser for rounding, and its factor; cache those of the last λ.

        Hessians that were summed in single precision need a larger one: the share of the trace that
        is added grows from λ's first trial until there is a factor.
        """
        if self.known[0] is not weights:
            self.ridge = TINY
        while self.known[0] is not weights:
            B = self._mixed(weights)
            try:
                self.known = weights, B, factor(B)
            except np.linalg.LinAlgError:
                if self.ridge >= COARSE:
                    raise
                self.ridge *= 100
        return self.known[1:]

    def _mixed(self, weights: Vector) -> Matrix:
        B: Matrix = (weights @ self.flat).reshape(len(self.E), -1)
        B.flat[:: len(B) + 1] += self.ridge * B.trace()
        return B

    def _step(self, here: _Place, weights: Vector, more: float, tol: float) -> Saddle:
        """Return Newton's step from here, with B(λ) + `more` times that of equal weights."""
        B, root = self._bend(weights)
        if more > 0:
            equal = np.full(len(weights), weights.sum() / len(weights))
            root = factor(B + more * self._mixed(equal))
        E = lapack.dtrtrs(root, here.slopes.T, lower=1)[0]
        found = solve_saddle(self.objective, here.losses, E, weights, tol)
        return found._replace(z=lapack.dtrtrs(root, found.z, lower=1, trans=1)[0])

    def _below(self, place: _Place, weights: Vector) -> float:
        """Return the minimum over z at λ, which is below the optimum: ⟨q, λ⟩ − ψ(λ) − ½gᵀB(λ)⁻¹g.

        It is −∞ if B(λ) has a direction without curvature beyond rounding, and B(λ) is what `_bend`
        makes of it.
        """
        g = weights @ place.slopes
        lower = float(place.losses @ weights) - self.objective._value(weights)
        if not np.isfinite(lower):
            return -np.inf
        try:
            half = lapack.dtrtrs(self._bend(weights)[1], g, lower=1)[0]
        except np.linalg.LinAlgError:
            return -np.inf
        return lower - 0.5 * float(half @ half)


def factor(B: Matrix) -> Matrix:
    root: Matrix
    root, failed = lapack.dpotrf(B, lower=1)
    if failed:
        raise np.linalg.LinAlgError("not positive definite")
    return root
