"""Read CSV files (plain or gzip) and Parquet files by pyarrow.

A column of a CSV file holds numbers where every cell is a number or missing, else categories. Whatever cannot be read
is named by line and column in one sentence.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError, shortened, unknown
from scaffpd.tabular.columns import MISSING, DataColumn, FeatureTable, Mask, Matrix, categorical, is_missing, numeric

Records = Iterator[tuple[int, list[str]]]

CSV, PARQUET = (".csv", ".csv.gz"), (".parquet", ".pq")
SAMPLE = 20  # lines to find out the separator by
SEPARATORS, DECIMALS = (",", ";", "\t", "|"), (".", ",")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")  # could be a decimal comma, too


def is_table(path: Path) -> bool:
    """Whether the name of a file is that of a table."""
    return path.name.lower().endswith((*CSV, *PARQUET))


def read_features(
    path: Path,
    target: str,
    columns: Sequence[str] | None = None,
    categories: Sequence[str] = (),
    separator: str | None = None,
    decimal: str | None = None,
) -> tuple[FeatureTable, DataColumn, int]:
    """Return the features and the target of all rows that have a target, and how many have none.

    Args:
        path: a CSV file, plain or gzip, or a Parquet file.
        target: the column to be predicted.
        columns: the features; `None` for all other columns.
        categories: columns of numbers that are names of categories.
        separator: between the columns of a CSV file: comma, semicolon, tab or pipe; `None` finds it out.
        decimal: the decimal mark in a CSV file: point or comma; `None` finds it out.
    """
    header = column_names(path, separator)
    names = list(columns) if columns is not None else [name for name in header if name != target]
    needed = {target: "target"}
    (goal, *features), dropped = read_columns(path, [target, *names], categories, needed, separator, decimal)
    return FeatureTable(len(goal.values), tuple(features)), goal, dropped[target]


def read_columns(
    path: Path,
    names: Sequence[str],
    categories: Sequence[str] = (),
    needed: Mapping[str, str] | None = None,
    separator: str | None = None,
    decimal: str | None = None,
) -> tuple[list[DataColumn], dict[str, int]]:
    """Return columns by name, of rows with a value in all columns that are `needed`, and how many rows lack which.

    Args:
        path: a CSV file, plain or gzip, or a Parquet file.
        names: the columns to return, in this order.
        categories: columns of numbers that are names of categories.
        needed: columns without which a row is left out, and what they are, as in {"ill": "target"}.
        separator: see `read_features`.
        decimal: see `read_features`.
    """
    header = column_names(path, separator)
    known = set(header)
    for name in (*names, *categories):
        if not name:
            raise InputError(
                f"Column {header.index('') + 1} of {path.name!r} has no name; name it in line 1, or choose "
                "data.columns."
            )
        if name not in known:
            raise unknown(f"column of {path.name!r},", name, [column for column in header if column])
    if decimal not in (None, *DECIMALS):
        raise InputError(f"The decimal mark is '.' or ',', got {decimal!r}.")
    text = path.name.lower().endswith(CSV)
    mark = _separator(path, separator) if text else ""
    cells = _csv_cells(path, header, names, mark) if text else _parquet_cells(path, names)
    if not len(cells[0]):
        raise InputError(f"{path.name!r} has column names but no rows.")
    kept, dropped = np.ones(len(cells[0]), dtype=bool), {}
    for name, what in (needed or {}).items():
        there = _present(cells[list(names).index(name)])
        dropped[name] = int((kept & ~there).sum())
        kept = kept & there
        if not kept.any():
            raise InputError(f"{path.name!r} has no row with a value in its {what} column {name!r}.")
    if not kept.all():
        cells = [_filtered(column, kept) for column in cells]
    made = _CsvColumns(path, mark, decimal, kept).column if text else partial(_parquet_column, path)
    return [made(name, own, name in categories) for name, own in zip(names, cells, strict=True)], dropped


def column_names(path: Path, separator: str | None = None) -> list[str]:
    """Return the names of all columns of a file, checked."""
    name = path.name.lower()
    if name.endswith(PARQUET):
        header, line = _parquet_names(path), None
    elif name.endswith(CSV):
        first = next(_records(path, _separator(path, separator)), None)
        if first is None:
            raise InputError(f"{path.name!r} is empty; a line with column names is expected first.")
        line, header = first[0], [cell.strip() for cell in first[1]]
    else:
        raise InputError(f"{path.name!r} is neither CSV nor Parquet; save it as one of them (.csv, .parquet).")
    for name, number in Counter(header).items():
        if name and number > 1:
            where = f" in line {line}" if line else ""
            raise InputError(f"{path.name!r} has two columns named {name!r}{where}; names must differ.")
    return header


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Import pyarrow, and turn what cannot be read into one sentence."""
    try:
        import pyarrow

        yield pyarrow
    except ImportError:
        raise InputError(f"Reading {path.name!r} needs pyarrow: pip install pyarrow.") from None
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise InputError(f"{path.name!r} is no gzip file, or is cut off.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path.name!r} is not UTF-8 text; save it as UTF-8.") from None
    except OSError as error:
        raise InputError(f"Cannot read the data file {str(path)!r}: {error.strerror or error}.") from None


