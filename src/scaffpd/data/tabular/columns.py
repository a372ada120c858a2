"""Columns of numbers or categories, and what they give away: codes for missing values, leaks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from scaffpd.errors import InputError

Matrix = NDArray[np.float64]
Codes = NDArray[np.int32]
Mask = NDArray[np.bool_]
Targets = NDArray[np.float64] | NDArray[np.int64]
Values = NDArray[np.float64] | NDArray[np.int32]

NUMBER: Final = "number"
CATEGORY: Final = "category"
DATE = "date"
UNKNOWN: Final = "unknown"
MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "?", "null"})
WHOLE = re.compile(r"([+-]?\d+)\.0*")
# numbers that mean "missing" in many files: -1, -9, two nines or more of either sign, also 99.9
CODES = np.array(
    [-1.0, -9.0, *(s * (10.0**k - 1) / d for k in range(2, 10) for d in (1, 10) for s in (-1, 1))]
)
REPEATED = 0.001  # the smallest share of rows with a code, and three rows at least
BEYOND_CHANCE = math.log(1e6)  # a column that tells all labels of rows at random is rarer than this


@dataclass(frozen=True)
class DataColumn:
    """One column."""

    name: str  # its name
    kind: str  # "number", "category", "date", or "unknown" where there is no value to tell by
    # numbers, or days since 1970, NaN where missing; of categories their places, -1 where missing
    values: Values = field(repr=False)
    categories: tuple[str, ...] = ()  # the values of a column of categories, sorted
    note: str = ""  # what the operator should know about it; it stays here

    @property
    def missing(self) -> Mask:
        return np.asarray(self.values < 0) if self.kind == CATEGORY else np.isnan(self.values)

    def counts(self, rows: Mask) -> NDArray[np.int64]:
        codes = self.values[rows & ~self.missing].astype(np.int64)
        return np.bincount(codes, minlength=len(self.categories)).astype(np.int64)

    def take(self, rows: Mask) -> DataColumn:
        return replace(self, values=self.values[rows])


@dataclass(frozen=True)
class FeatureTable:
    """Rows of features: either `columns`, or `block` with the shape of one sample in `shape`."""

    rows: int
    columns: tuple[DataColumn, ...] = ()
    block: Matrix | None = field(default=None, repr=False)
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """The number of features before encoding."""
        return len(self.columns) if self.block is None else self.block.shape[1]

    def take(self, rows: Mask) -> FeatureTable:
        columns = tuple(c.take(rows) for c in self.columns)
        block = None if self.block is None else self.block[rows]
        return FeatureTable(int(rows.sum()), columns, block, self.shape)


def spelt(value: object) -> str:
    """Name a category: 1, 1.0 and "1.0" are all "1", for silos store them differently."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        whole = math.isfinite(value) and value == int(value)
        return str(int(value)) if whole else repr(float(value))
    text = str(value).strip()
    number = WHOLE.fullmatch(text)
    return number[1] if number else text


def is_missing(cell: str, codes: Collection[object] = ()) -> bool:
    named = bool(codes) and spelt(cell.replace(",", ".")) in map(spelt, codes)
    return named or cell.strip().lower() in MISSING


def categorical(name: str, distinct: Sequence[object], codes: Codes, note: str = "") -> DataColumn:
    spelled = [None if cell is None or cell != cell else spelt(cell) for cell in distinct]
    names = sorted({cell for cell in spelled if cell is not None and not is_missing(cell)})
    place = {cell: k for k, cell in enumerate(names)}
    places = np.array([place.get(cell or "", -1) for cell in spelled], dtype=np.int32)
    return DataColumn(name, CATEGORY, places[codes], tuple(names), note)


def numeric(
    name: str, values: Matrix, owner: str, place: Callable[[int], str] | None = None
) -> DataColumn:
    """Make a column of numbers; refuse infinite ones by their place."""
    if np.isinf(values).any():
        row = int(np.isinf(values).argmax())
        where = place(row) if place else f"row {row + 1}"
        raise InputError(
            "infinite-value", f"{owner} has an infinite value in column {name!r}, {where}."
        )
    there = values[~np.isnan(values)]
    odd = ", ".join(f"{c:.10g} in {int((there == c).sum())} rows" for c in suspected_codes(there))
    advice = "far from all others: if that means missing, say so by --missing (data.missing)"
    kind = NUMBER if len(there) else UNKNOWN
    return DataColumn(name, kind, values, note=f"has {odd}, {advice}" if odd else "")


def numbers_of(column: DataColumn) -> Matrix:
    """Return the values of a column that must hold no texts."""
    if column.kind == CATEGORY:
        raise InputError(
            "texts-for-numbers",
            f"Column {column.name!r} has texts such as {column.categories[0]!r}.",
        )
    return column.values.astype(np.float64)


