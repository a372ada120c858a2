"""What the operator of a silo sees before joining anything: the data as it was read, and what is odd about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from scaffpd.deploy.silo.leaving import leaves, stays
from scaffpd.deploy.silo.reading import Dataset
from scaffpd.deploy.silo.silo_file import SiloFile
from scaffpd.tabular.encode import named_categories
from scaffpd.tabular.read import CATEGORY, DataColumn
from scaffpd.tabular.schema import CLASSIFICATION, PREPARED, REGRESSION

NAMED = 5  # so many columns are named in a warning, and then counted


def report(file: SiloFile, data: Dataset) -> dict[str, Any]:
    """Everything that `scaffpd silo check` shows, as JSON has it; nothing of it is sent anywhere."""
    train, test = data.rows
    width = encoded_width(file, data)
    return {
        "silo": file.name,
        "task": data.target.task,
        "rows": {"train": train, "test": test, "without_target": data.dropped},
        "features": {"columns": data.table.width, "encoded": width},
        "labels": _labels(data),
        "target": _range(data),
        "columns": [_column(file, data, column) for column in data.table.columns],
        "missing": int(np.isnan(data.table.block).sum()) if data.table.block is not None else None,
        "bytes": {"read": data.table.nbytes, "encoded": 8 * (train + test) * width},
        "warnings": list(warnings(file, data)),
        "leaves": leaves(file, data, width),
        "stays": stays(file, data),
    }


def encoded_width(file: SiloFile, data: Dataset) -> int:
    """How many columns this silo's own features make; other silos may add categories."""
    if data.table.block is not None:
        return data.table.width
    if data.cohort is not None:
        return data.cohort.dimension
    described = data.describe()["columns"]
    return sum(len(c["categories"]) + c["other"] if c["kind"] == CATEGORY else 1 for c in described)


def withheld(file: SiloFile, data: Dataset, column: DataColumn) -> int:
    """How many categories of a column are not named to others."""
    if column.kind != CATEGORY:
        return 0
    return len(column.categories) - len(named_categories(column, ~data.held, file.limits.rarest))


def _column(file: SiloFile, data: Dataset, column: DataColumn) -> dict[str, Any]:
    return {
        "name": column.name,
        "kind": column.kind,
        "missing": int(column.missing.sum()),
        "categories": len(column.categories),
        "withheld": withheld(file, data, column),
    }


def _labels(data: Dataset) -> list[dict[str, Any]]:
    if data.target.task != CLASSIFICATION:
        return []
    counts = [
        np.bincount(data.target.values[rows], minlength=len(data.target.labels)) for rows in (~data.held, data.held)
    ]
    return [
        {"label": label, "train": int(train), "test": int(test)}
        for label, train, test in zip(data.target.labels, *counts, strict=True)
    ]


def _range(data: Dataset) -> dict[str, float] | None:
    if data.target.task != REGRESSION:
        return None
    y = data.target.values
    return {"smallest": float(y.min()), "mean": float(y.mean()), "largest": float(y.max())}


def warnings(file: SiloFile, data: Dataset) -> Iterator[str]:
    """What the operator should look at; the silo can take part nevertheless, unless it has too few rows."""
    train = data.rows[0]
    if train < file.limits.rows:
        yield (
            f"There are {train} training rows, and limits.rows asks for {file.limits.rows}: this silo would not take "
            "part."
        )
    if data.dropped:
        yield f"{_rows(data.dropped)} without a target {'is' if data.dropped == 1 else 'are'} left out."
    if data.target.task == PREPARED:
        return
    width = encoded_width(file, data)
    if width > file.limits.dimension:
        yield f"The features make {width} columns, and limits.dimension allows {file.limits.dimension}."
    yield from _about_labels(data)
    yield from _about_columns(file, data)


def _about_labels(data: Dataset) -> Iterator[str]:
    found = _labels(data)
    for entry in found:
        if entry["train"] == 0:
            yield f"The label {entry['label']!r} has no training row."
        elif entry["train"] + entry["test"] == 1:
            yield f"The label {entry['label']!r} has one row only."
    if len(found) == 1:
        yield f"All rows have the label {found[0]['label']!r}."


def _about_columns(file: SiloFile, data: Dataset) -> Iterator[str]:
    train = ~data.held
    empty, constant = _empty_and_constant(data)
    if empty:
        yield f"No training row has a value in {_named(empty)}: the mean over all silos takes its place."
    if constant:
        yield f"All values are the same in {_named(constant)}."
    for column in data.table.columns:
        if column.note:
            yield f"Column {column.name!r} {column.note}."
        hidden = withheld(file, data, column)
        if not hidden:
            continue
        if hidden == len(column.categories) and column.counts(train).any():
            yield (
                f"Column {column.name!r} has {hidden} categories, each in fewer than {file.limits.rarest} training "
                "rows: it says nothing and is better left out (data.columns)."
            )
        else:
            yield (
                f"Column {column.name!r} has {hidden} of {len(column.categories)} categories in fewer than "
                f"{file.limits.rarest} training rows: they are not named to others and count as one, “other”."
            )


def _empty_and_constant(data: Dataset) -> tuple[list[str], list[str]]:
    train = ~data.held
    empty: list[str] = []
    constant: list[str] = []
    if data.table.block is not None:
        for j, values in enumerate(data.table.block[train].T):
            there = values[~np.isnan(values)]
            if len(there) == 0 or there.min() == there.max():
                (constant if len(there) else empty).append(f"x{j}")
    for column in data.table.columns:
        there = column.values[train & ~column.missing]
        if len(there) == 0:
            empty.append(column.name)
        elif there.min() == there.max():  # numbers, or codes of categories
            constant.append(column.name)
    return empty, constant


def _named(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMED]))
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more columns"


def _rows(n: int) -> str:
    return f"{n} row{'' if n == 1 else 's'}"
