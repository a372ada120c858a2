"""CSV files and Markdown tables of the experiments."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError
from scaffpd.files import csv_text, write_file
from scaffpd.machine import environment


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a header and rows; floats read back exactly, and what is missing or not a number is an
    empty cell.
    """
    write_file(path, csv_text([dict(zip(columns, row, strict=True)) for row in rows], columns))
    return path


def append_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Add rows to a file, which begins with a header."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows] if fresh else rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file by column; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1
) -> list[str]:
    """Return the lines of a table whose first `words` columns are flush left, the others flush
    right.
    """
    rule = "|" + "---|" * words + "---:|" * (len(header) - words)
    header, *others = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return [header, rule, *others]


def versions() -> dict[str, str]:
    """Return what the numbers were computed with."""
    found = environment()
    return {name: found[name] for name in ("scaffpd", "python", "torch", "numpy")}


def check_small(out: Path) -> None:
    """Refuse to write a part of a study into results/, which has full-size numbers."""
    if "results" in out.resolve().parts:
        raise InputError(
            "small-in-results", "A part of a study never goes into results/: name another --out."
        )
