"""CSV files, read twice: once to see what is in each column, once to keep it. Only what is used takes memory."""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from scaffpd.errors import InputError, shortened, unknown
from scaffpd.tabular.columns import (
    Column,
    Mask,
    Matrix,
    Table,
    categorical,
    is_missing,
    numeric,
    parsed,
    spelt,
)

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
Rows = Iterator[tuple[int, list[str]]]


@dataclass
class _Seen:
    """What the first reading found in one column: a cell that is no number and its line, numbers, an infinite one."""

    line: int = 0
    cell: str = ""
    numbers: int = 0
    infinite: int = 0


def read_csv(
    path: Path, target: str, columns: Sequence[str] | None, categories: Sequence[str]
) -> tuple[Table, Column, int]:
    """The features and the target of all rows that have a target, and how many have none."""
    header = column_names(path)
    names = list(columns) if columns is not None else [name for name in header if name != target]
    (goal, *features), there = read_columns(path, [target, *names], categories, needed=True)
    return Table(len(goal.values), tuple(features)), goal, int((~there).sum())


def read_columns(
    path: Path, names: Sequence[str], categories: Sequence[str], needed: bool = False
) -> tuple[list[Column], Mask]:
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


def _column(path: Path, name: str, values: Matrix | list[str | None], seen: _Seen, chosen: bool) -> Column:
    if isinstance(values, np.ndarray):
        return numeric(repr(path.name), name, values)
    if DECIMAL_COMMA.fullmatch(seen.cell) and not chosen:
        raise InputError(
            f"{path.name!r} has {seen.cell!r} in column {name!r}, line {seen.line}: write numbers with a decimal point."
        )
    odd = seen.numbers > len(values) / 2 and not chosen
    note = f"is read as categories because of {shortened(seen.cell)} in line {seen.line}" if odd else ""
    return categorical(name, values, note)


def _rows(path: Path) -> Rows:
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


def _checked(path: Path, header: list[str]) -> Rows:
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
