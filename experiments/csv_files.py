"""CSV files of the experiments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scaffpd.system import csv_text, write_file


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a header and rows; floats read back exactly, and what is missing or not a number is an empty cell."""
    tables = (dict(zip(columns, row, strict=True)) for row in rows)
    write_file(path, csv_text([{k: value for k, value in row.items() if value == value} for row in tables], columns))
    return path
