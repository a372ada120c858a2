"""Milliseconds of the server's dual step: prox and support of every objective, for 10³ to 10⁶
clients.

Uniform and random priors; losses of all sizes; the step σ = 0.01 moves weights without freeing
them. Every answer is checked first: λ = prox(s, l, σ) exactly where λ is a maximiser for the losses
v = s − (λ − l)/σ, that is, where support(v) = ⟨v, λ⟩ − ψ(λ). The exponent p of milliseconds ∝ N^p
is fitted from 10⁴ clients on: below, calls themselves take the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from harness import Row, exponent, interleaved, table
from numpy.typing import NDArray

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

TITLE = "Milliseconds of prox and support"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK = (1_000, 10_000, 50_000)
FITTED = 10_000
SIGMA = 0.01
ACCURACY = 1e-9

Array = NDArray[np.float64]


def cases(prior: Array | None) -> dict[str, Objective]:
    """Every objective, with a parameter that makes it bite."""
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


def measure(quick: bool) -> list[Row]:
    """One row per objective, prior and operation; all sizes take turns as well."""
    sizes = QUICK if quick else SIZES
    calls = {n: _calls(n) for n in sizes}
    timing = interleaved(
        {f"{n} {name}": call for n in sizes for name, call in calls[n].items()},
        turns=2 if quick else 5,
        least=0.005 if quick else 0.02,
    )
    fitted = [n for n in sizes if n >= FITTED]
    rows = []
    for name in calls[sizes[0]]:
        here = {n: 1e3 * timing.median(f"{n} {name}") for n in sizes}
        row: Row = dict(zip(("objective", "prior", "operation"), name.split(" "), strict=True))
        row |= {f"N = {n:,}, ms": here[n] for n in sizes}
        rows.append(row | {"exponent": exponent(fitted, [here[n] for n in fitted])})
    return rows


def _calls(n: int) -> dict[str, Callable[[], object]]:
    """What is timed for n clients, by "objective prior operation"."""
    random = np.random.default_rng(0)
    losses = random.exponential(size=n)
    old = random.dirichlet(np.ones(n))
    uneven = random.uniform(0.2, 5.0, n)
    calls: dict[str, Callable[[], object]] = {}
    for prior, weights in (("uniform", None), ("random", uneven)):
        for name, objective in cases(weights).items():
            check(name, objective, losses, old)
            calls[f"{name} {prior} prox"] = lambda o=objective: o.prox(losses, old, SIGMA)
            calls[f"{name} {prior} support"] = lambda o=objective: o.support(losses)
    return calls


def check(name: str, objective: Objective, losses: Array, old: Array) -> None:
    """Raise if prox or support is not what it should be."""
    weights = objective.prox(losses, old, SIGMA)
    for what, v, found in (
        ("prox", losses - (weights - old) / SIGMA, weights),
        ("support", losses, objective.maximizer(losses)),
    ):
        reached = float(v @ found) - objective.value(found)
        best = objective.support(v)
        size = float(np.abs(v) @ found) + abs(objective.value(found))
        if abs(best - reached) > ACCURACY * max(size, 1.0):  # outside Λ it would be above
            raise RuntimeError(
                f"{what} of {name} for {len(losses):,} clients is off by {best - reached:.1e}."
            )


def sentences(rows: list[Row]) -> list[str]:
    """The slowest at the largest N, and how time grows."""
    largest = next(name for name in reversed(rows[0]) if name.startswith("N ="))
    found = []
    for operation in ("prox", "support"):
        here = [row for row in rows if row["operation"] == operation]
        slowest = max(here, key=lambda row: row[largest])
        steepest = max(here, key=lambda row: row["exponent"])
        found.append(
            f"{operation.capitalize()} at {largest.removesuffix(', ms')} takes at most "
            f"{slowest[largest]:.0f} ms "
            f"({slowest['objective']}, {slowest['prior']} prior) and grows like "
            f"N^{steepest['exponent']:.2f} at most "
            f"({steepest['objective']}, {steepest['prior']} prior)."
        )
    return found


if __name__ == "__main__":
    rows = measure("--quick" in sys.argv)
    print(table(rows), *sentences(rows), sep="\n\n")
