"""Open tables: CSV in any usual encoding, Parquet and Excel; one file, several, or a folder.

A CSV file holds texts, and `scaffpd.data.tabular.read` finds out what they mean; the other formats
say it themselves.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scaffpd.data.tabular.columns import MISSING, is_missing
from scaffpd.errors import InputError, first_line, unknown
from scaffpd.numbers import several

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from pandas import DataFrame
    from pyarrow import Table as ArrowTable

Records = Iterator[tuple[int, list[str]]]

TEXT = (".csv", ".tsv", ".txt")
PARQUET = (".parquet", ".pq")
EXCEL = (".xlsx",)
ACCEPTED = ".csv or .tsv (also .gz), .xlsx or .parquet"
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
    return bool(kind_of(path))


def kind_of(path: Path) -> str:
    """Return the ending that says what a file holds, without .gz; empty where it is no table."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return next((end for end in TEXT if name.endswith(f"{end}.gz")), "")
    return next((end for end in (*TEXT, *PARQUET, *EXCEL) if name.endswith(end)), "")


def tables_of(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.is_file() and kind_of(file))
    if not files:
        raise InputError(
            "folder-without-tables", f"The folder {folder.name!r} holds no table ({ACCEPTED})."
        )
    return files


def _row(row: int) -> str:
    return f"row {row + 1}"


@dataclass(frozen=True)
class OpenTable:
    """The cells of a table, and where they stand in its file."""

    path: Path
    columns: ArrowTable = field(repr=False)  # null where a cell of CSV stands for no value
    place: Callable[[int], str] = field(default=_row, repr=False)  # where a row is, in words
    texts: bool = False  # whether cells are texts that may stand for numbers
    separator: str = ","  # between the columns of a CSV file
    remarks: tuple[str, ...] = ()  # how the file was read, where that had to be found out

    @cached_property
    def names(self) -> list[str]:
        names: list[str] = self.columns.column_names
        return names


def open_table(*paths: Path, sheet: str | None = None) -> OpenTable:
    """Open a file; several of them, or all tables of a folder, become one with a column `file`.

    Of workbooks it reads the `sheet` of that name, or the first.
    """
    path, *more = paths
    if (path / "config.toml").exists() and (path / "run.json").exists():
        raise InputError(
            "folder-of-a-run",
            f"{str(path)!r} is the folder of a run: give its settings file, "
            f"{str(path / 'config.toml')!r}.",
        )
    if path.is_dir() and not more:
        return _several(path, tables_of(path), sheet)
    if more:
        return _several(path, paths, sheet)
    kind = kind_of(path)
    if not kind:
        raise InputError(
            "not-a-table", f"{path.name!r} is not a table that can be read: save it as {ACCEPTED}."
        )
    with reading(path):
        data = path.read_bytes()
        if kind in TEXT:
            data = gzip.decompress(data) if path.suffix.lower() == ".gz" else data
            found = CsvText(path, *_utf8(path, data)).opened()
        elif kind in PARQUET:
            found = OpenTable(path, _parquet(path, data))
        else:
            found = _excel(path, data, sheet)
    if sheet is not None and kind not in EXCEL:
        raise InputError("no-workbook", f"{path.name!r} has no sheets: leave --sheet out.")
    for name, number in Counter(found.names).items():
        if name and number > 1:
            raise InputError(
                "column-named-twice",
                f"{path.name!r} has two columns named {name!r}; names must differ.",
            )
    return found


def entry_table(entry: str, frame: DataFrame) -> OpenTable:
    import pyarrow

    try:
        return OpenTable(Path(entry), pyarrow.Table.from_pandas(frame, preserve_index=False))
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(
            "frame-unusable",
            f"The data frame of {entry!r} does not form a table: {first_line(error)}.",
        ) from None


def entry_target(entry: str, y: ArrayLike) -> OpenTable:
    import pyarrow

    try:
        column = pyarrow.array(np.asarray(y).tolist(), from_pandas=True)
    except pyarrow.ArrowException:
        raise InputError(
            "column-type", f"The entry {entry!r} returns both numbers and text as 'y'."
        ) from None
    return OpenTable(Path(entry), pyarrow.table({"y": column}))


