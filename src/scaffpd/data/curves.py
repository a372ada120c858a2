"""Curves: a column of numbers v becomes a line and steps 1[v > t_k] at agreed thresholds.

A linear model of these is additive in curves of the columns, and as convex as one of lines. Steps
are centred but not scaled, so that jumps of one size cost the same wherever they are: a prior on
them is a random walk. On twelve tables that was as good as hinges (max(v − t_k, 0)) and as scaled
steps in the mean, and never far behind, which neither of the others was.
Thresholds are quantiles of the *values* that a column has, each weighted by the root of its number
of rows: quantiles of rows would spend all thresholds of a column that is mostly 0 on that 0.

Everything comes from sums over clients: how many rows, and how many clients with any, lie between
given edges. Edges are short decimal numbers, first those of one digit; where rows are many, the
next digit follows. So no edge is the value of a row unless that is as short, and every cell between
thresholds has ten rows and a part of it two clients. Clients in one process, silos that mask their
sums, and sums with noise use the same code and agree on the same thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
# edges of every column ↦ rows, and clients with any, in all cells, (2, cells): of each column one
# up to its first edge, …, one above its last
Total = Callable[[Sequence[Matrix]], Matrix]

MOST = 31  # thresholds of a column
LEAST_ROWS = 10  # of a cell between thresholds
LEAST_CLIENTS = 2  # likewise
DIGITS = 5  # the most of an edge; as many sums are made
EXPONENTS = range(-12, 13)  # of the first edges


class Limits(NamedTuple):
    """What thresholds are chosen by."""

    rows: float = LEAST_ROWS  # the least of a cell
    clients: float = LEAST_CLIENTS  # likewise; of cells that are merged, the most that one has
    most: int = MOST  # thresholds of a column
    sums: int = DIGITS  # the most that are made
    clear: float = 0.0  # rows up to which a cell may be noise, and counts as empty


# names of clients and their sorted numbers ↦ how to count them together, and the limits for that
Counting = Callable[[Sequence[str], Sequence[Sequence[Matrix]]], tuple[Total, Limits | None]]


class Feature(NamedTuple):
    """An encoded column."""

    name: str
    group: str  # of columns whose coefficients have one variance
    step: bool = False


def curve(name: str, steps: Sequence[float] | Matrix) -> list[Feature]:
    """Return a column's line and its steps: "age", "age > 37", …"""
    return [
        Feature(name, name),
        *(Feature(f"{name} > {t:.15g}", f"{name} steps", True) for t in steps),
    ]


def with_steps(lines: Matrix, steps: Sequence[Sequence[float] | Matrix]) -> Matrix:
    """Put its steps behind every column; what is missing (NaN) stays so."""
    blocks = []
    for line, own in zip(lines.T[:, :, None], steps, strict=True):
        blocks += [line, np.where(np.isnan(line), np.nan, line > np.asarray(own))]
    return np.concatenate(blocks, 1)


def counted(columns: Sequence[Matrix], edges: Sequence[Matrix]) -> Matrix:
    """Count a client's rows, and whether there are any, in every cell (−∞, e_1], …, (e_k, ∞).

    Args:
        columns: their numbers, sorted, without gaps.
        edges: of every column, rising.
    """
    rows = [
        np.diff(np.searchsorted(values, own, side="right"), prepend=0, append=len(values))
        for values, own in zip(columns, edges, strict=True)
    ]
    found = np.concatenate(rows) if rows else np.empty(0)
    return np.array([found, found > 0], dtype=np.float64)


def plainly(
    names: Sequence[str], columns: Sequence[Sequence[Matrix]]
) -> tuple[Total, Limits | None]:
    return lambda edges: np.sum([counted(own, edges) for own in columns], axis=0), None


def thresholds(columns: int, total: Total, limits: Limits | None = None) -> list[Matrix]:
    """Return the thresholds of every column, from sums over clients alone.

    Args:
        columns: how many there are.
        total: returns the sum of what `counted` returns at every client.
        limits: on cells, thresholds and sums.
    """
    limits = limits or Limits()
    # zero and all numbers of one digit, of either sign
    positive = np.array([float(f"{digit}e{k}") for k in EXPONENTS for digit in range(1, 10)])
    edges = [np.concatenate([-positive[::-1], [0.0], positive])] * columns
    cells = _cut(edges, total(edges))
    for _ in range(limits.sums - 1):
        finer = [_refined(own, n, limits) for own, (n, _) in zip(edges, cells, strict=True)]
        if all(map(np.array_equal, finer, edges)):
            break
        edges = finer
        cells = _cut(edges, total(edges))
    return [
        _chosen(own, n, present, limits) for own, (n, present) in zip(edges, cells, strict=True)
    ]


def _cut(edges: Sequence[Matrix], sums: Matrix) -> list[Matrix]:
    return np.split(sums, np.cumsum([len(own) + 1 for own in edges])[:-1], axis=1)


def _refined(edges: Matrix, n: Matrix, limits: Limits) -> Matrix:
    """Add the next digit where rows are many; drop edges between cells without rows."""
    weight = np.sqrt(np.where(n > limits.clear, n, 0.0))
    heavy = (n >= 2 * limits.rows) & (weight > weight.sum() / (2 * (limits.most + 1)))
    finer = [edges[np.maximum(n[:-1], n[1:]) > limits.clear]]
    for cell in np.flatnonzero(heavy[1:-1]):  # those at both ends have no width
        width = (edges[cell + 1] - edges[cell]) / 10
        digits = -int(np.floor(np.log10(width) + 0.5))
        finer.append(np.round(edges[cell] + width * np.arange(1, 10), digits))
    return np.unique(np.concatenate(finer))


def _chosen(edges: Matrix, n: Matrix, present: Matrix, limits: Limits) -> Matrix:
    """Merge thin cells, and choose quantiles of those that are left, weighted by √rows."""
    upper: list[float] = []
    sizes: list[float] = []
    size = most = 0.0
    for edge, own, whose in zip([*edges, np.inf], n, present, strict=True):
        size += own
        most = max(most, whose)
        if size >= limits.rows and most >= limits.clients:
            upper.append(edge)
            sizes.append(size)
            size = most = 0.0
    if len(upper) > limits.most + 1:
        share = np.cumsum(np.sqrt(sizes)) / np.sqrt(sizes).sum()
        quantiles = np.arange(1, limits.most + 1) / (limits.most + 1)
        places = np.unique(np.searchsorted(share, quantiles))
    else:
        places = np.arange(len(upper))
    return np.array(upper)[places[places < len(upper) - 1]]