# ------------------------------------------------------------------ CSV


def _separator(path: Path, given: str | None) -> str:
    """Find what stands between columns: what cuts the first rows into equally many cells, and the most of them."""
    if given is not None:
        if given not in SEPARATORS:
            raise InputError(f"The separator is a comma, a semicolon, a tab or '|', got {given!r}.")
        return given
    with _reading(path), _opened(path) as file:
        lines = list(islice(file, SAMPLE))
    fits = []
    for mark in SEPARATORS:
        try:
            widths = [len(row) for row in csv.reader(lines, delimiter=mark) if row] or [0]
        except csv.Error:  # too long a cell
            widths = [0]
        widths = widths[:-1] if len(widths) > 1 and len(lines) == SAMPLE else widths  # the last may go on
        fits.append((len(set(widths)) == 1 and widths[0] > 1, widths[0]))
    return SEPARATORS[fits.index(max(fits))]


def _opened(path: Path) -> Any:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    return opened(path, "rt", encoding="utf-8-sig", newline="")


def _records(path: Path, separator: str) -> Records:
    """Yield line numbers and cells, without blank lines."""
    with _reading(path), _opened(path) as file:
        reader = csv.reader(file, delimiter=separator, strict=True)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise InputError(f"{path.name!r} is broken in line {reader.line_num}: {error}.") from None
            if row:
                yield reader.line_num, row


def _checked(path: Path, separator: str, header: list[str]) -> Records:
    """Yield the rows below the header, each as long as the header."""
    for line, row in islice(_records(path, separator), 1, None):
        if len(row) != len(header):
            raise InputError(
                f"{path.name!r} has {len(row)} values in line {line}, but {len(header)} columns"
                + (f": the last value belongs to {header[len(row) - 1]!r}." if len(row) < len(header) else ".")
            )
        yield line, row


def _csv_cells(path: Path, header: list[str], names: Sequence[str], separator: str) -> list[Any]:
    """Read columns as pyarrow arrays of text."""
    place = {name: k for k, name in enumerate(header)}
    places = [place[name] for name in names]
    with _reading(path) as arrow:
        from pyarrow import csv as arrow_csv

        data = _content(path)
        quoted = b'"' in data
        if quoted:  # pyarrow is lenient about quotes
            for _ in _checked(path, separator, header):
                pass
        columns = [str(k) for k in range(len(header))]
        try:
            found = arrow_csv.read_csv(
                arrow.BufferReader(data),
                arrow_csv.ReadOptions(column_names=columns, skip_rows_after_names=1),
                arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=quoted),
                arrow_csv.ConvertOptions(
                    include_columns=list(dict.fromkeys(columns[k] for k in places)),
                    column_types=dict.fromkeys(columns, arrow.string()),
                    null_values=["NaN", *MISSING, *(cell.upper() for cell in MISSING)],
                    strings_can_be_null=True,
                ),
            )
            return [found.column(columns[k]) for k in places]
        except arrow.ArrowInvalid:
            rows = [row for _, row in _checked(path, separator, header)]  # says what is wrong, in most cases
            return [arrow.chunked_array([[row[k] for row in rows]], arrow.string()) for k in places]


