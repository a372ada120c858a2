"""Time the reading of one large table: scaffpd's reader beside pyarrow's own. Prints seconds and their ratio.

Run with `SCAFFPD_DATA=folder python benchmarks/reading.py [file] [target]`; the file is `beijing_air/hourly.csv.gz` in
the data folder and its target "PM2.5" unless others are named. The first reading pays for imports; the rest are warm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from scaffpd.tabular.formats import open_table
from scaffpd.tabular.read import read_features

REPEATS = 3


def seconds(call: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def main() -> None:
    """Print the times."""
    given = dict(enumerate(sys.argv[1:]))
    path = Path(given.get(0) or Path(os.environ["SCAFFPD_DATA"]) / "beijing_air" / "hourly.csv.gz")
    target = given.get(1, "PM2.5")
    first = seconds(lambda: read_features(open_table(path), target))
    from pyarrow import csv

    csv.read_csv(path)
    ours = min(seconds(lambda: read_features(open_table(path), target)) for _ in range(REPEATS))
    theirs = min(seconds(lambda: csv.read_csv(path)) for _ in range(REPEATS))
    rows = read_features(open_table(path), target)[0].rows
    print(f"{path.name}: {rows:,} rows with a target")
    print(f"scaffpd {first:.2f} s the first time, {ours:.2f} s warm; pyarrow {theirs:.2f} s; ratio {ours / theirs:.1f}")


if __name__ == "__main__":
    main()
