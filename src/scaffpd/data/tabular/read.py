"""Make columns of a table's cells: numbers, categories or dates.

A column of texts holds numbers where every cell is a number or missing, dates where every cell is
one, else categories. What cannot be read is named by line and column in one sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from scaffpd.data.tabular.columns import (
    NUMBER,
    Codes,
    DataColumn,
    Mask,
    Matrix,
    categorical,
    dated,
    is_missing,
    numeric,
    spelt,
)
from scaffpd.data.tabular.formats import OpenTable
from scaffpd.data.tabular.settings import DECIMALS
from scaffpd.errors import InputError, shortened, unknown

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")  # could be a decimal comma, too
DAY = re.compile(r"(\d{1,2})([./])(\d{1,2})[./](\d{4})(.*)")
UNITS = "%‰€$£¥₹"  # marks that a column of numbers may have before or behind every one
MIDNIGHT = re.compile(r"( 00:00:00)?(\.0+)?$")


def read_columns(
    table: OpenTable,
    names: Sequence[str],
    categories: Sequence[str] = (),
    needed: Mapping[str, str] | None = None,
    decimal: str | None = None,
    missing: Collection[object] = (),
) -> tuple[list[DataColumn], dict[str, int]]:
    """Return columns by name, without rows that lack a needed value, and how many lack which.

    Args:
        table: what `open_table` returns.
        names: the columns to return, in this order.
        categories: columns of numbers that are names of categories.
        needed: columns without which a row is left out, and what they are, as in
            {"ill": "target"}; the texts of a "label" stay texts.
        decimal: the decimal mark in texts: point or comma; `None` finds it out.
        missing: values that stand for none, except of the client.
    """
    for name in (*names, *categories):
        if not name:
            raise InputError(
                "column-without-name",
                f"Column {table.names.index('') + 1} of {table.path.name!r} has no name; name it "
                "in line 1, or choose --columns (data.columns).",
            )
        if name not in table.names:
            raise unknown(f"column of {table.path.name!r},", name, filter(None, table.names))
    needed = needed or {}
    cells = [
        _decoded(table, name, () if needed.get(name) == "client" else missing) for name in names
    ]
    if not len(cells[0]):
        raise InputError("no-rows", f"{table.path.name!r} has column names but no rows.")
    used = np.ones(len(cells[0]), dtype=bool)
    dropped = {}
    for name, what in needed.items():
        there = _present(cells[list(names).index(name)])
        dropped[name] = int((used & ~there).sum())
        used = used & there
        if not used.any():
            raise InputError(
                "column-without-values",
                f"{table.path.name!r} has no row with a value in its {what} column {name!r}.",
            )
    if not used.all():
        cells = [_filtered(column, used) for column in cells]
    make = _Columns(table, decimal, used)
    found = [
        make.column(name, own, name in categories, needed.get(name, ""))
        for name, own in zip(names, cells, strict=True)
    ]
    return found, dropped


def rows_with(table: OpenTable, names: Sequence[str], missing: Collection[object] = ()) -> Mask:
    """Return which rows have a value in all of these columns: those that `read_columns` needs."""
    parts = [_present(_decoded(table, name, missing)) for name in names]
    return np.asarray(np.all(parts, axis=0))


def names_in(table: OpenTable, column: str, missing: Collection[object] = ()) -> list[str | None]:
    """Return the cells of a column as names, `None` where there is none."""
    if column not in table.names:
        raise unknown(f"column of {table.path.name!r},", column, filter(None, table.names))
    distinct, codes = _distinct(_decoded(table, column, missing))
    spelled = [None if c != c or is_missing(str(c)) else spelt(c) for c in distinct]
    return [spelled[code] for code in codes.tolist()]


class _Columns:
    """Makes numbers, categories or dates of the cells of one table."""

    def __init__(self, table: OpenTable, decimal: str | None, used: Mask) -> None:
        self.table = table
        self.used = used  # rows of the file
        # between commas, "3,5" may as well be two values
        commas = table.separator == ","
        self.decimals = (decimal,) if decimal else (".",) if commas else DECIMALS
        self.marks: dict[str, str] = {}  # the decimal mark, and a column that shows it

    def column(self, name: str, cells: ChunkedArray, chosen: bool, what: str) -> DataColumn:
        """Make one column: categories where they are `chosen`; no dates where it is the target."""
        made = self._column(name, cells, chosen, what)
        if what == "time" and made.kind == NUMBER and (made.values <= 0).any():
            row = int((made.values <= 0).argmax())
            raise InputError(
                "time-not-positive",
                f"{self.table.path.name!r} has the time {made.values[row]:g} in column {name!r}, "
                f"{self._place(row)}: times are above zero.",
            )
        return made

    def _column(self, name: str, cells: ChunkedArray, chosen: bool, what: str) -> DataColumn:
        from pyarrow import ArrowInvalid, compute

        if not self.table.texts:
            return self._typed(name, cells, chosen)
        if not chosen and "." in self.decimals:
            try:
                values = _floats(cells)
                if (
                    len(self.decimals) == 2
                    and compute.any(compute.match_substring(cells, ".")).as_py()
                ):
                    self._mark(".", name)
                return self._numeric(name, values)
            except ArrowInvalid:  # spaces, other marks of missing values, a comma, or texts
                pass
        distinct, codes = _distinct(cells)
        if chosen:
            return categorical(name, distinct, codes)
        unit = "" if what == "label" else unit_of(distinct)
        bare = [cell.replace(unit, "").strip() for cell in distinct] if unit else distinct
        for decimal in self.decimals:
            numbers = [number(cell, decimal) for cell in bare]
            proof = decimal == "." or any(
                "," in cell and not THOUSANDS.fullmatch(cell.strip()) for cell in bare
            )
            if None not in numbers and (proof or len(self.decimals) == 1):
                if decimal == "," or any("." in cell for cell in bare):
                    self._mark(decimal, name)
                return self._numeric(name, np.array(numbers, dtype=np.float64)[codes], unit)
        found = None if what in ("label", "target") else self._dates(name, distinct, codes)
        return found or self._texts(name, distinct, codes)

    def _dates(self, name: str, distinct: list[str], codes: Codes) -> DataColumn | None:
        cells = ["" if is_missing(cell) else cell.strip() for cell in distinct]
        example = next((cell for cell in cells if cell), "")
        days = _all(_days(cells), cells) if example else None
        return None if days is None else dated(name, np.array(days)[codes], example)

    def _texts(self, name: str, distinct: list[str], codes: Codes) -> DataColumn:
        numbers = np.array([number(cell, self.decimals[0]) is not None for cell in distinct])
        row = int(numbers[codes].argmin())
        cell = distinct[codes[row]].strip()
        if DECIMAL_COMMA.fullmatch(cell):
            raise InputError(
                "decimal-mark-unclear",
                f"{self.table.path.name!r} has {cell!r} in column {name!r}, {self._place(row)}: "
                "write numbers with a decimal point, or say --decimal , or --decimal . "
                "(data.decimal).",
            )
        there = numbers & np.array([not is_missing(cell) for cell in distinct])
        odd = there[codes].sum() > len(codes) / 2
        note = (
            f"is read as categories because of {shortened(cell)} in {self._place(row)}"
            if odd
            else ""
        )
        return categorical(name, distinct, codes, note)

    def _typed(self, name: str, cells: ChunkedArray, chosen: bool) -> DataColumn:
        """Make a column that says itself what it holds."""
        from pyarrow import string, types

        kind = cells.type
        if types.is_temporal(kind):
            distinct, codes = _distinct(cells.cast(string()))
            if chosen:
                return categorical(name, [MIDNIGHT.sub("", cell) for cell in distinct], codes)
            found = _all(_days(distinct), [cell.split(".")[0] for cell in distinct])
            return dated(name, np.array(found)[codes], next(filter(None, distinct), ""))
        if chosen or types.is_string(kind) or types.is_large_string(kind):
            return categorical(name, *_distinct(cells))
        return self._numeric(name, _floats(cells, safe=False))

    def _numeric(self, name: str, values: Matrix, unit: str = "") -> DataColumn:
        note = f"is read as numbers in {unit}" if unit else ""
        if len(self.decimals) == 2 and self.marks.get(",") == name:
            note = "is read with decimal commas, as the rest of the file is"
        made = numeric(name, values, repr(self.table.path.name), self._place)
        return replace(made, note="; it ".join(filter(None, (note, made.note))))

    def _mark(self, decimal: str, name: str) -> None:
        self.marks.setdefault(decimal, name)
        if len(self.marks) == 2:
            raise InputError(
                "two-decimal-marks",
                f"{self.table.path.name!r} has decimal commas in column {self.marks[',']!r} and "
                f"decimal points in column {self.marks['.']!r}: use one decimal mark.",
            )

    def _place(self, row: int) -> str:
        return self.table.place(int(np.flatnonzero(self.used)[row]))


# ------------------------------------------------------------------ cells of text


def _all(read: Callable[[str], float | None], cells: Sequence[str]) -> list[float] | None:
    """Read all cells, NaN of empty ones; `None` where one cannot be read."""
    found: list[float] = []
    for cell in cells:
        value = read(cell) if cell else math.nan
        if value is None:
            return None
        found.append(value)
    return found


def unit_of(cells: Sequence[str]) -> str:
    """Return the mark, such as % or €, that all cells have before or behind a number, or ""."""
    there = [cell.strip() for cell in cells if not is_missing(cell)]
    marks = {mark for cell in there[:1] for mark in (cell[0], cell[-1]) if mark in UNITS}
    for mark in marks:
        if all(cell.count(mark) == 1 and mark in (cell[0], cell[-1]) for cell in there):
            return mark
    return ""


def number(cell: str, decimal: str) -> float | None:
    """Return a cell of text as a number, NaN where it stands for no value, or `None`."""
    if is_missing(cell):
        return math.nan
    if "_" in cell or (decimal == "," and "." in cell):
        return None
    try:
        return float(cell.replace(",", ".") if decimal == "," else cell)
    except ValueError:
        return None


def _days(cells: Sequence[str]) -> Callable[[str], float | None]:
    """Read days since 1970: 2024-12-31 14:00, 31.12.2024, and 12/31/2024 where it is clear."""
    firsts = [(int(found[1]), int(found[3])) for found in map(DAY.fullmatch, cells) if found]
    monthly = any(second > 12 for _, second in firsts)

    def read(cell: str) -> float | None:
        cell = re.sub(r"^(\d{4})/(\d\d)/(\d\d)", r"\1-\2-\3", cell)
        found = DAY.fullmatch(cell)
        if found:
            first = int(found[1])
            second = int(found[3])
            if found[2] == "/" and not monthly and not any(one > 12 for one, _ in firsts):
                return None  # the third of May, or the fifth of March
            day, month = (second, first) if monthly else (first, second)
            cell = f"{found[4]}-{month:02}-{day:02}{found[5]}"
        elif not re.match(r"\d{4}-\d\d-\d\d", cell):
            return None
        try:
            given = datetime.fromisoformat(cell)
        except ValueError:
            return None
        # what the clock there shows, in any zone
        return given.replace(tzinfo=UTC).timestamp() / 86400

    return read


# ------------------------------------------------------------------ from pyarrow
# without its own ways to NumPy: they import pandas


def _decoded(table: OpenTable, name: str, codes: Collection[object]) -> ChunkedArray:
    """Return cells, codes as null; refuse all but numbers, texts, categories and dates."""
    from pyarrow import array, compute, scalar, types

    cells = table.columns[name]
    kind = cells.type
    if types.is_nested(kind) or re.match("duration|time(32|64)|.*binary", str(kind)):
        raise InputError(
            "column-type",
            f"{table.path.name!r} has values of type {kind} in column {name!r}; leave it out.",
        )
    cells = cells.cast(kind.value_type) if types.is_dictionary(kind) else cells
    coded = (
        [cell for cell in _distinct(cells)[0] if cell != "" and is_missing(str(cell), codes)]
        if codes
        else []
    )
    there = compute.is_in(cells, value_set=array(coded, cells.type)) if coded else False
    return compute.if_else(there, scalar(None, cells.type), cells) if coded else cells


def _distinct(cells: ChunkedArray) -> tuple[list[str], Codes]:
    """Return the different cells, "" where there is none, and every row's place among them."""
    encoded = cells.combine_chunks().dictionary_encode(null_encoding="encode")
    distinct = ["" if cell is None else cell for cell in encoded.dictionary.to_pylist()]
    return distinct, np.frombuffer(encoded.indices.buffers()[1], np.int32, len(encoded))


def _present(cells: ChunkedArray) -> Mask:
    distinct, codes = _distinct(cells)
    there = np.array([cell == cell and not is_missing(str(cell)) for cell in distinct], dtype=bool)
    return np.asarray(there[codes])


def _filtered(cells: ChunkedArray, rows: Mask) -> ChunkedArray:
    import pyarrow

    bits = pyarrow.py_buffer(np.packbits(rows, bitorder="little"))
    return cells.filter(pyarrow.Array.from_buffers(pyarrow.bool_(), len(rows), [None, bits]))


def _floats(cells: ChunkedArray, safe: bool = True) -> Matrix:
    """Return cells as numbers, NaN where there is none."""
    import pyarrow

    array = cells.cast(pyarrow.float64(), safe=safe).combine_chunks()
    there, values = array.buffers()
    numbers = np.frombuffer(values, np.float64, len(array), 8 * array.offset)
    if not array.null_count:
        return numbers
    bits = np.unpackbits(np.frombuffer(there, np.uint8), bitorder="little")
    return np.where(bits[array.offset : array.offset + len(array)], numbers, np.nan)