def _number(cell: str, decimal: str) -> float | None:
    """A cell of text as a number, NaN where it stands for no value, or `None`."""
    if is_missing(cell):
        return math.nan
    if "_" in cell or (decimal == "," and "." in cell):
        return None
    try:
        return float(cell.replace(",", ".") if decimal == "," else cell)
    except ValueError:
        return None


def _content(path: Path) -> bytes:
    """Return the file from its first line that is not blank, checked to be UTF-8."""
    data = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    decoder = codecs.getincrementaldecoder("utf-8")()
    for k in range(0, len(data), 2**24):
        decoder.decode(data[k : k + 2**24], final=k + 2**24 >= len(data))
    return data.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")


class _CsvColumns:
    """Makes numbers or categories of the text in columns of one CSV file."""

    def __init__(self, path: Path, separator: str, decimal: str | None, kept: Mask) -> None:
        self.path, self.separator, self.kept = path, separator, kept
        # between commas, "3,5" may as well be two values
        self.decimals = (decimal,) if decimal else (".",) if separator == "," else DECIMALS
        self.marks: dict[str, str] = {}  # the decimal mark, and a column that shows it

    def column(self, name: str, cells: Any, chosen: bool) -> DataColumn:
        """Numbers where all cells are numbers, else (or where `chosen`) categories."""
        from pyarrow import ArrowInvalid, compute

        if not chosen and "." in self.decimals:
            try:
                values = _floats(cells)
                if len(self.decimals) == 2 and compute.any(compute.match_substring(cells, ".")).as_py():
                    self._mark(".", name)
                return self._numeric(name, values)
            except ArrowInvalid:  # spaces, other marks of missing values, a comma, or texts
                pass
        distinct, codes = _distinct(cells)
        if chosen:
            return categorical(name, distinct, codes)
        for decimal in self.decimals:
            numbers = [_number(cell, decimal) for cell in distinct]
            proof = decimal == "." or any("," in cell and not THOUSANDS.fullmatch(cell.strip()) for cell in distinct)
            if None not in numbers and (proof or len(self.decimals) == 1):
                if decimal == "," or any("." in cell for cell in distinct):
                    self._mark(decimal, name)
                return self._numeric(name, np.array(numbers, dtype=np.float64)[codes])
        return self._texts(name, distinct, codes)

    def _texts(self, name: str, distinct: list[str], codes: NDArray[Any]) -> DataColumn:
        numbers = np.array([_number(cell, self.decimals[0]) is not None for cell in distinct])
        row = int(numbers[codes].argmin())
        cell = distinct[codes[row]].strip()
        if DECIMAL_COMMA.fullmatch(cell):
            raise InputError(
                f"{self.path.name!r} has {cell!r} in column {name!r}, line {self._line(row)}: write numbers with a "
                "decimal point."
            )
        there = numbers & np.array([not is_missing(cell) for cell in distinct])
        odd = there[codes].sum() > len(codes) / 2
        note = f"is read as categories because of {shortened(cell)} in line {self._line(row)}" if odd else ""
        return categorical(name, distinct, codes, note)

    def _numeric(self, name: str, values: Matrix) -> DataColumn:
        if np.isinf(values).any():
            line = self._line(int(np.isinf(values).argmax()))
            raise InputError(f"{self.path.name!r} has an infinite value in column {name!r}, line {line}.")
        return numeric(name, values, repr(self.path.name))

    def _mark(self, decimal: str, name: str) -> None:
        self.marks.setdefault(decimal, name)
        if len(self.marks) == 2:
            raise InputError(
                f"{self.path.name!r} has decimal commas in column {self.marks[',']!r} and decimal points in column "
                f"{self.marks['.']!r}: write all numbers alike."
            )

    def _line(self, row: int) -> int:
        """The line in which a row that is kept ends."""
        at = int(np.flatnonzero(self.kept)[row])
        return next(islice(_records(self.path, self.separator), at + 1, None))[0]


