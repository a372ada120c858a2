"""Columns of numbers or categories, made of data frames, of arrays, or of what a file holds."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from scaffpd.errors import InputError, unknown

Matrix = NDArray[np.float64]
Codes = NDArray[np.int32]
Mask = NDArray[np.bool_]
Values = NDArray[np.float64] | NDArray[np.int32]
Parts = Sequence[Any]  # frames or arrays: of training and of held-out rows, or of all rows

NUMBER = "number"
CATEGORY = "category"
DATE = "date"
UNKNOWN = "unknown"
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
        """Return a mask of missing values."""
        return np.asarray(self.values < 0) if self.kind == CATEGORY else np.isnan(self.values)

    def counts(self, rows: Mask) -> NDArray[np.int64]:
        """Count how many of the chosen rows have each category."""
        codes = self.values[rows & ~self.missing].astype(np.int64)
        return np.bincount(codes, minlength=len(self.categories)).astype(np.int64)

    def take(self, rows: Mask) -> DataColumn:
        """Return some of the rows."""
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

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(c.values.nbytes for c in self.columns) + (
            0 if self.block is None else self.block.nbytes
        )

    def take(self, rows: Mask) -> FeatureTable:
        """Return some of the rows."""
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
    """Return whether a cell of text stands for no value, by itself or as one of these codes."""
    named = bool(codes) and spelt(cell.replace(",", ".")) in map(spelt, codes)
    return named or cell.strip().lower() in MISSING


def categorical(
    name: str, distinct: Sequence[object], codes: NDArray[Any], note: str = ""
) -> DataColumn:
    """Make a column of categories whose cells are distinct[codes]."""
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
    columns: Sequence[DataColumn], goal: NDArray[Any], labelled: bool, owner: Values | int = 0
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


def _leaks(
    column: DataColumn, goal: NDArray[Any], labelled: bool, owner: NDArray[np.int64]
) -> bool:
    rows = ~column.missing
    x: NDArray[Any] = column.values
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


def _separated(x: NDArray[Any], y: NDArray[Any], owner: NDArray[np.int64]) -> float:
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
    """Make a column of dates, as days since 1970: nothing to learn from by itself."""
    return DataColumn(name, DATE, days, note=f"holds dates such as {example!r}")


def read_npz(path: Path, features: str, target: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two arrays of an NPZ file; nothing in it is executed."""
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise InputError(
                    "not-npz",
                    f"{path.name!r} is not an NPZ file of several arrays; write one with numpy.savez.",
                )
            for name in (features, target):
                if name not in arrays.files:
                    raise unknown(f"array of {path.name!r},", name, arrays.files)
            return arrays[features], arrays[target]
    except OSError as error:
        raise InputError(
            "unreadable-data",
            f"Cannot read the data file {str(path)!r}: {error.strerror or 'it is cut off'}.",
        ) from None
    except (zipfile.BadZipFile, EOFError):
        raise InputError(
            "file-cut-off", f"{path.name!r} is not an NPZ file, or is cut off."
        ) from None
    except InputError:
        raise
    except ValueError:
        raise InputError(
            "not-npz",
            f"{path.name!r} is no NPZ file of plain arrays: save numbers or texts by numpy.savez, "
            "no Python objects.",
        ) from None


def _is_frame(X: Any) -> bool:
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def table(
    owner: str, parts: Parts, columns: Sequence[str], categories: Sequence[str]
) -> FeatureTable:
    """Make a table of one or several frames or arrays, one below the other."""
    if not _is_frame(parts[0]):
        if columns or categories:
            raise InputError(
                "features-without-names",
                f"{owner} has features without names, so data.columns and data.categories cannot "
                "be used.",
            )
        return _block(owner, parts)
    headers = [[str(name) for name in part.columns] if _is_frame(part) else [] for part in parts]
    header = headers[0]
    if any(sorted(other) != sorted(header) for other in headers):
        raise InputError(
            "other-held-out-columns",
            f"{owner} has other columns in its held-out rows than in its training rows.",
        )
    names = list(columns) or header
    for name in names:
        if header.count(name) > 1:
            raise InputError(
                "column-named-twice", f"{owner} has two columns named {name!r}; names must differ."
            )
    for name in (*names, *categories):
        if name not in header:
            raise unknown(f"column of {owner},", name, header)
    chosen = [
        column(
            owner,
            name,
            [part.iloc[:, at.index(name)] for part, at in zip(parts, headers, strict=True)],
            categories,
        )
        for name in names
    ]
    return FeatureTable(sum(len(part) for part in parts), tuple(chosen))


