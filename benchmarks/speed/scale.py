"""How far one process goes: very many clients, very many rows, and how a round's time and memory
grow.

Many clients: up to 100,000 of them with 50 samples each, of whom 1,000 take part in a round (10
minibatch steps of 10). Many rows: 10 million samples × 100 features of 1,000 clients, a float32
table mapped from disk, bound in float64; until a certified gap of 1e-6. Growth: full-batch
Scaff-PD, one of N, m, d and J varied at a time.

Each case is a process of its own on one thread. Its peak counts everything: Python and PyTorch (the
row "nothing"), the generated data, and of a mapped table the pages that were read although the
system may take them back. "Round, s" is the mean over rounds, everything that the history asks for
included (losses of *all* clients, after every round or, beyond 10,000 clients, after every
twentieth).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, exponent, table
from memory import _most as peak

TITLE = "Scale: clients, rows, and how cost grows"
MANY = "many clients"
WIDE = "many rows"
GROWTH = "growth"
PART = 1_000
TOL = 1e-6
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
BASE = {"N": 200, "m": 500, "d": 50, "J": 10}
FACTORS = {
    "N": (50, 200, 800, 3200),
    "m": (125, 500, 2000, 8000),
    "d": (25, 50, 100, 200),
    "J": (1, 10, 100, 1000),
}
SHAPE = ("N", "m", "d", "J")


def measure(quick: bool) -> list[Row]:
    """One row per case; the one that all growth starts from is measured once for each loss."""
    bare = {
        "part": "nothing",
        "method": "",
        "loss": "logistic",
        "N": 2,
        "m": 2,
        "d": 2,
        "J": 1,
        "rounds": 1,
    }
    rows = []
    known = dict[str, Row]()
    with tempfile.TemporaryDirectory() as folder:
        for case in [*(_quick() if quick else _cases()), bare]:
            base = case["loss"] if all(case[name] == BASE[name] for name in SHAPE) else ""
            row = known.get(base) or _apart(case, Path(folder))
            known |= {base: row} if base else {}
            rows.append(row | {"part": case["part"]})
    return rows


def _cases() -> list[Row]:
    many = [_many(method, n) for method in ("FedAvg", "Scaffold") for n in (1_000, 10_000, 100_000)]
    wide = {"part": WIDE, "method": "fair", "N": 1000, "m": 10_000, "d": 100, "J": None}
    large = [wide | {"loss": loss, "rounds": 20} for loss in ("squared", "logistic")]
    return [*many, *large, *(case for loss in ("squared", "logistic") for case in _growth(loss))]


def _quick() -> list[Row]:
    wide = {
        "part": WIDE,
        "method": "fair",
        "N": 10,
        "m": 500,
        "d": 10,
        "J": None,
        "loss": "squared",
        "rounds": 200,
    }
    return [_many("FedAvg", 2_000), wide, *[_grown("logistic", "N", n) for n in (20, 40)]]


def _many(method: str, n: int) -> Row:
    return {
        "part": MANY,
        "method": method,
        "loss": "logistic",
        "N": n,
        "m": 50,
        "d": 20,
        "J": 10,
        "rounds": 20,
    }


def _growth(loss: str) -> list[Row]:
    return [_grown(loss, factor, size) for factor, sizes in FACTORS.items() for size in sizes]


def _grown(loss: str, factor: str, size: int) -> Row:
    rounds = 2 if (loss, factor) == ("logistic", "J") and size >= 1000 else 6
    case = {"part": f"{GROWTH} in {factor}", "method": "ScaffPD", "loss": loss, "rounds": rounds}
    return case | BASE | {factor: size}


def _apart(case: Row, folder: Path) -> Row:
    """A case in a process of its own; a table is written by another process before, once for both
    losses.
    """
    if case["part"] == WIDE:
        _write(folder, case)
    command = [sys.executable, __file__, "--case", json.dumps(case), str(folder)]
    alone = os.environ | dict.fromkeys(THREADS, "1")
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} failed: {done.stderr[-600:]}")
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    print(row, file=sys.stderr, flush=True)
    return row


def _write(folder: Path, case: Row) -> None:
    """X and y of a linear model with noise and a shift of every client's own, client by client."""
    if (folder / "y.npy").exists():
        return
    N, m, d = (case[name] for name in SHAPE[:3])
    X = np.lib.format.open_memmap(folder / "X.npy", mode="w+", dtype=np.float32, shape=(N * m, d))
    y = np.lib.format.open_memmap(folder / "y.npy", mode="w+", dtype=np.float64, shape=(N * m,))
    random = np.random.default_rng(0)
    w = random.standard_normal(d) / d**0.5
    for rows in (slice(i * m, (i + 1) * m) for i in range(N)):
        X[rows] = random.standard_normal((m, d), dtype=np.float32)
        y[rows] = X[rows] @ (
            w + 0.2 * random.standard_normal(d) / d**0.5
        ) + 0.5 * random.standard_normal(m)
    X.flush()
    y.flush()


