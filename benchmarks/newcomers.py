r"""Is what `newcomers` says of sites that join later true of them? Simulated clients, exchangeable.

Three kinds of 16 clients × 40 rows, 4 columns, numbers with noise of variance one. The truth: the
objective that all clients choose, trained on all of them, on the worst fifth of 480 new clients.

alike    one model for all
slopes   every client has slopes of its own
groups   three in ten, by chance, have slopes of their own, the same for all three

claimed  the gain of the worst fifth over the average model, with the choice inside the folds
unnested the same, with the best of all objectives by the losses that judge it
true     the gain on new clients
bias     claimed less true, with the error of its mean over tables
fair     share of tables in which a fair objective is recommended
wrong    share of tables in which it is and the gain on new clients is none

    OMP_NUM_THREADS=1 python benchmarks/newcomers.py [--tables 12] [--workers 1]

and what it says of real tables, schools from SCAFFPD_DATA:

    OMP_NUM_THREADS=1 SCAFFPD_DATA=... python benchmarks/newcomers.py --real
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import scaffpd as sp
from spread import measured, options

sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.datasets import school

Array = NDArray[np.float64]
KINDS = ("alike", "slopes", "groups")
CLIENTS = 16
ROWS = 40
COLUMNS = 4
NEW = 480  # clients
MODEL = sp.Linear("squared", "auto", True)


def drawn(rng: np.random.Generator, kind: str, x: Array, clients: int) -> list[tuple[Array, Array]]:
    """Draw clients; x has the slopes of most, and those of the others."""
    found = []
    for _ in range(clients):
        u = x[int(kind == "groups" and rng.random() < 0.3)]
        u = u + 0.7 * (kind == "slopes") * rng.normal(size=COLUMNS)
        X = rng.normal(size=(ROWS, COLUMNS))
        found.append((X, X @ u + rng.normal(size=ROWS)))
    return found


def worst_fifth(losses: Array) -> float:
    """Return the mean of the largest fifth."""
    return float(np.sort(losses)[-math.ceil(len(losses) / 5) :].mean())


def table(kind: str, seed: int) -> tuple[float, float, float, bool]:
    """Return what is claimed, unnested and true, and whether a fair objective is recommended."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    x = rng.normal(size=(2, COLUMNS))
    cohort = sp.Cohort(drawn(rng, kind, x, CLIENTS), MODEL)
    goals = {"average": sp.Average(), "ρ = 1": sp.ChiSquare(1.0), "ρ = 0.1": sp.ChiSquare(0.1)}
    goals |= {"α = 0.5": sp.CVaR(0.5), "worst case": sp.Agnostic()}
    found = sp.newcomers(cohort, goals, seed=seed)
    models = [
        sp.train(sp.fair(goals[name]), cohort, tol=1e-4, progress=False).x
        for name in ("average", found.best)
    ]
    new = drawn(rng, kind, x, NEW)
    levels = [
        worst_fifth(np.array([((X @ w[:-1] + w[-1] - y) ** 2).mean() for X, y in new]))
        for w in models
    ]
    worst = np.array([worst_fifth(np.array(one.losses)) for one in found.points])
    true = 1 - levels[1] / levels[0]
    return found.gain.value, 1 - worst.min() / worst[0], true, found.recommendation != "average"


def main() -> None:
    """Print a line per kind."""
    given = options(__doc__, tables=12).parse_args()
    if given.real:
        real()
        return
    found = measured(table, KINDS, given)
    print("| kind | tables | claimed, % | unnested | true | bias | fair, % of tables | wrong |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind, rows in found.items():
        print(line(kind, rows))


def real() -> None:
    """Print what is said of schools, stations and hospitals."""
    tables = (
        ("school", school(seed=0), "squared"),
        ("station", sp.data.beijing_air(), "squared"),
        ("hospital", sp.data.heart_disease(), "logistic"),
    )
    for word, silos, loss in tables:
        found = sp.newcomers(sp.Cohort(silos.train, sp.Linear(loss, "auto", True)))
        print(*found.sentences(word), flush=True)
        for one in found.points:
            print(f"    {one.name}: mean {one.mean:.4f}, worst fifth {one.worst_20:.4f}")


def line(kind: str, rows: Sequence[Sequence[Any]]) -> str:
    """Return a line of the table."""
    claimed, unnested, true, fair = (np.array(column) for column in zip(*rows, strict=True))
    gains = " | ".join(f"{100 * own.mean():+.1f}" for own in (claimed, unnested, true))
    off = 100 * (claimed - true)
    bias = f"{off.mean():+.1f} ± {off.std() / math.sqrt(len(rows)):.1f}"
    shares = " | ".join(f"{100 * own.mean():.0f}" for own in (fair, fair & (true <= 0)))
    return f"| {kind} | {len(rows)} | {gains} | {bias} | {shares} |"


if __name__ == "__main__":
    main()
