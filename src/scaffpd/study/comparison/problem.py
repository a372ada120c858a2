"""`Problem`: data and model that methods are compared on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from scaffpd.data.silos import Client, Silos, held_out
from scaffpd.errors import InputError
from scaffpd.training.cohort import Cohort, ModelSpec


@dataclass(frozen=True)
class Problem:
    """Problem on which methods are compared.

    Args:
        data: `Silos` with test rows, or a function of `seed` that returns them, such as
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

    def silos(self, seed: int) -> Silos:
        """Return the rows of one seed, the same for every method."""
        silos = self.data(seed=seed) if callable(self.data) else self.data
        if not isinstance(silos, Silos):
            raise InputError(
                "problem-without-silos",
                f"Problem needs Silos or a function of `seed` that returns them, got {silos!r}.",
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
