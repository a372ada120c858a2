"""Columns of similar scale, from sums that clients could give; and the way back to the units of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.silos import standardiser
from scaffpd.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """Values become (values − mean)/deviation, column by column."""

    mean: Array
    deviation: Array

    @classmethod
    def of(cls, parts: Sequence[Array], centred: bool, what: str) -> Scale:
        """Mean and deviation over all clients; a model without an intercept leaves the mean where it is."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = standardiser(parts)
        wrong = np.flatnonzero(~(np.isfinite(mean) & np.isfinite(deviation)))
        if wrong.size:
            raise InputError(f"{what} {wrong[0]} has values too large to be standardised: scale them first.")
        return cls(mean if centred else np.zeros_like(mean), deviation)

    @classmethod
    def none(cls, columns: int) -> Scale:
        """Everything as it is."""
        return cls(np.zeros(columns), np.ones(columns))

    def __call__(self, values: Array) -> Array:
        """Values in units of their deviation."""
        scaled: Array = (values - self.mean) / self.deviation
        return scaled


def in_units(weights: Array, intercept: Array, inputs: Scale, outputs: Scale) -> tuple[Array, Array]:
    """Weights (features × outputs) and intercepts of a model of scaled values, for values as they were."""
    W = weights / inputs.deviation[:, None] * outputs.deviation
    return W, intercept * outputs.deviation + outputs.mean - inputs.mean @ W
