"""Pairs of columns, searched for beside curves, and put into what clients agree on.

The search fits an additive model by evidence, and makes one pass of sums over its clients.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaffpd.algorithms.evidence import Strengths
from scaffpd.data.pairs import ChosenPair, Indicators, Places
from scaffpd.data.tabular.agree import Column, ColumnPair, Schema
from scaffpd.data.tabular.columns import CATEGORY
from scaffpd.models import Linear
from scaffpd.models.losses import loss_named

MOST_INDICATORS = 1500  # beyond which no pairs are looked for: sums are of their squares


def indicators_of(sides: Sequence[Column]) -> list[Indicators]:
    """Number the steps and categories that columns may be cut by, from 1 on."""
    columns = []
    place = 1
    for side in sides:
        after = place + _size(side)
        columns.append(Indicators(tuple(range(place, after)), side["kind"] != CATEGORY))
        place = after
    return columns


def paired(schema: Schema, sides: Sequence[Column], chosen: Sequence[ChosenPair]) -> Schema:
    """Return the schema with the chosen pairs; the same one if there are none."""
    columns = indicators_of(sides)
    pairs: list[ColumnPair] = []
    for pair in chosen:
        left, right = (
            _part(sides[k], columns[k].places, cuts)
            for k, cuts in zip(pair.columns, pair.cuts, strict=True)
        )
        pairs.append({"left": left, "right": right})
    return {**schema, "pairs": pairs} if pairs else schema


def _size(side: Column) -> int:
    return len(side["categories"] if side["kind"] == CATEGORY else side["steps"])


def _part(side: Column, places: Places, cuts: Places) -> Column:
    """Return a column with the steps or categories that cut it."""
    chosen = [place - places[0] for place in cuts]
    if side["kind"] == CATEGORY:
        return {**side, "categories": [side["categories"][k] for k in chosen]}
    return {**side, "steps": [side["steps"][k] for k in chosen]}


def too_many(columns: Sequence[Indicators]) -> bool:
    """Return whether sums over all pairs of indicators would be too large."""
    return sum(len(column.places) for column in columns) > MOST_INDICATORS


def noise_of(model: Linear, found: Strengths) -> float:
    """Return what a row's loss is divided by in nats: 1, or 2σ² for squared loss."""
    return 2 * found.sigma2 if loss_named(model.loss).quadratic else 1.0
