r"""How often is a verdict wrong? Simulated clients whose true models are known.

`sp.joining` on clients with u_i ~ N(x, τI), 30 rows to train on and 30 held out; with x = 0 and
τ = 0 the columns say nothing. True losses are those of 4,000 fresh rows a client. Counted are

advice   a simpler model truly has a mean loss that is lower by more than 1 %
naming   draws in which some client is said to gain (or lose) clearly, and truly does not
names    the same, as a share of all clients that are named

    python benchmarks/verdicts.py [--draws 100]
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

import scaffpd as sp
from scaffpd.study.gains import Joining

Array = NDArray[np.float64]
COLUMNS = 4
ROWS = 30
FRESH = 4000
MATTERS = 0.01  # a difference that matters, as a share of the loss
MODEL = {True: sp.Linear("logistic", "auto", True), False: sp.Linear("squared", "auto", True)}


def drawn(
    rng: np.random.Generator, truth: Array, rows: int, labels: bool
) -> list[tuple[Array, Array]]:
    """Draw rows of every client: labels, or numbers with noise of variance one."""
    found = []
    for u in truth:
        X = rng.normal(size=(rows, COLUMNS))
        z = X @ u
        y = rng.random(rows) < 1 / (1 + np.exp(-z)) if labels else z + rng.normal(size=rows)
        found.append((X, y.astype(int) if labels else y))
    return found


def true_losses(found: Joining, fresh: list[tuple[Array, Array]], labels: bool) -> Array:
    """Return the loss of every model at every client, (models × clients)."""
    model = MODEL[labels]
    rows = []
    for name in found.models:
        own = found.parameters[name][1:]  # the first is for clients that were not trained on
        pairs = zip(own, fresh, strict=True)
        rows.append([model.row_losses(model.outputs(u, X), y)[0].mean() for u, (X, y) in pairs])
    return np.array(rows)


def judged(found: Joining, true: Array) -> tuple[bool, list[bool]]:
    """Return whether the advice is wrong, and of every client that is named whether that is."""
    place = found.models.index(found.recommendation)
    simpler = true[:place]
    wrong = bool((simpler.mean(1) < (1 - MATTERS) * true[place].mean()).any())
    base, shown = (found.models.index(name) for name in (found.base, found.shown))
    better = true[base] > true[shown]
    pays = found.pays(found.shown, found.base)
    named = [(p == "yes") != b for p, b in zip(pays, better, strict=True) if p != "within noise"]
    return wrong, named


def main() -> None:
    """Print a line per setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=100)
    draws = parser.parse_args().draws
    print(f"{draws} draws\n\n| loss | N | effect | τ | advice wrong | naming wrong | names wrong |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for labels in (False, True):
        for count, effect, tau in ((6, 0, 0), (20, 0, 0), (6, 1, 0), (20, 1, 0), (6, 1, 0.3)):
            rng = np.random.default_rng([labels, count, effect, int(10 * tau)])
            advice = []
            naming: list[list[bool]] = []
            for _ in range(draws):
                x = effect * rng.normal(size=COLUMNS)
                truth = x + np.sqrt(tau) * rng.normal(size=(count, COLUMNS))
                train, test, fresh = (drawn(rng, truth, n, labels) for n in (ROWS, ROWS, FRESH))
                found = sp.joining(train, test, MODEL[labels])
                wrong, named = judged(found, true_losses(found, fresh, labels))
                advice.append(wrong)
                naming.append(named)
            names = [one for named in naming for one in named]
            shares = (np.mean(advice), np.mean([any(n) for n in naming]), np.mean(names or [False]))
            cells = " | ".join(f"{share:.1%}" for share in shares)
            name = "logistic" if labels else "squared"
            print(f"| {name} | {count} | {effect} | {tau} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
