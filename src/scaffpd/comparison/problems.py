"""The problems that `scaffpd compare` knows by name."""

from __future__ import annotations

from functools import partial

import numpy as np

from scaffpd.comparison.problem import Problem, carve
from scaffpd.data import Silos, breast_cancer, digits, heart_disease, synthetic
from scaffpd.errors import InputError, unknown
from scaffpd.models import Linear

TEST_FRACTION = 0.3
FEWEST = 10  # rows of a client of a partition by labels: of fewer, none or one would be left to test on
PARTITIONS = {"digits": (20, 0.05), "breast-cancer": (10, 0.5)}  # clients and α, where not told
SYNTHETIC_CLIENTS = 20
NAMES = ("digits", "hospitals", "breast-cancer", "synthetic")


def problem(name: str, clients: int | None = None, alpha: float | None = None, test: float = TEST_FRACTION) -> Problem:
    """The problem of that name; every seed has a partition (or a draw) and test rows of its own.

    Args:
        name: "digits", "hospitals", "breast-cancer" or "synthetic".
        clients: how many; the hospitals are four.
        alpha: α of the Dirichlet partition by labels of digits and breast cancer: the smaller, the more clients differ.
        test: share of rows held out.
    """
    if name not in NAMES:
        raise unknown("problem", name, NAMES)
    if alpha is not None and name not in PARTITIONS:
        raise InputError(f"The problem {name!r} is not cut by labels: leave --alpha out.")
    if name == "hospitals":
        if clients not in (None, 4):
            raise InputError("The hospitals are four: leave --clients out.")
        return Problem(partial(heart_disease, test), Linear("logistic", l2=0.01, intercept=True), "hospitals")
    if name == "synthetic":
        draw = partial(synthetic_silos, clients or SYNTHETIC_CLIENTS, test=test)
        return Problem(draw, Linear("squared", l2=0.1), f"synthetic, {_clients(clients or SYNTHETIC_CLIENTS)}")
    return _partitioned(name, clients or PARTITIONS[name][0], alpha or PARTITIONS[name][1], test)


def _partitioned(name: str, clients: int, alpha: float, test: float) -> Problem:
    load = digits if name == "digits" else breast_cancer
    data = partial(load, clients=clients, alpha=alpha, test_fraction=test, minimum=FEWEST)
    softmax = Linear("softmax", l2=1e-3, intercept=True, classes=10)
    model = softmax if name == "digits" else Linear("logistic", l2=0.01, intercept=True)
    return Problem(data, model, f"{name}, {_clients(clients)}, Dirichlet({alpha:g})")


def _clients(number: int) -> str:
    return f"{number} client{'' if number == 1 else 's'}"


def synthetic_silos(clients: int, seed: int, test: float = TEST_FRACTION) -> Silos:
    """The paper's regression problem with some rows of every client held out."""
    random = np.random.default_rng([seed, 1])
    parts = [carve(pair, test, random) for pair in synthetic(N=clients, seed=seed)]
    features = tuple(f"a{k}" for k in range(parts[0][0][0].shape[1]))
    names = tuple(f"client {i}" for i in range(clients))
    return Silos(names, [train for train, _ in parts], [held for _, held in parts], features)
