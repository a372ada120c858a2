"""Open tables as they come: CSV in any encoding, Parquet, JSON lines and Excel, packed or not, one file or a folder.

A CSV file holds texts, and `scaffpd.data.tabular.read` finds out what they mean; the other formats say it themselves.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.data.tabular.columns import MISSING, is_missing
from scaffpd.errors import InputError
from scaffpd.numbers import several

Records = Iterator[tuple[int, list[str]]]

TEXT = (".csv", ".tsv", ".txt")
PACKED = (".gz", ".zip")
PARQUET = (".parquet", ".pq")
LINES = (".json", ".jsonl", ".ndjson")
EXCEL = (".xlsx",)
ACCEPTED = ".csv, .tsv, .json, .xlsx or .parquet, also in .gz or .zip"
NULLS = ["NaN", *MISSING, *(cell.upper() for cell in MISSING)]
SAMPLE = 20  # lines to find out the separator by
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "pipes"}
BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
FILE = "file"  # the column that says which file of a folder a row is from


def is_table(path: Path) -> bool:
    """Return whether a file, by its name, or a folder, by what is in it, holds a table."""
    if path.is_dir():
        return any(is_table(file) for file in path.iterdir() if file.is_file())
    return bool(_kind(path))


def _kind(path: Path) -> str:
    """Return the ending that says what a file holds, without that of its packing; empty where it is no table."""
    name = path.name.lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    found = next(
        (ending for ending in (*TEXT, *PARQUET, *LINES, *EXCEL) if name.endswith(ending)), ""
    )
    return found or (TEXT[0] if path.name.lower().endswith(".zip") else "")


@dataclass(frozen=True)
class OpenTable:
    """A table that can be asked for the cells of its columns."""

    path: Path
    names: list[str]  # of all columns
    cells: Callable[..., list[Any]] = field(
        repr=False
    )  # these columns as arrays of pyarrow, see `CsvText.cells`
    place: Callable[[int], str] = field(
        default=lambda row: f"row {row + 1}", repr=False
    )  # where a row is, in words
    texts: bool = False  # whether cells are texts that may stand for numbers
    separator: str = ","  # between the columns of a CSV file
    remarks: tuple[str, ...] = ()  # how the file was read, where that had to be found out


def open_table(path: Path, separator: str | None = None, more: Sequence[Path] = ()) -> OpenTable:
    """Open a file; `more` of them, or all tables of a folder, become one with a column `file`.

    Args:
        path: the file or folder.
        separator: between the columns of a CSV file: comma, semicolon, tab or pipe; `None` finds it out.
        more: files with the same columns.
    """
    if separator is not None and separator not in SEPARATORS:
        raise InputError(
            "separator-comma-semicolon",
            f"The separator is a comma, a semicolon, a tab or '|', got {separator!r}.",
        )
    if (path / "config.toml").exists() and (path / "run.json").exists():
        raise InputError(
            "folder-run-name",
            f"{str(path)!r} is the folder of a run: name its settings, {str(path / 'config.toml')!r}.",
        )
    if path.is_dir() and not more:
        files = sorted(file for file in path.iterdir() if file.is_file() and _kind(file))
        if not files:
            raise InputError(
                "folder-holds-table", f"The folder {path.name!r} holds no table ({ACCEPTED})."
            )
        return _several(path, files, separator)
    if more:
        return _several(path, [path, *more], separator)
    kind = _kind(path)
    if not kind:
        raise InputError(
            "table-read-save", f"{path.name!r} is no table that can be read: save it as {ACCEPTED}."
        )
    with _reading(path) as arrow:
        data = _unpacked(path)
        if kind in TEXT:
            text = CsvText(path, *_utf8(path, data), separator)
            found = OpenTable(
                path, text.names, text.cells, text.place, True, text.separator, text.remarks
            )
        else:
            read = _parquet if kind in PARQUET else _lines if kind in LINES else _excel
            table = read(path, data, arrow)
            found = OpenTable(
                path,
                list(table.column_names),
                lambda names, raw=False: [table[name] for name in names],
            )
    _check_names(found)
    return found


def _several(path: Path, files: Sequence[Path], separator: str | None) -> OpenTable:
    """Open several files as one table with a column `file`: their names, as far as these tell them apart."""
    for file in files:
        if file.is_dir():
            raise InputError(
                "folder-name-folder",
                f"{file.name!r} is a folder: name one folder, or several files.",
            )
        if not file.exists():
            raise InputError("file-several", f"There is no file {str(file)!r}.")
    folders = [[f.parts[-k] for f in files] for k in range(2, min(len(f.parts) for f in files))]
    below = [os.path.relpath(f, os.path.commonpath([f.absolute() for f in files])) for f in files]
    for labels in ([f.name.split(".")[0] for f in files], [f.name for f in files], *folders, below):
        if len(set(labels)) == len(labels):
            found = stacked(path, [open_table(file, separator) for file in files], labels)
            named = f": {', '.join(labels[:6])}{' and others' if len(labels) > 6 else ''}"
            where = f" in {path.name!r}" if path.is_dir() else named
            return replace(
                found, remarks=(f"{several(len(files), 'file')}{where}.", *found.remarks)
            )
    again = next(file for file in files if list(files).count(file) > 1)
    raise InputError("named-twice", f"{again.name!r} is named twice.")


def _check_names(table: OpenTable) -> None:
    for name, number in Counter(table.names).items():
        if name and number > 1:
            where = f" in {table.place(-1)}" if table.texts else ""
            raise InputError(
                "two-columns-named",
                f"{table.path.name!r} has two columns named {name!r}{where}; names must differ.",
            )


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Import pyarrow, and turn what cannot be read into one sentence."""
    try:
        import pyarrow

        yield pyarrow
    except ImportError as error:
        needed = "openpyxl" if "openpyxl" in str(error) else "pyarrow"
        raise InputError(
            "reading-pip-install", f"Reading {path.name!r} needs {needed}: pip install {needed}."
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError, zipfile.BadZipFile):
        packing = {".gz": "gzip", ".zip": "zip"}.get(path.suffix.lower(), "Excel")
        raise InputError(
            "file-cut-off", f"{path.name!r} is no {packing} file, or is cut off."
        ) from None
    except OSError as error:
        raise InputError(
            "read-data-file", f"Cannot read the data file {str(path)!r}: {error.strerror or error}."
        ) from None


