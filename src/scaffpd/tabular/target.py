"""The target of a silo: labels of classes, or numbers to be predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.tabular.columns import CATEGORY, Column
from scaffpd.tabular.schema import CLASSIFICATION, MOST_LABELS, REGRESSION

GUESSED = 50  # whole numbers with more different values than this are taken for amounts, not for labels
LARGEST_LABEL = 2**53

Label = int | str


@dataclass(frozen=True)
class Target:
    """What is to be predicted.

    Attributes:
        task: "classification" or "regression".
        values: the place of each row's label in `labels`; for regression the numbers.
        labels: the labels, sorted: whole numbers or texts.
    """

    task: str
    values: NDArray[Any] = field(repr=False)
    labels: tuple[Label, ...] = ()


def target(owner: str, column: Column, task: str | None) -> Target:
    """Read a column without missing values as a target; without a task, texts and few whole numbers are labels."""
    if column.kind == CATEGORY:
        if task == REGRESSION:
            raise InputError(
                f"{owner} has texts such as {column.categories[0]!r} in its target {column.name!r}; regression needs "
                "numbers."
            )
        return _labelled(owner, column, np.asarray(column.values), column.categories)
    numbers = np.asarray(column.values, dtype=np.float64)
    distinct, places = np.unique(numbers, return_inverse=True)
    whole = bool(np.all(distinct == np.round(distinct)) and np.all(np.abs(distinct) <= LARGEST_LABEL))
    if task is None:
        task = CLASSIFICATION if whole and len(distinct) <= GUESSED else REGRESSION
    if task == REGRESSION:
        return Target(REGRESSION, numbers)
    if not whole:
        odd = float(distinct[distinct != np.round(distinct)][0]) if np.any(distinct != np.round(distinct)) else 2.0**53
        raise InputError(
            f"{owner} has {odd:g} in its target {column.name!r}; labels are whole numbers or texts, regression takes "
            'any number (data.task = "regression").'
        )
    return _labelled(owner, column, places, tuple(int(value) for value in distinct))


def _labelled(owner: str, column: Column, places: NDArray[Any], labels: tuple[Label, ...]) -> Target:
    if len(labels) > MOST_LABELS:
        raise InputError(f"{owner} has {len(labels)} different labels in {column.name!r}; is it the right column?")
    return Target(CLASSIFICATION, places.astype(np.int64), labels)
