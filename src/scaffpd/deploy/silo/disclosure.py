"""Tell the operator of a silo, before it joins anything, how its data were read, what leaves and what stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from scaffpd.deploy.silo.dataset import Dataset
from scaffpd.deploy.silo.silo_file import SiloFile
from scaffpd.tabular.encode import named_categories
from scaffpd.tabular.read import CATEGORY, DataColumn
from scaffpd.tabular.schema import CLASSIFICATION, PREPARED, REGRESSION

SHOWN = 30  # names in a list before it is cut off


def leaves(file: SiloFile, data: Dataset, width: int) -> list[str]:
    """Everything that a coordinator may get, in the order in which it gets it."""
    train, test = data.rows
    held = " and on the held-out rows" if test >= file.limits.rows else ""
    lines = [f"The name {file.name!r}, and how many rows there are: {train} to train on, {test} held out."]
    if data.target.task == PREPARED:
        lines.append(f"The number of parameters of the model, {width}.")
    else:
        lines += _agreement(file, data, width)
    once, second, scores = (
        "Once: how curved the loss is, as three numbers: most, least, and at the steepest single row; and the loss at "
        "one arbitrary point, which tells whether the data are still the same when a run is resumed.",
        "For methods of second order: the diagonal of the Hessian (a vector of d numbers), and a few numbers on how "
        "the loss curves along directions that are asked for.",
        f"Loss and accuracy, each one number, on the training rows{held}.",
    )
    per_question = (
        f"Per question: the loss (one number{_rounded(file)}), and a gradient or a local update (each a vector of d "
        f"numbers; d is {_d(data, width)}). They are over all {train} training rows or a random part of them, never "
        f"fewer than {file.limits.rows} rows."
    )
    private = file.privacy.required
    lines += [per_question] if private else [once, per_question, second]
    lines += [*_masked(file), *_noisy(file)] if private else [*_masked(file), scores]
    allowed = "any algorithm of the package" if file.limits.algorithms is None else ", ".join(file.limits.algorithms)
    return [
        *lines,
        f"All this is answered for these algorithms only: {allowed}.",
        "Sums and vectors are not anonymous: from enough of them one can work out how many rows have which label, and "
        "the fewer rows there are, the more about each.",
    ]


def _masked(file: SiloFile) -> list[str]:
    """What masks change about that."""
    always = (
        "Every vector leaves masked" if file.secure.required else "In a federation with [secure], vectors leave masked"
    )
    along = (
        " and along directions that the coordinator chooses"
        if file.secure.projections
        else "; its gradient only as a length and along the way that x has gone"
    )
    return [
        f"{always}: others see the sum over all silos, in which this one has a share of {file.secure.share:.0%} at "
        f"most, and of this silo alone how large its vector is, as a power of two{along}."
    ]


def _noisy(file: SiloFile) -> list[str]:
    """What noise changes about that."""
    rules = file.privacy
    if not rules.required:
        return []
    most = "what the agreement says" if rules.epsilon is None else f"ε = {rules.epsilon:g}, all runs together"
    columns = "Sums over columns leave exactly." if rules.columns else "Sums over columns are refused."
    return [
        f"Losses, gradients and local updates carry noise, and cost at most {most}. Curvatures, scores and the loss at "
        f"an arbitrary point do not leave. {columns}"
    ]


def _rounded(file: SiloFile) -> str:
    return f", a multiple of {file.secure.quantum:g} where vectors are masked" if file.secure.quantum > 0 else ""


def _d(data: Dataset, width: int) -> str:
    if data.target.task == PREPARED:
        return str(width)
    outputs = " times the number of outputs" if len(data.target.labels) > 2 else ""
    return f"at least {width}{outputs} with a linear model"


def _agreement(file: SiloFile, data: Dataset, width: int) -> list[str]:
    lines = []
    if data.table.block is not None:
        lines.append(f"The shape of the features: {' × '.join(map(str, data.table.shape))}.")
    else:
        names = _cut([column.name for column in data.table.columns])
        lines.append(
            f"Names of the {len(data.table.columns)} columns, whether each holds numbers or categories, and whether "
            f"it has any value: {names}."
        )
    for column in data.table.columns:
        named = named_categories(column, ~data.held, file.limits.rarest) if column.kind == CATEGORY else []
        if named:
            lines.append(f"Categories of {column.name!r}: {_cut(named)}.")
    if data.target.task == CLASSIFICATION:
        lines.append(f"Labels: {_cut([str(label) for label in data.target.labels])}.")
    if file.privacy.required and not file.privacy.columns:
        return lines
    lines.append(
        f"For each of about {width} encoded columns: the number of training rows, their sum, and the sum of their "
        "squared distances from the mean over all silos. The sum of a category (or of all that are not named) is how "
        "many rows have it."
    )
    return lines


def stays(file: SiloFile, data: Dataset) -> list[str]:
    """What nobody else gets to see."""
    lines = [
        "Rows, single values, and labels of single rows.",
        "Predictions for single rows.",
        "Which rows are held out.",
        "Names of files and folders, and all columns that are not used.",
    ]
    if data.target.task == PREPARED:
        return lines
    if data.table.columns:
        lines.append(
            f"Names of categories with fewer than {file.limits.rarest} training rows here, and how many rows have each."
        )
    return [*lines, "How many values are missing and where (they are filled in before anything is added up)."]


def _cut(names: list[str]) -> str:
    short = [name if len(name) <= 40 else f"{name[:37]}..." for name in names[:SHOWN]]
    return ", ".join(short) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


NAMED = 5  # so many columns are named in a warning, and then counted


def site_overview(file: SiloFile, data: Dataset) -> dict[str, Any]:
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
