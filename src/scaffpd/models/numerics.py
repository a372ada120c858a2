"""Products and decompositions of many small matrices, with bounds on rounding errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from scaffpd.objectives.base import UNDERFLOW

# Infinite numbers pass, as they do in torch.
quiet = np.errstate(over="ignore", invalid="ignore")

# Relative error of one operation, in double and single precision.
UNIT = 2.0**-53
SINGLE = 2.0**-24
# Absolute error of an operation that underflows.
LEAST = 2.0**-1022
# Bounds on rounding are rounded themselves.
SAFE = 1.01
CONFIDENCE = 0.95  # of intervals


def student(freedom: float) -> float:
    """Return half of the width of a 95 % interval, in standard errors."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def gamma(n: float, unit: float = UNIT) -> float:
    """Return γ_n = nu/(1 − nu).

    A sum of n products, in any order, errs by at most γ_n Σ |a_j b_j| (Higham 2002).
    """
    return n * unit / (1 - n * unit) if n * unit < 0.5 else float("inf")


def array(numbers: Tensor | float) -> NDArray[np.float64]:
    """Return numbers as NumPy has them, or as they are on a GPU, which nobody waits for."""
    if isinstance(numbers, Tensor) and not numbers.is_cuda:
        return numbers.numpy()
    return numbers  # type: ignore[return-value]


