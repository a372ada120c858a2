"""Features that stay on disk: what a gradient and a round of Scaff-PD read per second, and what they take of memory.

A table in float32 is mapped from a temporary folder and lies in the page cache. Candidates take turns: a plain read of
the same bytes, piece after piece into a buffer; the work on the mapped table; the same work on a copy in memory. Both
cohorts have the same clients, whose rows are consecutive or scattered over the table, and their gradients are
compared before anything is timed. Logistic loss, computed in float32. A gradient is two passes over the features (A x
and Aᵀr), and a round is counted as the bytes of the table over its seconds. Memory is what the process holds of its
own (anonymous memory), sampled while a mapped cohort is bound and trained; pages of the file are the system's to take
back and do not count.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from harness import Row, Timing, interleaved, table
from numpy.typing import NDArray

import scaffpd as sp
from scaffpd.data import Table
from scaffpd.models import linear

TITLE = "Features larger than memory"
GIGABYTES = 1.0
QUICK = 0.02
FEATURES = 1000
CLIENTS = 50
ORDERS = ("consecutive", "scattered")
ROUNDS = 2
TURNS = 3
PIECE = 1000  # rows that the plain read copies at a time


def measure(quick: bool) -> list[Row]:
    """One row per order of the rows of a client and kind of work."""
    gigabytes = QUICK if quick else GIGABYTES
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.npy"
        write(file, int(gigabytes * 1e9 / 4 / FEATURES))
        for order in ORDERS:
            peak = _peak(file, order)
            for work, timing, passes in _timings(file, order, 3 if quick else TURNS):
                size = file.stat().st_size
                row: Row = {"rows of a client": order, "work": work, "table, GB": size / 1e9}
                row |= {
                    f"{name}, GB/s": passes[name] * size / 1e9 / timing.median(name)
                    for name in timing.seconds
                }
                row["time, over in memory"] = timing.ratio("mapped", "in memory")[0]
                row["peak memory, MB"] = peak / 1e6
                rows.append(row | {"peak over table": peak / size})
    return rows


def write(file: Path, rows: int) -> None:
    """Random numbers; reading them once more puts them into the page cache."""
    random = np.random.default_rng(0)
    values = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(rows, FEATURES))
    for start in range(0, rows, PIECE):
        values[start : start + PIECE] = random.standard_normal(
            values[start : start + PIECE].shape, dtype=np.float32
        )
    values.flush()


def _timings(file: Path, order: str, turns: int) -> list[tuple[str, Timing, dict[str, int]]]:
    """(work, timing, how often each candidate goes through the table)."""
    values: NDArray[np.float32] = np.load(file, mmap_mode="r")
    disk = cohort(file, order, mapped=True)
    memory = cohort(file, order, mapped=False)
    x = torch.from_numpy(np.random.default_rng(2).standard_normal(FEATURES)).float() / FEATURES**0.5
    weights = np.full(CLIENTS, 1 / CLIENTS)
    ours, theirs = (c.gradients(x).sum(weights) for c in (disk, memory))
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5):
        raise RuntimeError("The gradients of the mapped and of the copied rows differ.")

    def gradient(of: sp.Cohort) -> Callable[[], object]:
        return lambda: of.gradients(x).sum(weights)

    def rounds(of: sp.Cohort) -> Callable[[], object]:
        return lambda: sp.train(
            sp.ScaffPD(sp.ChiSquare(0.1), local_steps=3), of, rounds=ROUNDS, progress=False
        )

    found = []
    for work, make, passes in (("Gradient", gradient, 2), ("Scaff-PD round", rounds, ROUNDS)):
        calls = {"read": lambda: read(values), "mapped": make(disk), "in memory": make(memory)}
        found.append(
            (work, interleaved(calls, turns), {"read": 1, "mapped": passes, "in memory": passes})
        )
    return found


def read(values: NDArray[np.float32]) -> None:
    """The whole table, once, piece by piece into a buffer."""
    buffer = np.empty((PIECE, values.shape[1]), dtype=values.dtype)
    for start in range(0, len(values), PIECE):
        piece = values[start : start + PIECE]
        np.copyto(buffer[: len(piece)], piece)


def cohort(file: Path, order: str, mapped: bool) -> sp.Cohort:
    """Clients on the table; where `mapped`, memory is said to be too small for a copy."""
    values = np.load(file, mmap_mode="r")
    random = np.random.default_rng(1)
    stored = Table(values, key="benchmark")
    numbers = np.arange(len(values)) if order == ORDERS[0] else random.permutation(len(values))
    y = random.integers(0, 2, len(values))
    clients = [(stored.rows(part), y[part]) for part in np.array_split(numbers, CLIENTS)]
    with mock.patch.object(linear, "free_memory", return_value=0 if mapped else 2**60):
        made = sp.Cohort(clients, sp.Linear("logistic", l2=1e-2), dtype=torch.float32)
    made.constants()  # once, before the first round
    return made


def _peak(file: Path, order: str) -> int:
    """Bytes above those of a process that has only imported everything."""
    command = [sys.executable, __file__, "--case", str(file), order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"The case {order} failed: {done.stderr[-400:]}")
    return int(done.stdout.split()[-1])


def case(file: Path, order: str) -> int:
    """The most anonymous memory while a mapped cohort is bound and trained, less what there was before."""
    before = _own()
    most = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], _own())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = cohort(file, order, mapped=True)
    sp.train(sp.ScaffPD(sp.ChiSquare(0.1), local_steps=3), made, rounds=ROUNDS, progress=False)
    done.set()
    watcher.join()
    return most[0] - before


def _own() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def sentences(rows: list[Row]) -> list[str]:
    """Speed against a plain read and against memory, and the peak."""
    found = []
    for row in rows:
        found.append(
            f"{row['work']}, {row['rows of a client']} rows: "
            f"{row['mapped, GB/s']:.1f} GB/s from the mapped table, {row['in memory, GB/s']:.1f} GB/s in memory; "
            f"a plain read makes {row['read, GB/s']:.1f} GB/s. The peak is {row['peak over table']:.2f} of the table."
        )
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(case(Path(sys.argv[2]), sys.argv[3]))
    else:
        rows = measure("--quick" in sys.argv)
        print(table(rows), *sentences(rows), sep="\n\n")
