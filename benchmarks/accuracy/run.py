"""Held-out losses of ours and of what users have already, client by client: writes docs/accuracy.md.

    pip install -e ".[bench]"
    OMP_NUM_THREADS=1 SCAFFPD_DATA=... python benchmarks/accuracy/run.py            # all tables
    OMP_NUM_THREADS=1 SCAFFPD_DATA=... python benchmarks/accuracy/run.py lung star  # some

Every client's losses are stored in `--out`, a file for each table and method; a second run measures
what is missing, and `--again ours` anew what begins so. The loss of a client is its root mean
squared error for numbers, its log loss for labels. docs/accuracy.md is written from what is stored
once all tables are there; tables whose data is absent are skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ours import OURS
from page import RECOMMENDED, summary, write
from peers import PEERS, Method, quietly
from tables import TABLES, Array, Table

from scaffpd.errors import InputError

METHODS = {**PEERS, **OURS}


def row_losses(prediction: Array, y: Array, labels: bool) -> Array:
    """Return the log loss or the squared error of every row."""
    if not labels:
        return (prediction - y) ** 2
    p = np.clip(prediction, 1e-12, 1 - 1e-12)
    return -np.where(y > 0.5, np.log(p), np.log1p(-p))


def measure(table: Table, method: Method) -> dict | None:
    """Return every client's held-out loss, split by split or over all folds, and the seconds."""
    sums: list[Array] = []
    counts: list[NDArray[np.int64]] = []
    began = time.process_time()
    for split in table.splits():
        found = quietly(method, split)
        if found is None:
            return None
        N = len(split.names)
        losses = row_losses(found, split.y_test, split.labels)
        sums.append(np.bincount(split.owner_test, losses, N))
        counts.append(np.bincount(split.owner_test, minlength=N))
    seconds = (time.process_time() - began) / len(sums)
    if not table.draws:
        sums, counts = [np.sum(sums, 0)], [np.sum(counts, 0)]
    means = [s[n > 0] / n[n > 0] for s, n in zip(sums, counts, strict=True)]
    losses_of = [m.tolist() if table.labels else np.sqrt(m).tolist() for m in means]
    about = {"clients": N, "rows": len(split.y), "seconds": seconds}
    return {"losses": losses_of, **about}


def file_of(folder: Path, name: str, label: str) -> Path:
    """Return where the losses of a method on a table are."""
    return folder / name / ("".join(c if c.isalnum() else "-" for c in label) + ".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--out", type=Path, default=Path("accuracy"))
    parser.add_argument("--only", default="", help="methods whose names begin so")
    parser.add_argument("--again", default="-", help="measure such methods anew")
    parser.add_argument("--each", action="store_true", help="summarise every split by itself")
    options = parser.parse_args()
    wrong = set(options.tables) - TABLES.keys()
    if wrong:
        parser.error(f"no table is called {', '.join(sorted(wrong))}: choose from {[*TABLES]}")
    for name in options.tables or TABLES:
        print(f"{name}: {TABLES[name].what}", flush=True)
        for label, method in METHODS.items():
            if not label.startswith(options.only):
                continue
            file = file_of(options.out, name, label)
            if label.startswith(options.again) or not file.exists():
                try:
                    table = TABLES[name]
                    found = measure(replace(table, draws=options.each or table.draws), method)
                except InputError as error:
                    print(f"  skipped: {error}")
                    break
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found), encoding="utf-8")
            found = json.loads(file.read_text(encoding="utf-8"))
            mean, worst = summary(found["losses"]) if found else (np.nan, np.nan)
            took = f"{found['seconds']:.1f} s" if found else "does not apply"
            print(f"  {label:28s} {mean:10.4f} {worst:10.4f}  {took}", flush=True)
    if not options.each:
        publish(options.out)


def publish(folder: Path) -> None:
    """Write the page if every table has been measured by all peers and by what we recommend."""
    found = {
        name: {
            m: json.loads(file.read_text(encoding="utf-8"))
            for m in METHODS
            if (file := file_of(folder, name, m)).exists()
        }
        for name in TABLES
    }
    missing = [name for name, of in found.items() if not {*PEERS, RECOMMENDED} <= of.keys()]
    if missing:
        print(f"docs/accuracy.md stays as it is: {', '.join(missing)} not measured by all")
        return
    write({name: {m: one for m, one in of.items() if one} for name, of in found.items()})


if __name__ == "__main__":
    main()
