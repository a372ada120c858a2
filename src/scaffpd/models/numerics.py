r"""Tools of the numerics: one thread per piece of work, CUDA graphs, minibatch draws, linear algebra with error bounds.

PyTorch synchronises all cores after every operation. If an operation takes a few microseconds that takes longer than
the work, so `parallel_map` gives each core its own work, with PyTorch on a single thread.

A client's minibatches do not depend on the others: its stream is seeded by the round's key and the client's *name*. A
real silo draws the same minibatches as a simulation of all silos does for it, on any device. The streams are
SplitMix64 (Steele, Lea, Flood, 2014, "Fast splittable pseudorandom number generators"), whose n-th number

    u_n = mix(seed + n γ) / 2^64,    γ = 0x9E3779B97F4A7C15,

needs no state, so that all clients draw in one array operation.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Item = TypeVar("Item")
SMALL = 2**20  # data sizes up to which one core is faster than all cores at one pass
quiet = np.errstate(over="ignore", invalid="ignore")  # infinite numbers pass, as they do in torch
_allowed: ContextVar[int] = ContextVar("allowed", default=1)


@contextmanager
def limit_threads(numbers: float) -> Iterator[None]:
    """Run PyTorch on one thread if the data has few numbers; restore the setting afterwards."""
    before = torch.get_num_threads()
    if before == 1 or numbers > SMALL:
        yield
        return
    token = _allowed.set(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _allowed.reset(token)


def thread_count() -> int:
    """Return how many pieces of work may run at a time."""
    return max(_allowed.get(), torch.get_num_threads())


def parallel_map(work: Callable[[Item], None], items: Sequence[Item], device: torch.device) -> None:
    """Call `work` for every item, on as many threads as PyTorch may use; `work` stores its results.

    All threads have ended when this returns, or raises the error of the first item to fail.
    """
    if device.type != "cpu" or thread_count() < 2 or len(items) < 2:
        for item in items:
            work(item)
        return
    before = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()

    def alone(item: Item) -> None:
        torch.set_num_threads(
            1
        )  # of this thread's operations; but some libraries apply it to all threads
        with torch.inference_mode(inference):
            work(item)

    done = [_pool(thread_count()).submit(alone, item) for item in items]
    try:
        for one in done:
            one.result()
    finally:
        for one in done:
            one.cancel()
        wait(done)
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _pool(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, "scaffpd")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=_pool.cache_clear
    )  # threads are not copied into a new process


BEFORE = 2  # calls with the same shapes before one is recorded: one or two are not worth it


class GraphReplay:
    """Function of tensors that becomes a CUDA graph on a GPU when it is called again with the same shapes.

    Args:
        function: operations on the device only; tensors that it uses besides its arguments stay in place.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graph: a copy records its own."""
        return {"function": self.function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.function = state["function"]
        self._forget()

    def _forget(self, key: tuple[Any, ...] = ()) -> None:
        self.key = key
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.out: Tensor | tuple[Tensor, ...] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """Compute the function, a tensor or several; record or replay it."""
        if not tensors[0].is_cuda:
            return self.function(*tensors)
        key = tuple((t.shape, t.dtype, t.device) for t in tensors)
        if key != self.key:
            self._forget(key)
        self.calls += 1
        if self.calls <= BEFORE:
            return self.function(*tensors)
        if self.graph is None or self.out is None:
            self._record(tensors)
        assert self.graph is not None
        assert self.out is not None
        for held, given in zip(self.inputs, tensors, strict=True):
            held.copy_(given)
        self.graph.replay()
        return (
            self.out.clone() if isinstance(self.out, Tensor) else tuple(t.clone() for t in self.out)
        )

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        inputs = [t.clone() for t in tensors]
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # unused graphs must not be freed while another is recorded
        try:
            with torch.cuda.graph(graph):
                out = self.function(*inputs)
        finally:
            if collecting:
                gc.enable()
        self.inputs = inputs
        self.graph = graph
        self.out = out


def _signed(number: int) -> int:
    """Convert 64 bits to PyTorch's signed numbers."""
    return number - 2**64 if number >= 2**63 else number


