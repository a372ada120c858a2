"""Search for pairs: an additive model by evidence, and one pass of sums over its clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.evidence import Strengths
from scaffpd.data.pairs import ChosenPair, Indicators, chosen_pairs, pair_sums
from scaffpd.models import Linear, Personal
from scaffpd.training.cohort import Cohort, Pair

MOST_INDICATORS = 1500  # beyond which no pairs are looked for: sums are of their squares


def search(
    clients: Sequence[Pair],
    model: Linear,
    indicators: Sequence[NDArray[np.float64]],
    columns: Sequence[Indicators],
    most: int,
) -> list[ChosenPair]:
    """Return pairs whose products pay beside what clients' own additive models say.

    Args:
        clients: their (X, y), encoded.
        model: the additive model; clients make it their own.
        indicators: of every client's rows: zeros and ones.
        columns: which indicators are of which column, numbered from 1 on.
        most: the most pairs.
    """
    if too_many(columns):
        return []
    cohort = Cohort(clients, Personal(model))
    found = cohort.strengths
    assert found is not None
    own = cohort.own_models(found.x)
    assert own is not None
    sums = np.zeros(())
    for (X, y), Z, u in zip(clients, indicators, own, strict=True):
        sums = sums + pair_sums(Z, *model.slopes(u, X, y))
    return chosen_pairs(columns, sums / noise_of(model, found), most)


def too_many(columns: Sequence[Indicators]) -> bool:
    """Return whether sums over all pairs of indicators would be too large."""
    return sum(len(column.places) for column in columns) > MOST_INDICATORS


def noise_of(model: Linear, found: Strengths) -> float:
    """Return what a row's loss is divided by in nats: 1, or 2σ² for squared loss."""
    return 2 * found.sigma2 if model.loss == "squared" else 1.0