def case(given: Row, folder: str) -> Row:
    """Bind the data, train, check, and say what that took."""
    import scaffpd as sp

    tiny = sp.Cohort([(np.eye(2), np.zeros(2)), (np.eye(2), np.ones(2))], sp.Linear(given["loss"]))
    sp.train(
        _method(given | {"N": 2}), tiny, rounds=1, progress=False
    )  # loads what is loaded when it is needed
    clients, size = _clients(given, Path(folder))
    begun = time.perf_counter()
    cohort = sp.Cohort(clients, sp.Linear(given["loss"], l2=1e-2))
    bound = time.perf_counter()
    tol = TOL if given["part"] == WIDE else None
    result = sp.train(_method(given), cohort, rounds=given["rounds"], tol=tol, progress=False)
    ended = time.perf_counter()
    seconds = result.history["seconds"]
    history = result.history
    if tol is not None and not result.certificate <= tol:
        raise RuntimeError(f"A gap of {tol} was not reached: {result}")
    if not history.last_losses.mean() < history.first_losses.mean():
        raise RuntimeError("The losses have not fallen.")
    row = {name: given[name] for name in ("part", "method", "loss", *SHAPE)} | {
        "data, GB": size / 1e9
    }
    row |= {"Cohort, s": bound - begun, "start, s": float(seconds[0]), "rounds": result.rounds}
    row |= {
        "round, s": float(np.mean(np.diff(seconds))),
        "train, s": ended - bound,
        "peak, GB": peak() / 1e9,
    }
    return row | {
        "certified gap": float(result.certificate) if np.isfinite(result.certificate) else None
    }


def _clients(given: Row, folder: Path) -> tuple[list[tuple[Any, Any]], int]:
    """(X, y) of all clients, and bytes of all X: views of one array, or rows of a mapped table."""
    N, m, d = (given[name] for name in SHAPE[:3])
    cuts = [slice(i * m, (i + 1) * m) for i in range(N)]
    if given["part"] == WIDE:
        stored = np.load(folder / "X.npy", mmap_mode="r")
        z = np.load(folder / "y.npy")
        y = z if given["loss"] == "squared" else (z > 0).astype(float)
        return [(stored[cut], y[cut]) for cut in cuts], stored.nbytes
    random = np.random.default_rng(0)
    X = random.standard_normal((N * m, d))
    z = X @ random.standard_normal(d) / d**0.5 + 0.5 * random.standard_normal(N * m)
    y = z if given["loss"] == "squared" else (z > 0).astype(float)
    return [(X[cut], y[cut]) for cut in cuts], X.nbytes


def _method(given: Row) -> Any:
    import scaffpd as sp

    if given["part"] == MANY:
        method = {"FedAvg": sp.FedAvg, "Scaffold": sp.Scaffold}[given["method"]]
        return method(
            local_steps=given["J"], batch_size=10, clients_per_round=min(PART, given["N"])
        )
    if given["method"] == "fair":
        return sp.fair(sp.ChiSquare(0.1))
    return sp.ScaffPD(sp.ChiSquare(0.1), local_steps=given["J"])


def sentences(rows: list[Row]) -> list[str]:
    """What the largest cases took, and the exponents."""
    bare = rows[-1]["peak, GB"]
    found = []
    most = max((row["N"] for row in rows if row["part"] == MANY), default=0)
    for row in rows:
        if row["part"] == MANY and row["N"] == most:
            found.append(
                f"{row['method']} with {row['N']:,} clients, {min(PART, row['N']):,} a round: "
                f"{row['round, s']:.2g} s "
                f"a round; the Cohort took {row['Cohort, s']:.1f} s, peak {row['peak, GB']:.2g} GB "
                f"({row['data, GB']:.2g} GB of data included)."
            )
        if row["part"] == WIDE:
            proof = (
                f", certified gap {row['certified gap']:.1e}"
                if row["certified gap"] is not None
                else ""
            )
            found.append(
                f"{row['N'] * row['m']:,} rows × {row['d']} features, {row['loss']} loss: "
                f"{row['rounds']} rounds in "
                f"{row['train, s']:.0f} s after {row['Cohort, s']:.0f} s for the Cohort{proof}; "
                "peak "
                f"{row['peak, GB']:.3g} GB ({row['data, GB']:.3g} GB of mapped table included)."
            )
    return found + [
        line for loss in ("squared", "logistic") for line in _exponents(rows, loss, bare)
    ]


def _exponents(rows: list[Row], loss: str, bare: float) -> list[str]:
    """Powers of the growth of time and of memory above an empty process, fitted to the three
    largest sizes.
    """
    time_like = []
    memory_like = []
    for factor in SHAPE:
        here = [
            row for row in rows if (row["part"], row["loss"]) == (f"{GROWTH} in {factor}", loss)
        ][-3:]
        if len(here) == 3:
            sizes = [row[factor] for row in here]
            time_like.append(f"{factor}^{exponent(sizes, [row['round, s'] for row in here]):.2f}")
            above = [max(row["peak, GB"] - bare, 1e-4) for row in here]
            memory_like.append(f"{factor}^{exponent(sizes, above):.2f}")
    if not time_like:
        return []
    return [
        f"A Scaff-PD round, {loss} loss: time grows like {', '.join(time_like)}, and the peak "
        "above an empty process "
        f"like {', '.join(memory_like)} (fitted to the three largest sizes of each)."
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(json.loads(sys.argv[2]), sys.argv[3])))
    else:
        measured = measure("--quick" in sys.argv)
        print(table(measured), *sentences(measured), sep="\n\n")
