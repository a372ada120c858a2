r"""A table of clients in a few numbers: no worst client without the mean, and no mean without the worst.

The worst and the best 20 % are those of the paper's footnote: sort the clients by the measure and take the mean of the
lowest and of the highest fifth. A fifth of N clients is ⌈N/5⌉ of them: 1 of 4, 1 of 5, 2 of 6, 4 of 20.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, real
from scaffpd.federation import ClientScores, Vector

MEGABYTE = 1e6


@dataclass(frozen=True)
class Spread:
    """One measure v_i over all N clients.

    Attributes:
        mean: over clients, each counting the same.
        weighted_mean: over samples, so that clients count by their size.
        worst: of the client that is served worst.
        best: of the client that is served best.
        worst_client: its name (the first of several).
        best_client: its name (the first of several).
        deviation: the standard deviation over clients.
        worst_20: the mean over the ⌈N/5⌉ clients that are served worst.
        best_20: the mean over the ⌈N/5⌉ clients that are served best.
        gini: Gini's coefficient Σ_ij |v_i − v_j| / (2 N Σ v_i): 0 where all are equal, (N − 1)/N where one has
            everything; NaN where a value is negative or not finite.
        jain: Jain's index (Σ v_i)² / (N Σ v_i²): 1 where all are equal, 1/N where one has everything; NaN likewise.
    """

    mean: float
    weighted_mean: float
    worst: float
    best: float
    worst_client: str
    best_client: str
    deviation: float
    worst_20: float
    best_20: float
    gini: float
    jain: float


@dataclass(frozen=True)
class Summary:
    """`ClientScores` in a few numbers.

    Attributes:
        loss: over the clients' losses (the worst is the largest).
        accuracy: over the clients' accuracies (the worst is the smallest); `None` for regression.
    """

    loss: Spread
    accuracy: Spread | None

    @classmethod
    def of(cls, scores: ClientScores) -> Summary:
        """Summarise the scores of one model."""
        accuracy = None if np.isnan(scores.accuracy).all() else spread(scores, scores.accuracy, upwards=True)
        return cls(spread(scores, scores.loss, upwards=False), accuracy)


def a_fifth(clients: int) -> int:
    """⌈N/5⌉."""
    return math.ceil(clients / 5)


def gini(values: ArrayLike) -> float:
    """Gini's coefficient; with v sorted upwards, Σ_ij |v_i − v_j| = 2 Σ_k (2k − N − 1) v_k, k from 1 to N."""
    v = _shares(values)
    if v is None:
        return math.nan
    N, total = len(v), v.sum()
    ranks = 2 * np.arange(1, N + 1) - N - 1
    return float(max(ranks @ np.sort(v), 0.0) / (N * total)) if total > 0 else 0.0


def jain(values: ArrayLike) -> float:
    """Jain's index; 1 where all values are zero, for they are equal."""
    v = _shares(values)
    if v is None:
        return math.nan
    squares = float(v @ v)
    return float(min(v.sum() ** 2 / (len(v) * squares), 1.0)) if squares > 0 else 1.0


def _shares(values: ArrayLike) -> Vector | None:
    """Values over their largest, which changes neither index and lets no sum overflow; `None` where there is none."""
    v = np.asarray(values, dtype=np.float64)
    if not np.all(np.isfinite(v)) or v.min() < 0:
        return None
    largest = v.max()
    return v / largest if largest > 0 else v


def spread(scores: ClientScores, values: Vector, upwards: bool) -> Spread:
    """One measure over the clients of `scores`; `upwards` where more is better."""
    badness = -values if upwards else values
    order = np.argsort(-badness, kind="stable")
    k = a_fifth(len(values))
    worst, best = int(badness.argmax()), int(badness.argmin())
    return Spread(
        mean=float(values.mean()),
        weighted_mean=float(np.average(values, weights=scores.counts)),
        worst=float(values[worst]),
        best=float(values[best]),
        worst_client=scores.names[worst],
        best_client=scores.names[best],
        deviation=float(values.std()),
        worst_20=float(values[order[:k]].mean()),
        best_20=float(values[order[-k:]].mean()),
        gini=gini(values),
        jain=jain(values),
    )


class Rounds(Protocol):
    """What is asked of a `History`."""

    def __len__(self) -> int:
        """The number of rows; the first is the starting point."""

    def __getitem__(self, column: str, /) -> NDArray[Any]:
        """One column."""


@dataclass(frozen=True)
class Communication:
    """What was sent from the start up to some round, summed over clients."""

    rounds: int  # communication rounds; 0 is the starting point
    exchanges: int  # request-reply turns
    megabytes_up: float  # from clients, in units of 10⁶ bytes
    megabytes_down: float  # to clients


def communication_until(
    history: Rounds, measure: str | Callable[[Any], ArrayLike], target: float, upwards: bool = False
) -> Communication | None:
    """How much communication it took until a measure first reached a target; `None` where it never did.

    Args:
        history: of a run.
        measure: a column such as "certificate", or a function that makes one number per row of the history, such as
            `lambda history: history.losses.max(axis=1)`, the worst training loss.
        target: reached at the first row with measure <= target.
        upwards: reached at the first row with measure >= target instead.
    """
    values = history[measure] if isinstance(measure, str) else np.asarray(measure(history), dtype=np.float64)
    if values.shape != (len(history),):
        raise InputError(f"The measure must have one number for each of {len(history)} rows, got shape {values.shape}.")
    goal = real("communication_until", "target", target)
    reached = np.flatnonzero(values >= goal if upwards else values <= goal)
    if len(reached) == 0:
        return None
    row = {name: int(history[name][reached[0]]) for name in ("round", "exchanges", "bytes_up", "bytes_down")}
    up, down = row["bytes_up"] / MEGABYTE, row["bytes_down"] / MEGABYTE
    return Communication(row["round"], row["exchanges"], up, down)
