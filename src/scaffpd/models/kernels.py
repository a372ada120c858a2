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

MOST = 128  # columns of X, or outputs, that are taken at once
PROGRAMS = 2048  # that keep a GPU busy
SAMPLES = 2**13  # bytes of their derivatives that a step reads at once
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


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    K,
    R,
    out,
    Z,
    P,
    r,
    w,
    y,
    p,
    f,
    keep,
    m,
    k,
    T: tl.constexpr,
    J: tl.constexpr,
    C: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """Take one local step of a client in the space of samples, for T of them and all outputs."""
    client = tl.program_id(0)
    i = tl.program_id(1) * T + tl.arange(0, T)
    c = tl.arange(0, C)
    place = (client * k + c[:, None]) * m + i[None]
    inside = (c[:, None] < k) & (i[None] < m)
    Z_, P_ = tl.load(Z + place, inside, 0.0), tl.load(P + place, inside, 0.0)
    ahead = tl.load(f + client) * Z_ - tl.load(p + client) * P_
    rows = K + client.to(tl.int64) * m * m
    for s in tl.range(0, m, J, num_stages=3):
        j = s + tl.arange(0, J)
        known = (c[:, None] < k) & (j[None] < m)
        left = tl.load(R + (client * k + c[:, None]) * m + j[None], known, 0.0)
        right = tl.load(rows + j[:, None] * m + i[None], (j[:, None] < m) & (i[None] < m), 0.0)
        ahead = tl.dot(left, right, ahead, input_precision="ieee", out_dtype=ahead.dtype)
    t = tl.load(y + place, inside, 0.0)
    if SOFTMAX:
        shares = tl.where(c[:, None] < k, ahead, float("-inf"))
        shares = tl.exp(shares - tl.max(shares, 0)[None])
        slope = shares / tl.sum(shares, 0)[None] - t
    else:  # s σ(s z)
        slope = t / (1 + tl.exp(-t * ahead))
    own = tl.load(R + place, inside, 0.0) * tl.load(keep + client)
    own += (slope - tl.load(r + place, inside, 0.0)) * tl.load(w + client * m + i, i < m, 0.0)[None]
    tl.store(out + place, own, inside)


def sample_loop(
    softmax: bool,
    K: Tensor,
    y: Tensor,
    R: Tensor,
    Z: Tensor,
    P: Tensor,
    r: Tensor,
    weight: Tensor,
    p: Tensor,
    fade: Tensor,
    keep: Tensor,
) -> Tensor:
    """Return R after more steps: `local_steps._sample_loop` of logistic and softmax losses."""
    n, k, m = R.shape
    P, r = (t.expand_as(R).contiguous() for t in (P, r))
    R, out = R.clone(), torch.empty_like(R)
    fade = fade.view(len(p), -1, 1, 1).expand_as(p)
    p, fade, keep = (t.reshape(-1, n).contiguous() for t in (p, fade, keep))
    weight = weight.contiguous()
    C = max(16, triton.next_power_of_2(k))
    for t in range(len(p)):
        w = weight[t if len(weight) > 1 else 0]
        where = (n, triton.cdiv(m, 16))
        sizes = (m, k, 16, max(16, SAMPLES // K.element_size() // C), C, softmax)
        _step[where](K, R, out, Z, P, r, w, y, p[t], fade[t], keep, *sizes)
        R, out = out, R
    return R
