"""The point of a fairness path at which more fairness begins to cost more than it brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaffpd.metrics import Spread

LEAST = 0.002  # gains below this share (0.2 points of accuracy, 0.2 % of an error) are no reason to leave the average


@dataclass(frozen=True)
class Knee:
    """A suggestion.

    Attributes:
        index: of the point.
        gain: of the clients served worst, against the average model (what is better is positive).
        cost: what the mean gives up for it.
    """

    index: int
    gain: float
    cost: float


def knee(points: Sequence[Spread], upwards: bool) -> Knee:
    """The point with the largest gain/G − cost/C, the first one being the average model.

    Gain is that of the worst 20 % and cost that of the mean, both against the first point; G is the largest gain, and C
    the largest cost or G, whichever is larger: where fairness is cheap, a point counts the same on both sides.
    """
    sign = 1.0 if upwards else -1.0
    mean, worst = (sign * np.array([getattr(p, name) for p in points]) for name in ("mean", "worst_20"))
    gain, cost = worst - worst[0], mean[0] - mean
    most = float(gain.max())
    if most <= LEAST * (1.0 if upwards else abs(float(worst[0]))):
        return Knee(0, 0.0, 0.0)
    score = gain / most - np.maximum(cost, 0.0) / max(float(cost.max()), most)
    best = int(np.flatnonzero(score >= score.max() - 1e-12)[0])
    return Knee(best, float(gain[best]), float(cost[best]))
