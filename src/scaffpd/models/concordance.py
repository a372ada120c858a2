"""Concordance: how often the row with the higher risk has its event first (Harrell et al. 1982)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
TOGETHER = 2**22  # pairs that are compared at a time


class PairCounts(NamedTuple):
    """Pairs of every row with an event: right ones (ties of risk count half), and all of them."""

    right: Vector
    pairs: Vector


def concordant(
    time: Vector, event: Vector, risk: Vector, entry: Vector | None = None
) -> PairCounts:
    """Count pairs (e, j): e has its event while j is at risk, and j has none until then.

    Of two events at the same time neither is first; a row that leaves at the time of an event
    without one has outlived it.
    """
    dead = np.flatnonzero(np.asarray(event) > 0)
    begins = np.zeros_like(time) if entry is None else entry
    right, pairs = np.zeros((2, len(dead)))
    step = max(1, TOGETHER // max(len(time), 1))
    for k in range(0, len(dead), step):
        rows = dead[k : k + step, None]
        later = (time > time[rows]) | ((time == time[rows]) & (np.asarray(event) <= 0))
        later &= begins < time[rows]
        pairs[k : k + step] = later.sum(1)
        wins = 2 * (risk[rows] > risk).astype(np.int8) + (risk[rows] == risk)
        right[k : k + step] = (wins * later).sum(1) / 2
    return PairCounts(right, pairs)


def concordance(time: Vector, event: Vector, risk: Vector, entry: Vector | None = None) -> float:
    """Return the share of right pairs; NaN where no pair can be compared."""
    right, pairs = concordant(time, event, risk, entry)
    return float(right.sum() / pairs.sum()) if pairs.sum() > 0 else float("nan")
