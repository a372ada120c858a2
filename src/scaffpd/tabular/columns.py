"""A silo's table: named columns of numbers or categories, or one array of unnamed features."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError

Matrix = NDArray[np.float64]
Codes = NDArray[np.int32]
Mask = NDArray[np.bool_]

NUMBER, CATEGORY, UNKNOWN = "number", "category", "unknown"
MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "?", "null"})
WHOLE = re.compile(r"([+-]?\d+)\.0*")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its name.
        kind: "number", "category", or "unknown" where there is not a single value to tell by.
        values: numbers with NaN where missing; for categories places in `categories`, -1 where missing.
        categories: the values of a column of categories, sorted.
        note: what the operator should know about it; it stays here.
    """

    name: str
    kind: str
    values: Matrix | Codes = field(repr=False)
    categories: tuple[str, ...] = ()
    note: str = ""

    @property
    def missing(self) -> Mask:
        """Where there is no value."""
        return np.asarray(self.values < 0) if self.kind == CATEGORY else np.isnan(self.values)

    def counts(self, rows: Mask) -> NDArray[np.int64]:
        """How many of the chosen rows have each category."""
        codes = self.values[rows & ~self.missing].astype(np.int64)
        return np.bincount(codes, minlength=len(self.categories)).astype(np.int64)


@dataclass(frozen=True)
class Table:
    """Rows of features: either `columns`, or `block` with the shape of one sample in `shape`."""

    rows: int
    columns: tuple[Column, ...] = ()
    block: Matrix | None = field(default=None, repr=False)
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """The number of features before encoding."""
        return len(self.columns) if self.block is None else self.block.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(c.values.nbytes for c in self.columns) + (0 if self.block is None else self.block.nbytes)

    def take(self, rows: Mask) -> Table:
        """Some of the rows."""
        columns = tuple(Column(c.name, c.kind, c.values[rows], c.categories, c.note) for c in self.columns)
        return Table(int(rows.sum()), columns, None if self.block is None else self.block[rows], self.shape)


def is_missing(cell: str) -> bool:
    """Whether a cell of text stands for no value."""
    return cell.strip().lower() in MISSING


def parsed(cell: str) -> float | None:
    """A cell of text as a number, or `None` if it is none."""
    try:
        return float(cell) if "_" not in cell else None
    except ValueError:
        return None


def spelt(value: object) -> str:
    """A category's name: 1, 1.0 and "1.0" are all "1", so that silos that store them differently agree."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))
    text = str(value).strip()
    whole = WHOLE.fullmatch(text)
    return whole[1] if whole else text


def categorical(name: str, cells: Sequence[str | None], note: str = "") -> Column:
    """A column of categories from cells, `None` where missing."""
    names = sorted({cell for cell in cells if cell is not None})
    place = {cell: k for k, cell in enumerate(names)}
    codes = np.fromiter((-1 if c is None else place[c] for c in cells), dtype=np.int32, count=len(cells))
    return Column(name, CATEGORY, codes, tuple(names), note)


def numeric(owner: str, name: str, values: Matrix) -> Column:
    """A column of numbers; infinite ones are refused."""
    if np.isinf(values).any():
        row = int(np.isinf(values).argmax())
        raise InputError(f"{owner} has an infinite value in column {name!r} (row {row + 1}).")
    return Column(name, UNKNOWN if np.isnan(values).all() else NUMBER, values)
