r"""Features that stay where they are stored, on disk if they are mapped from there, and are multiplied piece by piece.

A `Mapped` answers to what linear models ask of a matrix: A X, AᵀV, (A∘A)ᵀV, norms of rows, and some rows as a tensor.
A product takes the rows in the order of the table, whoever owns them, so that a pass over clients with scattered rows
is still a pass from the beginning of a file to its end. Scale and intercept belong to the products, not to features:

    A = [s·values 1],    A X = s·values X₁ + 1 X₂,    AᵀV = [s·valuesᵀV; 1ᵀV].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.memory import free, words
from scaffpd.models.inputs import check_range
from scaffpd.models.pieces import Numbers, Piece, Tables
from scaffpd.models.spectral import EXACT, power_iteration, random_direction
from scaffpd.models.store import Transposed
from scaffpd.models.threads import shared, threads

HELD = 2**25  # numbers of a client from which on its rows are not held together unless they have to be
CHECKED = 2**23  # bytes of a copy from which on it is asked whether there is room


class Mapped:
    """The rows of all clients as a matrix, not copied.

    Args:
        tables: where the rows are.
        numbers: which rows, one client after the other.
        intercept: whether a constant 1 is the last feature.
        dtype: of x.
        power: 2 for the squares of all entries.
    """

    device = torch.device("cpu")

    def __init__(self, tables: Tables, numbers: Numbers, intercept: bool, dtype: torch.dtype, power: int = 1) -> None:
        self.tables, self.numbers, self.intercept, self.dtype, self.power = tables, numbers, intercept, dtype, power
        self.columns = tables.columns
        self.shape = len(numbers), self.columns + intercept

    def __len__(self) -> int:
        return self.shape[0]

    @cached_property
    def _pieces(self) -> list[Piece]:
        return self.tables.cut(self.numbers, self.dtype)

    def _read(self, pieces: list[Piece]) -> Iterator[tuple[slice | Tensor, Tensor, float]]:
        for at, values, scale in self.tables.read(pieces, self.dtype):
            yield at, values if self.power == 1 else values**self.power, scale**self.power

    def _split(self) -> list[list[Piece]]:
        """As many lists of pieces as there are threads, which read side by side."""
        number = min(threads(), len(self._pieces))
        return [self._pieces[k::number] for k in range(number)]

    def __matmul__(self, X: Tensor) -> Tensor:
        """A X."""
        out, inner = self.new_empty(len(self), X.shape[1]), X[: self.columns]

        def work(pieces: list[Piece]) -> None:
            for at, values, scale in self._read(pieces):
                out[at] = torch.mm(values, inner if scale == 1 else scale * inner)

        shared(work, self._split(), self.device)
        return out.add_(X[-1]) if self.intercept else out

    @property
    def mT(self) -> Transposed:  # noqa: N802
        """Aᵀ."""
        return Transposed(self)

    T = mT

    def transposed(self, V: Tensor) -> Tensor:
        """AᵀV; several columns go as rows from the left, which takes BLAS half the time."""
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

        shared(work, range(len(split)), self.device)
        out = parts.sum(0)
        return (torch.cat([out, V.sum(0)[:, None]], 1) if self.intercept else out).mT

    def stream(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """All rows, scaled and with their intercept, some at a time and in the order of the tables."""
        for at, values, scale in self._read(self._pieces):
            scaled = values if scale == 1 else scale * values
            yield at, torch.cat([scaled, scaled.new_ones(len(scaled), 1)], 1) if self.intercept else scaled

    def largest_eigenvalue(self) -> Tensor:
        """λ_max(AᵀA), exactly for few columns, else from above."""
        if self.shape[1] <= EXACT:
            gram = self.new_zeros(self.shape[1], self.shape[1])
            for _, values in self.stream():
                gram.addmm_(values.T, values)
            top: Tensor = torch.linalg.eigvalsh(gram)[-1]
            return top.clamp_min(0)
        start = random_direction(self.new_empty(self.shape[1], 1))
        return torch.minimum(power_iteration(lambda v: self.T @ (self @ v), start), self.norms.square().sum())

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Some rows (a slice, a mask, or an index of any shape) as a tensor: a view where that is possible."""
        numbers = self.numbers[rows if isinstance(rows, slice) else rows.numpy()]
        lying = None if self.intercept or not isinstance(rows, slice) else self.tables.lying(numbers)
        if lying is not None and lying[0].dtype == self.dtype and lying[1] == self.power == 1:
            return lying[0]
        size = numbers.size * self.shape[1] * self.dtype.itemsize
        if size > CHECKED and size > (have := free(self.device)):
            raise InputError(
                f"{numbers.size:,} rows of features are needed at a time, {words(size)}, and {words(have)} are free: "
                "take minibatches, or a table that has each client's rows together and in the number format of x."
            )
        out = self.new_empty(numbers.size, self.shape[1])
        for at, values, scale in self._read(self.tables.cut(numbers.ravel(), self.dtype)):
            out[at, : self.columns] = values if scale == 1 else scale * values
        out[:, self.columns :] = 1
        return out.view(*numbers.shape, self.shape[1])

    def take(self, rows: slice | Tensor) -> Mapped:
        """Some rows, still not copied."""
        numbers = self.numbers[rows if isinstance(rows, slice) else rows.numpy()]
        other = Mapped(self.tables, numbers, self.intercept, self.dtype, self.power)
        if self.power == 1:
            other.norms = self.norms[rows]
        return other

    def large(self, first: int, size: int) -> Mapped | None:
        """One client's rows where those are too many to be held together."""
        return self.take(slice(first, first + size)) if size * self.shape[1] >= HELD else None

    def square(self) -> Mapped:
        """A ∘ A."""
        return Mapped(self.tables, self.numbers, self.intercept, self.dtype, 2)

    @cached_property
    def norms(self) -> Tensor:
        """‖a_j‖ per row, from one pass."""
        out = self.new_empty(len(self))

        def work(pieces: list[Piece]) -> None:
            for at, values, scale in self._read(pieces):
                out[at] = scale * values.norm(dim=1)

        shared(work, self._split(), self.device)
        return torch.hypot(out, torch.ones_like(out)) if self.intercept else out

    def norm(self, dim: int) -> Tensor:
        """The same."""
        assert dim == 1
        return self.norms

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Refuse numbers that are none or too large: the norms of their rows are, too."""
        limit, ends = torch.finfo(self.dtype).max ** 0.5 * 1e-4, np.cumsum(sizes)
        for row in torch.nonzero(~(self.norms <= limit))[:, 0].tolist():
            check_range([names[int(np.searchsorted(ends, row, side="right"))]], [1], self[row : row + 1], "feature")

    def contents(self) -> list[Tensor]:
        """What tells the tables from any others, and which rows."""
        tables = repr([table.identity for table in self.tables.tables]).encode()
        return [torch.from_numpy(np.frombuffer(tables, dtype=np.uint8).copy()), torch.from_numpy(self.numbers)]

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros in the format of x."""
        return torch.zeros(*shape, dtype=self.dtype)

    def new_empty(self, *shape: int) -> Tensor:
        """Numbers in the format of x."""
        return torch.empty(*shape, dtype=self.dtype)
