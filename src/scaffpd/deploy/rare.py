r"""What few rows have becomes what many have: a table before its rows have a part in any sum.

Sums over all silos hide a silo among others, and not a row that is alone in a cell: where one row
of all has a category c, Σ 1[cp = c] v is its v, and Hessians at x = 0 have that for every v. So a
silo recodes its rows before anything is masked, and all that it adds up is made of the recoded
ones: tables, curves, pairs, evidence, gradients and Hessians.

categories   those of fewer than `least` training rows become "other", and unknown where the
             agreement has no other, or where the others are fewer than `least` rows together
numbers      where fewer than `least` training rows differ from the commonest value, all have that
             value: a column of zeros with three ones is an indicator of three rows
with curves  numbers are cut into groups of at least `least` training rows of successive values, and
             each has the group's median: whatever edges and steps are agreed on later, and however
             often they are refined, a silo's part of a cell is 0 or at least `least`, and so is
             the difference of two

Products of a pair are cells of two columns: `Dataset.acts` leaves out those with a rare one.
Held-out rows follow the training rows. Unknown values are filled as missing ones are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaffpd.data.tabular.agree import REST, CategoryColumn, Schema
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, DataColumn, FeatureTable, Mask, Matrix


def recoded(
    table: FeatureTable, train: Mask, schema: Schema, least: int, curved: bool
) -> FeatureTable:
    """Return the table as it may have a part in sums; numbers are cut by thresholds if `curved`."""
    if table.block is not None:
        return replace(table, block=without_few(table.block, train, least))
    agreed = {column["name"]: column for column in schema["columns"]}
    columns = []
    for column in table.columns:
        own = agreed.get(column.name)
        if own is not None and column.kind == own["kind"] == CATEGORY:
            column = _common(column, own, train, least)
        elif column.kind == NUMBER:
            values = column.values.astype(np.float64)
            values = (
                grouped(values, train, least)
                if curved
                else without_few(values[:, None], train, least)[:, 0]
            )
            column = replace(column, values=values)
        columns.append(column)
    return replace(table, columns=tuple(columns))


def _common(column: DataColumn, agreed: CategoryColumn, train: Mask, least: int) -> DataColumn:
    counts = column.counts(train)
    named = np.array([name in agreed["categories"] for name in column.categories], dtype=bool)
    common = named & (counts >= least)
    others = ~common if agreed["other"] else ~named
    other = len(counts) if counts[others].sum() >= least else -1
    places = np.where(common, np.arange(len(counts)), np.where(others, other, -1))
    codes = np.array([*places, -1], dtype=np.int32)[column.values.astype(np.int64)]
    # no agreement has a category of this name
    return replace(column, values=codes, categories=(*column.categories, REST))


def without_few(values: Matrix, train: Mask, least: int) -> Matrix:
    """Return columns in which at least `least` training rows differ from the median, or none.

    Where all rows but few have one value, the median is that value.
    """
    rows = np.sort(values[train], axis=0)  # gaps come last
    number = (~np.isnan(rows)).sum(0)
    columns = np.arange(values.shape[1])
    low, high = (rows[place, columns] for place in ((number - 1) // 2, number // 2))
    median = _between(low, high)
    differ = (~np.isnan(rows) & (rows != median)).sum(0)
    few = (differ > 0) & (differ < least)
    return np.where(few & ~np.isnan(values), median, values)


def grouped(values: Matrix, train: Mask, least: int) -> Matrix:
    """Return numbers as the medians of groups of at least `least` training rows, in order."""
    there = np.sort(values[train & ~np.isnan(values)])
    if not len(there):
        return values
    _, first, counts = np.unique(there, return_index=True, return_counts=True)
    ends = []  # of groups, among the sorted rows; equal values stay together
    begin = 0
    for start, count in zip(first.tolist(), counts.tolist(), strict=True):
        if start + count - begin >= least:
            begin = start + count
            ends.append(begin)
    stops = np.array([*ends[:-1], len(there)])  # the last group has what is left
    starts = np.concatenate([[0], stops[:-1]])
    median = _between(there[(starts + stops - 1) // 2], there[(starts + stops) // 2])
    group = np.searchsorted(there[stops[:-1] - 1], values)
    return np.where(np.isnan(values), np.nan, median[np.minimum(group, len(median) - 1)])


def _between(low: Matrix, high: Matrix) -> Matrix:
    """Return the middle of two numbers of any size, of equal ones these."""
    return np.where(low == high, low, low / 2 + high / 2)
