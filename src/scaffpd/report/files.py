"""Files of a folder, read with one sentence for what is not as it should be."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError

Row = dict[str, str]


def text(path: Path) -> str:
    """A file's text; empty where there is no such file."""
    if not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{str(path)!r} cannot be read as text.") from None


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    written = text(path)
    try:
        value = json.loads(written) if written else {}
    except ValueError:
        raise InputError(f"{str(path)!r} is not JSON: was it cut off while it was written?") from None
    if not isinstance(value, dict):
        raise InputError(f"{str(path)!r} should hold a JSON object.")
    return value


def table(path: Path, *needed: str) -> list[Row]:
    """The rows of a CSV file with these columns; none where there is no such file."""
    if not path.is_file():
        return []
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(text(path), newline=""))
    columns = next(reader, [])
    missing = [name for name in needed if name not in columns]
    if missing:
        raise InputError(f"{str(path)!r} has no column {missing[0]!r}.")
    rows = []
    for cells in reader:
        if cells and len(cells) != len(columns):
            raise InputError(
                f"{str(path)!r}, line {reader.line_num}, has {len(cells)} cells where {len(columns)} are named."
            )
        if cells:
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def number(row: dict[str, Any], name: str) -> float | None:
    """A finite number of a row, or `None`."""
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise InputError(f"The column {name!r} has {value!r} where a number should be.") from None
    return found if math.isfinite(found) else None


def whole(row: dict[str, Any], name: str) -> int | None:
    """A whole number of a row, or `None`."""
    found = number(row, name)
    return None if found is None else int(found)


def megabytes(row: dict[str, Any], up: str = "bytes_up", down: str = "bytes_down", unit: float = 1e6) -> float | None:
    """What went up and down, in units of 10⁶ bytes."""
    sent = (number(row, up), number(row, down))
    return None if sent[0] is None or sent[1] is None else (sent[0] + sent[1]) / unit
