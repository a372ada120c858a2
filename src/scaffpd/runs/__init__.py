"""The tables of run folders: one name for every column, whichever command writes them, and one way to read them."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError

Row = dict[str, Any]
EVERYONE = "all rows"  # in the place of a client: the row of all of them
# columns that are never numbers
TEXTS = ("model", "client", "leaving", "label", "what", "sentence", "failures", "by", "group", "column")
OLD_NAMES = {  # columns of folders that versions up to 0.1 wrote
    "method": "model", "silo": "client", "train_samples": "train_rows", "test_samples": "test_rows",
    **{f"{split} {what}": f"{split}_{what}" for split in ("train", "test") for what in ("rows", "loss", "accuracy")},
}  # fmt: skip


def read_text(path: Path) -> str:
    """Read a file; empty where there is no such file."""
    if not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{str(path)!r} cannot be read as text.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty where there is no such file."""
    written = read_text(path)
    try:
        value = json.loads(written) if written else {}
    except ValueError:
        raise InputError(f"{str(path)!r} is not JSON: was it cut off while it was written?") from None
    if not isinstance(value, dict):
        raise InputError(f"{str(path)!r} should hold a JSON object.")
    return value


def read_table(path: Path, *needed: str) -> list[Row]:
    """Read a CSV file that has these columns, numbers as numbers and empty cells as `None`; no rows without a file."""
    if not path.is_file():
        return []
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    columns = [OLD_NAMES.get(name, name) for name in next(reader, [])]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise InputError(f"{str(path)!r} has no column {missing[0]!r}.")
    rows = []
    for cells in filter(None, reader):
        if len(cells) != len(columns):
            raise InputError(
                f"{str(path)!r}, line {reader.line_num}, has {len(cells)} cells where {len(columns)} are named."
            )
        pairs = zip(columns, cells, strict=True)
        rows.append({name: cell if name in TEXTS else _value(cell) for name, cell in pairs})
    return rows


def _value(cell: str) -> Any:
    if cell in ("", "True", "False"):
        return None if cell == "" else cell == "True"
    try:
        return int(cell) if cell.removeprefix("-").isdecimal() else float(cell)
    except ValueError:
        return cell


def number(row: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number of a row, or `None`."""
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise InputError(f"The column {name!r} has {value!r} where a number should be.") from None
    return found if math.isfinite(found) else None


def whole(row: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a row, or `None`."""
    found = number(row, name)
    return None if found is None else int(found)


def megabytes(
    row: Mapping[str, Any], up: str = "bytes_up", down: str = "bytes_down", unit: float = 1e6
) -> float | None:
    """Return what was sent up and down, in units of 10⁶ bytes."""
    sent = (number(row, up), number(row, down))
    return None if sent[0] is None or sent[1] is None else (sent[0] + sent[1]) / unit
