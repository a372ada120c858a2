"""The rows of one client: describe their columns, sum them, fill gaps and encode them as agreed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.silos import held_out
from scaffpd.data.tabular import agree
from scaffpd.data.tabular.agree import PREPARED, Json, checked_schema, features, width
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, DataColumn, FeatureTable, Mask, Matrix
from scaffpd.data.tabular.settings import CLASSIFICATION, COUNTS, REGRESSION
from scaffpd.errors import InputError

# whole numbers with more different values than this are taken for amounts, not for labels
GUESSED = 5
LARGEST_LABEL = 2**53
MANY_TEXTS = 50  # a target of texts with more labels than this, and than half the rows, is refused

Label = int | str
Pair = tuple[Matrix, NDArray[Any]]


@dataclass(frozen=True)
class Target:
    """Target to predict."""

    task: str  # "classification" or "regression"
    # the place of each row's label in `labels`; for regression the numbers
    values: NDArray[Any] = field(repr=False)
    labels: tuple[Label, ...] = ()  # the labels, sorted: whole numbers or texts
    note: str = ""  # what the operator should know about it


def target(owner: str, column: DataColumn, task: str | None) -> Target:
    """Read a column without missing values; texts and few whole numbers are labels by default."""
    task = REGRESSION if task == COUNTS else task
    if column.kind == CATEGORY:
        labels = column.categories
        if task == REGRESSION:
            raise InputError(
                "texts-in-target",
                f"{owner} has texts such as {labels[0]!r} in its target {column.name!r}; "
                "regression needs numbers.",
            )
        if task is None and len(labels) > max(MANY_TEXTS, len(column.values) / 2):
            raise InputError(
                "texts-in-target",
                f"{owner} has {len(labels)} different texts such as {labels[0]!r} in its target "
                f"{column.name!r}: write numbers without units and marks of thousands.",
            )
        return _labelled(owner, column, np.asarray(column.values), labels)
    numbers = np.asarray(column.values, dtype=np.float64)
    distinct, places = np.unique(numbers, return_inverse=True)
    odd = distinct[(distinct != np.round(distinct)) | (np.abs(distinct) > LARGEST_LABEL)]
    if task is None:
        task = CLASSIFICATION if not len(odd) and len(distinct) <= GUESSED else REGRESSION
    if task == REGRESSION:
        return Target(REGRESSION, numbers, note=column.note)
    if len(odd):
        raise InputError(
            "labels-not-whole",
            f"{owner} has {odd[0]:g} in its target {column.name!r}; labels are whole numbers or "
            'texts, regression takes any number (data.task = "regression").',
        )
    return _labelled(owner, column, places, tuple(int(value) for value in distinct))


def _labelled(
    owner: str, column: DataColumn, places: NDArray[Any], labels: tuple[Label, ...]
) -> Target:
    if len(labels) > agree.MOST_LABELS:
        raise InputError(
            "too-many-labels",
            f"{owner} has {len(labels)} different labels in {column.name!r}; is it the right "
            "column?",
        )
    return Target(CLASSIFICATION, places.astype(np.int64), labels, column.note)


@dataclass(frozen=True)
class Encoded:
    """Rows as the agreement has them."""

    train: Pair = field(repr=False)  # (X, y) to train on
    test: Pair | None = field(repr=False)  # (X, y) held out, or `None`
    features: tuple[str, ...] = field(repr=False)  # names of the columns of X


@dataclass(frozen=True)
class ClientRows:
    """All rows of a client that have a target."""

    name: str  # the client
    table: FeatureTable  # the features
    target: Target  # what is to be predicted
    held: Mask = field(repr=False)  # which rows are held out
    dropped: int = 0  # how many rows had no target
    rarest: int = 1  # categories with fewer training rows than this are "other"

    @property
    def rows(self) -> tuple[int, int]:
        """Return the numbers of training rows and held-out rows."""
        return int((~self.held).sum()), int(self.held.sum())

    def describe(self) -> Json:
        """Tell the others what they have to know of columns and labels, and nothing else.

        These are names and kinds of columns, categories with at least `rarest` training rows,
        labels, numbers of rows.
        """
        train, test = self.rows
        about: Json = {
            "version": agree.VERSION,
            "task": self.target.task,
            "train": train,
            "test": test,
        }
        if self.target.task == CLASSIFICATION:
            about["labels"] = list(self.target.labels)
        if self.table.block is not None:
            return about | {"shape": list(self.table.shape)}
        columns = [_described(column, ~self.held, self.rarest) for column in self.table.columns]
        return about | {"columns": columns}

    def totals(
        self, schema: Mapping[str, Any], mean: Matrix | None = None
    ) -> dict[str, NDArray[Any]]:
        """Sum the training rows: n and Σx of each encoded column, or n and Σ(x − mean)²."""
        agreed = self._own(schema)
        X = filled(self, agreed, ~self.held)
        there = ~np.isnan(X).any(0)
        n = np.where(there, len(X), 0).astype(np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            if mean is None:
                name = "sum"
                values = X.sum(0)
            else:
                name = "squares"
                values = ((X - _vector(mean, "mean", width(agreed))) ** 2).sum(0)
        values = np.where(there, values, 0.0)
        if not np.isfinite(values).all():
            at = features(agreed)[int((~np.isfinite(values)).argmax())]
            raise InputError(
                "numbers-too-large",
                f"Silo {self.name!r} has numbers in column {at!r} that are too large to be added.",
            )
        return {"n": n, name: values}

    def encoded(
        self, schema: Mapping[str, Any], mean: Matrix, deviation: Matrix, separate: bool = False
    ) -> Encoded:
        """Encode training and held-out rows as agreed: filled, and standardised if agreed.

        Where rows are to be `separate`, none has a part in how another one is encoded: missing
        values are the agreed mean, and categories are named by the agreement alone. So it is too
        where ranges are declared.
        """
        agreed = self._own(schema)
        separate = separate or bool(agreed.get("declared"))
        centre = _vector(mean, "mean", width(agreed))
        scale = _vector(deviation, "deviation", width(agreed)) if agreed["standardise"] else None
        if scale is not None and not (scale > 0).all():
            raise InputError(
                "deviation-not-positive",
                "The coordinator sent a deviation that is not above zero.",
            )
        y = self._targets(agreed)

        def part(rows: Mask) -> Pair:
            X = scaled(filled(self, agreed, rows, separate), centre, scale)
            return X.reshape(len(X), *self.table.shape) if self.table.shape else X, y[rows]

        test = part(self.held) if self.held.any() else None
        return Encoded(part(~self.held), test, features(agreed))

    def _own(self, schema: Mapping[str, Any]) -> Json:
        agreed = checked_schema(schema)
        task = self.target.task
        if agreed["task"] != task or task == PREPARED:
            raise InputError(
                "task-not-agreed",
                f"Silo {self.name!r} has data for {task}, the agreement is on {agreed['task']}.",
            )
        return agreed

    def _targets(self, schema: Json) -> NDArray[Any]:
        if self.target.task != CLASSIFICATION:
            return self.target.values
        place = {label: k for k, label in enumerate(schema["labels"])}
        if not all(label in place for label in self.target.labels):
            raise InputError(
                "label-not-agreed",
                f"Silo {self.name!r} has a label that the agreement does not have.",
            )
        places = np.array([place[label] for label in self.target.labels], dtype=np.int64)
        return np.take(places, self.target.values)


def held_whole(name: str, by: DataColumn, fraction: float, seed: int) -> Mask:
    """Choose rows to hold out together: the latest ones by date or number, or groups by seed."""
    groups, place, counts = np.unique(by.values, return_inverse=True, return_counts=True)
    if len(groups) < 2:
        raise InputError(
            "nothing-to-split-by",
            f"{name!r} has a single value in {by.name!r}, so its rows cannot be split by it.",
        )
    if by.kind == CATEGORY:
        order = _generator(seed, name).permutation(len(groups))
    else:
        order = np.arange(len(groups))[::-1]
    before = np.cumsum(counts[order]) - counts[order]  # rows held out before a group's turn
    held = order[(before < fraction * len(place)) & (np.arange(len(groups)) < len(groups) - 1)]
    return np.isin(place, held)


def held_rows(name: str, target: Target, fraction: float, seed: int) -> Mask:
    """Choose the rows to hold out by seed and name, label by label."""
    if fraction > 0 and len(target.values) < 2:
        raise InputError(
            "client-of-one-row",
            f"{name!r} has a single row, which cannot be split; use test = 0.",
        )
    none = np.zeros(len(target.values), dtype=np.int64)
    labels = target.values if target.task == CLASSIFICATION else none
    return held_out(labels, fraction, _generator(seed, name))


def _generator(seed: int, name: str) -> np.random.Generator:
    # by the client's name, so that other clients' rows do not change which of its rows are drawn
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16]))


def _described(column: DataColumn, train: Mask, rarest: int) -> Json:
    there = bool((~column.missing[train]).any())
    about: Json = {"name": column.name, "kind": column.kind, "any": there}
    if column.kind != CATEGORY:
        return about
    named = named_categories(column, train, rarest)
    counts = column.counts(np.ones(len(train), dtype=bool))
    present = {name for name, n in zip(column.categories, counts, strict=True) if n > 0}
    return about | {"categories": named, "other": bool(present - set(named))}


def named_categories(column: DataColumn, train: Mask, rarest: int) -> list[str]:
    """Return the categories that others may hear of."""
    pairs = zip(column.categories, column.counts(train), strict=True)
    frequent = [
        name for name, count in pairs if count >= max(rarest, 1) and 1 <= len(name) <= agree.LONGEST
    ]
    return frequent if len(frequent) <= agree.MOST_CATEGORIES else []


def scaled(X: Matrix, centre: Matrix, scale: Matrix | None) -> Matrix:
    """Return encoded rows without gaps, in units of the deviation."""
    X = np.where(np.isnan(X), centre, X)
    return X if scale is None else (X - centre) / scale


def filled(data: ClientRows, schema: Json, rows: Mask, separate: bool = False) -> Matrix:
    """Encode rows, not yet scaled; NaN is left only in columns without a training value here.

    Every missing value stays NaN where rows are to be `separate`.
    """
    if schema["shape"] is not None:
        if data.table.block is None or list(data.table.shape) != schema["shape"]:
            raise InputError(
                "features-not-agreed",
                f"Silo {data.name!r} has other features than the agreement: {data.table.width}.",
            )
        return _within(_filled_block(data.table.block, ~data.held, rows, separate), schema)
    own = {column.name: column for column in data.table.columns}
    return np.concatenate(
        [
            _encoded(data, own.get(agreed["name"]), agreed, rows, separate)
            for agreed in schema["columns"]
        ],
        1,
    )


def _within(X: Matrix, agreed: Json) -> Matrix:
    """Bring numbers into the range that is declared of them."""
    return np.clip(X, *agreed["range"]) if "range" in agreed else X


def _encoded(
    data: ClientRows, column: DataColumn | None, agreed: Json, rows: Mask, separate: bool
) -> Matrix:
    """Encode one agreed column of some rows."""
    train = ~data.held
    if column is None or (column.kind in (NUMBER, CATEGORY) and column.kind != agreed["kind"]):
        raise InputError(
            "column-not-agreed",
            f"Silo {data.name!r} has no column {agreed['name']!r} of the kind that the agreement "
            "names.",
        )
    if agreed["kind"] == NUMBER:
        return _within(_filled_block(column.values[:, None], train, rows, separate), agreed)
    if column.kind != CATEGORY:  # not a single value
        return np.full((int(rows.sum()), len(agreed["categories"]) + agreed["other"]), np.nan)
    if separate:
        return _one_hot(column, agreed, agreed["categories"], None, rows)
    summed = bool((rows & train).any())  # only training rows go into sums
    known = named_categories(column, train, data.rarest) if summed else agreed["categories"]
    return _one_hot(column, agreed, known, train, rows)


def _one_hot(
    column: DataColumn, agreed: Json, known: list[str], train: Mask | None, rows: Mask
) -> Matrix:
    """Make zeros and ones per agreed category; gaps get the most frequent category of `train`.

    What is not `known` is "other", and none of the categories where the agreement has no "other".
    In training rows that is what this silo does not name itself, whoever else names it: a sum must
    not tell who is rare.
    """
    other = len(agreed["categories"])
    places = {name: k for k, name in enumerate(agreed["categories"]) if name in set(known)}
    codes = column.values[rows].astype(np.int64)
    fill = None if train is None else _commonest(column, train)
    codes = codes if fill is None else np.where(codes < 0, fill, codes)
    # code -1, a gap that nothing fills, takes the last entry
    place = np.array([*(places.get(name, other) for name in column.categories), -1])[codes]
    block: Matrix = np.equal(place[:, None], np.arange(other + agreed["other"])).astype(np.float64)
    block[place < 0] = np.nan
    return block


def _filled_block(values: NDArray[Any], train: Mask, rows: Mask, separate: bool) -> Matrix:
    """Fill missing numbers by their column's median over training rows, unless `separate`."""
    chosen: Matrix = values[rows].astype(np.float64)
    for j in np.flatnonzero(np.isnan(chosen).any(0) & (not separate)):
        median = _median(values[train, j])
        if median is not None:
            chosen[np.isnan(chosen[:, j]), j] = median
    return chosen


def _median(values: NDArray[Any]) -> float | None:
    there = values[~np.isnan(values)]
    return float(np.median(there)) if len(there) else None


def _commonest(column: DataColumn, train: Mask) -> int | None:
    counts = column.counts(train)
    return int(counts.argmax()) if counts.any() else None


def fills(data: ClientRows) -> dict[str, float | str]:
    """Return what fills gaps by column: median or most frequent category of training rows."""
    found: dict[str, float | str] = {}
    for column in data.table.columns:
        if column.kind == CATEGORY:
            code = _commonest(column, ~data.held)
            fill: float | str | None = None if code is None else column.categories[code]
        else:
            fill = _median(column.values[~data.held])
        if fill is not None:
            found[column.name] = fill
    return found


def _vector(given: object, name: str, length: int) -> Matrix:
    values = np.asarray(given) if isinstance(given, np.ndarray | list | tuple) else np.empty(0)
    if values.dtype.kind not in "fiu" or values.shape != (length,) or not np.isfinite(values).all():
        raise InputError(
            "not-finite-numbers",
            f"The coordinator sent a {name} that is no list of {length} finite numbers.",
        )
    return values.astype(np.float64)
