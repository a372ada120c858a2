r"""Concordance of clients: pairs of rows in the wrong order as a mean over rows, with intervals.

C is a ratio of sums over pairs. With W_j of the P_j pairs of row j in the wrong order, and W of P
in all,

    v_j = W/P + (n/P)(W_j − P_j W/P),    Σ_j v_j/n = W/P = 1 − C,    Var(1 − C) ≈ Var(v)/n

to first order, as a row is in many pairs (W. Hoeffding 1948, "A class of statistics with
asymptotically normal distribution"). At C = 1 that variance is nothing: the interval of C itself is
one of its logit, and as wide as that of so many independent rows as there are events, at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaffpd.models.baseline import Vector, order_of_pairs
from scaffpd.models.linear import Linear
from scaffpd.models.numerics import student

Array = NDArray[np.float64]


def influence(y: Array, risk: Vector, model: Linear) -> Vector | None:
    """Return v_j of every row; `None` where no pair can be compared."""
    wrong, pairs = order_of_pairs(y[:, 0], y[:, 1], risk, y[:, 2] if model.entry else None)
    total = pairs.sum() / 2
    if not total:
        return None
    share = wrong.sum() / 2 / total
    return np.asarray(share + len(y) / total * (wrong - share * pairs))


def wrong_pairs(
    outputs: Sequence[Sequence[Array]], targets: Sequence[Array], model: Linear
) -> list[Array]:
    """Return v_j of every model, (models × rows) client by client.

    A client without a pair has one row of NaN, which leaves it out; where no client has one, all
    models are alike.
    """
    found = []
    for own, y in zip(outputs, targets, strict=True):
        rows = [influence(np.asarray(y, dtype=np.float64), z[:, 0], model) for z in own]
        known = [row for row in rows if row is not None]
        found.append(np.stack(known) if known else None)
    unknown = np.full((len(outputs[0]), 1), math.nan if any(v is not None for v in found) else 0.5)
    return [unknown if one is None else one for one in found]


def interval(y: Array, risk: Vector, model: Linear) -> tuple[float, float, float] | None:
    """Return C with its 95 % interval; `None` without a pair."""
    v = influence(y, risk, model)
    if v is None:
        return None
    right = 1 - float(v.mean())
    events = max(int((y[:, 1] > 0).sum()), 1)
    inside = (right * events + 0.5) / (events + 1)
    spread = inside * (1 - inside)
    error = float(v.std(ddof=1)) / math.sqrt(len(v)) if len(v) > 1 else math.inf
    error = max(error, math.sqrt(spread / events) / 2)
    reach = student(max(events - 1.0, 1.0)) * error / spread
    centre = math.log(inside / (1 - inside))
    low, high = (1 / (1 + math.exp(-min(max(centre + s * reach, -700), 700))) for s in (-1, 1))
    return right, min(low, right), max(high, right)
