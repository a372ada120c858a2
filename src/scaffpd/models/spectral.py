"""Largest eigenvalues: exactly where that is cheap, by power iteration where it is dear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EXACT = 1024
CLEAR = 1e3  # times its error must a smallest eigenvalue be, to be taken from AᵀA


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


def extreme_values(A: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """λ_max(A_iᵀA_i) of n matrices, and a bound on λ_min from below, for A_i known up to noise_i·‖A_i‖.

    Rounding must not enter a certificate. Of the small matrix A_iᵀA_i the eigenvalues are known up to a share of the
    largest; where that is not enough, the singular values of A_i itself are, up to a share of the largest.
    """
    rows, columns = A.shape[1:]
    if rows < columns:
        return largest_eigenvalues(A), A.new_zeros(len(A))
    w = torch.linalg.eigvalsh(A.mT @ A).clamp_min(0)
    top, trace = w[:, -1], A.square().sum((1, 2))
    slack = 8 * torch.finfo(A.dtype).eps * rows**0.5 * trace + 2 * noise * top
    if bool((w[:, 0] > CLEAR * slack).all()):
        return top, w[:, 0] - slack
    s = torch.linalg.svdvals(A)
    error = (noise + 4 * torch.finfo(A.dtype).eps * rows**0.5) * s[:, 0]
    return s[:, 0].square(), (s[:, -1] - error).clamp_min(0).square()


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