def norm_above(v: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return ‖v‖ along some axes, in double precision and from above."""
    axes = (dim,) if isinstance(dim, int) else dim
    n = math.prod(v.shape[k] for k in axes)
    if n == 1:
        return v.double().abs().squeeze(axes)
    return root_above(v.double().square().sum(axes), n)


def root_above(square: Tensor, n: int) -> Tensor:
    """Bound ‖v‖ from above, from the sum of n squares in double precision, in any order."""
    return square.sqrt().mul_(1 + gamma(n + 8)).add_(float(n) ** 0.5 * UNDERFLOW)


# Terms that are summed without blocks.
SHORT = 1024


def squares(x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Compute Σ_j s_j x_j² along the last axis, in double precision.

    In blocks of about √d terms, so that its error grows like √d.
    """
    terms = scale * x.double().square()
    d = terms.shape[-1]
    if d <= SHORT:
        return terms.sum(-1)
    width = math.isqrt(d)
    cut = d - d % width
    blocks = terms[..., :cut].reshape(*terms.shape[:-1], -1, width)
    return blocks.sum(-1).sum(-1) + terms[..., cut:].sum(-1)


# Multiplications up to which NumPy's BLAS uses one thread, for matrices and for vectors.
ALONE = 2**18
ALONE_VECTOR = 9000
# Unexplained share of a column above which BᵀB has enough digits.
INDEPENDENT = 0.01


def gram(B: Tensor) -> tuple[Tensor, int]:
    """Return BᵀB of n matrices, in blocks of about √rows, and the number of additions per row."""
    n, rows, columns = B.shape
    block = max(columns, math.isqrt(rows), 1)
    if rows < 2 * block:
        return B.mT @ B, rows
    cut = rows - rows % block
    head, tail = B[:, :cut].reshape(-1, block, columns), B[:, cut:]
    G = (head.mT @ head).view(n, -1, columns, columns).sum(1)
    return G + tail.mT @ tail, block + rows // block + 1


def triangle_of(B: Tensor) -> tuple[Tensor, Tensor]:
    """Return R with RᵀR = BᵀB of n matrices, and η with |BᵀB − RᵀR|_jk ≤ η ‖b_j‖‖b_k‖.

    R is the Cholesky factor of BᵀB if its columns are clearly independent, and else comes from
    Householder's method, which takes five times as long. The bound compares RᵀR with BᵀB.
    """
    B = B.double()
    G, additions = gram(B)
    size = G.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt() + UNDERFLOW
    sizes = size[:, :, None] * size[:, None]
    R, failed = torch.linalg.cholesky_ex(G / sizes, upper=True)
    clear = (failed == 0) & (R.diagonal(dim1=1, dim2=2).amin(1) > INDEPENDENT)
    R = R * size[:, None]
    if not bool(clear.all()):
        far = torch.geqrf(B[~clear])[0][:, : B.shape[2]].triu()
        R = far if len(far) == len(B) else R.index_put((~clear,), far)
    off = ((G - R.mT @ R).abs() / sizes).amax((1, 2))
    return R, SAFE * (off + gamma(additions + B.shape[2] + 16))


def largest_eigenvalues(A: Tensor) -> Tensor:
    """Return λ_max(A_iᵀA_i) of n matrices."""
    small = A @ A.mT if A.shape[1] <= A.shape[2] else A.mT @ A
    top: Tensor = torch.linalg.eigvalsh(small)[:, -1]
    return top.clamp_min(0)


def extreme_values(A: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return λ_max(A_iᵀA_i) of n matrices and a lower bound on λ_min.

    A_iᵀA_i is known up to noise_i·‖A_i‖_F². Rounding must not enter a certificate. If G − cI has a
    Cholesky factor in floating point, no eigenvalue of G is below c − γ_{d+2} tr G (Rump 2006,
    "Verification of positive definiteness").
    """
    rows, columns = A.shape[1:]
    if rows < columns:
        return largest_eigenvalues(A), noise.new_zeros(len(A), dtype=torch.float64)
    A = A.double()
    G = A.mT @ A
    trace = norm_above(A, (1, 2)).square()
    w = torch.linalg.eigvalsh(G).clamp_min(0)
    slack = SAFE * (gamma(rows + 2) + 2 * gamma(columns + 4)) * trace
    bottom = w[:, 0] - 2 * slack
    G.diagonal(dim1=1, dim2=2).sub_(bottom[:, None])
    _, failed = torch.linalg.cholesky_ex(G)
    bottom = torch.where(failed == 0, bottom - slack, 0)
    return w[:, -1], (bottom - SAFE * noise * trace).clamp_min(0)


def random_direction(like: Tensor) -> Tensor:
    """Return a fixed random unit vector: one like the data might miss the largest eigenvector."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    unit: Tensor = v / v.norm()
    return unit.to(like)


# Numbers that are converted to double precision at a time: on a CPU they stay in the cache.
PIECE = {"cpu": 2**16, "cuda": 2**24}
# Numbers from which on a kernel on a GPU takes less time than its launch.
LARGE = 2**20


class Kernels(Protocol):
    """What `scaffpd.models.kernels` has."""

    MOST: int

    def takes(self, A: Tensor, k: int) -> bool: ...
    def product(self, A: Tensor, X: Tensor, transposed: bool = False) -> Tensor: ...
    def sample_loop(self, softmax: bool, K: Tensor, y: Tensor, *steps: Tensor) -> Tensor: ...


@cache
def kernels() -> Kernels | None:
    """Return the products of one pass over A, if Triton is there and can compile them."""
    if find_spec("triton") is None or torch.cuda.get_device_capability() < (8, 0):
        return None
    try:
        found = cast(Kernels, import_module("scaffpd.models.kernels"))
        one = torch.ones(1, 1, device="cuda")
        return found if float(found.product(one, one)) == 1 else None
    except Exception as error:  # no compiler of C, an older Triton: slower, and as exact
        logging.getLogger("scaffpd").info("Products without a kernel of our own: %s", error)
        return None


class DoubleProducts:
    """A X and AᵀV in double precision.

    Products of numbers in single precision are exact in double precision, to which A is converted
    number by number (`kernels`), or piece by piece, so that no second copy of A is stored.
    """

    def __init__(self, A: Tensor) -> None:
        self.A = A
        self.double = A.dtype == torch.float64
        self.large = A.is_cuda and not self.double and A.numel() >= LARGE

    def fused(self, k: int) -> Kernels | None:
        """Return what multiplies by k columns in one pass."""
        found = kernels() if self.large else None
        return found if found is not None and found.takes(self.A, k) else None

    def times(self, X: Tensor) -> Tensor:
        if self.double:
            return self.A @ X
        if fused := self.fused(X.shape[1]):
            return fused.product(self.A, X)
        return torch.cat([piece @ X.double() for piece in self._pieces()])

    def transposed(self, V: Tensor) -> Tensor:
        """Return AᵀV."""
        if self.double:
            return transposed(self.A, V)
        if fused := self.fused(V.shape[1]):
            return fused.product(self.A, V, transposed=True)
        V = V.double()
        out = V.new_zeros(V.shape[1], self.A.shape[1])
        start = 0
        for piece in self._pieces():
            out.addmm_(V[start : start + len(piece)].mT.contiguous(), piece)
            start += len(piece)
        return out.mT

    def norms(self, factors: Tensor | float = 1.0) -> Tensor:
        """Return ‖a_j‖ per row, from above, with columns times `factors`."""
        return torch.cat([norm_above(piece * factors, 1) for piece in self._pieces()])

    def _pieces(self) -> Iterator[Tensor]:
        size = PIECE.get(self.A.device.type, PIECE["cuda"])
        for piece in torch.split(self.A, max(1, size // self.A.shape[1])):
            yield piece.double()


def product(A: Tensor, v: Tensor) -> Tensor:
    """Return A v, client by client; one column goes as a row from the left, which is faster."""
    return (v.mT @ A.mT).mT if v.shape[-1] == 1 else A @ v


def transposed(A: Tensor, V: Tensor) -> Tensor:
    """Return AᵀV; several columns go as rows from the left, which takes BLAS half the time."""
    return (V.mT.contiguous() @ A).mT if V.shape[1] > 1 else A.T @ V


class Products:
    """Products R A_i and D A_iᵀ of n clients, in buffers that the next such product overwrites.

    On a CPU, NumPy's loop over BLAS takes down to an eighth of the time of torch.bmm for small
    matrices.
    """

    def __init__(self, A: Tensor, k: int) -> None:
        n, m, features = A.shape
        self.A = A
        self.out = A.new_empty(n, k, m)
        self.own = A.new_empty(n, k, features)
        most = ALONE if k > 1 else ALONE_VECTOR
        self.small = not A.is_cuda and k * m * features <= most
        if self.small:
            self.arrays = A.numpy(), self.out.numpy(), self.own.numpy()

    def along(self, D: Tensor) -> Tensor:
        """Return D A_iᵀ, (n, k, m), for D (n, k, features)."""
        if self.small:
            np.matmul(D.numpy(), self.arrays[0].transpose(0, 2, 1), out=self.arrays[1])
            return self.out
        if D.shape[1] == 1:
            return torch.bmm(D, self.A.mT, out=self.out)
        # Several rows are transposed, because torch.bmm is slow at Aᵀ.
        return self.out.copy_(torch.bmm(self.A, D.mT.contiguous()).mT)

    def times(self, R: Tensor) -> Tensor:
        """Return R A_i, (n, k, features), for R (n, k, m)."""
        if not self.small:
            return torch.bmm(R, self.A, out=self.own)
        own = self.arrays[1] if R is self.out else R.numpy()
        np.matmul(own, self.arrays[0], out=self.arrays[2])
        return self.own

    def back(self, R: Tensor, D: Tensor) -> Tensor:
        """Compute D + R A_i in place, for R (n, k, m)."""
        return D.add_(self.times(R)) if self.small else D.baddbmm_(R, self.A)
