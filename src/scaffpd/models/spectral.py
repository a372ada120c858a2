"""Largest eigenvalues: exactly where that is cheap, by power iteration where it is dear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EXACT = 1024


def largest_eigenvalue(A: Tensor) -> Tensor:
    """λ_max(AᵀA), exact for a small side of A up to `EXACT`, else by power iteration and never above ‖A‖_F²."""
    rows, columns = A.shape
    if min(rows, columns) <= EXACT:
        small = A @ A.T if rows <= columns else A.T @ A
        return torch.linalg.eigvalsh(small)[-1].clamp_min(0)
    start = A.T @ (A @ A.new_ones(columns))
    return torch.minimum(power_iteration(lambda v: A.T @ (A @ v), start), A.square().sum())


def power_iteration(apply: Callable[[Tensor], Tensor], start: Tensor, steps: int = 100, tolerance: float = 1e-4) -> Tensor:
    """|λ|_max of a symmetric operator, with two percent on top: power iteration approaches it from below."""
    size = start.norm()
    v = start / size if size > 0 else torch.ones_like(start) / start.numel() ** 0.5
    value = start.new_zeros(())
    for _ in range(steps):
        w = apply(v)
        previous, value = value, w.norm()
        if value == 0 or abs(value - previous) <= tolerance * value:
            break
        v = w / value
    return 1.02 * value
