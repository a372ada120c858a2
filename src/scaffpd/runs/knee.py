"""The point of a fairness path at which the worst-served have gained most for what the mean gives up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scaffpd.metrics import Spread

LEAST = 0.002  # of a share (0.2 points of accuracy) or of an error: less is no reason to leave the average


def knee(points: Sequence[Spread], upwards: bool) -> int:
    """The point with the largest gain − cost, the first one being the average model; 0 where that is hardly anything.

    Gain is that of the worst 20 %, cost that of the mean, both against the first point: a point of the worst-served
    fifth counts as much as a point of the mean. A mean that rises is no cost, and no reason either.
    """
    sign = 1.0 if upwards else -1.0
    mean, worst = (sign * np.array([getattr(p, name) for p in points]) for name in ("mean", "worst_20"))
    score = worst - worst[0] - np.maximum(mean[0] - mean, 0.0)
    least = LEAST * (1.0 if upwards else abs(float(worst[0])))
    return 0 if score.max() <= least else int(np.flatnonzero(score >= score.max() - 1e-12)[0])