def column(owner: str, name: str, parts: Parts, categories: Sequence[str] = ()) -> DataColumn:
    """Make a column of one or several arrays or series."""
    arrays = [_values(owner, f"column {name!r}", part) for part in parts]
    if name not in categories and all(array.dtype.kind == "f" for array in arrays):
        return numeric(name, np.concatenate(arrays), owner)
    cells = [cell for array in arrays for cell in array.tolist()]
    place: dict[tuple[type, Any], int] = {}
    codes = [place.setdefault((type(cell), cell), len(place)) for cell in cells]
    return categorical(name, [cell for _, cell in place], np.array(codes, dtype=np.int64))


def _values(owner: str, what: str, given: Any) -> NDArray[Any]:
    """Return one column as float64 with NaN, or as an array of texts and `None`."""
    objects: NDArray[Any]
    if hasattr(given, "isna") and hasattr(given, "to_numpy"):  # a pandas series of any kind
        objects = np.array(given.astype(object), dtype=object)
        objects[np.asarray(given.isna())] = None
    else:
        objects = _array(owner, what, given)
    if objects.ndim != 1:
        raise InputError(
            "column-shape",
            f"{owner} has a {what} of shape {objects.shape}; one value per row is expected.",
        )
    if objects.dtype.kind in "fiub":
        return np.asarray(objects, dtype=np.float64)
    if objects.dtype.kind in "mM" or any(
        type(cell).__name__ in ("Timestamp", "datetime", "date") for cell in objects
    ):
        raise InputError(
            "column-of-dates",
            f"{owner} has dates in {what}, which are neither numbers nor categories; leave it out.",
        )
    present = [cell for cell in objects.tolist() if cell is not None]
    if all(isinstance(cell, bool | int | float | np.number | np.bool_) for cell in present):
        return np.array([np.nan if cell is None else float(cell) for cell in objects.tolist()])
    return np.asarray(objects, dtype=object)


def _array(owner: str, what: str, given: Any) -> NDArray[Any]:
    given = given.detach().cpu().numpy() if hasattr(given, "detach") else given
    if isinstance(given, np.ma.MaskedArray):
        given = np.ma.filled(given.astype(np.float64), np.nan)
    try:
        return np.asarray(given)
    except (TypeError, ValueError):
        raise InputError(
            "not-an-array", f"{owner} has a {what} that does not form an array."
        ) from None


def _block(owner: str, parts: Parts) -> FeatureTable:
    arrays = [_array(owner, "feature array", part) for part in parts]
    for array in arrays:
        if array.dtype.kind not in "fiub":
            raise InputError(
                "features-not-numbers",
                f"{owner} has features that are not numbers ({array.dtype}): encode them, or use "
                "CSV.",
            )
        if array.ndim < 2 or array.shape[1:] != arrays[0].shape[1:] or 0 in array.shape[1:]:
            raise InputError(
                "features-shape",
                f"{owner} has features of shape {array.shape}; rows × features are expected.",
            )
    block: Matrix = np.concatenate(arrays).astype(np.float64, copy=False)
    if np.isinf(block).any():
        place = np.unravel_index(int(np.isinf(block).argmax()), block.shape)
        raise InputError(
            "infinite-value", f"{owner} has an infinite feature in row {int(place[0]) + 1}."
        )
    return FeatureTable(len(block), block=block.reshape(len(block), -1), shape=block.shape[1:])
