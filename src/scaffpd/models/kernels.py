"""A X and AᵀV by one pass over a table of 2 or 4 bytes a number, with sums in double precision.

Triton, which comes with PyTorch for CUDA, compiles it for a GPU. Numbers become doubles in
registers, so that a product takes the time of reading A. Sums are of n products in some order, to
which γ_n applies as to any other; the order is fixed, so that results repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 128  # columns of X that are taken at once
PROGRAMS = 2048  # that keep a GPU busy
LINE = 16  # numbers whose reading is one instruction at most


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    A,
    X,
    out,
    n,
    length,
    rows,
    columns,
    across,
    along,
    k,
    K: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
):
    """Add up T sums over a part of the terms, R at a time; K is k, filled up, or 1."""
    i = tl.program_id(0) * T + tl.arange(0, T)
    part = tl.cdiv(tl.cdiv(length, tl.num_programs(1)), R) * R
    first = tl.program_id(1) * part
    c = tl.arange(0, K)
    start = A + i[:, None].to(tl.int64) * across
    total = tl.zeros((T, R if K == 1 else K), tl.float64)
    for s in tl.range(first, tl.minimum(first + part, length), R, num_stages=3):
        j = s + tl.arange(0, R)
        inside = (i[:, None] < rows) & (j[None] < columns)
        a = tl.load(start + j[None].to(tl.int64) * along, inside, 0.0).to(tl.float64)
        if K == 1:
            total += a * tl.load(X + j, j < length, 0.0)[None].to(tl.float64)
        else:
            known = (j[:, None] < length) & (c[None] < k)
            x = tl.load(X + j[:, None] * k + c[None], known, 0.0).to(tl.float64)
            total = tl.dot(a, x, total, out_dtype=tl.float64)
    place = out + (tl.program_id(1) * n + i[:, None]) * k + c[None]
    if K == 1:
        total = tl.sum(total, 1)[:, None]
    tl.store(place, total, (i[:, None] < n) & (c[None] < k))


def takes(A: Tensor, k: int) -> bool:
    """Return whether this is for A and k columns; a product of two bytes has one of them."""
    known = A.dtype in (torch.float32, torch.bfloat16) and A.ndim == 2 and A.stride(1) == 1
    return known and 0 < k <= (MOST if A.element_size() == 4 else 1) and A.numel() > 0


def product(A: Tensor, X: Tensor, transposed: bool = False) -> Tensor:
    """Return A X, or AᵀX, in double precision, for X in single or double precision."""
    n, length = A.shape
    k = X.shape[1]
    # what is read of a row: up to a whole line, if that is still the row's own memory
    wide = min(-(-length // LINE) * LINE, max(A.stride(0), length))
    rows, columns, across, along = n, wide, A.stride(0), 1
    tile = (8, 512) if k == 1 else (64, 64)
    if transposed:
        n, length = length, n
        rows, columns, across, along = wide, length, 1, A.stride(0)
        tile = (256, 16) if k == 1 else (64, 32)
    tiles = triton.cdiv(n, tile[0])
    split = min(triton.cdiv(PROGRAMS, tiles), triton.cdiv(length, tile[1]))
    out = torch.empty(split, n, k, dtype=torch.float64, device=A.device)
    K = 1 if k == 1 else max(16, triton.next_power_of_2(k))
    warps = 4 if K <= 32 else 8
    sizes = (n, length, rows, columns, across, along, k)
    _sums[tiles, split](A, X.contiguous(), out, *sizes, K, *tile, num_warps=warps)
    return out[0] if split == 1 else out.sum(0)
