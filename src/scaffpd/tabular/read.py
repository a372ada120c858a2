"""Read tables: CSV, Parquet and NPZ files, data frames and arrays."""

from __future__ import annotations

import csv
import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError, shortened, unknown

Matrix = NDArray[np.float64]
Codes = NDArray[np.int32]
Mask = NDArray[np.bool_]

NUMBER, CATEGORY, UNKNOWN = "number", "category", "unknown"
MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "?", "null"})
WHOLE = re.compile(r"([+-]?\d+)\.0*")


@dataclass(frozen=True)
class DataColumn:
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
        return sum(c.values.nbytes for c in self.columns) + (0 if self.block is None else self.block.nbytes)

    def take(self, rows: Mask) -> FeatureTable:
        """Some of the rows."""
        columns = tuple(DataColumn(c.name, c.kind, c.values[rows], c.categories, c.note) for c in self.columns)
        return FeatureTable(int(rows.sum()), columns, None if self.block is None else self.block[rows], self.shape)


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


def categorical(name: str, cells: Sequence[str | None], note: str = "") -> DataColumn:
    """A column of categories from cells, `None` where missing."""
    names = sorted({cell for cell in cells if cell is not None})
    place = {cell: k for k, cell in enumerate(names)}
    codes = np.fromiter((-1 if c is None else place[c] for c in cells), dtype=np.int32, count=len(cells))
    return DataColumn(name, CATEGORY, codes, tuple(names), note)


def numeric(owner: str, name: str, values: Matrix) -> DataColumn:
    """A column of numbers; infinite ones are refused."""
    if np.isinf(values).any():
        row = int(np.isinf(values).argmax())
        raise InputError(f"{owner} has an infinite value in column {name!r} (row {row + 1}).")
    return DataColumn(name, UNKNOWN if np.isnan(values).all() else NUMBER, values)


DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
Records = Iterator[tuple[int, list[str]]]


@dataclass
class _Seen:
    """What the first reading found in one column: a cell that is no number and its line, numbers, an infinite one."""

    line: int = 0
    cell: str = ""
    numbers: int = 0
    infinite: int = 0


def read_csv(
    path: Path, target: str, columns: Sequence[str] | None, categories: Sequence[str]
) -> tuple[FeatureTable, DataColumn, int]:
    """The features and the target of all rows that have a target, and how many have none."""
    header = column_names(path)
    names = list(columns) if columns is not None else [name for name in header if name != target]
    (goal, *features), there = read_columns(path, [target, *names], categories, needed=True)
    return FeatureTable(len(goal.values), tuple(features)), goal, int((~there).sum())


def read_columns(
    path: Path, names: Sequence[str], categories: Sequence[str], needed: bool = False
) -> tuple[list[DataColumn], Mask]:
    """Columns by name, and which rows are kept: all, or those with a value in the first column if it is `needed`."""
    header = column_names(path)
    for name in (*names, *categories):
        _find(path, header, name)
    places = [header.index(name) for name in names]
    seen, kept = _first_reading(path, header, places, needed)
    rows = int(kept.sum())
    if rows == 0:
        raise InputError(f"{path.name!r} has no row with a value in its target column {names[0]!r}.")
    texts = [bool(found.line) or name in categories for name, found in zip(names, seen, strict=True)]
    for name, found, text in zip(names, seen, texts, strict=True):
        if found.infinite and not text:
            raise InputError(f"{path.name!r} has an infinite value in column {name!r}, line {found.infinite}.")
    values = _second_reading(path, header, places, texts, kept)
    made = zip(names, values, seen, strict=True)
    return [_column(path, name, value, found, name in categories) for name, value, found in made], kept


def _column(path: Path, name: str, values: Matrix | list[str | None], seen: _Seen, chosen: bool) -> DataColumn:
    if isinstance(values, np.ndarray):
        return numeric(repr(path.name), name, values)
    if DECIMAL_COMMA.fullmatch(seen.cell) and not chosen:
        raise InputError(
            f"{path.name!r} has {seen.cell!r} in column {name!r}, line {seen.line}: write numbers with a decimal point."
        )
    odd = seen.numbers > len(values) / 2 and not chosen
    note = f"is read as categories because of {shortened(seen.cell)} in line {seen.line}" if odd else ""
    return categorical(name, values, note)


