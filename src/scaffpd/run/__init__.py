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
from scaffpd.files import csv_cell

Row = dict[str, Any]
EVERYONE = "all rows"  # in the place of a client: the row of all of them
# columns that are never numbers
TEXTS = (
    "model",
    "client",
    "leaving",
    "label",
    "what",
    "sentence",
    "failures",
    "by",
    "group",
    "column",
)
OLD_NAMES = {  # columns as earlier versions called them, in TABLE/ alone or in any; {split} is the run's
    "method": "model",
    "silo": "client",
    "train_samples": "train_rows",
    "test_samples": "test_rows",
    **{
        f"{split} {what}": f"{split}_{what}"
        for split in ("train", "test")
        for what in ("rows", "loss", "accuracy")
    },
    **{
        f"{of}_{what}": f"{{split}}_{what}_{of}"
        for of in ("mean", "worst_20", "worst", "best_20")
        for what in ("accuracy", "rmse")
    },
    **{
        f"megabytes_{way}_{of}": f"bytes_{way}_{of}"
        for way in ("up", "down")
        for of in ("mean", "sd")
    },
    **{f"joining/{what}": f"test_{what}" for what in ("loss", "accuracy", "rmse")},
    **{f"kappa_path/{of}_loss": f"validation_loss_{of}" for of in ("mean", "worst_20")},
    **{f"kappa_path/{of}_error": f"validation_loss_{of}_se" for of in ("mean", "worst_20")},
    **{f"reliability/share{end}": f"base_rate{end}" for end in ("", "_low", "_high")},
    "kappa_path/strength": "kappa",
    "mean_over_alone": "gain_over_alone_mean",
}


def read_text(path: Path) -> str:
    """Read a file; empty where there is no such file."""
    if not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise InputError("read-text", f"{str(path)!r} cannot be read as text.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty where there is no such file."""
    written = read_text(path)
    try:
        value = json.loads(written) if written else {}
    except ValueError:
        raise InputError(
            "json-cut-off", f"{str(path)!r} is not JSON: was it cut off while it was written?"
        ) from None
    if not isinstance(value, dict):
        raise InputError("should-hold-json", f"{str(path)!r} should hold a JSON object.")
    return value


def new_name(name: str, table: str = "", split: str = "test") -> str:
    """Return what a column is called today."""
    found = OLD_NAMES.get(f"{table}/{name}", OLD_NAMES.get(name))
    return name if found is None else found.format(split=split)


def read_table(path: Path, *needed: str, split: str = "test") -> list[Row]:
    """Read a CSV file of any version under today's names; empty cells are `None`, and no file has no rows."""
    if not path.is_file():
        return []
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    written = next(reader, [])
    columns = [new_name(name, path.stem, split) for name in written]
    rescaled = [
        new for old, new in zip(written, columns, strict=True) if old.startswith("megabytes")
    ]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise InputError("column-read-table", f"{str(path)!r} has no column {missing[0]!r}.")
    rows = []
    for cells in filter(None, reader):
        if len(cells) != len(columns):
            raise InputError(
                "line-cells-where",
                f"{str(path)!r}, line {reader.line_num}, has {len(cells)} cells where {len(columns)} are named.",
            )
        pairs = zip(columns, map(csv_cell, cells), strict=True)
        rows.append({name: cell if name in TEXTS else _value(cell) for name, cell in pairs})
        rows[-1] |= {
            name: 1e6 * found for name in rescaled if (found := number(rows[-1], name)) is not None
        }
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
        raise InputError(
            "column-where-number", f"The column {name!r} has {value!r} where a number should be."
        ) from None
    return found if math.isfinite(found) else None


def whole(row: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a row, or `None`."""
    found = number(row, name)
    return None if found is None else int(found)


def megabytes(row: Mapping[str, Any], over: str = "") -> float | None:
    """Return what was sent up and down, in units of 10⁶ bytes; `over` is "_mean" of several seeds."""
    up, down = (number(row, f"bytes_{way}{over}") for way in ("up", "down"))
    return None if up is None or down is None else (up + down) / 1e6