def _distinct(cells: Any) -> tuple[list[Any], NDArray[Any]]:
    """The different cells, empty texts where there is none, and for each row the place of its own among them."""
    encoded = cells.combine_chunks().dictionary_encode(null_encoding="encode")
    distinct = ["" if cell is None else cell for cell in encoded.dictionary.to_pylist()]
    return distinct, np.frombuffer(encoded.indices.buffers()[1], np.int32, len(encoded))


def _present(cells: Any) -> Mask:
    """Which cells hold a value."""
    distinct, codes = _distinct(cells)
    there = np.array([cell == cell and not is_missing(str(cell)) for cell in distinct], dtype=bool)
    return np.asarray(there[codes])


# pyarrow's own ways from and to NumPy import pandas where it is installed


def _filtered(cells: Any, rows: Mask) -> Any:
    import pyarrow

    bits = pyarrow.py_buffer(np.packbits(rows, bitorder="little"))
    return cells.filter(pyarrow.Array.from_buffers(pyarrow.bool_(), len(rows), [None, bits]))


def _floats(cells: Any, safe: bool = True) -> Matrix:
    """The cells as numbers, NaN where there is none."""
    import pyarrow

    array = cells.cast(pyarrow.float64(), safe=safe).combine_chunks()
    there, values = array.buffers()
    numbers = np.frombuffer(values, np.float64, len(array), 8 * array.offset)
    if not array.null_count:
        return numbers
    bits = np.unpackbits(np.frombuffer(there, np.uint8), bitorder="little")
    return np.where(bits[array.offset : array.offset + len(array)], numbers, np.nan)


# ------------------------------------------------------------------ Parquet


def _parquet_names(path: Path) -> list[str]:
    """The columns of a file, without those that pandas has written as the index."""
    with _parquet(path) as file:
        schema = file.schema_arrow
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    return [name for name in schema.names if name not in index]


def _parquet_cells(path: Path, names: Sequence[str]) -> list[Any]:
    with _parquet(path) as file:
        found = file.read(columns=list(dict.fromkeys(names)))
    return [found.column(name) for name in names]


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    with _reading(path) as arrow:
        from pyarrow import parquet

        path.open("rb").close()
        try:
            yield parquet.ParquetFile(path)
        except (arrow.ArrowException, OSError) as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise InputError(f"{path.name!r} cannot be read as Parquet: {reason}.") from None


def _parquet_column(path: Path, name: str, cells: Any, chosen: bool) -> DataColumn:
    from pyarrow import types

    kind = cells.type
    if types.is_dictionary(kind):
        cells, kind = cells.cast(kind.value_type), kind.value_type
    if types.is_temporal(kind):
        raise InputError(
            f"{path.name!r} has dates in column {name!r}, which are neither numbers nor categories; leave it out."
        )
    if types.is_string(kind) or types.is_large_string(kind):
        return categorical(name, *_distinct(cells))
    if types.is_nested(kind) or types.is_binary(kind):
        raise InputError(f"{path.name!r} has values of type {kind} in column {name!r}; leave it out.")
    values = _floats(cells, safe=False)
    if not chosen:
        return numeric(name, values, repr(path.name))
    distinct, codes = np.unique(values, return_inverse=True)
    return categorical(name, distinct.tolist(), codes)
