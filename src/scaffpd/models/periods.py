r"""Times to an event in periods: a logistic hazard of every person and period, a sum over rows.

A person at risk in a period has its event in it with probability h, logit h = γ_period + ⟨a, β⟩
(D. Cox 1972, section 6). A period counts where a person is followed until its event, or beyond its
middle. Within a period the hazard is constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaffpd.federation import Vector

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]
Places = NDArray[np.intp]


def at_risk(y: Matrix, ends: Sequence[float]) -> tuple[Mask, Mask]:
    """Return in which periods persons are at risk and have their event, each (n, K).

    Args:
        y: time, event and, if there is one, entry.
        ends: of the periods, rising; the first one begins at 0.
    """
    until = np.asarray(ends, dtype=np.float64)
    begin = np.append(0.0, until[:-1])
    middle = (begin + until) / 2
    time, event, entry = (y[:, k, None] if k < y.shape[1] else 0.0 for k in range(3))
    seen = (event > 0) & (begin < time) & (time <= until)
    there = (entry <= middle) & (seen | (time > middle)) & ((event <= 0) | (begin < time))
    return there, seen & there


def person_periods(X: Matrix, there: Mask, who: Places, when: Places) -> Matrix:
    """Return rows of some persons and periods, with the periods' indicators behind X; zeros where
    the person is not at risk.
    """
    rows = np.hstack([X[who], np.eye(there.shape[1])[when]])
    rows *= there[who, when, None]
    return rows


def survival_at(times: Vector, z: Vector, levels: Matrix, ends: Sequence[float]) -> Matrix:
    """Return the chance to survive each time, (rows × times), with levels γ, of all or by row."""
    begin = np.append(0.0, ends[:-1])[:, None]
    passed = np.clip((times - begin) / (np.asarray(ends)[:, None] - begin), 0, 1)
    return np.asarray(np.exp(-np.logaddexp(0.0, z[:, None] + levels) @ passed))
