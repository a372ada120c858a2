"""Measure many tables at once, and keep what is found: a run cut short goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Job = tuple[str, int]  # a kind of table, and a seed


def options(about: str | None, tables: int) -> argparse.ArgumentParser:
    """Return the options that such benchmarks have in common."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=tables, help="of each kind")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, help="begin no table later than this")
    parser.add_argument("--rows", type=Path, help="a file for what is found, table by table")
    parser.add_argument("--real", action="store_true", help="real tables")
    return parser


def measured(
    table: Callable[[str, int], Sequence[Any]], kinds: Sequence[str], given: argparse.Namespace
) -> dict[str, list[list[Any]]]:
    """Return what `table` finds for every seed, by kind and of all."""
    jobs = [(kind, seed) for seed in range(given.tables) for kind in kinds]
    found: dict[Job, list[Any]] = {}
    if given.rows is not None and given.rows.exists():
        for line in given.rows.read_text(encoding="utf-8").splitlines():
            kind, seed, row = json.loads(line)
            found[kind, seed] = row
    left = [job for job in jobs if job not in found]
    end = time.monotonic() + (math.inf if given.seconds is None else given.seconds)
    with ProcessPoolExecutor(max(given.workers, 1), get_context("spawn")) as pool:
        waiting = {pool.submit(table, *job): job for job in left}
        for done in as_completed(waiting):
            if time.monotonic() > end:
                for one in waiting:
                    one.cancel()
            if done.cancelled():
                continue
            job, row = waiting[done], [_plain(value) for value in done.result()]
            found[job] = row
            if given.rows is not None:
                with given.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([*job, row]) + "\n")
            print(f"\r{len(found)} tables", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    ordered = sorted(found.items())
    rows = {kind: [row for (k, _), row in ordered if k == kind] for kind in kinds}
    rows["all"] = [row for _, row in ordered]
    return {kind: own for kind, own in rows.items() if own}


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