def _unpacked(path: Path) -> bytes:
    ending = path.suffix.lower()
    if ending == ".gz":
        return gzip.decompress(path.read_bytes())
    if ending != ".zip":
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        files = [
            name
            for name in archive.namelist()
            if not name.endswith("/") and not name.startswith("__MACOSX")
        ]
        if len(files) != 1:
            raise InputError(
                "holds-unpack-name",
                f"{path.name!r} holds {several(len(files), 'file')}: unpack it and name the folder.",
            )
        if _kind(Path(files[0])) not in TEXT:
            raise InputError(
                "holds-unpack-name",
                f"{path.name!r} holds {files[0]!r}: unpack it and name that file.",
            )
        return archive.read(files[0])


def _utf8(path: Path, data: bytes) -> tuple[bytes, str]:
    """Return a text in UTF-8, and the encoding that it had."""
    encoding = next((name for mark, name in BOMS.items() if data.startswith(mark)), "")
    zeros = [data[k:4096:2].count(0) for k in (0, 1)]
    if not encoding and 8 * max(zeros) > len(
        data[:4096]
    ):  # of plain letters, every other byte is zero
        encoding = "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    for name in (encoding,) if encoding else ("utf-8", "cp1252", "latin-1"):
        try:
            if name == "utf-8":
                decoder = codecs.getincrementaldecoder(name)()
                for k in range(0, len(data), 2**24):
                    decoder.decode(data[k : k + 2**24], final=k + 2**24 >= len(data))
                text = data.removeprefix(codecs.BOM_UTF8)
            else:
                text = data.decode(name).removeprefix("\ufeff").encode()
        except UnicodeDecodeError:
            continue
        if b"\0" in text:
            break
        return text, {"cp1252": "Windows-1252 (Latin-1)"}.get(name, name.upper()[:6].rstrip("-"))
    raise InputError("text-save", f"{path.name!r} is no text: save it as {ACCEPTED}.")


