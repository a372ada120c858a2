"""Peak memory of a cohort and three rounds of Scaff-PD, beside the size of its data.

Every case runs in a process of its own. Its peak less that of the same case on almost no data is
what the data costs, and less the data itself is what this package adds. Data is float64: a list of
arrays, or a table mapped from disk, whose pages count as far as they are read although the system
may take them back. Clients are equal, or one of them has a hundred times the rows of each other.
The allocator is not the same twice: at the largest size the median of several processes is shown,
and the largest ratio.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
from harness import Row, table
from numpy.typing import NDArray

TITLE = "Peak memory"
MEGABYTES = (32, 128)
QUICK = (16,)
BARE = 0.05
TURNS = 3
LOSSES = ("squared", "logistic")
KINDS = ("arrays", "mapped table")
SHAPES = ("equal", "one 100×")
CLIENTS = 50
FEATURES = 100
ROUNDS = 3


def measure(quick: bool) -> list[Row]:
    """One row per loss, kind of data, shape of the federation and size."""
    losses, kinds = (LOSSES[:1], KINDS[:1]) if quick else (LOSSES, KINDS)
    rows = []
    for loss, kind, shape in product(losses, kinds, SHAPES):
        bare, _ = _peak(loss, kind, shape, BARE)
        for size in QUICK if quick else MEGABYTES:
            turns = 1 if quick or size < MEGABYTES[-1] else TURNS
            peaks, data = zip(*(_peak(loss, kind, shape, size) for _ in range(turns)), strict=True)
            row: Row = {"loss": loss, "data as": kind, "clients": shape, "data, MB": data[0] / 1e6}
            above = statistics.median(peaks) - bare - data[0]
            row |= {"bare, MB": bare / 1e6, "peak above bare, MB": (above + data[0]) / 1e6}
            row |= {"above the data, MB": above / 1e6, "ratio": above / data[0]}
            rows.append(row | {"largest ratio": (max(peaks) - bare) / data[0] - 1})
    return rows


def sizes(shape: str, megabytes: float) -> list[int]:
    """Rows of every client, at least two each."""
    total = megabytes * 1e6 / (8 * FEATURES)
    parts = np.ones(CLIENTS)
    if shape != SHAPES[0]:
        parts[0] = 100
    return [max(2, int(total * part / parts.sum())) for part in parts]


def _peak(loss: str, kind: str, shape: str, megabytes: float) -> tuple[int, int]:
    """(peak, data) in bytes of one case, in a process of its own."""
    rows = sizes(shape, megabytes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.npy"
        if kind == KINDS[1]:
            _write(file, sum(rows))
        command = [sys.executable, __file__, "--case", loss, kind, shape, str(megabytes), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{loss}, {kind}, {shape}, {megabytes} MB failed: {done.stderr[-400:]}")
    return int(done.stdout.split()[-1]), 8 * FEATURES * sum(rows)


def _write(file: Path, rows: int, piece: int = 10_000) -> None:
    random = np.random.default_rng(0)
    values = np.lib.format.open_memmap(file, mode="w+", dtype=np.float64, shape=(rows, FEATURES))
    for start in range(0, rows, piece):
        values[start : start + piece] = random.standard_normal(values[start : start + piece].shape)
    values.flush()


def case(loss: str, kind: str, shape: str, megabytes: float, file: str) -> int:
    """Bind the data, train, and return the peak of this process in bytes."""
    import scaffpd as sp

    random = np.random.default_rng(1)
    rows = sizes(shape, megabytes)
    if kind == KINDS[1]:
        X = np.split(np.load(file, mmap_mode="r"), np.cumsum(rows)[:-1])
    else:
        X = [random.standard_normal((n, FEATURES)) for n in rows]
    clients = [(x, _targets(loss, len(x), random)) for x in X]
    cohort = sp.Cohort(clients, sp.Linear(loss, l2=1e-2))
    method = sp.ScaffPD(sp.ChiSquare(0.1), local_steps=3)
    result = sp.train(method, cohort, rounds=ROUNDS, progress=False)
    if len(result.history.losses) != ROUNDS + 1 or not np.isfinite(result.history.losses[-1]).all():
        raise RuntimeError(f"{ROUNDS} rounds were not made: {result.status}.")
    return _most()


def _most() -> int:
    """The largest resident size of this process, in bytes; on Linux getrusage would remember that
    of its parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(
            line
            for line in status.read_text(encoding="ascii").splitlines()
            if line.startswith("VmHWM:")
        )
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _targets(loss: str, rows: int, random: np.random.Generator) -> NDArray[np.float64]:
    noise = random.standard_normal(rows)
    return noise if loss == "squared" else (noise > 0).astype(np.float64)


def sentences(rows: list[Row]) -> list[str]:
    """The most that is added, by loss and kind of data, at the largest size."""
    largest = max(row["data, MB"] for row in rows)
    found = []
    for loss, kind in dict.fromkeys((row["loss"], row["data as"]) for row in rows):
        here = [
            r
            for r in rows
            if (r["loss"], r["data as"]) == (loss, kind) and r["data, MB"] > 0.9 * largest
        ]
        parts = [f"{row['ratio']:.2f} times the data ({row['clients']})" for row in here]
        found.append(
            f"{loss.capitalize()} loss, {kind}: the peak is above the data by "
            f"{' and '.join(parts)}."
        )
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(case(*sys.argv[2:5], float(sys.argv[5]), sys.argv[6]))
    else:
        rows = measure("--quick" in sys.argv)
        print(table(rows), *sentences(rows), sep="\n\n")
