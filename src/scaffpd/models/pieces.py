r"""Rows of tables read a piece at a time, in the order in which they are stored.

Consecutive rows in the number format that is asked for are used where they lie, in memory or in the page cache; all
others are gathered or converted into a buffer that stays in a core's cache. Rows have one number through all tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.table import FORMATS, Selection, Table

Numbers = NDArray[np.int64]
LYING, COPIED = 2**22, 2**19  # numbers in a piece: where it lies, and in a buffer
RUN = 2**14  # numbers in consecutive rows from which on they are worth a piece of their own


class Piece(NamedTuple):
    """Some rows: which of those asked for, in which table, and which of its rows; slices where they are in a row."""

    at: slice | Tensor
    table: int
    rows: slice | Tensor


class Tables:
    """Tables of equal width, one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables, self.columns = list(tables), tables[0].values.shape[1]
        # One number is left out between two tables, so that no run goes on from one to the next.
        self.bases: Numbers = np.cumsum([0, *(len(table) + 1 for table in tables[:-1])])

    def __getstate__(self) -> dict[str, Any]:
        """Without views: other processes map the files themselves."""
        return {name: value for name, value in vars(self).items() if name != "values"}

    @cached_property
    def values(self) -> list[Tensor]:
        """The same memory as tensors, which nobody writes to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arrays = [table.values for table in self.tables]
            return [torch.from_numpy(a if min(a.strides) >= 0 else np.ascontiguousarray(a)) for a in arrays]

    def lying(self, numbers: Numbers) -> tuple[Tensor, float] | None:
        """Rows where they lie, and their scale, if they are consecutive."""
        if not _consecutive(numbers):
            return None
        table = self._table(numbers[0])
        first = int(numbers[0] - self.bases[table])
        return self.values[table][first : first + len(numbers)], self.tables[table].scale

    def cut(self, numbers: Numbers, dtype: torch.dtype) -> list[Piece]:
        """Rows in pieces: runs, and what is scattered between them."""
        order = None if bool((numbers[1:] >= numbers[:-1]).all()) else np.argsort(numbers, kind="stable")
        numbers = numbers if order is None else numbers[order]
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        starts, ends = np.append(0, breaks), np.append(breaks, len(numbers))
        long = (ends - starts) * self.columns >= RUN
        runs, tables = set(starts[long].tolist()), np.searchsorted(numbers, self.bases)
        edges = np.unique(np.concatenate([[0, len(numbers)], starts[long], ends[long], tables]))
        pieces = []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            table = self._table(numbers[first])
            lies = first in runs and self.values[table].dtype == dtype
            size = max(1, (LYING if lies else COPIED) // self.columns)
            for k in range(first, last, size):
                at = np.arange(k, min(k + size, last)) if order is None else order[k : min(k + size, last)]
                own = numbers[k : min(k + size, last)] - self.bases[table]
                pieces.append(Piece(_positions(at), table, _positions(own)))
        return pieces

    def read(self, pieces: Sequence[Piece], dtype: torch.dtype) -> Iterator[tuple[slice | Tensor, Tensor, float]]:
        """(which, values, scale) of every piece; values hold until the next ones are asked for."""
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
    """The rows of all clients, one client after the other; arrays among them are tables of their own."""
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
    return slice(first, first + len(numbers)) if _consecutive(numbers) else torch.from_numpy(numbers)