def suspected_codes(there: Matrix) -> list[float]:
    """Return numbers that look like codes for missing values.

    They repeat, and are alone below zero, or lie beyond the range, and ten quartile ranges, of all
    other numbers.
    """
    if not len(there) or not np.isin([there.min(), there.max()], CODES).any():
        return []
    rest = there[~np.isin(there, CODES)]
    if not len(rest) or rest.min() == rest.max():
        return []
    least = rest.min()
    largest = rest.max()
    far = max(largest - least, 10 * np.subtract(*np.quantile(rest, (0.75, 0.25))))
    odd = [c for c in CODES if max(least - c, c - largest) > far or c <= -9 < 0 <= least]
    return [float(c) for c in odd if (there == c).sum() >= max(3, REPEATED * len(there))]


def leaking_columns(
    columns: Sequence[DataColumn], goal: Targets, labelled: bool, owner: Values | int = 0
) -> list[str]:
    """Say which columns alone give the target away.

    Numbers do so on a line, labels where thresholds separate them at every owner.
    """
    whose = np.broadcast_to(np.asarray(owner, dtype=np.int64), len(goal))
    return [
        f"Column {column.name!r} alone tells the target: is it known beforehand?"
        for column in columns
        if _leaks(column, goal, labelled, whose)
    ]


def _leaks(column: DataColumn, goal: Targets, labelled: bool, owner: NDArray[np.int64]) -> bool:
    rows = ~column.missing
    x: Values = column.values
    if column.categories:  # a category counts by the mean of its rows, if these are not too few
        counts = column.counts(rows)
        rows[rows] = counts[x[rows]] >= 5
        x = (np.bincount(x[rows], goal[rows], len(counts)) / np.maximum(counts, 1))[x]
    if rows.sum() < max(20, len(rows) / 2):
        return False
    x = x[rows]
    y = goal[rows]
    whose = owner[rows]
    if labelled:  # some rows first, for speed: thresholds that separate all separate these
        steps = ((len(y) // 2000 + 1, -math.inf), (1, BEYOND_CHANCE))
        return all(_separated(x[::k], y[::k], whose[::k]) > least for k, least in steps)
    a = x - x.mean()
    b = y - y.mean()
    if not a.any() or abs(a @ b) <= 0.9999 * math.sqrt((a @ a) * (b @ b)):
        return False
    residual = b - a * (a @ b) / (a @ a)
    error, spread = (np.subtract(*np.quantile(v, (0.75, 0.25))) for v in (residual, b))
    return bool(error <= 0.02 * spread + 1e-9 * b.std())  # a few far points alone make no line


def _separated(x: Values, y: Targets, owner: NDArray[np.int64]) -> float:
    """Return −log of the chance that thresholds on x separate all labels, −∞ if they do not.

    With n rows of an owner, n_k of label k and K labels, that is K! Π n_k! / n! for labels at
    random, multiplied over owners.
    """
    order = np.lexsort((y, x, owner))
    most = int(y.max()) + 1
    x = x[order]
    pairs = owner[order] * np.int64(most) + y[order]
    change = (np.diff(pairs) != 0) & (np.diff(pairs // most) == 0)
    distinct, counts = np.unique(pairs, return_counts=True)
    sizes = np.bincount(distinct // most, counts)
    kinds = np.bincount(distinct // most)
    if change.sum() > np.maximum(kinds - 1, 0).sum() or np.any(change & (np.diff(x) == 0)):
        return -math.inf
    return float(gammaln(sizes + 1).sum() - gammaln(counts + 1).sum() - gammaln(kinds + 1).sum())


def dated(name: str, days: Matrix, example: str) -> DataColumn:
    return DataColumn(name, DATE, days, note=f"holds dates such as {example!r}")


def array_block(owner: str, given: ArrayLike) -> FeatureTable:
    try:
        block = np.asarray(given)
        if isinstance(given, np.ma.MaskedArray):  # its gaps, which asarray makes numbers of
            block = np.where(np.ma.getmaskarray(given), np.nan, block)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            "not-an-array", f"{owner} has features that do not form an array of numbers."
        ) from None
    if block.dtype.kind not in "fiub" or block.ndim < 2 or 0 in block.shape[1:]:
        raise InputError(
            "features-not-numbers",
            f"{owner} has features of shape {block.shape} and type {block.dtype}; "
            "rows × features of numbers are expected.",
        )
    numbers: Matrix = block.astype(np.float64, copy=False).reshape(len(block), -1)
    if np.isinf(numbers).any():
        row = int(np.isinf(numbers).any(1).argmax()) + 1
        raise InputError("infinite-value", f"{owner} has an infinite feature in row {row}.")
    return FeatureTable(len(block), block=numbers, shape=block.shape[1:])
