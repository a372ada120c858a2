"""Small problems and awkward methods for the tests of `compare`; here because other processes must
find them.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

import scaffpd as sp
from scaffpd.data import Silos

NAMES = tuple("abcdef")


def toy(seed: int, garbage: bool = False) -> Silos:
    """Six clients that differ, two features, labels 0/1; `garbage` turns the test labels over."""
    random = np.random.default_rng(seed)
    truth = random.standard_normal(2)

    def rows(n, shift):
        X = random.standard_normal((n, 2)) + shift
        return X, (X @ (truth + shift) + 0.5 * random.standard_normal(n) > 0).astype(np.int64)

    shifts = random.standard_normal((len(NAMES), 2))
    train = [rows(12 + 3 * i, shift) for i, shift in enumerate(shifts)]
    test = [rows(9, shift) for shift in shifts]
    return Silos(NAMES, train, [(X, 1 - y if garbage else y) for X, y in test], ("u", "v"))


def regression(seed: int) -> Silos:
    """Three clients, squared loss."""
    pairs = sp.data.synthetic(N=3, d=3, m=30, seed=seed)
    return Silos(
        tuple("abc"),
        [(X[:20], y[:20]) for X, y in pairs],
        [(X[20:], y[20:]) for X, y in pairs],
        tuple("uvw"),
    )


PROBLEM = sp.Problem(toy, sp.Linear("logistic", l2=0.01, intercept=True), "toy")
METHODS = {
    "FedAvg": sp.FedAvg(local_steps=3),
    "DRFA": sp.DRFA(local_steps=3, batch_size=4),
    "Scaff-PD": sp.ScaffPD(sp.ChiSquare(0.1), local_steps=3),
}


@dataclass(frozen=True)
class Moody(sp.FedAvg):
    """FedAvg with a rate beyond all bounds on one seed."""

    knobs: ClassVar[tuple[str, ...]] = ()
    bad_seed: int = field(default=1, kw_only=True)

    def init(self, federation, seed=0, x0=None):
        state = super().init(federation, seed, x0)
        return replace(state, local_rate=1e9) if seed == self.bad_seed else state


@dataclass(frozen=True)
class Broken(sp.FedAvg):
    """A method with a bug."""

    def round(self, federation, state):
        raise ZeroDivisionError("a bug")
