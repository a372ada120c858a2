"""`Problem`: data and model that methods are compared on, and the problems known by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from scaffpd.data.datasets import breast_cancer, digits, synthetic
from scaffpd.data.hospitals import heart_disease
from scaffpd.data.silos import Client, Silos, held_out
from scaffpd.errors import InputError, unknown
from scaffpd.models.linear import Linear
from scaffpd.numbers import several
from scaffpd.training.cohort import Cohort, ModelSpec


@dataclass(frozen=True)
class Problem:
    """Problem on which methods are compared.

    Args:
        data: `Silos` with test rows, or a function that makes them from a seed, such as
            `partial(sp.data.digits, clients=20, alpha=0.05, test_fraction=0.3)`.
        model: such as `Linear("softmax", l2=1e-3, intercept=True, classes=10)`.
        name: what to call it.
        device: where to compute, such as "cpu" or "cuda".
        dtype: the number format; by default the model's own.
    """

    data: Silos | Callable[..., Silos] = field(repr=False)
    model: ModelSpec
    name: str = "problem"
    device: str = "cpu"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data, Silos) and not callable(self.data):
            raise InputError(
                "problem-without-silos",
                f"Problem needs Silos or a function from a seed to Silos, got {self.data!r}.",
            )
        if not hasattr(self.model, "oracle") or isinstance(self.model, type):
            raise InputError(
                "problem-without-model",
                f"Problem needs a model such as Linear(...) or Module(...), got {self.model!r}.",
            )

    def silos(self, seed: int) -> Silos:
        """Return the rows of one seed, the same for every method."""
        if isinstance(self.data, Silos):
            return self.data
        try:
            named = "seed" in inspect.signature(self.data).parameters
        except ValueError:  # such as the `get` of a dictionary: built in, without a signature
            named = False
        silos = self.data(seed=seed) if named else self.data(seed)
        if not isinstance(silos, Silos):
            raise InputError(
                "problem-without-silos",
                f"The data function of {self.name!r} must return Silos, got {silos!r}.",
            )
        return silos

    def cohort(self, seed: int) -> Cohort:
        """Bind all training rows, and the test rows to score on."""
        silos = self.silos(seed)
        if not silos.test:
            raise InputError(
                "problem-without-test-rows",
                f"The problem {self.name!r} has no test rows: give it a test_fraction above 0.",
            )
        return self._bound(silos, silos.train, silos.test)

    def rehearsal(self, seed: int, fraction: float) -> Cohort:
        """Bind training rows only, a fraction of every client's in the place of the test rows."""
        silos = self.silos(seed)
        random = np.random.default_rng([seed, 2])
        parts = [carve(pair, fraction, random) for pair in silos.train]
        return self._bound(silos, [p[0] for p in parts], [p[1] for p in parts])

    def _bound(self, silos: Silos, train: Sequence[Client], test: Sequence[Client]) -> Cohort:
        return Cohort(
            train, self.model, names=silos.names, device=self.device, dtype=self.dtype, test=test
        )


def carve(pair: Client, fraction: float, random: np.random.Generator) -> tuple[Client, Client]:
    """Cut rows to fit and to validate, of every label alike; a single row serves as both."""
    X = np.asarray(pair[0])
    y = np.asarray(pair[1])
    if len(y) < 2:
        return (X, y), (X, y)
    labels = y if np.issubdtype(y.dtype, np.integer) else np.zeros(len(y), dtype=np.int64)
    out = held_out(labels, fraction, random)
    return (X[~out], y[~out]), (X[out], y[out])


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
            "alpha-without-labels", f"{name!r} is not cut by labels: leave out --alpha."
        )
    logistic = Linear("logistic", l2=0.01, intercept=True)
    if name == "hospitals":
        if clients not in (None, 4):
            raise InputError("four-hospitals", "There are four hospitals: leave out --clients.")
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
