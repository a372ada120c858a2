"""A proximal step together with how it answers to a change of its argument."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

DEPENDENT = 1e-12  # a normal with less than this outside the span of the others is one of them, but for rounding


@dataclass(frozen=True)
class ProxStep:
    r"""λ = prox_σ(s, l) and its derivative  ∂λ/∂s = D − DNᵀ(NDNᵀ)⁻¹ND  with D = diag(d).

    Attributes:
        weights: λ.
        slope: d, between 0 and σ: how λ_i follows s_i alone; zero where λ_i stays at a bound.
        normals: N, one row for each constraint that ties the weights together, such as Σ λ_i = 1.
    """

    weights: Vector
    slope: Vector
    normals: Matrix

    def factors(self) -> tuple[Vector, Matrix]:
        """D^½ and Q, QQᵀ = I, with  ∂λ/∂s = D^½ (I − QᵀQ) D^½."""
        root = np.sqrt(self.slope)
        rows: list[Vector] = []
        for row in self.normals * root:
            size = float(np.sqrt(row @ row))
            for other in 2 * rows:  # twice, to make up for rounding
                row = row - other * (other @ row)
            left = float(np.sqrt(row @ row))
            if left > DEPENDENT * size:
                rows.append(row / left)
        return root, np.array(rows).reshape(len(rows), len(root))

    def jacobian(self) -> Matrix:
        """∂λ/∂s: N×N, symmetric and positive semidefinite."""
        root, Q = self.factors()
        scaled = root * Q
        jacobian: Matrix = np.diag(root**2) - scaled.T @ scaled
        return jacobian
