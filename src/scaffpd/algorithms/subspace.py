r"""The model of the subspace saddle method: the clients' losses near x in the span of V.

To second order, for a step Vα and new weights l ∈ Λ, with g_i = Vᵀc_i and Q = Σ λ_i VᵀH_iV,

    m(α, l) = Σ l_i (L_i + g_iᵀα) + ½αᵀ[(1 + δ)Q + δκI]α − ψ(l) − ½ Σ w_i² (l_i − λ_i)².

δ damps a model that has predicted too much; κ does so where Q is flat, as in directions that matter
only to clients without weight. The last term accounts for the clients' gradients outside V: if a
client's c_i lies mostly outside V, the model cannot predict the effect of a change of its weight,
and w_i holds the weight back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.saddle import Saddle, solve_saddle
from scaffpd.federation import Vector
from scaffpd.objectives.base import Matrix, Objective

DEPENDENT = 1e-7  # columns with a smaller part outside the span of those before are rounding
FLAT = 1e-14  # curvature below this share of the largest is rounding


@dataclass(frozen=True)
class SubspaceModel:
    """Model m of one round."""

    objective: Objective  # (Λ, ψ)
    losses: Vector  # L_i
    slopes: Matrix  # g_i, (N, k)
    curvature: Matrix  # Q, (k, k)
    weights: Vector  # λ
    w: Vector  # w_i
    stiffness: float = 0.0  # κ

    def solve(self, damping: float, tol: float) -> Saddle:
        """Solve min_α max_l m(α, l).

        With (1 + δ)|Q| + δκI = R⁻ᵀR⁻¹, it is the saddle problem of E = RᵀGᵀ, and α = Rz. If losses
        are not convex Q may have negative eigenvalues, and |Q| has their absolute values: a step as
        long as for positive curvature, and still a descent step.
        """
        values, vectors = np.linalg.eigh(self.curvature)
        sizes = (1 + damping) * np.abs(values) + damping * self.stiffness
        R = vectors / np.sqrt(np.maximum(sizes, FLAT * sizes.max(initial=1e-300)))
        found = solve_saddle(
            self.objective, self.losses, (self.slopes @ R).T, self.weights, tol, self.w
        )
        return found._replace(z=R @ found.z)

    def predicted(self, alpha: Vector) -> Vector:
        """Predict the losses at Vα, without damping: L_i + g_iᵀα + ½αᵀQα."""
        return np.asarray(
            self.losses + self.slopes @ alpha + 0.5 * float(alpha @ self.curvature @ alpha)
        )

    def merit(self, losses: Vector, tol: float) -> float:
        """Return F_w(L) = max_{l∈Λ} ⟨L, l⟩ − ψ(l) − ½ Σ w_i² (l_i − λ_i)², which judges a step."""
        nothing = np.empty((0, len(losses)))  # is coupled: where all w_i > 0, it is one step
        return solve_saddle(self.objective, losses, nothing, self.weights, tol, self.w).value


def orthonormal(columns: list[Tensor], metric: Tensor, most: int) -> Tensor:
    """Return V with VᵀDV = I, (d, k), spanning the first `most` linearly independent columns.

    With D^½ [V, next columns] = QR, the small R alone shows which columns these are.
    """
    root = metric.sqrt()
    rows = root.new_empty(0, len(root))
    most = min(most, len(root))
    while columns and len(rows) < most:
        room = most - len(rows)
        fresh = torch.stack(columns[:room])
        columns = columns[room:]
        finite = fresh.sum(1).isfinite()
        fresh = root * (fresh if bool(finite.all()) else fresh[finite])
        Q, R = torch.linalg.qr(torch.cat([rows, fresh]).mT)
        own = torch.from_numpy(_independent(R.double().cpu().numpy().T)).to(R)
        rows = own @ Q.mT
    return rows.div_(root).mT


def _independent(rows: Matrix) -> Matrix:
    """Return an orthonormal basis, in rows, of the span of the rows, without dependent ones.

    The rows are those of a triangle: each adds its own last entry to the span of those before,
    unless it is zero.
    """
    last = np.diagonal(rows)
    sizes = np.sqrt((rows * rows).sum(1))
    if np.all(np.abs(last) > DEPENDENT * sizes):
        return np.diag(np.sign(last))
    basis = np.empty(rows.shape)
    k = 0
    for row in rows:
        size = float(np.sqrt(row @ row))
        if not 0 < size < np.inf:
            continue
        row = row / size
        for _ in range(2):  # twice, to correct rounding
            row = row - (basis[:k] @ row) @ basis[:k]
            size = float(np.sqrt(row @ row))
            if not size > DEPENDENT:
                break
            row = row / size
        else:
            basis[k] = row
            k += 1
    return basis[:k]
