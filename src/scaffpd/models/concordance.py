"""Concordance: how often the row with the higher risk has its event first (Harrell et al. 1982)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
TOGETHER = 2**22  # pairs that are compared at a time


class PairCounts(NamedTuple):
    """Pairs that each row is in: those in the wrong order (ties of risk count half), and all."""

    wrong: Vector
    pairs: Vector


def order_of_pairs(
    time: Vector, event: Vector, risk: Vector, entry: Vector | None = None
) -> PairCounts:
    """Count pairs (e, j): e has its event while j is at risk, and j has none until then.

    Of two events at the same time neither is first; a row that leaves at the time of an event
    without one has outlived it.
    """
    dead = np.flatnonzero(np.asarray(event) > 0)
    begins = np.zeros_like(time) if entry is None else entry
    wrong, pairs = np.zeros((2, len(time)))
    step = max(1, TOGETHER // max(len(time), 1))
    for k in range(0, len(dead), step):
        rows = dead[k : k + step, None]
        later = (time > time[rows]) | ((time == time[rows]) & (np.asarray(event) <= 0))
        later &= begins < time[rows]
        lost = later * ((risk[rows] < risk) + 0.5 * (risk[rows] == risk))
        for total, count in ((pairs, later), (wrong, lost)):
            total[rows[:, 0]] += count.sum(1)
            total += count.sum(0)
    return PairCounts(wrong, pairs)


def concordance(time: Vector, event: Vector, risk: Vector, entry: Vector | None = None) -> float:
    """Return the share of pairs in the right order; NaN where no pair can be compared."""
    wrong, pairs = order_of_pairs(time, event, risk, entry)
    return 1 - float(wrong.sum() / pairs.sum()) if pairs.sum() > 0 else float("nan")
