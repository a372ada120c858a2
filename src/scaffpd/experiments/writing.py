"""Tables as files: comma-separated, and in Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def csv_file(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a header and rows; the file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """The lines of a table; the first columns, so many as are `words`, are set flush left, and numbers flush right."""
    rule = "|" + "---|" * words + "---:|" * (len(header) - words)
    return [_line(header), rule, *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
