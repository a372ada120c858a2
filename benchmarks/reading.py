"""Time the reading of one large table: scaffpd's reader beside pyarrow's own. Prints seconds and
their ratio.

Run with `SCAFFPD_DATA=folder python benchmarks/reading.py [file] [target]`; the file is
`beijing_air/hourly.csv.gz` in the data folder and its target "PM2.5" unless others are named. The
first reading pays for imports; the rest are warm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from scaffpd.data.tabular.formats import open_table
from scaffpd.data.tabular.read import read_columns

REPEATS = 3


def seconds(call: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def rows_of(path: Path, target: str) -> int:
    """Read all columns of a table, and return how many rows have a target."""
    table = open_table(path)
    names = [target, *(name for name in table.names if name != target)]
    return len(read_columns(table, names, (), {target: "target"})[0][0].values)


def main() -> None:
    """Print the times."""
    given = dict(enumerate(sys.argv[1:]))
    path = Path(given.get(0) or Path(os.environ["SCAFFPD_DATA"]) / "beijing_air" / "hourly.csv.gz")
    target = given.get(1, "PM2.5")
    first = seconds(lambda: rows_of(path, target))
    from pyarrow import csv

    csv.read_csv(path)
    ours = min(seconds(lambda: rows_of(path, target)) for _ in range(REPEATS))
    theirs = min(seconds(lambda: csv.read_csv(path)) for _ in range(REPEATS))
    rows = rows_of(path, target)
    print(f"{path.name}: {rows:,} rows with a target")
    print(
        f"scaffpd {first:.2f} s the first time, {ours:.2f} s warm; pyarrow {theirs:.2f} s; ratio "
        f"{ours / theirs:.1f}"
    )


if __name__ == "__main__":
    main()
