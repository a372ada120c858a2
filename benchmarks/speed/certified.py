"""Seconds to a certified gap of 1e-8 on one χ²-robust problem with squared loss, from raw arrays to
x.

Every candidate solves the same problem in a process of its own, on as many threads as it likes,
after a tiny problem that loads its libraries; all that it does with the data counts. A dense Newton
solver that shares nothing with the candidates (see `tests/cases/reference.py`) gives a lower bound
on the optimum, and F(x), from the raw rows, less that bound is the gap that is shown. A candidate
that is slow runs once, all others in every turn, and a ratio is one of seconds within a turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from certified_peers import CANDIDATES, L2, RHO, TOL, Clients, primal, problem, timed
from harness import Row, quartiles, table
from threadpoolctl import threadpool_limits

import scaffpd as sp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from cases.reference import reference_optimum

TITLE = "Seconds to a certified gap of 1e-8"
SIZES = ((10, 100, 20), (30, 300, 50), (100, 1000, 100))
# seconds after which a candidate is stopped, or is not run again; turns
LIMIT = 60
SLOW = 10
TURNS = 5
OURS, *OTHERS = CANDIDATES

Size = tuple[int, int, int]
Answer = tuple[float, float] | str
Once = Callable[[str, Size, Clients], Answer]


def measure(quick: bool) -> list[Row]:
    """One row per size and candidate."""
    if quick:
        return _compared((5, 40, 8), _here, 1)
    return [row for size in SIZES for row in _compared(size, _apart, TURNS)]


def _compared(size: Size, once: Once, turns: int) -> list[Row]:
    clients = problem(*size)
    optimum = reference_optimum(clients, "squared", L2, sp.ChiSquare(RHO))
    if not optimum.gap <= 0.01 * TOL:
        raise RuntimeError(f"The reference proves {optimum.gap:.1e} only.")
    least = optimum.value - optimum.gap
    seconds = defaultdict(list)
    gaps = defaultdict(list)
    ratios = defaultdict(list)
    failed = {}
    for _ in range(turns):
        own = once(OURS, size, clients)
        if isinstance(own, str):
            raise RuntimeError(f"{OURS} failed at N, m, d = {size}: {own}")
        seconds[OURS].append(own[0])
        gaps[OURS].append(own[1] - least)
        for name in OTHERS:
            if name in failed or max(seconds[name], default=0) > SLOW:
                continue
            found = once(name, size, clients)
            if isinstance(found, str):
                failed[name] = found
                ratios[name].append(LIMIT / own[0])
                continue
            seconds[name].append(found[0])
            gaps[name].append(found[1] - least)
            ratios[name].append(found[0] / own[0])
    if max(gaps[OURS]) > TOL:
        raise RuntimeError(f"{OURS} claimed a gap of {TOL}, but has {max(gaps[OURS]):.1e}.")
    return [
        _row(size, name, seconds[name], gaps[name], ratios[name], failed.get(name))
        for name in CANDIDATES
    ]


def _row(
    size: Size,
    name: str,
    seconds: list[float],
    gaps: list[float],
    ratios: list[float],
    failed: str | None,
) -> Row:
    """A line; where a candidate was stopped its ratio is a lower bound, where it failed there is
    none.
    """
    row: Row = dict(zip(("N", "m", "d"), size, strict=True)) | {
        "candidate": name,
        "runs": len(seconds),
    }
    late = failed is not None and failed.startswith(">")
    row["seconds"] = failed if failed else statistics.median(seconds)
    row["gap"] = max(gaps) if gaps else None
    row["times ours"] = (
        1.0 if name == OURS else None if failed and not late else statistics.median(ratios)
    )
    row["middle half"] = (
        "" if failed or name == OURS else "–".join(f"{edge:.3g}" for edge in quartiles(ratios))
    )
    row["note"] = (
        "at least" if late else f"at gap {max(gaps):.0e}" if gaps and max(gaps) > TOL else ""
    )
    return row


def _here(name: str, size: Size, clients: Clients) -> Answer:
    """As `_apart`, in this process: a rehearsal."""
    seconds, x = timed(name, size)
    return seconds, primal(clients, x)[0]


def _apart(name: str, size: Size, clients: Clients) -> Answer:
    """(seconds, F(x)) by a process of its own, or why there are none."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("certified_peers.py")),
        name,
        *map(str, size),
    ]
    free = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=free, check=False
        )
    except subprocess.TimeoutExpired:
        return f"> {LIMIT} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"failed: {last.split(':')[0].split('.')[-1]}"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["seconds"], primal(clients, np.array(answer["x"]))[0]


def sentences(rows: list[Row]) -> list[str]:
    """How many times faster than each other candidate, size by size."""
    found = []
    for size in dict.fromkeys((row["N"], row["m"], row["d"]) for row in rows):
        here = [row for row in rows if (row["N"], row["m"], row["d"]) == size]
        others = [_words(row) for row in here if row["candidate"] != OURS]
        own = next(row for row in here if row["candidate"] == OURS)
        found.append(
            f"N, m, d = {size[0]}, {size[1]}, {size[2]}: {OURS} proves a gap of {TOL:g} in "
            f"{own['seconds']:.2f} s; "
            f"in multiples of that, {'; '.join(others)}."
        )
        solved = [row for row in here if isinstance(row["seconds"], float) and row["gap"] <= TOL]
        fastest = min(solved, key=lambda row: row["times ours"])["candidate"]
        held = "" if fastest == OURS else f"; that {OURS} is the fastest DOES NOT HOLD"
        found.append(f"Fastest there: {fastest}{held}.")
    return found


def _words(row: Row) -> str:
    if row["times ours"] is None:
        return f"{row['candidate']} {row['seconds']}"
    return f"{row['candidate']} {row['note']} {row['times ours']:.2g}".replace("  ", " ")


def least_cpu(size: Size, turns: int = 40) -> dict[str, float]:
    """Milliseconds of CPU of the candidates on one thread, in turn and in one process: what a busy
    machine can tell.
    """
    clients = problem(*size)
    names = (OURS, "SciPy L-BFGS-B", "SciPy L-BFGS-B, QR")
    seconds = defaultdict(list)
    with threadpool_limits(1):
        torch.set_num_threads(1)
        for name in names * turns:
            begun = time.process_time()
            CANDIDATES[name](clients)
            seconds[name].append(time.process_time() - begun)
    return {name: round(1e3 * min(seconds[name]), 2) for name in names}


if __name__ == "__main__":
    if "--cpu" in sys.argv:
        for size in SIZES:
            print(size, least_cpu(size, 40 if size[0] < 100 else 4), flush=True)
        sys.exit()
    rows = measure("--quick" in sys.argv)
    print(table(rows), *sentences(rows), sep="\n\n")
