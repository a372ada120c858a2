"""How long the server's dual step takes: milliseconds of prox and support for every objective.

Run with `python benchmarks/objectives.py [clients]` (100,000 unless told); the best of 20 calls is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def main(n: int = 100_000) -> None:
    random = np.random.default_rng(0)
    losses, old, prior = random.exponential(size=n), random.dirichlet(np.ones(n)), random.uniform(0.2, 5.0, n)
    sigmas = (1e-6, 1e-2, 1e2)
    print(f"N = {n:,} clients: milliseconds, best of 20\n")
    print(f"{'objective':<20}{'prior':<12}" + "".join(f"{f'prox σ={s:g}':>14}" for s in sigmas) + f"{'support':>12}")
    for kind, weights in (("uniform", None), ("random", prior)):
        for name, objective in cases(weights).items():
            prox = [milliseconds(lambda o=objective, s=sigma: o.prox(losses, old, s)) for sigma in sigmas]
            support = milliseconds(lambda o=objective: o.support(losses))
            print(f"{name:<20}{kind:<12}" + "".join(f"{ms:>14.1f}" for ms in prox) + f"{support:>12.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
