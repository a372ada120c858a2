"""Cells that are read one by one: what is in one has no part in how another one is read.

Usually the cells of a column say together what they mean: one text makes a column of numbers one of
categories. Where a silo's answers have noise, a single cell must not do that, nor end a run. So an
agreement's columns are read cell by cell, and a cell that is none of what was agreed is missing:
"3,5", "1e400" and "x" among numbers, 2 among the labels 0 and 1. The decimal mark is a point unless
somebody says so, the separator is that of the header, and a line that is too short or too long is a
row without values.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from scaffpd.data.tabular.columns import (
    CATEGORY,
    NUMBER,
    DataColumn,
    Matrix,
    categorical,
    is_missing,
    spelt,
)
from scaffpd.data.tabular.formats import (
    BOMS,
    EXCEL,
    SEPARATORS,
    TEXT,
    kind_of,
    open_table,
    reading,
    tables_of,
)
from scaffpd.data.tabular.read import number
from scaffpd.errors import InputError, unknown

TRUTHS = {"true": 1.0, "false": 0.0}
Cells = Sequence[object]
T = TypeVar("T")


def open_cells(path: Path) -> dict[str, Cells]:
    """Return the cells of all columns of a table, or of all tables of a folder, by name."""
    if path.is_dir():
        parts = [open_cells(file) for file in tables_of(path)]
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: [cell for part in parts for cell in part[name]] for name in names}
    with reading(path):
        kind = kind_of(path)
        if kind in TEXT:
            data = path.read_bytes()
            rows = _lines(gzip.decompress(data) if path.suffix.lower() == ".gz" else data)
        elif kind in EXCEL:
            rows = _sheet(path)
        else:
            columns = open_table(path).columns
            return {name: columns[name].to_pylist() for name in columns.column_names}
        header = ["" if cell is None else str(cell).strip() for cell in next(rows, ())]
        blank: list[object] = [None] * len(header)
        cells = [row if len(row) == len(header) else blank for row in rows]
    for name, times in Counter(filter(None, header)).items():
        if times > 1:
            raise InputError(
                "column-named-twice",
                f"{path.name!r} has two columns named {name!r}; names must differ.",
            )
    if not cells:
        raise InputError("no-rows", f"{path.name!r} has column names but no rows.")
    return dict(zip(header, zip(*cells, strict=True), strict=True))


def cells_of(table: Mapping[str, Cells], name: str, of: str) -> Cells:
    if name not in table:
        raise unknown(f"column of {of!r},", name, filter(None, table))
    return table[name]


def as_number(cell: object, decimal: str = ".", missing: Collection[object] = ()) -> float:
    if isinstance(cell, str):
        text = cell.strip().lower()
        found = TRUTHS.get(text, None if is_missing(cell, missing) else number(cell, decimal))
    else:
        try:
            found = float(cell)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            found = None
        if found is not None and missing and is_missing(str(cell), missing):
            found = None
    return found if found is not None and math.isfinite(found) else math.nan


def as_text(cell: object, missing: Collection[object] = ()) -> str | None:
    if cell is None or cell != cell or is_missing(str(cell), missing):
        return None
    return spelt(cell)


def _each(read: Callable[[object], T], cells: Cells) -> list[T]:
    """Read all cells, each different text once."""
    known = {cell: read(cell) for cell in {cell for cell in cells if isinstance(cell, str)}}
    return [known[cell] if isinstance(cell, str) else read(cell) for cell in cells]


def texts(cells: Cells, missing: Collection[object] = ()) -> list[str | None]:
    return _each(lambda cell: as_text(cell, missing), cells)


def numbers(cells: Cells, decimal: str = ".", missing: Collection[object] = ()) -> Matrix:
    return np.array(_each(lambda cell: as_number(cell, decimal, missing), cells), dtype=np.float64)


def read_cells(
    name: str, cells: Cells, kind: str, decimal: str = ".", missing: Collection[object] = ()
) -> DataColumn:
    if kind != CATEGORY:
        return DataColumn(name, NUMBER, numbers(cells, decimal, missing))
    found = texts(cells, missing)
    place = {text: k for k, text in enumerate(dict.fromkeys(found))}
    return categorical(name, [*place], np.array([place[text] for text in found], dtype=np.int32))


def label_places(
    cells: Cells, labels: Sequence[object], decimal: str = ".", missing: Collection[object] = ()
) -> Matrix:
    """Return the place of every cell's label among those agreed; NaN where it is none of them."""
    if all(isinstance(label, int) for label in labels):
        given = [*map(spelt, numbers(cells, decimal, missing))]
    else:
        given = [text or "" for text in texts(cells, missing)]
    place = {str(label): k for k, label in enumerate(labels)}
    found = [place.get(text, math.nan) for text in given]
    return np.array(found, dtype=np.float64)


def _lines(data: bytes) -> Iterator[Sequence[object]]:
    encoding = next((name for mark, name in BOMS.items() if data.startswith(mark)), "utf-8")
    # bytes that are no UTF-8 are Windows-1252 where they stand, and nowhere else
    text = data.decode(encoding, "scaffpd-bytes").lstrip("\ufeff").lstrip("\r\n")
    text = text.replace("\0", "\ufffd")
    header = re.split("[\r\n]", text, maxsplit=1)[0]
    cut = {mark: len(next(csv.reader([header], delimiter=mark), ())) for mark in SEPARATORS}
    separator = max(SEPARATORS, key=lambda mark: cut[mark])
    longest = csv.field_size_limit(len(text) + 1)
    try:
        lines = io.StringIO(text, newline="")
        yield from [row for row in csv.reader(lines, delimiter=separator) if row]
    finally:
        csv.field_size_limit(longest)


def _bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error("scaffpd-bytes", _bytes)


def _sheet(path: Path) -> Iterator[Sequence[object]]:
    """Yield the rows of the first sheet, the header first; none is left out for being empty."""
    from openpyxl import load_workbook

    try:
        data = io.BytesIO(path.read_bytes())  # openpyxl leaves a file open
        sheet = load_workbook(data, read_only=True, data_only=True).worksheets[0]
    except (KeyError, ValueError, IndexError):
        raise InputError("empty-sheet", f"{path.name!r} has no sheet.") from None
    width = 0
    for row in sheet.iter_rows(values_only=True):
        if width or any(cell is not None for cell in row):
            width = width or len(row)
            yield [*row, *[None] * width][:width]
