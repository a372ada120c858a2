"""Pairs of a table's columns: searched for beside curves, and put into what clients agree on."""

from __future__ import annotations

from collections.abc import Sequence

from scaffpd.data.pairs import ChosenPair, Indicators, Places
from scaffpd.data.tabular.agree import Column, ColumnPair, Schema, checked_schema
from scaffpd.data.tabular.clients import Clients
from scaffpd.data.tabular.columns import CATEGORY
from scaffpd.models import Linear
from scaffpd.training.cohort import Pair
from scaffpd.training.pairs import search


def with_pairs(found: Clients, train: Sequence[Pair], model: Linear, most: int) -> Clients:
    """Return the clients with the products of pairs that pay beside their additive models."""
    if len(found.sides) < 2 or not most:
        return found
    columns = indicators_of(found.sides)
    own = [rows.indicators(found.schema, found.sides) for rows in found.rows]
    schema = paired(found.schema, found.sides, search(train, model, own, columns, most))
    return found if schema is found.schema else found.under(schema)


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
    return checked_schema({**schema, "pairs": pairs}) if pairs else schema


def _size(side: Column) -> int:
    return len(side["categories"] if side["kind"] == CATEGORY else side["steps"])


def _part(side: Column, places: Places, cuts: Places) -> Column:
    """Return a column with the steps or categories that cut it."""
    chosen = [place - places[0] for place in cuts]
    if side["kind"] == CATEGORY:
        return {**side, "categories": [side["categories"][k] for k in chosen]}
    return {**side, "steps": [side["steps"][k] for k in chosen]}
