r"""A small saddle problem, solved to a proven accuracy.

    max_{λ∈Λ}  ⟨a, λ⟩ − ψ(λ) − ½‖E λ‖²   =   min_z  support(a + Eᵀz) + ½‖z‖²,        z = −E λ,

with E an r×N matrix, or such a matrix above a diagonal one. Both sides are known at every (z, λ), so their difference bounds the error of either. Two nested
methods, each with a reason:

* proximal points in λ, of growing σ: λ⁺ = argmax ⟨a, λ⟩ − ψ(λ) − ½‖Eλ‖² − ‖λ − λ_ref‖²/(2σ), because support alone
  is not differentiable (its smoothed version, through `prox`, is);
* a semismooth Newton method with line search for the smoothed left-hand problem in z,

      φ(z) = ½‖z‖² + max_λ { ⟨a + Eᵀz, λ⟩ − ψ(λ) − ‖λ − λ_ref‖²/(2σ) },   ∇φ = z + E λ(z),   ∂²φ ∋ I + E P Eᵀ,

  with P the Jacobian of `prox`. Only clients with a row in P (weights that can move) enter the linear system.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaffpd.objectives.base import Objective, Vector

Matrix = NDArray[np.float64]
GROWTH, OUTER, NEWTON = 5.0, 60, 50
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
    if diagonal is not None:
        E = np.vstack([E, np.diag(diagonal)])
    shift = float(start @ a / start.sum()) if objective.simplex else 0.0
    problem = _Smoothed(objective, a - shift, E)
    reference, z, sigma = start, np.zeros(len(E)), float(np.clip(1 / max(problem.coupling, 1e-40), 1e-40, 1e40))
    best, steps = problem.proof(z, start), 0
    for _ in range(OUTER):
        z, weights, used = problem.minimise(z, reference, sigma, 1e-3 * tol)
        steps += used
        for candidate in (z, -E @ weights):
            found = problem.proof(candidate, weights)
            best = found if found.gap < best.gap else best
        moved = float(np.abs(weights - reference).max())
        if best.gap <= tol or (moved == 0 and sigma * problem.coupling > 1e8):
            break
        reference, sigma = weights, min(GROWTH * sigma, 1e40)
    return Saddle(best.weights, best.z, best.value + shift, best.gap, steps)


class _Smoothed:
    """φ for any reference point and σ."""

    def __init__(self, objective: Objective, a: Vector, E: Matrix) -> None:
        self.objective, self.a, self.E = objective, a, E
        centred = E - E.mean(1, keepdims=True) if objective.simplex else E
        self.coupling = float(np.linalg.norm(centred, 2) ** 2) if E.size else 0.0

    def proof(self, z: Vector, weights: Vector) -> Saddle:
        """Both values at (z, λ)."""
        primal = self.objective.support(self.a + self.E.T @ z) + 0.5 * float(z @ z)
        pull = self.E @ weights
        dual = float(self.a @ weights) - self.objective.value(weights) - 0.5 * float(pull @ pull)
        gap = primal - dual
        return Saddle(weights, z, primal, max(gap, 0.0) if np.isfinite(gap) else np.inf, 0)

    def value(self, z: Vector, reference: Vector, sigma: float) -> tuple[float, Vector]:
        """φ(z) and λ(z)."""
        v = self.a + self.E.T @ z
        weights = self.objective.prox(v, reference, sigma)
        away = weights - reference
        height = float(v @ weights) - self.objective.value(weights) - float(away @ away) / (2 * sigma)
        return height + 0.5 * float(z @ z), weights

    def minimise(self, z: Vector, reference: Vector, sigma: float, tol: float) -> tuple[Vector, Vector, int]:
        """Newton steps until the decrement is below `tol`."""
        now, weights = self.value(z, reference, sigma)
        for count in range(NEWTON):
            gradient = z + self.E @ weights
            step = self._newton(z, gradient, reference, sigma)
            decrement = -float(gradient @ step)
            if not decrement > tol:
                return z, weights, count
            length = 1.0
            while length > SHORTEST:
                then, new = self.value(z + length * step, reference, sigma)
                if then <= now - 1e-4 * length * decrement + 1e-15 * abs(now):
                    break
                length /= 2
            if length <= SHORTEST:
                return z, weights, count
            z, now, weights = z + length * step, then, new
        return z, weights, NEWTON

    def _newton(self, z: Vector, gradient: Vector, reference: Vector, sigma: float) -> Vector:
        """−(I + E P Eᵀ)⁻¹ ∇φ, by a system in the smaller of the two spaces."""
        P = self.objective.prox_jacobian(self.a + self.E.T @ z, reference, sigma)
        free = np.flatnonzero(np.diag(P) > 0)
        if not len(free):
            return -gradient
        E, P = self.E[:, free], P[np.ix_(free, free)]
        if len(E) <= len(free):
            H = np.eye(len(E)) + E @ P @ E.T
            return -np.asarray(np.linalg.solve(H, gradient))
        inner = np.linalg.solve(np.eye(len(free)) + P @ (E.T @ E), P @ (E.T @ gradient))
        return E @ inner - gradient
