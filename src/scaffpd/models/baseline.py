"""Curves over time: Kaplan and Meier's survival, Breslow's baseline hazard, and Brier's score.

    S(t) = Π_{t_k ≤ t} (1 − d_k/n_k)                  d_k events, n_k rows at risk
    H(t) = Σ_{t_k ≤ t} d_k / Σ_{j at risk} e^{z_j}    and S(t | z) = exp(−H(t) e^z)

(E. Kaplan and P. Meier 1958; N. Breslow 1972.) The Brier score of S(t | z_j) at t weights a row by
one over the chance G that it is not censored before (E. Graf et al. 1999).

Concordance: how often the row with the higher risk has its event first (Harrell et al. 1982).
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Steps:
    """A function that jumps at `times` to `values`, and is `first` before."""

    times: Vector
    values: Vector
    first: float

    def __call__(self, t: Vector | float, before: bool = False) -> Vector:
        place = np.searchsorted(self.times, t, "left" if before else "right")
        return np.asarray(np.concatenate([[self.first], self.values])[place])


def _rates(y: Vector, size: Vector) -> tuple[Vector, Vector]:
    """Return event times and events over the size of those at risk; y has times, events, entries.

    Sizes are counted from the last time on: no early row hides a late one.
    """
    time, event = y[:, 0], y[:, 1] > 0
    times, counts = np.unique(time[event], return_counts=True)

    def from_then_on(at: Vector) -> Vector:
        order = np.argsort(at)
        total = np.append(np.cumsum(size[order][::-1])[::-1], 0.0)
        return np.asarray(total[np.searchsorted(at[order], times)])

    risk = from_then_on(time)
    if y.shape[1] > 2:
        risk = risk - from_then_on(y[:, 2])
    return times, np.asarray(counts / risk, dtype=np.float64)


def kaplan_meier(y: Vector) -> Steps:
    times, rates = _rates(y, np.ones(len(y)))
    return Steps(times, np.asarray(np.cumprod(1 - rates)), 1.0)


def breslow(y: Vector, z: Vector) -> Steps:
    """Return the cumulative hazard of a row with z = 0."""
    top = float(z.max(initial=0.0))
    times, rates = _rates(y, np.exp(z - top))
    return Steps(times, np.cumsum(rates) * np.exp(-top), 0.0)


def brier(y: Vector, times: Vector, survival: Vector) -> Vector:
    """Return the Brier score of the predicted survival, (rows × times), of rows y at each time."""
    censored = kaplan_meier(np.column_stack([y[:, 0], 1 - y[:, 1]]))
    time, event = y[:, :1], y[:, 1:2] > 0
    early = (time <= times) & event
    left = np.where(early, censored(time, before=True), censored(times))
    squares = np.where(early, survival**2, np.where(time > times, (1 - survival) ** 2, 0.0))
    return np.asarray((squares / np.where(left > 0, left, np.inf)).mean(0))


def log_rank(groups: NDArray[np.int64], strata: NDArray[np.int64], y: Vector) -> float:
    """Return the statistic of the stratified log-rank test, χ² with groups − 1 degrees of freedom.

    (N. Mantel 1966.) Events of a group, less those expected of its share of the rows at risk.
    """
    k = int(groups.max()) + 1
    less = np.zeros(k)
    spread = np.zeros((k, k))
    for stratum in np.unique(strata):
        own = strata == stratum
        time, event, group = y[own, 0], y[own, 1] > 0, groups[own]
        for t in np.unique(time[event]):
            risk = time >= t
            n = risk.sum()
            d = (event & (time == t)).sum()
            share = np.bincount(group[risk], minlength=k) / n
            less += np.bincount(group[event & (time == t)], minlength=k) - d * share
            if n > 1:
                spread += d * (n - d) / (n - 1) * (np.diag(share) - np.outer(share, share))
    return float(less @ np.linalg.pinv(spread) @ less)
