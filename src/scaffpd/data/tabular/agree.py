"""What clients agree on: a schema of columns, and one scale out of many sums.

A schema is plain JSON. One that was written elsewhere is checked once, where it is read
(`scaffpd.data.tabular.schemas`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Literal, NotRequired, TypedDict

import numpy as np

from scaffpd.data.curves import MOST, Feature, Limits, Total, curve, thresholds
from scaffpd.data.silos import unless_constant
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, Matrix
from scaffpd.errors import InputError

MOST_CATEGORIES = 10_000
LONGEST = 500  # characters of a name
LARGEST = 2**53  # whole numbers up to here survive JSON
REST = "*"  # the columns that no range names


class NumberColumn(TypedDict):
    """A column of numbers."""

    name: str
    kind: Literal["number"]
    range: NotRequired[list[float]]  # declared in the schema
    steps: NotRequired[list[float]]  # thresholds of its curve, agreed in the schema


class CategoryColumn(TypedDict):
    """A column of categories."""

    name: str
    kind: Literal["category"]
    categories: list[str]
    other: bool  # whether there are categories that are not named


Column = NumberColumn | CategoryColumn


class ColumnPair(TypedDict):
    """Two columns with the steps or categories whose products are encoded."""

    left: Column
    right: Column


class Schema(TypedDict):
    """What all silos follow; parts that a task does not have are empty."""

    task: Literal["classification", "regression"]
    labels: list[int] | list[str]
    columns: list[Column]
    shape: list[int] | None
    declared: NotRequired[bool]  # whether columns are scaled by declared ranges
    range: NotRequired[list[float]]  # of all features that have a shape
    pairs: NotRequired[list[ColumnPair]]


def width(schema: Schema) -> int:
    return len(features(schema)) if schema["shape"] is None else prod(schema["shape"])


def features(schema: Schema) -> tuple[str, ...]:
    """Name the encoded columns: "age", "age > 37", "cp=1", …, "cp (other)" for all not named."""
    return tuple(feature.name for feature in encoded_features(schema))


def encoded_features(schema: Schema) -> list[Feature]:
    if schema["shape"] is not None:
        return [Feature(f"x{j}", f"x{j}") for j in range(prod(schema["shape"]))]
    found: list[Feature] = []
    for column in schema["columns"]:
        name = column["name"]
        if column["kind"] == CATEGORY:
            found += [Feature(f"{name}={category}", name) for category in column["categories"]]
            found += [Feature(f"{name} (other)", name)] if column["other"] else []
        else:
            found += curve(name, column.get("steps", ()))
    for pair in schema.get("pairs", ()):
        group = f"{pair['left']['name']} × {pair['right']['name']}"
        found += [
            Feature(f"{left} × {right}", group, True)
            for left in _indicators(pair["left"])
            for right in _indicators(pair["right"])
        ]
    return found


def of_pairs(schema: Schema) -> set[str]:
    """Name the products of pairs, and the steps that they are made of."""
    found = set[str]()
    for pair in schema.get("pairs", ()):
        left, right = _indicators(pair["left"]), _indicators(pair["right"])
        found |= {*left, *right, *(f"{a} × {b}" for a in left for b in right)}
    return found


def _indicators(side: Column) -> list[str]:
    name = side["name"]
    if side["kind"] == CATEGORY:
        return [f"{name}={category}" for category in side["categories"]]
    return [feature.name for feature in curve(name, side["steps"])[1:]]


def curved(
    schema: Schema, total: Total, limits: Limits | None = None
) -> tuple[Schema, list[Column]]:
    """Return the schema with curves of its numbers, and what columns may be cut by in pairs.

    `total` sums what silos count. A column with one threshold stays a line, which says as much.
    """
    columns: list[Column] = []
    sides: list[Column] = []
    numbers = [column for column in schema["columns"] if column["kind"] != CATEGORY]
    agreed = iter(thresholds(len(numbers), total, limits) if numbers else ())
    for column in schema["columns"]:
        if column["kind"] == CATEGORY:
            columns.append(column)
            sides.append(column)
            continue
        steps = next(agreed).tolist()
        stepped: NumberColumn = {**column, "steps": steps}
        columns.append(stepped if len(steps) > 1 else column)
        sides += [stepped] if steps else []
    return {**schema, "columns": columns}, sides


def common(side: Column, schema: Schema, mean: Matrix) -> Column:
    """Return a side of pairs with its most common categories only."""
    if side["kind"] != CATEGORY:
        return side
    shares = dict(zip(features(schema), mean, strict=True))
    order = sorted(side["categories"], key=lambda name: -shares[f"{side['name']}={name}"])
    return {**side, "categories": order[:MOST], "other": False}


def scale_of(schema: Schema, total: Callable[[Matrix | None], Matrix]) -> tuple[Matrix, Matrix]:
    """Return mean and deviation of every encoded column: 0 without values, 1 of constants, steps.

    `total(None)` adds up n and Σx of training rows, `total(mean)` n and Σ(x − mean)².
    """
    if schema.get("declared"):
        return _declared_scale(schema)
    n, sums = total(None)
    mean = np.divide(sums, n, out=np.zeros_like(sums), where=n > 0)
    n, squares = total(mean)
    deviation = np.sqrt(np.divide(squares, n, out=np.zeros_like(squares), where=n > 0))
    steps = [one.step for one in encoded_features(schema)]
    return mean, np.where(steps, 1.0, unless_constant(mean, deviation, n))


def _declared_scale(schema: Schema) -> tuple[Matrix, Matrix]:
    """Return centres and scales that no row has a part in.

    The middle of the range and a quarter of it, which is about the deviation of numbers that fill a
    range; categories and steps stay zeros and ones.
    """
    spans = [] if schema["shape"] is None else [schema["range"]] * width(schema)
    for column in schema["columns"]:
        if column["kind"] == CATEGORY:
            spans += [[-2.0, 2.0]] * (len(column["categories"]) + column["other"])
        else:
            spans += [column["range"], *[[-2.0, 2.0]] * len(column.get("steps", ()))]
    spans += [[-2.0, 2.0]] * (width(schema) - len(spans))  # products
    low, high = np.array(spans).T
    return (low + high) / 2, (high - low) / 4


def declared(schema: Schema, ranges: Mapping[str, list[float]]) -> Schema:
    """Give every column of numbers its range, by name, "*" for all others.

    Columns are then scaled by these, and by nothing that rows have a part in.
    """
    numbers = [column["name"] for column in schema["columns"] if column["kind"] == NUMBER]
    for name in ranges:
        if name != REST and name not in numbers:
            raise InputError(
                "range-without-column",
                f"A range is declared for {name!r}, which is not a numeric column here "
                f"({', '.join(numbers)}).",
            )
    lacking = [name for name in numbers if name not in ranges]
    if REST not in ranges and (lacking or schema["shape"] is not None):
        which = f"the column {lacking[0]!r}" if lacking else "the features"
        raise InputError(
            "range-missing",
            f"No range is declared for {which}: declare one, or one for all others, "
            '"*" = [min, max].',
        )
    for column in schema["columns"]:
        if column["kind"] != CATEGORY:
            column["range"] = ranges.get(column["name"]) or ranges[REST]
    if schema["shape"] is not None:
        schema["range"] = ranges[REST]
    schema["declared"] = True
    return schema


def category_order(category: str) -> tuple[bool, int, str]:
    whole = category.removeprefix("-").isdecimal() and len(category) < 16
    return not whole, int(category) if whole else 0, category