def _rows(path: Path) -> Records:
    """Line numbers and cells, blank lines left out, what cannot be read in one sentence."""
    try:
        with _opened(path) as file:
            reader = csv.reader(file, strict=True)
            while True:
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    raise InputError(f"{path.name!r} is broken in line {reader.line_num}: {error}.") from None
                if row:
                    yield reader.line_num, row
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise InputError(f"{path.name!r} is no gzip file, or is cut off.") from None
    except OSError as error:
        raise InputError(f"Cannot read the data file {str(path)!r}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path.name!r} is not UTF-8 text; save it as UTF-8.") from None


def _opened(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def column_names(path: Path) -> list[str]:
    """The first line of a file, checked."""
    first = next(_rows(path), None)
    if first is None:
        raise InputError(f"{path.name!r} is empty; a line with column names is expected first.")
    header = [cell.strip() for cell in first[1]]
    for name in header:
        if name and header.count(name) > 1:
            raise InputError(f"{path.name!r} has two columns named {name!r} in line {first[0]}; names must differ.")
    for mark, words in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and mark in header[0]:
            raise InputError(f"{path.name!r} has {words} between its columns (line {first[0]}); save it with commas.")
    return header


def _find(path: Path, header: list[str], name: str) -> None:
    if not name:
        raise InputError(
            f"Column {header.index('') + 1} of {path.name!r} has no name; name it in line 1, or choose data.columns."
        )
    if name not in header:
        raise unknown(f"column of {path.name!r},", name, [column for column in header if column])


def _checked(path: Path, header: list[str]) -> Records:
    """The rows below the header, each as long as the header."""
    rows = _rows(path)
    next(rows, None)
    for line, row in rows:
        if len(row) != len(header):
            raise InputError(
                f"{path.name!r} has {len(row)} values in line {line}, but {len(header)} columns"
                + (f": the last value belongs to {header[len(row) - 1]!r}." if len(row) < len(header) else ".")
            )
        yield line, row


def _first_reading(path: Path, header: list[str], places: list[int], needed: bool) -> tuple[list[_Seen], Mask]:
    """What kind of cells each column has, among rows that are kept (by the first of `places`)."""
    seen = [_Seen() for _ in places]
    kept: list[bool] = []
    pairs = list(zip(places, seen, strict=True))
    for line, row in _checked(path, header):
        kept.append(not needed or not is_missing(row[places[0]]))
        if not kept[-1]:
            continue
        for place, found in pairs:
            cell = row[place]
            number = parsed(cell)
            if number is not None:
                found.numbers += 1
                found.infinite = found.infinite or (line if math.isinf(number) else 0)
            elif not found.line and not is_missing(cell):
                found.line, found.cell = line, cell.strip()
    if not kept:
        raise InputError(f"{path.name!r} has column names but no rows.")
    return seen, np.array(kept)


def _second_reading(
    path: Path, header: list[str], places: list[int], texts: list[bool], kept: Mask
) -> list[Matrix | list[str | None]]:
    """Numbers as arrays, everything else as names of categories; equal names are stored once."""
    values: list[Matrix | list[str | None]] = [[] if text else np.full(int(kept.sum()), np.nan) for text in texts]
    pairs = list(zip(places, values, strict=True))
    known: dict[str, str | None] = {}
    k = 0
    for here, (_, row) in zip(kept, _checked(path, header), strict=True):
        if not here:
            continue
        for place, store in pairs:
            cell = row[place]
            if isinstance(store, list):
                if cell not in known:
                    known[cell] = None if is_missing(cell) else spelt(cell)
                store.append(known[cell])
            else:
                number = parsed(cell)
                store[k] = np.nan if number is None else number  # no number: missing, as the first reading has seen
        k += 1
    return values


Parts = Sequence[Any]  # the same thing of training and of held-out rows, or of all rows


def read_parquet(path: Path) -> Any:
    """A data frame."""
    if not path.is_file():
        raise InputError(f"Cannot read the data file {str(path)!r}: No such file or directory.")
    try:
        import pandas

        return pandas.read_parquet(path)
    except ImportError:
        raise InputError(
            f"Reading {path.name!r} needs pandas and pyarrow: pip install 'scaffpd[parquet]', or use CSV."
        ) from None
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(f"{path.name!r} cannot be read as Parquet: {reason}.") from None


def read_npz(path: Path, features: str, target: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two arrays of an NPZ file; nothing in it is executed."""
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise InputError(f"{path.name!r} is not an NPZ file of several arrays; write one with numpy.savez.")
            for name in (features, target):
                if name not in arrays.files:
                    raise unknown(f"array of {path.name!r},", name, arrays.files)
            return arrays[features], arrays[target]
    except OSError as error:
        raise InputError(f"Cannot read the data file {str(path)!r}: {error.strerror or 'it is cut off'}.") from None
    except (zipfile.BadZipFile, EOFError):
        raise InputError(f"{path.name!r} is not an NPZ file, or is cut off.") from None
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"{path.name!r} is no NPZ file of plain arrays: save numbers or texts by numpy.savez, no Python objects."
        ) from None


def is_frame(X: Any) -> bool:
    """Whether X has named columns."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def table(owner: str, parts: Parts, columns: Sequence[str] | None, categories: Sequence[str]) -> FeatureTable:
    """Features of one or several parts, one below the other."""
    if not is_frame(parts[0]):
        if columns is not None or categories:
            raise InputError(f"{owner} has features without names, so data.columns and data.categories cannot be used.")
        return _block(owner, parts)
    header = [str(name) for name in parts[0].columns]
    for part in parts:
        if not is_frame(part) or sorted(map(str, part.columns)) != sorted(header):
            raise InputError(f"{owner} has other columns in its held-out rows than in its training rows.")
    names = header if columns is None else list(columns)
    for name in names:
        if header.count(name) > 1:
            raise InputError(f"{owner} has two columns named {name!r}; names must differ.")
    for name in (*names, *categories):
        if name not in header:
            raise unknown(f"column of {owner},", name, header)
    place = [[str(name) for name in part.columns] for part in parts]
    chosen = [
        column(owner, name, [part.iloc[:, at.index(name)] for part, at in zip(parts, place, strict=True)], categories)
        for name in names
    ]
    return FeatureTable(sum(len(part) for part in parts), tuple(chosen))


def column(owner: str, name: str, parts: Parts, categories: Sequence[str] = ()) -> DataColumn:
    """One column of one or several parts."""
    arrays = [values(owner, f"column {name!r}", part) for part in parts]
    if name not in categories and all(array.dtype.kind == "f" for array in arrays):
        return numeric(owner, name, np.concatenate(arrays))
    cells: list[str | None] = []
    for array in arrays:
        cells += [None if cell is None or cell != cell else spelt(cell) for cell in array.tolist()]
    cells = [None if cell is None or is_missing(cell) else cell for cell in cells]
    return categorical(name, cells)


def values(owner: str, what: str, given: Any) -> NDArray[Any]:
    """One column as float64 with NaN, or as an array of texts and `None`."""
    objects: NDArray[Any]
    if hasattr(given, "isna") and hasattr(given, "to_numpy"):  # a pandas series, whatever it keeps its values in
        objects = np.array(given.astype(object), dtype=object)
        objects[np.asarray(given.isna())] = None
    else:
        objects = _array(owner, what, given)
    if objects.ndim != 1:
        raise InputError(f"{owner} has a {what} of shape {objects.shape}; one value per row is expected.")
    if objects.dtype.kind in "fiub":
        return np.asarray(objects, dtype=np.float64)
    if objects.dtype.kind in "mM" or any(type(cell).__name__ in ("Timestamp", "datetime", "date") for cell in objects):
        raise InputError(f"{owner} has dates in {what}, which are neither numbers nor categories; leave it out.")
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
        raise InputError(f"{owner} has a {what} that does not form an array.") from None


def _block(owner: str, parts: Parts) -> FeatureTable:
    arrays = [_array(owner, "feature array", part) for part in parts]
    for array in arrays:
        if array.dtype.kind not in "fiub":
            raise InputError(
                f"{owner} has features that are not numbers ({array.dtype}); encode them, or use a CSV file."
            )
        if array.ndim < 2 or array.shape[1:] != arrays[0].shape[1:] or 0 in array.shape[1:]:
            raise InputError(f"{owner} has features of shape {array.shape}; rows × features are expected.")
    block: Matrix = np.concatenate(arrays).astype(np.float64, copy=False)
    if np.isinf(block).any():
        place = np.unravel_index(int(np.isinf(block).argmax()), block.shape)
        raise InputError(f"{owner} has an infinite feature in row {int(place[0]) + 1}.")
    return FeatureTable(len(block), block=block.reshape(len(block), -1), shape=block.shape[1:])
