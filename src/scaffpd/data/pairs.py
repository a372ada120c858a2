"""Pairs of columns whose effects do not add up: few, and chosen by sums over clients.

Given an additive model, let g and h be the first and second derivatives of a row's loss in its
output, and z_k the indicators 1[v > t] and 1[v = category] of all columns, z_0 = 1. All that is
needed of clients are

    G = Σ_rows g z zᵀ,   H = Σ_rows h z zᵀ.

They tell the sums of g and h in every cell of every two columns, cut anywhere. If the cells of a
pair had effects of their own, N(0, ω), the evidence would gain, in nats,

    max_ω Σ_cells ½ ω G²/(1 + ω H) − ½ log(1 + ω H).

Two columns are cut once each where that gains most (as FAST does for explainable boosting machines:
Lou, Caruana, Gehrke & Hooker 2013), and a few times more while it pays. A pair's columns are the
products of the indicators that cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Places = tuple[int, ...]

CUTS = 4  # of a column in a pair
PAYS = 1.0  # nats that another cut must gain
SURE = 3.0  # nats that a pair must gain, and the logarithm of how many there are
# ω, in units of one over the mean of H over cells
VARIANCES = np.geomspace(1e-3, 1e3, 19)


class Indicators(NamedTuple):
    """A column's indicators."""

    places: Places  # among all
    nested: bool  # whether each implies the one before it: steps, not categories


class ChosenPair(NamedTuple):
    """Two columns, by their numbers, the indicators that cut them, and what the pair gains."""

    columns: tuple[int, int]
    cuts: tuple[Places, Places]
    gain: float


def pair_sums(Z: Matrix, g: Matrix, h: Matrix) -> Matrix:
    """Return a client's G and H for every output, (2, outputs, 1 + indicators, 1 + indicators).

    Args:
        Z: indicators of rows, zeros and ones.
        g: first derivatives of losses, (rows, outputs).
        h: second ones.
    """
    ones = np.column_stack([np.ones(len(Z)), Z])
    return np.array([[ones.T @ (ones * w[:, None]) for w in part.T] for part in (g, h)])


def chosen_pairs(columns: Sequence[Indicators], sums: Matrix, most: int) -> list[ChosenPair]:
    """Return at most so many pairs, those that gain most first.

    Args:
        columns: the indicators of every column, numbered from 1 on: 0 is the constant.
        sums: what `pair_sums` returns, added up over clients; of squared loss, divided by 2σ².
        most: the most pairs.
    """
    all_pairs = list(combinations(range(len(columns)), 2))
    first = [_first_cut(columns[a], columns[b], sums) for a, b in all_pairs]
    order = np.argsort([-gain for gain, _, _ in first], kind="stable")
    found = []
    for k in order[: 2 * most]:
        a, b = all_pairs[k]
        gain, left, right = first[k]
        cuts, gain = _more_cuts(columns[a], columns[b], sums, ((left,), (right,)), gain)
        if gain > SURE + np.log(len(all_pairs)):
            found.append(ChosenPair((a, b), cuts, gain))
    return sorted(found, key=lambda pair: -pair.gain)[:most]


def _gain(G: Matrix, H: Matrix) -> Matrix:
    """Return the evidence that effects of cells gain; outputs are first, cells last."""
    H = np.maximum(H, 0.0)
    unit = np.maximum(H.mean((0, -1), keepdims=True), 1e-300)
    best = np.zeros(H.shape[1:-1])
    for variance in VARIANCES:
        seen = variance * H / unit
        own = variance / unit * G**2 / (1 + seen) - np.log1p(seen)
        best = np.maximum(best, own.sum((0, -1)) / 2)
    return best


def _first_cut(a: Indicators, b: Indicators, sums: Matrix) -> tuple[float, int, int]:
    """Return the gain of the best two cuts, and the two."""
    inner = sums[:, :, a.places][..., b.places]
    left = sums[:, :, a.places, 0][..., None] - inner
    right = sums[:, :, 0, b.places][:, :, None, :] - inner
    rest = sums[:, :, 0, 0][..., None, None] - inner - left - right
    G, H = np.stack([inner, left, right, rest], axis=-1)
    gains = _gain(G, H)
    i, j = np.unravel_index(int(gains.argmax()), gains.shape)
    return float(gains[i, j]), a.places[i], b.places[j]


def _more_cuts(
    a: Indicators, b: Indicators, sums: Matrix, cuts: tuple[Places, Places], gain: float
) -> tuple[tuple[Places, Places], float]:
    """Cut on while it pays."""
    while True:
        best = cuts
        before = gain
        for side, column in enumerate((a, b)):
            if len(cuts[side]) == CUTS:
                continue
            for place in set(column.places) - set(cuts[side]):
                tried = list(cuts)
                tried[side] = tuple(sorted((*cuts[side], place)))
                new = _cells_gain((a, b), sums, (tried[0], tried[1]))
                if new > max(gain, before + PAYS):
                    gain = new
                    best = (tried[0], tried[1])
        if best == cuts:
            return cuts, gain
        cuts = best


def _cells_gain(
    columns: tuple[Indicators, Indicators], sums: Matrix, cuts: tuple[Places, Places]
) -> float:
    table = sums
    for axis, column, own in zip((2, 3), columns, cuts, strict=True):
        table = np.moveaxis(table, axis, -1)[..., [0, *own]]
        if column.nested:
            table = np.concatenate([table[..., :-1] - table[..., 1:], table[..., -1:]], -1)
        else:
            table = np.concatenate(
                [table[..., :1] - table[..., 1:].sum(-1, keepdims=True), table[..., 1:]], -1
            )
        table = np.moveaxis(table, -1, axis)
    G, H = table.reshape(*table.shape[:2], -1)
    return float(_gain(G, H))
