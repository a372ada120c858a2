r"""Times to an event in periods: a row for every person and period, whose loss is a sum over rows.

A person at risk in a period has an event in it with probability h, logit h = γ_period + ⟨a, β⟩
(D. Cox 1972, section 6). It has K rows, no more and no fewer: the rows of periods in which it is
not at risk are zeros, whose gradient is zero without an intercept. So minibatches work, and with
`Private` a person is K records: with K times the noise of `Private.solved` its (ε, δ) are a
person's. A period counts where a person is followed until its event, or beyond its middle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scaffpd.data.silos import Matrix
from scaffpd.errors import InputError


def person_periods(X: Matrix, y: Matrix, ends: Sequence[float]) -> tuple[Matrix, Matrix]:
    """Return rows and labels of persons × periods, for `Linear("logistic")` without intercept.

    Args:
        X: the columns of every person, centred.
        y: time, event and, if there are such, entry.
        ends: of the periods, rising; the first one begins at 0. All clients have the same. Chosen
            from rows, such as quantiles of event times, they are not covered by ε.

    Returns:
        (n K, d + K) rows, the periods' indicators last; (n K,) labels.
    """
    until = np.asarray(ends, dtype=np.float64)
    if until.ndim != 1 or not len(until) or (np.diff(until, prepend=0.0) <= 0).any():
        raise InputError("periods-not-rising", "Periods need ends that rise from above zero.")
    begin = np.concatenate([[0.0], until[:-1]])
    middle = (begin + until) / 2
    time, event, entry = (y[:, k, None] if k < y.shape[1] else 0.0 for k in range(3))
    seen = (event > 0) & (begin < time) & (time <= until)
    there = (entry <= middle) & (seen | (time > middle)) & ((event <= 0) | (begin < time))
    n, K = there.shape
    rows = np.concatenate(
        [np.repeat(X[:, None, :], K, 1), np.broadcast_to(np.eye(K), (n, K, K))], axis=2
    )
    return (rows * there[..., None]).reshape(n * K, -1), (seen & there).astype(float).ravel()


def survival_of(X: Matrix, x: Matrix, periods: int) -> Matrix:
    """Return the chance to survive every period, (n, K), under the model x."""
    z = (X @ x[: len(x) - periods])[:, None] + x[len(x) - periods :]
    chance: Matrix = np.exp(-np.logaddexp(0.0, z).cumsum(1))
    return chance
