r"""Large features kept once, in the format they are stored in, and multiplied at the precision of x.

A `Store` answers to the few operations of a matrix that linear models need: A x, Aᵀv, some of its rows, their norms.
Half precision is a format for storage, not for arithmetic: on a GPU, x in single precision is split into two halves,

    x = 2^e (h + 2⁻¹¹ l),    h, l in half precision,

and A [h l] is one product whose terms are exact and whose sums are in single precision: 22 digits of x for the price
of twice the columns, with half the memory traffic of A in single precision. Where eleven digits of x are enough (local
steps, if so wished), h alone goes. Elsewhere A is converted piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from scaffpd.data.table import Selection
from scaffpd.errors import InputError

PIECE = 64 * 2**20  # numbers that are converted at a time
TERMS, DEPTH = 8192, 16  # of a sum that matrix units may carry out on their own; how many of them at a time
ACCUMULATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)  # torch.mm knows out_dtype
COLUMNS = 8  # in multiples of which products in half precision run at full speed
DIGITS, LARGEST, SMALLEST = 11, 14, -126  # of a half: binary digits, the exponent that x is scaled to; the least 2^e


class Store:
    """A = scale · values as a matrix; values in parts of consecutive rows, none of them copied."""

    def __init__(self, parts: Sequence[Tensor], scale: float, dtype: torch.dtype, rough: bool = False) -> None:
        self.parts, self.scale, self.dtype, self.rough = list(parts), scale, dtype, rough
        self.device = self.parts[0].device
        self.shape = (sum(map(len, self.parts)), self.parts[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __matmul__(self, X: Tensor) -> Tensor:
        """A X."""
        if self._split(X):
            halves, factor = split(X, self.rough)
            products = [_mm(part, halves, self.rough) for part in self.parts]
            return joined(torch.cat(products), self.scale * factor, X.shape[-1], self.rough)
        return self.scale * torch.cat([piece @ X for piece in self._pieces()])

    @property
    def T(self) -> Transposed:  # noqa: N802
        """Aᵀ."""
        return Transposed(self)

    def transposed(self, V: Tensor) -> Tensor:
        """AᵀV."""
        start, out = 0, V.new_zeros(self.shape[1], V.shape[1])
        if self._split(V):
            halves, factor = split(V, self.rough)
            for part in self.parts:
                product = _mm(part.T, halves[start : start + len(part)], self.rough)
                out += joined(product, self.scale * factor, V.shape[-1], self.rough)
                start += len(part)
            return out
        for piece in self._pieces():
            out += piece.T @ V[start : start + len(piece)]
            start += len(piece)
        return out.mul_(self.scale)

    def each(self, G: Tensor, sizes: Sequence[int]) -> Tensor:
        """A_i G_i of clients with so many rows each, in one stack; G is (N, features, k)."""
        parts = self._by_client(sizes)
        if self._split(G):
            halves, factor = split(G)
            products = [_mm(part, g) for part, g in zip(parts, halves, strict=True)]
            return joined(torch.cat(products), self.scale * factor, G.shape[-1])
        return self.scale * torch.cat([part.to(self.dtype) @ g for part, g in zip(parts, G, strict=True)])

    def transposed_each(self, V: Tensor, sizes: Sequence[int]) -> Tensor:
        """A_iᵀV_i of clients with so many rows each, (N, features, k)."""
        parts = self._by_client(sizes)
        if self._split(V):
            halves, factor = split(V)
            pairs = zip(parts, torch.split(halves, list(sizes)), strict=True)
            return joined(torch.stack([_mm(part.T, v) for part, v in pairs]), self.scale * factor, V.shape[-1])
        pairs = zip(parts, torch.split(V, list(sizes)), strict=True)
        return self.scale * torch.stack([part.to(self.dtype).T @ v for part, v in pairs])

    def _by_client(self, sizes: Sequence[int]) -> list[Tensor]:
        return self.parts if len(self.parts) == len(sizes) else list(torch.split(self.parts[0], list(sizes)))

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Some rows (an index of any shape) as they are: converted and scaled."""
        if len(self.parts) == 1:
            return self.scale * self.parts[0][rows].to(self.dtype)
        out, start = self.new_zeros(*rows.shape, self.shape[1]), 0
        for part in self.parts:
            inside = (rows >= start) & (rows < start + len(part))
            out[inside] = part[rows[inside] - start].to(self.dtype)
            start += len(part)
        return out.mul_(self.scale)

    def clients(self, sizes: Sequence[int]) -> list[Store]:
        """The same, client by client."""
        return [Store([part], self.scale, self.dtype) for part in self._by_client(sizes)]

    def gram(self, weight: Tensor | None = None) -> Tensor:
        """A diag(w) Aᵀ, summed over pieces of columns."""
        rows, columns = self.shape
        if weight is None and len(self.parts) == 1 and self._split(self.new_zeros(0)):
            return _mm(self.parts[0], self.parts[0].T).mul_(self.scale**2)
        out = self.new_zeros(rows, rows)
        width = max(1, PIECE // max(rows, 1))
        for k in range(0, columns, width):
            piece = torch.cat([part[:, k : k + width].to(self.dtype) for part in self.parts])
            out += (piece if weight is None else piece * weight[k : k + width]) @ piece.T
        return out.mul_(self.scale**2)

    def squares(self, V: Tensor) -> Tensor:
        """(A ∘ A)ᵀV."""
        start, out = 0, V.new_zeros(self.shape[1], V.shape[1])
        for piece in self._pieces():
            out += piece.square().T @ V[start : start + len(piece)]
            start += len(piece)
        return out.mul_(self.scale**2)

    def norm(self, dim: int) -> Tensor:
        """‖a_j‖ per row."""
        assert dim == 1
        return self.scale * torch.cat([piece.norm(dim=1) for piece in self._pieces()])

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros in the format of x."""
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)

    def slack(self, terms: Any) -> Any:
        """How many ε a sum of so many products may be off, relative to the sizes of its terms.

        4√n for sums whose roundings err in both directions (Higham and Mary, 2019). Matrix units cut off digits
        instead, `DEPTH` products at a time, so their errors add up within `TERMS` of them; splitting x adds 2ε.
        """
        if not self._split(self.new_zeros(0)):
            return 4 * terms**0.5
        return 2 + min(TERMS, self.shape[1]) / DEPTH + 4 * (1 + terms / TERMS) ** 0.5

    def double(self) -> Store:
        """The same values, multiplied in double precision."""
        return Store(self.parts, self.scale, torch.float64)

    def roughly(self) -> Store:
        """The same values; on a GPU, A x and Aᵀv take eleven digits of x and v, in half the time."""
        return Store(self.parts, self.scale, self.dtype, rough=True)

    def _split(self, X: Tensor) -> bool:
        half = self.parts[0].dtype == torch.float16 and X.dtype == torch.float32
        return half and X.is_cuda and ACCUMULATES

    def _pieces(self) -> Iterator[Tensor]:
        """The values in the format of x, some rows at a time; views where that is their format already."""
        for part in self.parts:
            if part.dtype == self.dtype:
                yield part
            else:
                for piece in torch.split(part, max(1, PIECE // self.shape[1])):
                    yield piece.to(self.dtype)


class Turnable(Protocol):
    """A matrix that is no tensor."""

    def transposed(self, V: Tensor) -> Tensor:
        """AᵀV."""


class Transposed:
    """Aᵀ of a matrix that is no tensor."""

    def __init__(self, matrix: Turnable) -> None:
        self.matrix = matrix

    def __matmul__(self, V: Tensor) -> Tensor:
        """AᵀV."""
        return self.matrix.transposed(V)


def split(X: Tensor, rough: bool = False) -> tuple[Tensor, Tensor]:
    """[h l] (or h alone) and 2^e with X = 2^e (h + 2⁻¹¹ l); zero columns fill up to a multiple of what GPUs like."""
    exponent = (torch.frexp(X.abs().amax()).exponent - LARGEST).clamp_min(SMALLEST)
    factor = torch.ldexp(torch.ones((), device=X.device), exponent)
    scaled = X / factor
    high = scaled.half()
    both = high if rough else torch.cat([high, ((scaled - high) * 2**DIGITS).half()], -1)
    return pad(both, (0, -both.shape[-1] % COLUMNS)), factor


def joined(both: Tensor, factor: Tensor, columns: int, rough: bool = False) -> Tensor:
    """2^e (A h + 2⁻¹¹ A l) from A [h l], or 2^e A h from A h; of so many columns each."""
    high = both[..., :columns]
    if rough:
        return high * factor
    return torch.add(high, both[..., columns : 2 * columns], alpha=2.0**-DIGITS).mul_(factor)


def _mm(A: Tensor, B: Tensor, rough: bool = False) -> Tensor:
    """A B of halves, summed in single precision: by the matrix units, which cut off digits, only `TERMS` at a time."""
    terms = len(B) if rough else TERMS
    out = torch.mm(A[:, :terms], B[:terms], out_dtype=torch.float32)
    for k in range(terms, len(B), terms):
        torch.addmm(out, A[:, k : k + terms], B[k : k + terms], out_dtype=torch.float32, out=out)
    return out


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Products in single precision on a GPU's matrix units, which take eleven digits of each factor, where allowed."""
    if not allowed or not torch.cuda.is_available():
        yield
        return
    place = torch.backends.cuda.matmul
    before, place.allow_tf32 = place.allow_tf32, True
    try:
        yield
    finally:
        place.allow_tf32 = before


def load(features: Sequence[Selection], names: Sequence[str], device: torch.device, dtype: torch.dtype) -> Store:
    """The rows of all clients, one client after the other, in the table's own format: one copy on the device."""
    table = features[0].table
    table.check()
    kind = torch.from_numpy(np.empty(0, dtype=table.values.dtype)).dtype
    values = torch.empty(sum(map(len, features)), features[0].shape[1], dtype=kind, device=device)
    start = 0
    for name, x in zip(names, features, strict=True):
        for numbers in x.pieces():
            piece = torch.from_numpy(table.values[numbers]).to(device)
            check_values(name, float(piece.abs().amax()) * abs(table.scale), dtype)
            values[start : start + len(numbers)] = piece
            start += len(numbers)
    return Store([values], table.scale, dtype)


def check_values(name: str, largest: float, dtype: torch.dtype) -> None:
    """Refuse numbers that are none, or whose squares would overflow."""
    limit = torch.finfo(dtype).max ** 0.5 * 1e-4
    if not np.isfinite(largest):
        raise InputError(f"Client {name!r} has a NaN or infinite value in its rows of the table of features.")
    if largest > limit:
        kind = str(dtype).removeprefix("torch.")
        raise InputError(
            f"Client {name!r} has a feature beyond ±{limit:.0e}, too large for {kind}: scale the data first."
        )


def stacked(
    features: Sequence[NDArray[Any] | Selection], intercept: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The rows of all clients as one dense tensor, rows of tables copied piece by piece; an intercept is a last 1."""
    width = features[0].shape[1]
    A = torch.empty(sum(map(len, features)), width + intercept, dtype=dtype, device=device)
    A[:, width:] = 1
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    start = 0
    for x in features:
        pieces = [len(piece) for piece in x.pieces()] if isinstance(x, Selection) else [len(x)]
        for k, size in zip(np.cumsum([0, *pieces[:-1]]), pieces, strict=True):
            values = x[int(k) : int(k) + size]
            if isinstance(values, Selection) or not values.flags.writeable:
                values = np.array(values, dtype=kind)
            A[start : start + size, :width] = torch.from_numpy(values)  # converted on the way
            start += size
    return A
