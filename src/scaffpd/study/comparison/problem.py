"""`Problem`: the data and the model that all methods of a comparison share, and the problems known by name."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from scaffpd.data import Selection, Silos, breast_cancer, digits, heart_disease, synthetic
from scaffpd.data.silos import held_out
from scaffpd.errors import InputError, unknown
from scaffpd.models import Linear
from scaffpd.numbers import several
from scaffpd.training.cohort import Cohort, ModelSpec

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Problem on which methods are compared.

    Args:
        data: `Silos` with test rows, or a function that makes them from a seed, such as
            `partial(sp.data.digits, clients=20, alpha=0.05, test_fraction=0.3)`; with more than one process it must be
            picklable, so a function at the top level of a module or a `functools.partial` of one.
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
                "problem-silos-function",
                f"Problem needs Silos or a function from a seed to Silos, got {type(self.data).__name__}.",
            )
        if not hasattr(self.model, "oracle") or isinstance(self.model, type):
            raise InputError(
                "problem-model-such",
                f"Problem needs a model such as Linear(...) or Module(...), got {self.model!r}.",
            )
        if not isinstance(self.name, str) or not self.name:
            raise InputError("problem-name", f"Problem needs a name, got {self.name!r}.")

    def silos(self, seed: int) -> Silos:
        """Return the rows of one seed, the same for every method."""
        if isinstance(self.data, Silos):
            return self.data
        silos = self.data(seed=seed) if _takes_seed(self.data) else self.data(seed)
        if not isinstance(silos, Silos):
            raise InputError(
                "data-function-must",
                f"The data function of {self.name!r} must return Silos, got {type(silos).__name__}.",
            )
        return silos

    def cohort(self, seed: int) -> Cohort:
        """Bind all training rows, and the test rows to score on."""
        silos = self.silos(seed)
        if not silos.test:
            raise InputError(
                "problem-test-rows",
                f"The problem {self.name!r} has no test rows: make it with a test_fraction above 0.",
            )
        return self._bound(silos, silos.train, silos.test)

    def rehearsal(self, seed: int, fraction: float) -> Cohort:
        """Bind training rows only: `fraction` of every client's is held out in the place of the test rows."""
        silos = self.silos(seed)
        random = np.random.default_rng([seed, 2])
        parts = [carve(pair, fraction, random) for pair in silos.train]
        return self._bound(silos, [p[0] for p in parts], [p[1] for p in parts])

    def _bound(self, silos: Silos, train: Sequence[Pair], test: Sequence[Pair]) -> Cohort:
        return Cohort(
            train, self.model, names=silos.names, device=self.device, dtype=self.dtype, test=test
        )


def carve(pair: Pair, fraction: float, random: np.random.Generator) -> tuple[Pair, Pair]:
    """Cut rows to fit and rows to validate, of every label alike; the only row of a client serves as both."""
    X = pair[0] if isinstance(pair[0], Selection) else np.asarray(pair[0])
    y = np.asarray(pair[1])
    if len(y) < 2:
        return (X, y), (X, y)
    labels = y if np.issubdtype(y.dtype, np.integer) else np.zeros(len(y), dtype=np.int64)
    out = held_out(labels, fraction, random)
    return (X[~out], y[~out]), (X[out], y[out])


def fingerprint(problem: Problem, cohort: Cohort, seed: int) -> str:
    """Return a digest of model, start and all rows of one seed, the test rows included."""
    digest = hashlib.sha256(cohort.fingerprint.encode())
    digest.update(cohort.start().detach().cpu().numpy().tobytes())
    for X, y in problem.silos(seed).test:
        features: Any = X
        rows = features
        if isinstance(features, Selection):
            digest.update(repr(features.table.identity).encode())
            rows = features.numbers
        for array in (np.ascontiguousarray(rows), np.ascontiguousarray(y)):
            digest.update(repr((array.shape, str(array.dtype))).encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _takes_seed(function: Callable[..., Any]) -> bool:
    """Return whether there is a parameter of that name; others take the seed as their only argument."""
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


TEST_FRACTION = 0.3
FEWEST = (
    10  # rows of a client of a partition by labels: of fewer, none or one would be left to test on
)
PARTITIONS = {
    "digits": (20, 0.05),
    "breast-cancer": (10, 0.5),
}  # clients and α, unless they are given
SYNTHETIC_CLIENTS = 20
NAMES = ("digits", "hospitals", "breast-cancer", "synthetic")


def problem(
    name: str, clients: int | None = None, alpha: float | None = None, test: float = TEST_FRACTION
) -> Problem:
    """Return the problem of that name; every seed has a partition (or a draw) and test rows of its own.

    Args:
        name: "digits", "hospitals", "breast-cancer" or "synthetic".
        clients: how many; the hospitals are four.
        alpha: α of the Dirichlet partition by labels of digits and breast cancer: the smaller, the more clients differ.
        test: share of rows held out.
    """
    if name not in NAMES:
        raise unknown("problem", name, NAMES)
    if alpha is not None and name not in PARTITIONS:
        raise InputError(
            "problem-cut-labels", f"The problem {name!r} is not cut by labels: leave --alpha out."
        )
    if name == "hospitals":
        if clients not in (None, 4):
            raise InputError("hospitals-four-leave", "The hospitals are four: leave --clients out.")
        return Problem(
            partial(heart_disease, test), Linear("logistic", l2=0.01, intercept=True), "hospitals"
        )
    if name == "synthetic":
        draw = partial(synthetic_silos, clients or SYNTHETIC_CLIENTS, test=test)
        return Problem(
            draw,
            Linear("squared", l2=0.1),
            f"synthetic, {several(clients or SYNTHETIC_CLIENTS, 'client')}",
        )
    clients = clients or PARTITIONS[name][0]
    alpha = alpha or PARTITIONS[name][1]
    load = breast_cancer
    model = Linear("logistic", l2=0.01, intercept=True)
    if name == "digits":
        load = digits
        model = Linear("softmax", l2=1e-3, intercept=True, classes=10)
    data = partial(load, clients=clients, alpha=alpha, test_fraction=test, minimum=FEWEST)
    return Problem(data, model, f"{name}, {several(clients, 'client')}, Dirichlet({alpha:g})")


def synthetic_silos(clients: int, seed: int, test: float = TEST_FRACTION) -> Silos:
    """Return the paper's regression problem with some rows of every client held out."""
    random = np.random.default_rng([seed, 1])
    parts = [carve(pair, test, random) for pair in synthetic(N=clients, seed=seed)]
    features = tuple(f"a{k}" for k in range(parts[0][0][0].shape[1]))
    names = tuple(f"client {i}" for i in range(clients))
    return Silos(names, [train for train, _ in parts], [held for _, held in parts], features)
