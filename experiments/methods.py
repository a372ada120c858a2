"""`python -m experiments.methods digits`: every method on a known problem, who serves whom.

All have the same partitions, starts, rounds and tuning budget, and are scored on test rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from scaffpd.algorithms import published
from scaffpd.data import Silos, breast_cancer, digits, heart_disease, synthetic
from scaffpd.data.silos import carve
from scaffpd.files import make_folder, write_file
from scaffpd.models import Linear
from scaffpd.objectives import ChiSquare
from scaffpd.study.comparison import Problem, compare

TEST_FRACTION = 0.3
FEWEST = 10  # rows of a client cut by labels: of fewer, none or one would be left to test on
PARTITIONS = {"digits": (20, 0.05), "breast-cancer": (10, 0.5)}  # clients and α
SYNTHETIC_CLIENTS = 20
NAMES = ("digits", "hospitals", "breast-cancer", "synthetic")


def problem(name: str, test: float = TEST_FRACTION) -> Problem:
    """Return the problem of that name; every seed has a partition and test rows of its own."""
    logistic = Linear("logistic", l2=0.01, intercept=True)
    if name == "hospitals":
        return Problem(partial(heart_disease, test), logistic, name)
    if name == "synthetic":
        words = f"synthetic, {SYNTHETIC_CLIENTS} clients"
        return Problem(partial(synthetic_silos, test=test), Linear("squared", l2=0.1), words)
    clients, alpha = PARTITIONS[name]
    load = digits if name == "digits" else breast_cancer
    softmax = Linear("softmax", l2=1e-3, intercept=True, classes=10)
    data = partial(load, clients=clients, alpha=alpha, test_fraction=test, minimum=FEWEST)
    words = f"{name}, {clients} clients, Dirichlet({alpha:g})"
    return Problem(data, softmax if name == "digits" else logistic, words)


def synthetic_silos(seed: int, test: float = TEST_FRACTION) -> Silos:
    """Return the paper's regression problem with some rows of every client held out."""
    random = np.random.default_rng([seed, 1])
    clients = synthetic(N=SYNTHETIC_CLIENTS, seed=seed)
    parts = [carve(pair, test, random) for pair in clients]
    features = tuple(f"a{k}" for k in range(parts[0][0][0].shape[1]))
    names = tuple(f"client {i}" for i in range(len(parts)))
    return Silos(names, [train for train, _ in parts], [held for _, held in parts], features)


def main(words: Sequence[str] | None = None) -> int:
    """Carry out a command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.methods", description=__doc__)
    parser.add_argument("problem", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=100, help="of every run")
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1, help="partitions to average over")
    parser.add_argument("--tune", type=int, default=5, help="configurations of every method")
    parser.add_argument("--rho", type=float, default=0.1, help="of the χ² penalty")
    parser.add_argument("--out", type=Path, help="folder for table.txt and runs.csv")
    parser.add_argument("--processes", type=int, help="runs at a time; else one per core")
    given = parser.parse_args(words)
    found = compare(
        published(ChiSquare(given.rho), given.local_steps),
        problem(given.problem),
        seeds=range(given.seeds),
        rounds=given.rounds,
        tune=given.tune,
        processes=given.processes,
        strengths=True,
    )
    text = f"{found.problem}\n\n{found}"
    if given.out is not None:
        found.to_csv(make_folder(given.out) / "runs.csv")
        write_file(given.out / "table.txt", f"{text}\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