GAMMA = _signed(0x9E3779B97F4A7C15)
ROUNDS = (30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))


class Draws:
    """Uniform numbers for each of the named clients, from one key.

    Args:
        key: purpose of the draws.
        names: the clients, or their `streams` on the device where numbers are drawn.
    """

    def __init__(self, key: tuple[int, ...], names: Sequence[str] | Tensor) -> None:
        common = _signed(_hash(repr(tuple(int(k) for k in key))))
        self.seeds = (names if isinstance(names, Tensor) else streams(names)) ^ common
        self.drawn = 0

    @classmethod
    def of(cls, seeds: Tensor) -> Draws:
        """Return the draws of some clients, from their `seeds` and from the first number on."""
        own = cls.__new__(cls)
        own.seeds = seeds
        own.drawn = 0
        return own

    def uniform(self, size: int) -> Tensor:
        """Return the next `size` numbers in [0, 1) of every client, (N, size), in float64."""
        n = torch.arange(self.drawn + 1, self.drawn + size + 1, device=self.seeds.device)
        self.drawn += size
        return _mixed(self.seeds[:, None] + n * GAMMA)


def uniform_at(seed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first numbers in [0, 1) of one seed, in float64."""
    n = torch.arange(1, math.prod(shape) + 1, device=seed.device).view(*shape)
    return _mixed(seed + n * GAMMA)


def _mixed(z: Tensor) -> Tensor:
    """Scramble the bits of z, in place, and return numbers in [0, 1)."""
    for shift, factor in ROUNDS:
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return _shifted(z.bitwise_xor_(_shifted(z, 31)), 11).double().mul_(2.0**-53)


def streams(names: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    """Return every client's seed, from its name."""
    return torch.tensor([_signed(_hash(name)) for name in names], dtype=torch.int64, device=device)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift the bits of z down, with zeros from above."""
    return (z >> by).bitwise_and_(2 ** (64 - by) - 1)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


# relative error of one operation, in double and single precision
UNIT = 2.0**-53
SINGLE = 2.0**-24
LEAST = 2.0**-1022  # absolute error of an operation that underflows
UNDERFLOW = 1.5e-154  # a number whose square underflows
SAFE = 1.01  # bounds on rounding are rounded themselves


def gamma(n: float, unit: float = UNIT) -> float:
    """Return γ_n = nu/(1 − nu): a sum of n products, in any order, errs by at most γ_n Σ |a_j b_j| (Higham 2002)."""
    return n * unit / (1 - n * unit) if n * unit < 0.5 else float("inf")


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


# multiplications up to which NumPy's BLAS uses one thread
ALONE = 2**18
ALONE_VECTOR = 9000
INDEPENDENT = 0.01  # unexplained share of a column above which BᵀB has enough digits
GRID = (
    2.0**25
)  # numbers of at most 25 binary digits after the point: sums of their products up to 8 are exact


def skewness(Q: Tensor) -> Tensor:
    """Bound ‖QᵀQ − I‖ for n matrices with nearly orthonormal columns, (n, rows, columns); a matrix with
    orthonormal columns is as near to Q.

    Q = H + R with H of 25 digits: HᵀH is exact in any order of summation, and the rest is small.
    """
    H = (Q * GRID).round() / GRID
    R, (rows, columns) = Q - H, Q.shape[1:]
    square = H.mT @ H
    cross = H.mT @ R
    rest = R.mT @ R
    identity = torch.eye(columns, dtype=Q.dtype, device=Q.device)
    off = (square - identity) + (cross + cross.mT) + rest
    sizes = norm_above(H, (1, 2)), norm_above(R, (1, 2))
    error = gamma(rows + 4) * (2 * sizes[0] + sizes[1]) * sizes[1] + gamma(8) * norm_above(
        off, (1, 2)
    )
    found = norm_above(off, (1, 2)) + error
    return torch.where(square.diagonal(dim1=1, dim2=2).amax(1) < 2, found, float("inf"))


def unexplained(B: Tensor, Q: Tensor, R: Tensor) -> Tensor:
    """Return ‖b_j − (QR)_j‖ per column of n matrices, from above."""
    inside = R.shape[1]
    sizes = norm_above(B, 1) + norm_above(Q, (1, 2))[:, None] * norm_above(R, 1)
    return norm_above(B - Q @ R, 1) + gamma(inside + 4) * sizes


def gram(B: Tensor) -> tuple[Tensor, int]:
    """Return BᵀB of n matrices, (n, rows, columns), in blocks of about √rows, and the number of additions per row."""
    n, rows, columns = B.shape
    block = max(columns, math.isqrt(rows), 1)
    if rows < 2 * block:
        return squared(B), rows
    cut = rows - rows % block
    G = squared(B[:, :cut].reshape(-1, block, columns)).view(n, -1, columns, columns).sum(1)
    return G + squared(B[:, cut:]) if cut < rows else G, block + rows // block + 1


@quiet
def squared(B: Tensor) -> Tensor:
    """Return BᵀB of n matrices; small ones by NumPy's loop over BLAS, which takes half of the time of torch.bmm."""
    if B.is_cuda or B.shape[1] * B.shape[2] ** 2 > ALONE:
        return B.mT @ B
    array = B.numpy()
    return torch.from_numpy(np.matmul(array.transpose(0, 2, 1), array))


def triangle_of(
    B: Tensor, known: Tensor | None = None, additions: int = 0
) -> tuple[Tensor, Tensor]:
    """Return R with RᵀR = BᵀB of n matrices in double precision, and η with |BᵀB − RᵀR|_jk ≤ η ‖b_j‖‖b_k‖.

    R is the Cholesky factor of BᵀB if its columns are clearly independent, and else comes from Householder's method,
    which takes five times as long. The bound is computed, not assumed: RᵀR is compared with BᵀB, which is `known` if
    B is not.
    """
    B = B.double()
    G, additions = gram(B) if known is None else (known, additions)
    size = G.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt() + UNDERFLOW
    unit = G / (size[:, :, None] * size[:, None])
    R, failed = torch.linalg.cholesky_ex(unit, upper=True)
    clear = (failed == 0) & (R.diagonal(dim1=1, dim2=2).amin(1) > INDEPENDENT)
    R = R * size[:, None]
    if not bool(clear.all()):
        far = torch.geqrf(B if not bool(clear.any()) else B[~clear])[0][:, : B.shape[2]].triu()
        R = far if len(far) == len(B) else R.index_put((~clear,), far)
    off = ((G - R.mT @ R).abs() / (size[:, :, None] * size[:, None])).amax((1, 2))
    return R, SAFE * (off + gamma(additions + B.shape[2] + 16))


EXACT = 1024
CLEAR = 1e3  # ratio of a smallest eigenvalue to its error, to be taken from AᵀA


def largest_eigenvalues(A: Tensor) -> Tensor:
    """Return λ_max(A_iᵀA_i) of n matrices, (n, rows, columns): exact if the smaller side is ≤ `EXACT`, else from above.

    Larger ones use power iteration, and are never above ‖A_i‖_F².
    """
    rows, columns = A.shape[1:]
    if min(rows, columns) <= EXACT:
        small = A @ A.mT if rows <= columns else A.mT @ A
        top: Tensor = torch.linalg.eigvalsh(small)[:, -1]
        return top.clamp_min(0)
    return torch.stack([_approached(a) for a in A])


def extreme_values(A: Tensor, noise: Tensor, G: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return λ_max(A_iᵀA_i) of n matrices and a lower bound on λ_min, for A_iᵀA_i known up to noise_i·‖A_i‖_F².

    `G` is AᵀA, if known.

    Rounding must not enter a certificate. If G − cI has a Cholesky factor in floating point, no eigenvalue of G is
    below c − γ_{d+2} tr G (Rump 2006, "Verification of positive definiteness"). If that is not enough, the singular
    values of A_i itself are known up to a share of the largest.
    """
    rows, columns = A.shape[1:]
    if rows < columns:
        return largest_eigenvalues(A), noise.new_zeros(len(A), dtype=torch.float64)
    A = A.double()
    G = squared(A) if G is None else G.clone()
    trace = norm_above(A, (1, 2)).square()
    w = torch.linalg.eigvalsh(G).clamp_min(0)
    slack = SAFE * (gamma(rows + 2) + 2 * gamma(columns + 4)) * trace
    bottom = w[:, 0] - 2 * slack
    G.diagonal(dim1=1, dim2=2).sub_(bottom[:, None])
    _, failed = torch.linalg.cholesky_ex(G)
    bottom = torch.where(failed == 0, bottom - slack, 0)
    if not bool((w[:, 0] > CLEAR * slack).all()):
        U, s, V = torch.linalg.svd(A, full_matrices=False)
        left = SAFE * unexplained(A, U * s[:, None], V).square().sum(1).sqrt()
        bottom = (s[:, -1] * (1 - skewness(U) - skewness(V.mT)) - left).clamp_min(0).square() * (
            1 - 8 * UNIT
        )
    return w[:, -1], (bottom - SAFE * noise * trace).clamp_min(0)


def _approached(A: Tensor) -> Tensor:
    start = random_direction(A.new_empty(A.shape[1]))
    return torch.minimum(power_iteration(lambda v: A.T @ (A @ v), start), A.square().sum())


def random_direction(like: Tensor) -> Tensor:
    """Return a fixed unit vector without structure: one like the data might miss the largest eigenvector."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    unit: Tensor = v / v.norm()
    return unit.to(like)


def power_iteration(
    apply: Callable[[Tensor], Tensor], start: Tensor, steps: int = 100, tolerance: float = 1e-4
) -> Tensor:
    """Return |λ|_max of a symmetric operator from a unit vector, plus two percent: it is approached from below."""
    v = start
    value = start.new_zeros(())
    for _ in range(steps):
        w = apply(v)
        previous = value
        value = w.norm()
        if value == 0 or abs(value - previous) <= tolerance * value:
            break
        v = w / value
    return 1.02 * value


def regularised(R: Tensor, e: Tensor, raises: bool = False) -> Callable[[Tensor], Tensor]:
    """Return B ↦ (R_iᵀR_i + E_i)⁻¹B of n clients, (n, d, k), by Cholesky in the smaller of rows and features.

    R is (n, m, d), e the diagonal of E, (n or 1, d, 1). (RᵀR + E)⁻¹ = E⁻¹ − E⁻¹Rᵀ(I + RE⁻¹Rᵀ)⁻¹RE⁻¹.
    """
    if R.shape[1] >= R.shape[2]:  # if x is not finite, neither is the result, unless it `raises`
        L = torch.linalg.cholesky_ex(R.mT @ R + torch.diag_embed(e[..., 0]), check_errors=raises)[0]
        return lambda B: torch.cholesky_solve(B, L)
    inside = torch.eye(R.shape[1], dtype=R.dtype, device=R.device) + (R / e.mT) @ R.mT
    L = torch.linalg.cholesky_ex(inside, check_errors=raises)[0]
    return lambda B: (B - R.mT @ torch.cholesky_solve(R @ (B / e), L)) / e


@contextmanager
def tensor_cores(device: torch.device, allowed: bool) -> Iterator[None]:
    """Allow or forbid single-precision products on a GPU's matrix units (TF32: eleven digits of each factor)."""
    if device.type != "cuda":
        yield
        return
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases prefer another spelling
        before = [place.allow_tf32 for place in places]
        for place in places:
            place.allow_tf32 = allowed
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for place, value in zip(places, before, strict=True):
                place.allow_tf32 = value
