"""How long the server's dual step takes: milliseconds of prox and support for every objective.

Run with `python benchmarks/objectives.py [clients]` (100,000 unless told); the best of 20 calls is shown and
written to OBJECTIVES.md beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

from scaffpd.objectives import (
    Agnostic,
    Average,
    ChiSquare,
    ChiSquareBall,
    CVaR,
    Nash,
    Objective,
    QFair,
    Tilted,
)


def cases(prior: np.ndarray | None) -> dict[str, Objective]:
    return {
        "Average": Average(prior),
        "Agnostic": Agnostic(prior),
        "ChiSquare(0.1)": ChiSquare(0.1, prior),
        "ChiSquareBall(0.5)": ChiSquareBall(0.5, prior),
        "CVaR(0.2)": CVaR(0.2, prior),
        "Tilted(0.1)": Tilted(0.1, prior),
        "QFair(0.5)": QFair(0.5, prior),
        "QFair(2)": QFair(2.0, prior),
        "Nash(20)": Nash(20.0, prior),
    }


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return 1e3 * min(times)


def table(n: int) -> list[str]:
    """One Markdown row per objective and kind of prior."""
    random = np.random.default_rng(0)
    losses, old, prior = random.exponential(size=n), random.dirichlet(np.ones(n)), random.uniform(0.2, 5.0, n)
    sigmas = (1e-6, 1e-2, 1e2)
    head = ["objective", "prior", *(f"prox, σ = {s:g}" for s in sigmas), "support"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for kind, weights in (("uniform", None), ("random", prior)):
        for name, objective in cases(weights).items():
            times = [milliseconds(lambda o=objective, s=sigma: o.prox(losses, old, s)) for sigma in sigmas]
            times.append(milliseconds(lambda o=objective: o.support(losses)))
            lines.append(f"| {name} | {kind} | " + " | ".join(f"{ms:.1f}" for ms in times) + " |")
    return lines


def main(n: int = 100_000) -> None:
    about = f"Written by `python benchmarks/objectives.py {n}`: best of 20 calls, NumPy {np.__version__}."
    title = f"# Milliseconds of prox and support at N = {n:,} clients"
    text = "\n".join([title, "", about, "", *table(n), ""])
    print(text)
    Path(__file__).with_name("OBJECTIVES.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
