"""Problems that are known by name: `train` takes their clients, `compare` their model as well."""

from __future__ import annotations

from functools import partial

import numpy as np

from scaffpd.data.datasets import breast_cancer, digits, synthetic
from scaffpd.data.hospitals import heart_disease
from scaffpd.data.silos import Silos, carve
from scaffpd.errors import InputError, unknown
from scaffpd.models.linear import Linear
from scaffpd.numbers import several
from scaffpd.study.comparison import Problem

TEST_FRACTION = 0.3
FEWEST = 10  # rows of a client cut by labels: of fewer, none or one would be left to test on
PARTITIONS = {"digits": (20, 0.05), "breast-cancer": (10, 0.5)}  # clients and α, unless given
SYNTHETIC_CLIENTS = 20
NAMES = ("digits", "hospitals", "breast-cancer", "synthetic")


def problem(
    name: str, clients: int | None = None, alpha: float | None = None, test: float = TEST_FRACTION
) -> Problem:
    """Return the problem of that name; every seed has a partition and test rows of its own.

    Args:
        name: "digits", "hospitals", "breast-cancer" or "synthetic".
        clients: how many; the hospitals are four.
        alpha: α of the Dirichlet partition of digits and breast cancer: the smaller, the more
            clients differ.
        test: share of rows held out.
    """
    if name not in NAMES:
        raise unknown("problem", name, NAMES)
    if alpha is not None and name not in PARTITIONS:
        raise InputError(
            "alpha-without-labels", f"{name!r} is not split by labels: leave out --alpha."
        )
    logistic = Linear("logistic", l2=0.01, intercept=True)
    if name == "hospitals":
        if clients not in (None, 4):
            raise InputError("clients-fixed", "There are four hospitals: leave out --clients.")
        return Problem(partial(heart_disease, test), logistic, "hospitals")
    if name == "synthetic":
        clients = clients or SYNTHETIC_CLIENTS
        words = f"synthetic, {several(clients, 'client')}"
        return Problem(
            partial(synthetic_silos, clients, test=test), Linear("squared", l2=0.1), words
        )
    clients = clients or PARTITIONS[name][0]
    alpha = alpha or PARTITIONS[name][1]
    load = digits if name == "digits" else breast_cancer
    softmax = Linear("softmax", l2=1e-3, intercept=True, classes=10)
    data = partial(load, clients=clients, alpha=alpha, test_fraction=test, minimum=FEWEST)
    words = f"{name}, {several(clients, 'client')}, Dirichlet({alpha:g})"
    return Problem(data, softmax if name == "digits" else logistic, words)


def synthetic_silos(clients: int, seed: int, test: float = TEST_FRACTION) -> Silos:
    """Return the paper's regression problem with some rows of every client held out."""
    random = np.random.default_rng([seed, 1])
    parts = [carve(pair, test, random) for pair in synthetic(N=clients, seed=seed)]
    features = tuple(f"a{k}" for k in range(parts[0][0][0].shape[1]))
    names = tuple(f"client {i}" for i in range(clients))
    return Silos(names, [train for train, _ in parts], [held for _, held in parts], features)
