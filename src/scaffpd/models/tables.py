r"""Features that stay where they are stored, as matrices for linear models.

`Tables` reads rows a piece at a time, in the order in which they are stored. Consecutive rows in the requested number
format are used in place, in memory or in the page cache; all others go through a buffer that stays in a
core's cache. Rows are numbered through all tables.

A `MappedMatrix` multiplies rows that stay on disk, for all clients, in one pass from the beginning of a file to its
end. Scale and intercept belong to the products, not to the features:

    A = [s·values 1],    A X = s·values X₁ + 1 X₂,    AᵀV = [s·valuesᵀV; 1ᵀV].

A `StoredMatrix` holds one copy on the device in the format of the table. Half precision is a format for storage, not
for arithmetic: on a GPU, x in single precision is split into two halves,

    x = 2^e (h + 2⁻¹¹ l),    h, l in half precision,

and A [h l] is one product whose terms are exact and whose sums are in single precision: 22 digits of x for the cost
of twice the columns, with half the memory traffic of A in single precision. If eleven digits of x are enough (local
steps, on request), h alone is used. Elsewhere A is converted piece by piece.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.table import FORMATS, Selection, Table
from scaffpd.errors import InputError
from scaffpd.machine import free_memory
from scaffpd.models.numerics import (
    EXACT,
    parallel_map,
    power_iteration,
    random_direction,
    thread_count,
)
from scaffpd.models.oracle import check_range
from scaffpd.numbers import format_bytes

Numbers = NDArray[np.int64]
# numbers in a piece: in place, and in a buffer
LYING = 2**22
COPIED = 2**19
RUN = 2**14  # numbers in consecutive rows above which they become a piece


class Piece(NamedTuple):
    """Rows to read: their places in the request, the table, and its rows; slices if consecutive."""

    at: slice | Tensor
    table: int
    rows: slice | Tensor


class Tables:
    """Tables of equal width, one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self.columns = tables[0].values.shape[1]
        # One number is skipped between two tables, so that no run continues from one to the next.
        self.bases: Numbers = np.cumsum([0, *(len(table) + 1 for table in tables[:-1])])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out views: other processes map the files themselves."""
        return {name: value for name, value in vars(self).items() if name != "values"}

    @cached_property
    def values(self) -> list[Tensor]:
        """The same memory as read-only tensors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arrays = [table.values for table in self.tables]
            return [
                torch.from_numpy(a if min(a.strides) >= 0 else np.ascontiguousarray(a))
                for a in arrays
            ]

    def lying(self, numbers: Numbers) -> tuple[Tensor, float] | None:
        """Return consecutive rows in place, with their scale; else `None`."""
        if not _consecutive(numbers):
            return None
        table = self._table(numbers[0])
        first = int(numbers[0] - self.bases[table])
        return self.values[table][first : first + len(numbers)], self.tables[table].scale

    def cut(self, numbers: Numbers, dtype: torch.dtype) -> list[Piece]:
        """Cut rows into pieces: runs, and the scattered rows between them."""
        order = (
            None
            if bool((numbers[1:] >= numbers[:-1]).all())
            else np.argsort(numbers, kind="stable")
        )
        numbers = numbers if order is None else numbers[order]
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        starts = np.append(0, breaks)
        ends = np.append(breaks, len(numbers))
        long = (ends - starts) * self.columns >= RUN
        runs = set(starts[long].tolist())
        tables = np.searchsorted(numbers, self.bases)
        edges = np.unique(np.concatenate([[0, len(numbers)], starts[long], ends[long], tables]))
        pieces = []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            table = self._table(numbers[first])
            lies = first in runs and self.values[table].dtype == dtype
            size = max(1, (LYING if lies else COPIED) // self.columns)
            for k in range(first, last, size):
                at = (
                    np.arange(k, min(k + size, last))
                    if order is None
                    else order[k : min(k + size, last)]
                )
                own = numbers[k : min(k + size, last)] - self.bases[table]
                pieces.append(Piece(_positions(at), table, _positions(own)))
        return pieces

    def read(
        self, pieces: Sequence[Piece], dtype: torch.dtype
    ) -> Iterator[tuple[slice | Tensor, Tensor, float]]:
        """Yield (which, values, scale) of every piece; values are valid until the next piece."""
        for number in {piece.table for piece in pieces}:
            self.tables[number].check()
        buffers: dict[torch.dtype, Tensor] = {}
        for at, table, rows in pieces:
            values = self.values[table]
            if isinstance(rows, slice):
                values = values[rows]
            else:
                out = self._room(buffers, len(rows), values.dtype)
                values = torch.index_select(values, 0, rows, out=out)
            if values.dtype != dtype:
                values = self._room(buffers, len(values), dtype).copy_(values)
            yield at, values, self.tables[table].scale

    def _room(self, buffers: dict[torch.dtype, Tensor], rows: int, dtype: torch.dtype) -> Tensor:
        size = rows * self.columns
        if dtype not in buffers or buffers[dtype].numel() < size:
            buffers[dtype] = torch.empty(size, dtype=dtype)
        return buffers[dtype][:size].view(rows, self.columns)

    def _table(self, number: Any) -> int:
        return int(np.searchsorted(self.bases, number, side="right")) - 1


def numbered(features: Sequence[NDArray[Any] | Selection]) -> tuple[Tables, Numbers]:
    """Number the rows of all clients, one client after the other; each array becomes a table."""
    rows = [x if isinstance(x, Selection) else _whole(x) for x in features]
    tables = Tables(list({id(x.table): x.table for x in rows}.values()))
    bases = dict(zip(map(id, tables.tables), tables.bases.tolist(), strict=True))
    return tables, np.concatenate([x.numbers + bases[id(x.table)] for x in rows])


def _whole(x: NDArray[Any]) -> Selection:
    return Table(x if x.dtype in FORMATS else x.astype(np.float64)).rows(np.arange(len(x)))


def _consecutive(numbers: Numbers) -> bool:
    return len(numbers) > 0 and bool((np.diff(numbers) == 1).all())


def _positions(numbers: Numbers) -> slice | Tensor:
    first = int(numbers[0])
    return (
        slice(first, first + len(numbers)) if _consecutive(numbers) else torch.from_numpy(numbers)
    )


PIECE = 64 * 2**20  # numbers that are converted at a time
FINE = 2**16  # numbers at a time for double precision in main memory: half a megabyte
TERMS = 8192  # terms of a sum that matrix units may add up
ACCUMULATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (
    2,
    8,
)  # torch.mm knows out_dtype
COLUMNS = 8  # products in half precision run at full speed for multiples of this
# of a half: binary digits, the exponent that x is scaled to; the least 2^e
DIGITS = 11
LARGEST = 14
SMALLEST = -126


class TableMatrix(ABC):
    """Matrix A whose rows stay in tables, with the few operations of a tensor that linear models need."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __matmul__(self, X: Tensor) -> Tensor:
        """Return A X."""

    @abstractmethod
    def transposed(self, V: Tensor) -> Tensor:
        """Return AᵀV."""

    @property
    def mT(self) -> Transposed:  # noqa: N802
        """Aᵀ."""
        return Transposed(self)

    T = mT

    def new_zeros(self, *shape: int) -> Tensor:
        """Return zeros in the format of x."""
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)

    def new_empty(self, *shape: int) -> Tensor:
        """Return uninitialised numbers in the format of x."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    @abstractmethod
    def double(self) -> TableMatrix:
        """Return the same values, multiplied in double precision."""


class Transposed:
    """Transpose of a matrix that is no tensor."""

    def __init__(self, matrix: TableMatrix) -> None:
        self.matrix = matrix

    def __matmul__(self, V: Tensor) -> Tensor:
        """Return AᵀV."""
        return self.matrix.transposed(V)


class StoredMatrix(TableMatrix):
    """Matrix A = scale · values; values in parts of consecutive rows, none of them copied."""

    def __init__(
        self, parts: Sequence[Tensor], scale: float, dtype: torch.dtype, rough: bool = False
    ) -> None:
        self.parts = list(parts)
        self.scale = scale
        self.dtype = dtype
        self.rough = rough
        self.device = self.parts[0].device
        self.shape = (sum(map(len, self.parts)), self.parts[0].shape[1])

    def __matmul__(self, X: Tensor) -> Tensor:
        """Return A X."""
        if self._split(X):
            halves, factor = split_halves(X, self.rough)
            products = [_mm(part, halves, self.rough) for part in self.parts]
            product = products[0] if len(products) == 1 else torch.cat(products)
            return join_halves(product, self.scale * factor, X.shape[-1], self.rough)
        return self.scale * torch.cat([piece @ X for piece in self._pieces()])

    def transposed(self, V: Tensor) -> Tensor:
        """Return AᵀV."""
        if self._split(V):
            halves, factor = split_halves(V, self.rough)
            pairs = zip(
                self.parts, torch.split(halves, [len(part) for part in self.parts]), strict=True
            )
            products = [
                join_halves(
                    _mm(part.T, v, self.rough), self.scale * factor, V.shape[-1], self.rough
                )
                for part, v in pairs
            ]
            return products[0] if len(products) == 1 else torch.stack(products).sum(0)
        start = 0
        out = V.new_zeros(self.shape[1], V.shape[1])
        for piece in self._pieces():
            out += piece.T @ V[start : start + len(piece)]
            start += len(piece)
        return out.mul_(self.scale)

    def each(self, G: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return A_i G_i of clients with `sizes` rows, in one stack; G is (N, features, k)."""
        parts = self._by_client(sizes)
        if self._split(G):
            halves, factor = split_halves(G)
            products = [_mm(part, g) for part, g in zip(parts, halves, strict=True)]
            return join_halves(torch.cat(products), self.scale * factor, G.shape[-1])
        return self.scale * torch.cat(
            [part.to(self.dtype) @ g for part, g in zip(parts, G, strict=True)]
        )

    def transposed_each(self, V: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return A_iᵀV_i of clients with `sizes` rows, (N, features, k)."""
        parts = self._by_client(sizes)
        if self._split(V):
            halves, factor = split_halves(V)
            pairs = zip(parts, torch.split(halves, list(sizes)), strict=True)
            return join_halves(
                torch.stack([_mm(part.T, v) for part, v in pairs]), self.scale * factor, V.shape[-1]
            )
        pairs = zip(parts, torch.split(V, list(sizes)), strict=True)
        return self.scale * torch.stack([part.to(self.dtype).T @ v for part, v in pairs])

    def _by_client(self, sizes: Sequence[int]) -> list[Tensor]:
        return (
            self.parts
            if len(self.parts) == len(sizes)
            else list(torch.split(self.parts[0], list(sizes)))
        )

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return rows (an index of any shape), converted and scaled."""
        if len(self.parts) == 1:
            return self.scale * self.parts[0][rows].to(self.dtype)
        out = self.new_zeros(*rows.shape, self.shape[1])
        start = 0
        for part in self.parts:
            inside = (rows >= start) & (rows < start + len(part))
            out[inside] = part[rows[inside] - start].to(self.dtype)
            start += len(part)
        return out.mul_(self.scale)

    def clients(self, sizes: Sequence[int]) -> list[StoredMatrix]:
        """Split the matrix by client."""
        return [StoredMatrix([part], self.scale, self.dtype) for part in self._by_client(sizes)]

    def gram(self, weight: Tensor | None = None) -> Tensor:
        """Return A diag(w) Aᵀ, summed over pieces of columns."""
        rows, columns = self.shape
        if weight is None and len(self.parts) == 1 and self.halved:
            return _mm(self.parts[0], self.parts[0].T).mul_(self.scale**2)
        out = self.new_zeros(rows, rows)
        width = max(1, PIECE // max(rows, 1))
        for k in range(0, columns, width):
            piece = torch.cat([part[:, k : k + width].to(self.dtype) for part in self.parts])
            out += (piece if weight is None else piece * weight[k : k + width]) @ piece.T
        return out.mul_(self.scale**2)

    def squares(self, V: Tensor) -> Tensor:
        """Return (A ∘ A)ᵀV."""
        start = 0
        out = V.new_zeros(self.shape[1], V.shape[1])
        for piece in self._pieces():
            out += piece.square().T @ V[start : start + len(piece)]
            start += len(piece)
        return out.mul_(self.scale**2)

    def norm(self, dim: int) -> Tensor:
        """Return ‖a_j‖ per row."""
        assert dim == 1
        return self.scale * torch.cat([piece.norm(dim=1) for piece in self._pieces()])

    def double(self) -> StoredMatrix:
        """Return the same values, multiplied in double precision."""
        return StoredMatrix(self.parts, self.scale, torch.float64)

    def roughly(self) -> StoredMatrix:
        """Return the same values; on a GPU, A x and Aᵀv take eleven digits of x and v, in half the time."""
        return StoredMatrix(self.parts, self.scale, self.dtype, rough=True)

    @property
    def halved(self) -> bool:
        """Return whether products use halves, on matrix units."""
        return self._split(self.new_zeros(0))

    def _split(self, X: Tensor) -> bool:
        half = self.parts[0].dtype == torch.float16 and X.dtype == torch.float32
        return half and X.is_cuda and ACCUMULATES

    def _pieces(self) -> Iterator[Tensor]:
        """Yield the values in the format of x, some rows at a time; views if that is their format already."""
        for part in self.parts:
            if part.dtype == self.dtype:
                yield part
            else:
                size = FINE if part.device.type == "cpu" and self.dtype == torch.float64 else PIECE
                for piece in torch.split(part, max(1, size // self.shape[1])):
                    yield piece.to(self.dtype)


def split_halves(X: Tensor, rough: bool = False) -> tuple[Tensor, Tensor]:
    """Return [h l] (or h alone) and 2^e with X = 2^e (h + 2⁻¹¹ l), padded to a multiple of `COLUMNS`."""
    exponent = (torch.frexp(torch.stack(X.aminmax()).abs().amax()).exponent - LARGEST).clamp_min(
        SMALLEST
    )
    factor = torch.ldexp(torch.ones((), device=X.device), exponent)
    columns = X.shape[-1]
    scaled = X / factor
    width = columns if rough else 2 * columns
    both = torch.empty(
        *X.shape[:-1], width + -width % COLUMNS, dtype=torch.float16, device=X.device
    )
    high = both[..., :columns].copy_(scaled)
    if not rough:
        torch.mul(scaled.sub_(high), 2**DIGITS, out=both[..., columns:width])
    both[..., width:] = 0
    return both, factor


def join_halves(both: Tensor, factor: Tensor, columns: int, rough: bool = False) -> Tensor:
    """Return 2^e (A h + 2⁻¹¹ A l) from A [h l], or 2^e A h from A h; of `columns` columns each."""
    high = both[..., :columns]
    if rough:
        return high * factor
    return torch.add(high, both[..., columns : 2 * columns], alpha=2.0**-DIGITS).mul_(factor)


def _mm(A: Tensor, B: Tensor, rough: bool = False) -> Tensor:
    """Multiply halves, summed in single precision: by matrix units, which cut off digits, only `TERMS` at a time."""
    terms = len(B) if rough else TERMS
    out = torch.mm(A[:, :terms], B[:terms], out_dtype=torch.float32)
    for k in range(terms, len(B), terms):
        torch.addmm(out, A[:, k : k + terms], B[k : k + terms], out_dtype=torch.float32, out=out)
    return out


HELD = 2**25  # numbers of a client above which its rows are not loaded at once unless necessary
CHECKED = 2**23  # bytes of a copy above which free memory is checked


class MappedMatrix(TableMatrix):
    """Rows of all clients as a matrix, not copied.

    Args:
        tables: tables with the rows.
        numbers: row numbers, one client after the other.
        intercept: whether a constant 1 is the last feature.
        dtype: format of x.
        power: 2 for the squares of all entries.
    """

    device = torch.device("cpu")

    def __init__(
        self, tables: Tables, numbers: Numbers, intercept: bool, dtype: torch.dtype, power: int = 1
    ) -> None:
        self.tables = tables
        self.numbers = numbers
        self.intercept = intercept
        self.dtype = dtype
        self.power = power
        self.columns = tables.columns
        self.shape = len(numbers), self.columns + intercept

    @cached_property
    def _pieces(self) -> list[Piece]:
        return self.tables.cut(self.numbers, self.dtype)

    def _read(self, pieces: list[Piece]) -> Iterator[tuple[slice | Tensor, Tensor, float]]:
        for at, values, scale in self.tables.read(pieces, self.dtype):
            yield at, values if self.power == 1 else values**self.power, scale**self.power

    def _split(self) -> list[list[Piece]]:
        """Lists of pieces, one per thread, which read in parallel."""
        number = min(thread_count(), len(self._pieces))
        return [self._pieces[k::number] for k in range(number)]

    def __matmul__(self, X: Tensor) -> Tensor:
        """Return A X."""
        out = self.new_empty(len(self), X.shape[1])
        inner = X[: self.columns]

        def work(pieces: list[Piece]) -> None:
            for at, values, scale in self._read(pieces):
                out[at] = torch.mm(values, inner if scale == 1 else scale * inner)

        parallel_map(work, self._split(), self.device)
        return out.add_(X[-1]) if self.intercept else out

    def transposed(self, V: Tensor) -> Tensor:
        """Return AᵀV; several columns go as rows from the left, which takes BLAS half the time."""
        split = self._split()
        parts = self.new_zeros(len(split), V.shape[1], self.columns)

        def work(number: int) -> None:
            part = parts[number]
            for at, values, scale in self._read(split[number]):
                own = V[at] if scale == 1 else scale * V[at]
                if V.shape[1] == 1:
                    part.mT.addmm_(values.T, own)
                else:
                    part.addmm_(own.mT.contiguous(), values)

        parallel_map(work, range(len(split)), self.device)
        out = parts.sum(0)
        return (torch.cat([out, V.sum(0)[:, None]], 1) if self.intercept else out).mT

    def stream(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Yield all rows, scaled and with their intercept, some at a time and in the order of the tables."""
        for at, values, scale in self._read(self._pieces):
            scaled = values if scale == 1 else scale * values
            yield (
                at,
                torch.cat([scaled, scaled.new_ones(len(scaled), 1)], 1)
                if self.intercept
                else scaled,
            )

    def largest_eigenvalue(self) -> Tensor:
        """Return λ_max(AᵀA), exact for few columns, else from above."""
        if self.shape[1] <= EXACT:
            gram = self.new_zeros(self.shape[1], self.shape[1])
            for _, values in self.stream():
                gram.addmm_(values.T, values)
            top: Tensor = torch.linalg.eigvalsh(gram)[-1]
            return top.clamp_min(0)
        start = random_direction(self.new_empty(self.shape[1], 1))
        return torch.minimum(
            power_iteration(lambda v: self.T @ (self @ v), start), self.norms.square().sum()
        )

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return rows (a slice, a mask, or an index of any shape) as a tensor: a view if possible."""
        numbers = self.numbers[rows if isinstance(rows, slice) else rows.numpy()]
        lying = (
            None if self.intercept or not isinstance(rows, slice) else self.tables.lying(numbers)
        )
        if lying is not None and lying[0].dtype == self.dtype and lying[1] == self.power == 1:
            return lying[0]
        size = numbers.size * self.shape[1] * self.dtype.itemsize
        if size > CHECKED and size > (have := free_memory(self.device)):
            raise InputError(
                "rows-features-needed",
                f"{numbers.size:,} rows of features are needed at a time, {format_bytes(size)}, and "
                f"{format_bytes(have)} are free: "
                "take minibatches, or a table that has each client's rows together and in the number format of x.",
            )
        out = self.new_empty(numbers.size, self.shape[1])
        for at, values, scale in self._read(self.tables.cut(numbers.ravel(), self.dtype)):
            out[at, : self.columns] = values if scale == 1 else scale * values
        out[:, self.columns :] = 1
        return out.view(*numbers.shape, self.shape[1])

    def take(self, rows: slice | Tensor) -> MappedMatrix:
        """Select rows without copying them."""
        numbers = self.numbers[rows if isinstance(rows, slice) else rows.numpy()]
        other = MappedMatrix(self.tables, numbers, self.intercept, self.dtype, self.power)
        if self.power == 1:
            other.norms = self.norms[rows]
        return other

    def double(self) -> MappedMatrix:
        """Return the same values, multiplied in double precision."""
        return MappedMatrix(self.tables, self.numbers, self.intercept, torch.float64, self.power)

    def large(self, first: int, size: int) -> MappedMatrix | None:
        """Return one client's rows if they are too many to load at once."""
        return self.take(slice(first, first + size)) if size * self.shape[1] >= HELD else None

    def square(self) -> MappedMatrix:
        """Return A ∘ A."""
        return MappedMatrix(self.tables, self.numbers, self.intercept, self.dtype, 2)

    @cached_property
    def norms(self) -> Tensor:
        """‖a_j‖ per row, from one pass."""
        out = self.new_empty(len(self))

        def work(pieces: list[Piece]) -> None:
            for at, values, scale in self._read(pieces):
                out[at] = scale * values.norm(dim=1)

        parallel_map(work, self._split(), self.device)
        return torch.hypot(out, torch.ones_like(out)) if self.intercept else out

    def norm(self, dim: int) -> Tensor:
        """Return ‖a_j‖ per row."""
        assert dim == 1
        return self.norms

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Refuse numbers that are not finite or too large, found by the norms of their rows."""
        limit = torch.finfo(self.dtype).max ** 0.5 * 1e-4
        ends = np.cumsum(sizes)
        for row in torch.nonzero(~(self.norms <= limit))[:, 0].tolist():
            check_range(
                [names[int(np.searchsorted(ends, row, side="right"))]],
                [1],
                self[row : row + 1],
                "feature",
            )

    def contents(self) -> list[Tensor]:
        """Return the tables' fingerprints and the row numbers."""
        tables = repr([table.identity for table in self.tables.tables]).encode()
        return [
            torch.from_numpy(np.frombuffer(tables, dtype=np.uint8).copy()),
            torch.from_numpy(self.numbers),
        ]