def _several(path: Path, files: Sequence[Path], sheet: str | None) -> OpenTable:
    """Open several files as one table; the column `file` has names that tell them from others."""
    for file in files:
        if file.is_dir():
            raise InputError(
                "folder-among-files",
                f"{file.name!r} is a folder: name one folder, or several files.",
            )
    labels = [file.name.split(".")[0] for file in files]
    if len(set(labels)) < len(labels):  # north/2024.csv and south/2024.csv: by their folders
        labels = [file.absolute().parent.name for file in files]
    if len(set(labels)) < len(labels):
        twin = Counter(file.name for file in files).most_common(1)[0][0]
        raise InputError(
            "file-named-twice",
            f"Several files are called {twin!r}: give every client's file its own name.",
        )
    found = stacked(path, [open_table(file, sheet=sheet) for file in files], labels)
    named = f": {', '.join(labels[:6])}{' and others' if len(labels) > 6 else ''}"
    where = f" in {path.name!r}" if path.is_dir() else named
    return replace(found, remarks=(f"{several(len(files), 'file')}{where}.", *found.remarks))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what cannot be read into one sentence."""
    try:
        yield
    except ImportError as error:
        needed = (error.name or "").split(".")[0]
        raise InputError(
            "reader-not-installed",
            f"Reading {path.name!r} needs {needed}: pip install {needed}.",
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError, zipfile.BadZipFile):
        packing = "gzip" if path.suffix.lower() == ".gz" else "Excel"
        raise InputError(
            "file-cut-off", f"{path.name!r} is no {packing} file, or is truncated."
        ) from None
    except OSError as error:
        raise InputError(
            "data-file-unreadable",
            f"Cannot read the data file {str(path)!r}: {error.strerror or error}.",
        ) from None


def _utf8(path: Path, data: bytes) -> tuple[bytes, str]:
    """Return a text in UTF-8, and the encoding that it had."""
    marked = next((name for mark, name in BOMS.items() if data.startswith(mark)), "")
    for name in (marked,) if marked else ("utf-8", "cp1252", "latin-1"):
        try:
            decoded = data.decode(name)
        except UnicodeDecodeError:
            continue
        if name == "utf-8":
            text = data.removeprefix(codecs.BOM_UTF8)
        else:
            text = decoded.removeprefix("\ufeff").encode()
        if b"\0" in text:
            break
        return text, {"cp1252": "Windows-1252 (Latin-1)"}.get(name, name.upper()[:6].rstrip("-"))
    raise InputError("not-a-text", f"{path.name!r} is not a text file: save it as {ACCEPTED}.")


@dataclass
class CsvText:
    """A CSV file: texts between separators."""

    path: Path
    data: bytes = field(repr=False)  # in UTF-8
    encoding: str

    def __post_init__(self) -> None:
        body = self.data.lstrip(b"\r\n")
        blank = self.data[: len(self.data) - len(body)].replace(b"\r\n", b"\n")
        self.data = body
        self.blank = len(blank)  # lines before the first one that says something

    @cached_property
    def separator(self) -> str:
        """The separator that cuts the first rows into equally many cells, and the most of them."""
        lines = list(islice(self._text(), SAMPLE))
        fits = []
        for mark in SEPARATORS:
            try:
                widths = [len(row) for row in csv.reader(lines, delimiter=mark) if row] or [0]
            except csv.Error:  # too long a cell
                widths = [0]
            if len(widths) > 1 and len(lines) == SAMPLE:
                widths.pop()  # a quoted cell may go on in the next line
            fits.append((len(set(widths)) == 1 and widths[0] > 1, widths[0]))
        return list(SEPARATORS)[fits.index(max(fits))]

    @cached_property
    def names(self) -> list[str]:  # read once
        first = next(self._records(), None)
        if first is None:
            raise InputError(
                "empty-file",
                f"{self.path.name!r} is empty; the first line must hold the column names.",
            )
        return [cell.strip() for cell in first[1]]

    def opened(self) -> OpenTable:
        """Read it, and say how, if that was detected."""
        usual = "\t" if kind_of(self.path) == ".tsv" else ","
        found = [] if self.encoding == "UTF-8" else [f"{self.encoding} text"]
        if self.separator != usual:
            found.append(f"{SEPARATORS[self.separator]} between columns")
        said = (f"{self.path.name!r} is read as {' with '.join(found)}.",) if found else ()
        return OpenTable(self.path, self.columns(), self.place, True, self.separator, said)

    def place(self, row: int) -> str:
        return f"line {next(islice(self._records(), row + 1, None))[0]}"

    def columns(self) -> ArrowTable:
        import pyarrow
        from pyarrow import csv as arrow_csv

        quoted = b'"' in self.data
        if quoted:  # pyarrow is lenient about quotes
            for _ in self._rows():
                pass
        places = [str(k) for k in range(len(self.names))]
        try:
            return arrow_csv.read_csv(
                pyarrow.BufferReader(self.data),
                arrow_csv.ReadOptions(column_names=places, skip_rows_after_names=1),
                arrow_csv.ParseOptions(delimiter=self.separator, newlines_in_values=quoted),
                arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(places, pyarrow.string()),
                    null_values=NULLS,
                    strings_can_be_null=True,
                ),
            ).rename_columns(self.names)
        except pyarrow.ArrowInvalid:
            rows = [row for _, row in self._rows()]  # says what is wrong, in most cases
            texts = list(zip(*rows, strict=True)) or [()] * len(places)
            return pyarrow.table([pyarrow.array(t, pyarrow.string()) for t in texts], self.names)

    def _text(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BytesIO(self.data), "utf-8", newline="")

    def _records(self) -> Records:
        reader = csv.reader(self._text(), delimiter=self.separator, strict=True)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                line = reader.line_num + self.blank
                raise InputError(
                    "line-unreadable", f"Line {line} of {self.path.name!r} cannot be read: {error}."
                ) from None
            if row:
                yield reader.line_num + self.blank, row

    def _rows(self) -> Records:
        """Yield the rows below the header, each as long as the header."""
        header = self.names
        for line, row in islice(self._records(), 1, None):
            if len(row) != len(header):
                short = len(row) < len(header)
                hint = f": the last value belongs to {header[len(row) - 1]!r}." if short else "."
                raise InputError(
                    "row-length",
                    f"{self.path.name!r} has {len(row)} values in line {line}, but {len(header)} "
                    f"columns{hint}",
                )
            yield line, row


def _parquet(path: Path, data: bytes) -> ArrowTable:
    """Read all but the columns that pandas has written as the index."""
    import pyarrow
    from pyarrow import parquet

    try:
        found = parquet.ParquetFile(pyarrow.BufferReader(data)).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            "parquet-unreadable", f"{path.name!r} cannot be read as Parquet: {first_line(error)}."
        ) from None
    index = (found.schema.pandas_metadata or {}).get("index_columns", [])
    return found.drop_columns([name for name in index if name in found.column_names])


def _excel(path: Path, data: bytes, sheet: str | None) -> OpenTable:
    """Read a sheet, whose first row names the columns; say which others there are."""
    import pyarrow
    from openpyxl import load_workbook
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        sheets = {one.title: one for one in book.worksheets}
        if sheet is not None and sheet not in sheets:
            raise unknown(f"sheet of {path.name!r},", sheet, sheets)
        name = sheet or next(iter(sheets))
        header, *rows = (
            [*row]
            for row in sheets[name].iter_rows(values_only=True)
            if any(cell is not None for cell in row)
        )
    except InputError:
        raise
    except (InvalidFileException, KeyError, ValueError):
        raise InputError(
            "empty-sheet", f"{path.name!r} has no sheet with column names in its first row."
        ) from None
    others = [repr(one) for one in sheets if one != name]
    said = f"Sheet {name!r} is read, not {', '.join(others)}: --sheet chooses another."
    names = []
    columns = []
    for k, name in enumerate("" if cell is None else str(cell).strip() for cell in header):
        if not name:
            continue
        cells = [None if isinstance(row[k], str) and is_missing(row[k]) else row[k] for row in rows]
        names.append(name)
        try:
            columns.append(pyarrow.array(cells))
        except (pyarrow.ArrowException, OverflowError):  # several types become texts
            columns.append(pyarrow.array([None if one is None else str(one) for one in cells]))
    remarks = (said,) if others and sheet is None else ()
    return OpenTable(path, pyarrow.table(columns, names), remarks=remarks)


def stacked(
    path: Path, tables: Sequence[OpenTable], labels: Sequence[str], column: str = FILE
) -> OpenTable:
    """Put tables with the same columns below each other; a new column has their labels."""
    first, *others = tables
    for other in others:
        if other.texts != first.texts:
            raise InputError(
                "two-formats",
                f"{first.path.name!r} and {other.path.name!r} have different formats: save "
                "both in the same one.",
            )
        odd = sorted(set(first.names) ^ set(other.names))
        if odd:
            having, lacking = (first, other) if odd[0] in first.names else (other, first)
            raise InputError(
                "column-missing",
                f"{lacking.path.name!r} has no column {odd[0]!r}, which {having.path.name!r} has.",
            )
    import pyarrow

    # in any order of columns; of those without a name, the first
    names = dict.fromkeys(first.names)
    parts = [one.columns.select([one.names.index(name) for name in names]) for one in tables]
    try:
        columns = pyarrow.concat_tables(parts, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise InputError(
            "column-of-two-types",
            f"The files of {path.name!r} differ: {first_line(error)}.",
        ) from None
    sizes = [part.num_rows for part in parts]
    ends = np.cumsum(sizes)
    if column not in first.names:
        texts = pyarrow.array(np.repeat(labels, sizes).tolist(), pyarrow.string())
        columns = columns.append_column(column, texts)

    def place(row: int) -> str:
        k = int(np.searchsorted(ends, row, side="right"))
        return f"{tables[k].place(row - (int(ends[k - 1]) if k else 0))} of {tables[k].path.name!r}"

    separator = "," if "," in [table.separator for table in tables] else first.separator
    return OpenTable(path, columns, place, first.texts, separator, first.remarks)
