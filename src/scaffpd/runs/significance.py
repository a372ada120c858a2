"""Whether a client's change in accuracy is more than chance: the rows on which two models disagree.

Of the held-out rows that exactly one of the two models gets right, either should have half if nothing had changed
(McNemar's test, exact: a binomial with probability ½).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from scaffpd.models import Linear
from scaffpd.runs.prepared import Prepared
from scaffpd.tabular.schema import CLASSIFICATION

CONFIDENCE = 0.95


def clear(prepared: Prepared, before: NDArray[Any], after: NDArray[Any]) -> tuple[bool, ...] | None:
    """Client by client, each for itself; `None` where there are no labels, no held-out rows or no linear model."""
    model = prepared.model
    if prepared.task != CLASSIFICATION or not prepared.test or not isinstance(model, Linear):
        return None
    return tuple(_differs(_right(model, before, *pair), _right(model, after, *pair)) for pair in prepared.test)


def _right(model: Linear, x: NDArray[Any], X: Any, y: Any) -> NDArray[np.bool_]:
    """Which rows the model x gets right."""
    z = model.outputs(x, np.asarray(X, dtype=np.float64))
    found: NDArray[np.bool_] = (z[:, 0] > 0 if model.loss == "logistic" else z.argmax(1)) == np.asarray(y)
    return found


def _differs(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> bool:
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    return gained + lost > 0 and bool(binomtest(gained, gained + lost).pvalue < 1 - CONFIDENCE)