@dataclass
class CsvText:
    """A CSV file: texts between separators."""

    path: Path
    data: bytes = field(repr=False)  # in UTF-8
    encoding: str
    given: str | None  # the separator, where it is given

    def __post_init__(self) -> None:
        body = self.data.lstrip(b"\r\n")
        blank = self.data[: len(self.data) - len(body)].replace(b"\r\n", b"\n")
        self.data, self.blank = body, len(blank)  # lines before the first one that says something

    @cached_property
    def separator(self) -> str:
        """Return the separator that cuts the first rows into equally many cells, and the most of them."""
        if self.given is not None:
            return self.given
        lines = list(islice(self._text(), SAMPLE))
        fits = []
        for mark in SEPARATORS:
            try:
                widths = [len(row) for row in csv.reader(lines, delimiter=mark) if row] or [0]
            except csv.Error:  # too long a cell
                widths = [0]
            widths = (
                widths[:-1] if len(widths) > 1 and len(lines) == SAMPLE else widths
            )  # the last may go on
            fits.append((len(set(widths)) == 1 and widths[0] > 1, widths[0]))
        return list(SEPARATORS)[fits.index(max(fits))]

    @cached_property
    def names(self) -> list[str]:  # read once
        """The names in the first line."""
        records = self._records()
        first = next(records, None)
        second = next(records, None)
        if first is None:
            raise InputError(
                "empty-line-column",
                f"{self.path.name!r} is empty; a line with column names is expected first.",
            )
        said, then = (
            [cell.strip() for cell in row[1] if cell.strip()] for row in (first, second or first)
        )
        if len(said) == 1 < len(then):
            raise InputError(
                "begins-delete-stands",
                f"{self.path.name!r} begins with {said[0]!r}: delete what stands above the column names.",
            )
        return [cell.strip() for cell in first[1]]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Describe how the file was read, if that was detected."""
        usual = {".tsv": "\t"}.get(_kind(self.path), ",")
        found = (
            []
            if self.separator == usual or self.given
            else [f"{SEPARATORS[self.separator]} between columns"]
        )
        found = ([] if self.encoding == "UTF-8" else [f"{self.encoding} text"]) + found
        return (f"{self.path.name!r} is read as {' with '.join(found)}.",) if found else ()

    def place(self, row: int) -> str:
        """Say where a row is."""
        return f"line {next(islice(self._records(), row + 1, None))[0]}"

    def cells(self, names: Sequence[str], raw: bool = False) -> list[Any]:
        """Return these columns as arrays of pyarrow; missing values are none, or as they are written if `raw`."""
        at = {name: k for k, name in enumerate(self.names)}
        places = [at[name] for name in names]
        with _reading(self.path) as arrow:
            from pyarrow import csv as arrow_csv

            quoted = b'"' in self.data
            if quoted:  # pyarrow is lenient about quotes
                for _ in self._rows():
                    pass
            columns = [str(k) for k in range(len(self.names))]
            try:
                found = arrow_csv.read_csv(
                    arrow.BufferReader(self.data),
                    arrow_csv.ReadOptions(column_names=columns, skip_rows_after_names=1),
                    arrow_csv.ParseOptions(delimiter=self.separator, newlines_in_values=quoted),
                    arrow_csv.ConvertOptions(
                        include_columns=list(dict.fromkeys(columns[k] for k in places)),
                        column_types=dict.fromkeys(columns, arrow.string()),
                        null_values=[] if raw else NULLS,
                        strings_can_be_null=True,
                    ),
                )
                return [found.column(columns[k]) for k in places]
            except arrow.ArrowInvalid:
                rows = [row for _, row in self._rows()]  # says what is wrong, in most cases
                return [
                    arrow.chunked_array([[row[k] for row in rows]], arrow.string()) for k in places
                ]

    def _text(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BytesIO(self.data), "utf-8", newline="")

    def _records(self) -> Records:
        """Yield line numbers and cells, without blank lines."""
        reader = csv.reader(self._text(), delimiter=self.separator, strict=True)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                line = reader.line_num + self.blank
                raise InputError(
                    "broken-line", f"{self.path.name!r} is broken in line {line}: {error}."
                ) from None
            if row:
                yield reader.line_num + self.blank, row

    def _rows(self) -> Records:
        """Yield the rows below the header, each as long as the header."""
        header = self.names
        for line, row in islice(self._records(), 1, None):
            if len(row) != len(header):
                raise InputError(
                    "values-line-columns",
                    f"{self.path.name!r} has {len(row)} values in line {line}, but {len(header)} columns"
                    + (
                        f": the last value belongs to {header[len(row) - 1]!r}."
                        if len(row) < len(header)
                        else "."
                    ),
                )
            yield line, row


def _parquet(path: Path, data: bytes, arrow: Any) -> Any:
    """Read all but the columns that pandas has written as the index."""
    from pyarrow import parquet

    try:
        found = parquet.ParquetFile(arrow.BufferReader(data)).read()
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            "read-parquet", f"{path.name!r} cannot be read as Parquet: {reason}."
        ) from None
    index = (found.schema.pandas_metadata or {}).get("index_columns", [])
    return found.drop_columns([name for name in index if name in found.column_names])


def _lines(path: Path, data: bytes, arrow: Any) -> Any:
    """Read one JSON object a line, or a list of them."""
    text = _utf8(path, data)[0].strip()
    try:
        given = (
            json.loads(text)
            if text.startswith(b"[")
            else [json.loads(row) for row in text.splitlines() if row]
        )
    except ValueError as error:
        raise InputError("read-json", f"{path.name!r} cannot be read as JSON: {error}.") from None
    if not given or not all(isinstance(row, dict) for row in given):
        raise InputError(
            "holds-rows-json", f"{path.name!r} holds no rows: one JSON object a line is expected."
        )
    names = dict.fromkeys(name for row in given for name in row)
    return _typed(arrow, [(name, [row.get(name) for row in given]) for name in names])


def _excel(path: Path, data: bytes, arrow: Any) -> Any:
    """Read the first sheet, whose first row names the columns."""
    from openpyxl import load_workbook
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        header, *rows = (
            [*row]
            for row in book.worksheets[0].iter_rows(values_only=True)
            if any(c is not None for c in row)
        )
    except (InvalidFileException, KeyError, ValueError):
        raise InputError(
            "sheet-column-names", f"{path.name!r} has no sheet with column names in its first row."
        ) from None
    names = ["" if cell is None else str(cell).strip() for cell in header]
    return _typed(arrow, [(name, [row[k] for row in rows]) for k, name in enumerate(names) if name])


def _typed(arrow: Any, columns: list[tuple[str, list[Any]]]) -> Any:
    """Make a table of cells; columns of several types become texts."""
    made = []
    for _, given in columns:
        cells = [None if isinstance(cell, str) and is_missing(cell) else cell for cell in given]
        try:
            made.append(arrow.array(cells))
        except (arrow.ArrowException, OverflowError):
            made.append(arrow.array([None if cell is None else str(cell) for cell in cells]))
    return arrow.table(made, [name for name, _ in columns])


def stacked(
    path: Path, tables: Sequence[OpenTable], labels: Sequence[str], column: str = FILE
) -> OpenTable:
    """Put tables with the same columns below each other; a new column tells them apart by their labels."""
    first, *others = tables
    for other in others:
        if other.texts != first.texts:
            raise InputError(
                "two-formats-save",
                f"{first.path.name!r} and {other.path.name!r} are of two formats: save both in one.",
            )
        odd = sorted(set(first.names) ^ set(other.names))
        if odd:
            having, lacking = (first, other) if odd[0] in first.names else (other, first)
            raise InputError(
                "column-stacked",
                f"{lacking.path.name!r} has no column {odd[0]!r}, which {having.path.name!r} has.",
            )
    made = column not in first.names
    ends = np.zeros(len(tables), dtype=np.int64)

    def cells(names: Sequence[str], raw: bool = False) -> list[Any]:
        import pyarrow

        asked = [name for name in names if not (made and name == column)]
        parts = [table.cells(asked or table.names[:1], raw) for table in tables]
        sizes = [len(part[0]) for part in parts]
        ends[:] = np.cumsum(sizes)
        found = {
            name: _joined(pyarrow, path, name, [part[k] for part in parts])
            for k, name in enumerate(asked)
        }
        if made:
            texts = pyarrow.array(np.repeat(labels, sizes).tolist(), pyarrow.string())
            found[column] = pyarrow.chunked_array([texts])
        return [found[name] for name in names]

    def place(row: int) -> str:
        k = int(np.searchsorted(ends, row, side="right"))
        return f"{tables[k].place(row - (int(ends[k - 1]) if k else 0))} of {tables[k].path.name!r}"

    names = [*first.names, column] if made else first.names
    commas = "," in [table.separator for table in tables]
    return OpenTable(
        path, names, cells, place, first.texts, "," if commas else first.separator, first.remarks
    )


def _joined(arrow: Any, path: Path, name: str, parts: Sequence[Any]) -> Any:
    tables = [arrow.table({"": part}) for part in parts]
    try:
        return arrow.concat_tables(tables, promote_options="permissive").column(0)
    except arrow.ArrowException:
        kinds = " and ".join(dict.fromkeys(str(part.type) for part in parts))
        raise InputError(
            "column-holds-different",
            f"Column {name!r} holds {kinds} in different files of {path.name!r}.",
        ) from None
