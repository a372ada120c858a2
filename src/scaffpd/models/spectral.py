"""Largest eigenvalues: exactly where that is cheap, by power iteration where it is dear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EXACT = 1024


def largest_eigenvalues(A: Tensor) -> Tensor:
    """λ_max(A_iᵀA_i) of n matrices, (n, rows, columns): exact for a small side of up to `EXACT`, else from above.

    By power iteration then, and never above ‖A_i‖_F².
    """
    rows, columns = A.shape[1:]
    if min(rows, columns) <= EXACT:
        small = A @ A.mT if rows <= columns else A.mT @ A
        top: Tensor = torch.linalg.eigvalsh(small)[:, -1]
        return top.clamp_min(0)
    return torch.stack([_approached(a) for a in A])


def _approached(A: Tensor) -> Tensor:
    start = random_direction(A.new_empty(A.shape[1]))
    return torch.minimum(power_iteration(lambda v: A.T @ (A @ v), start), A.square().sum())


def random_direction(like: Tensor) -> Tensor:
    """A fixed unit vector without structure: one like the data itself might miss the largest eigenvector."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    unit: Tensor = v / v.norm()
    return unit.to(like)


def power_iteration(
    apply: Callable[[Tensor], Tensor], start: Tensor, steps: int = 100, tolerance: float = 1e-4
) -> Tensor:
    """|λ|_max of a symmetric operator from a unit vector, with two percent on top: it is approached from below."""
    v, value = start, start.new_zeros(())
    for _ in range(steps):
        w = apply(v)
        previous, value = value, w.norm()
        if value == 0 or abs(value - previous) <= tolerance * value:
            break
        v = w / value
    return 1.02 * value
