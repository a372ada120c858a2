r"""The rows of one client: describe their columns, sum them, and encode them as agreed.

A linear model of expanded rows bends and stays certified. The columns themselves stay; `expand` adds, to numbers z,

splines       natural cubic splines of every z, linear beyond the outer knots: a generalised additive model
interactions  z_i z_j of every pair
rff           of all columns √(2/D) cos(⟨w, z⟩ + b), w ~ N(0, I/d), b uniform: the Gaussian kernel (Rahimi, Recht 2007)

Knots and directions are in units of the deviation that clients agree on by sums, so nothing else has to be told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.silos import held_out
from scaffpd.data.tabular import agree
from scaffpd.data.tabular.agree import (
    CLASSIFICATION,
    PREPARED,
    REGRESSION,
    Json,
    checked_schema,
    features,
    width,
)
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, DataColumn, FeatureTable, Mask, Matrix
from scaffpd.errors import InputError

GUESSED = (
    5  # whole numbers with more different values than this are taken for amounts, not for labels
)
LARGEST_LABEL = 2**53
KNOTS = np.array([-1.6, -0.8, 0.0, 0.8, 1.6])
DIRECTIONS = 200
SEED = 0
MOST_EXPANDED = 20_000  # features once expanded
FURTHEST = 10.0  # deviations; numbers further out count as that far

Label = int | str


@dataclass(frozen=True)
class Target:
    """Target to predict."""

    task: str  # "classification" or "regression"
    values: NDArray[Any] = field(
        repr=False
    )  # the place of each row's label in `labels`; for regression the numbers
    labels: tuple[Label, ...] = ()  # the labels, sorted: whole numbers or texts
    note: str = ""  # what the operator should know about it


def target(owner: str, column: DataColumn, task: str | None) -> Target:
    """Read a column without missing values as a target; without a task, texts and few whole numbers are labels."""
    if column.kind == CATEGORY:
        if task == REGRESSION:
            raise InputError(
                "texts-such-target",
                f"{owner} has texts such as {column.categories[0]!r} in its target {column.name!r}; regression needs "
                "numbers.",
            )
        return _labelled(owner, column, np.asarray(column.values), column.categories)
    numbers = np.asarray(column.values, dtype=np.float64)
    distinct, places = np.unique(numbers, return_inverse=True)
    whole = bool(
        np.all(distinct == np.round(distinct)) and np.all(np.abs(distinct) <= LARGEST_LABEL)
    )
    if task is None:
        task = CLASSIFICATION if whole and len(distinct) <= GUESSED else REGRESSION
    if task == REGRESSION:
        return Target(REGRESSION, numbers, note=column.note)
    if not whole:
        odd = (
            float(distinct[distinct != np.round(distinct)][0])
            if np.any(distinct != np.round(distinct))
            else 2.0**53
        )
        raise InputError(
            "target-labels-whole",
            f"{owner} has {odd:g} in its target {column.name!r}; labels are whole numbers or texts, regression takes "
            'any number (data.task = "regression").',
        )
    return _labelled(owner, column, places, tuple(int(value) for value in distinct))


def _labelled(
    owner: str, column: DataColumn, places: NDArray[Any], labels: tuple[Label, ...]
) -> Target:
    if len(labels) > agree.MOST_LABELS:
        raise InputError(
            "different-labels-right",
            f"{owner} has {len(labels)} different labels in {column.name!r}; is it the right column?",
        )
    return Target(CLASSIFICATION, places.astype(np.int64), labels, column.note)


Pair = tuple[Matrix, NDArray[Any]]


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

        These are names and kinds of columns, categories with at least `rarest` training rows, labels, numbers of rows.
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
        return about | {
            "columns": [
                _described(column, ~self.held, self.rarest) for column in self.table.columns
            ]
        }

    def totals(self, schema: Mapping[str, Any], mean: Any = None) -> dict[str, NDArray[Any]]:
        """Sum the training rows: per encoded column n and Σx, or n and Σ(x − mean)² where the mean is given."""
        agreed = self._own(schema)
        X = filled(self, agreed, ~self.held)
        there = ~np.isnan(X).any(0)
        n = np.where(there, len(X), 0).astype(np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            if mean is None:
                values = X.sum(0)
                name = "sum"
            else:
                values = ((X - _vector(mean, "mean", width(agreed))) ** 2).sum(0)
                name = "squares"
        values = np.where(there, values, 0.0)
        if not np.isfinite(values).all():
            at = features(agreed)[int((~np.isfinite(values)).argmax())]
            raise InputError(
                "silo-numbers-column",
                f"Silo {self.name!r} has numbers in column {at!r} that are too large to be added.",
            )
        return {"n": n, name: values}

    def encoded(
        self, schema: Mapping[str, Any], mean: Any, deviation: Any, apart: bool = False
    ) -> Encoded:
        """Encode training and held-out rows as agreed: filled, and standardised if that was agreed.

        Where rows are to be `apart`, no row has a part in how another one is encoded: missing values are the agreed
        mean, and categories are named by the agreement alone. So it is too where ranges are declared.
        """
        agreed = self._own(schema)
        apart = apart or bool(agreed.get("declared"))
        centre = _vector(mean, "mean", width(agreed))
        scale = _vector(deviation, "deviation", width(agreed)) if agreed["standardise"] else None
        if scale is not None and not (scale > 0).all():
            raise InputError(
                "coordinator-sent-deviation",
                "The coordinator sent a deviation that is not above zero.",
            )
        y = self._targets(agreed)

        def part(rows: Mask) -> Pair:
            X = expanded(scaled(filled(self, agreed, rows, apart), centre, scale), agreed)
            return X.reshape(len(X), *self.table.shape) if self.table.block is not None else X, y[
                rows
            ]

        return Encoded(
            part(~self.held), part(self.held) if self.held.any() else None, expanded_names(agreed)
        )

    def _own(self, schema: Mapping[str, Any]) -> Json:
        agreed = checked_schema(schema)
        task = self.target.task
        if agreed["task"] != task or task == PREPARED:
            raise InputError(
                "silo-data-agreement",
                f"Silo {self.name!r} has data for {task}, the agreement is on {agreed['task']}.",
            )
        return agreed

    def _targets(self, schema: Json) -> NDArray[Any]:
        if self.target.task != CLASSIFICATION:
            return self.target.values
        place = {label: k for k, label in enumerate(schema["labels"])}
        if not all(label in place for label in self.target.labels):
            raise InputError(
                "silo-label-agreement",
                f"Silo {self.name!r} has a label that the agreement does not have.",
            )
        return np.take(
            np.array([place[label] for label in self.target.labels], dtype=np.int64),
            self.target.values,
        )


def held_whole(name: str, by: DataColumn, fraction: float, seed: int) -> Mask:
    """Choose rows to hold out that belong together: the latest ones by date or number, or whole groups by seed."""
    groups, place, counts = np.unique(by.values, return_inverse=True, return_counts=True)
    if len(groups) < 2:
        raise InputError(
            "single-value-rows",
            f"{name!r} has a single value in {by.name!r}, so its rows cannot be split by it.",
        )
    order = (
        np.arange(len(groups))[::-1]
        if by.kind != CATEGORY
        else _generator(seed, name).permutation(len(groups))
    )
    before = (
        np.cumsum(counts[order]) - counts[order]
    )  # rows held out already when it is a group's turn
    held = order[(before < fraction * len(place)) & (np.arange(len(groups)) < len(groups) - 1)]
    return np.isin(place, held)


def held_rows(name: str, target: Target, fraction: float, seed: int) -> Mask:
    """Choose the rows to hold out by seed and name, label by label."""
    if fraction > 0 and len(target.values) < 2:
        raise InputError(
            "single-row-split", f"{name!r} has a single row, which cannot be split; use test = 0."
        )
    labels = (
        target.values
        if target.task == CLASSIFICATION
        else np.zeros(len(target.values), dtype=np.int64)
    )
    return held_out(labels, fraction, _generator(seed, name))


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(
        int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16])
    )


def _described(column: DataColumn, train: Mask, rarest: int) -> Json:
    about: Json = {
        "name": column.name,
        "kind": column.kind,
        "any": bool((~column.missing[train]).any()),
    }
    if column.kind == CATEGORY:
        named = named_categories(column, train, rarest)
        there = column.counts(np.ones(len(train), dtype=bool)) > 0
        held_back = {
            name for name, some in zip(column.categories, there, strict=True) if some
        } - set(named)
        about |= {"categories": named, "other": bool(held_back)}
    return about


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


def expanded(X: Matrix, schema: Json) -> Matrix:
    """Return standardised rows with the features that the schema agrees on."""
    kind = schema.get("expand", "")
    if not kind:
        return X
    if kind == "rff":
        W, b = _directions(X.shape[1])
        return np.concatenate(
            [X, np.sqrt(2 / DIRECTIONS) * np.cos(np.clip(X, -FURTHEST, FURTHEST) @ W + b)], axis=1
        )
    Z = np.clip(X[:, _numbers(schema)], -FURTHEST, FURTHEST)
    if kind == "splines":
        return np.concatenate([X, *map(_splines, Z.T)], axis=1)
    pairs = [Z[:, i] * Z[:, j] for i, j in combinations(range(Z.shape[1]), 2)]
    return np.concatenate([X, *(product[:, None] for product in pairs)], axis=1)


def expanded_names(schema: Json) -> tuple[str, ...]:
    """Name the columns of expanded rows."""
    kind = schema.get("expand", "")
    names = features(schema)
    numbers = [names[j] for j in _numbers(schema)] if kind else []
    if kind == "splines":
        return (
            *names,
            *(f"{name} (bend {k + 1})" for name in numbers for k in range(len(KNOTS) - 2)),
        )
    if kind == "interactions":
        return (*names, *(f"{a} × {b}" for a, b in combinations(numbers, 2)))
    return (*names, *(f"direction {k + 1}" for k in range(DIRECTIONS))) if kind == "rff" else names


def with_expansion(schema: Json, kind: str | None) -> Json:
    """Return the schema with an expansion, or refuse one that cannot be made of these columns."""
    if not kind:
        return schema
    if not schema["standardise"]:
        raise InputError(
            "features-made-standardised",
            f"features = {kind!r} are made of standardised columns: leave standardise on.",
        )
    if schema["shape"] is not None:
        raise InputError("features-columns-names", f"features = {kind!r} need columns with names.")
    numbers = len(_numbers(schema))
    if kind != "rff" and numbers < (2 if kind == "interactions" else 1):
        raise InputError(
            "features-made-columns",
            f"features = {kind!r} are made of columns of numbers, and there are {numbers}.",
        )
    made = len(expanded_names({**schema, "expand": kind}))
    if made > MOST_EXPANDED:
        raise InputError(
            "features-make-columns",
            f"features = {kind!r} would make {made:,} columns, and {MOST_EXPANDED:,} are allowed: choose fewer columns.",
        )
    return {**schema, "expand": kind}


def _numbers(schema: Json) -> list[int]:
    """Return where the columns of numbers are among the encoded ones."""
    found = []
    place = 0
    for column in schema["columns"]:
        if column["kind"] == NUMBER:
            found.append(place)
        place += 1 if column["kind"] == NUMBER else len(column["categories"]) + column["other"]
    return found


def _bent(z: Matrix) -> Matrix:
    """d_k(z) − d_{K−1}(z), d_k = ((z − t_k)³₊ − (z − t_K)³₊)/(t_K − t_k): what natural splines have besides 1 and z."""
    cubes = np.maximum(z[:, None] - KNOTS, 0.0) ** 3
    d = (cubes[:, :-1] - cubes[:, -1:]) / (KNOTS[-1] - KNOTS[:-1])
    found: Matrix = d[:, :-1] - d[:, -1:]
    return found


def _splines(z: Matrix) -> Matrix:
    """Return what natural splines add to 1 and z, in units of its deviation for z ~ N(0, 1)."""
    mean, slope, scale = _normal()
    found: Matrix = (_bent(z) - mean - z[:, None] * slope) / scale
    return found


@cache
def _normal() -> tuple[Matrix, Matrix, Matrix]:
    """For z ~ N(0, 1), by quadrature: mean of `_bent`, what z explains of it, and the deviation of the rest."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    bent = _bent(nodes)
    mean = weights @ bent
    slope = weights @ (nodes[:, None] * bent)
    rest = bent - mean - nodes[:, None] * slope
    return mean, slope, np.sqrt(weights @ rest**2)


@cache
def _directions(d: int) -> tuple[Matrix, Matrix]:
    random = np.random.default_rng(SEED)
    return random.standard_normal((d, DIRECTIONS)) / np.sqrt(d), random.uniform(
        0, 2 * np.pi, DIRECTIONS
    )


def filled(data: ClientRows, schema: Json, rows: Mask, apart: bool = False) -> Matrix:
    """Encode rows, not yet scaled; NaN is left only in columns of which this silo has no training value.

    Every missing value stays NaN where rows are to be `apart`.
    """
    if schema["shape"] is not None:
        if data.table.block is None or list(data.table.shape) != schema["shape"]:
            raise InputError(
                "silo-other-features",
                f"Silo {data.name!r} has other features than the agreement: {data.table.width}.",
            )
        return _within(_filled_block(data.table.block, ~data.held, rows, apart), schema)
    own = {column.name: column for column in data.table.columns}
    parts = [
        _encoded(data, own.get(agreed["name"]), agreed, rows, apart) for agreed in schema["columns"]
    ]
    return np.concatenate(parts, 1)


def _within(X: Matrix, agreed: Json) -> Matrix:
    """Bring numbers into the range that is declared of them."""
    return np.clip(X, *agreed["range"]) if "range" in agreed else X


def _encoded(
    data: ClientRows, column: DataColumn | None, agreed: Json, rows: Mask, apart: bool
) -> Matrix:
    """Encode one agreed column of some rows."""
    train = ~data.held
    if column is None:
        raise InputError(
            "silo-column-agreement",
            f"Silo {data.name!r} has no column {agreed['name']!r}, which the agreement names.",
        )
    if column.kind in (NUMBER, CATEGORY) and column.kind != agreed["kind"]:
        raise InputError(
            "silo-column-another",
            f"Silo {data.name!r} has a column {column.name!r} of another kind than the agreement.",
        )
    if agreed["kind"] == NUMBER:
        return _within(_filled_block(column.values[:, None], train, rows, apart), agreed)
    if column.kind != CATEGORY:
        return np.full((int(rows.sum()), len(agreed["categories"]) + agreed["other"]), np.nan)
    if apart:
        return _one_hot(column, agreed, set(agreed["categories"]), None, rows)
    summed = bool((rows & train).any())  # only training rows go into sums
    known = named_categories(column, train, data.rarest) if summed else agreed["categories"]
    return _one_hot(column, agreed, set(known), train, rows)


def _one_hot(
    column: DataColumn, agreed: Json, known: set[str], train: Mask | None, rows: Mask
) -> Matrix:
    """Make a column of zeros and ones per agreed category; the most frequent one of `train` where it is missing.

    What is not `known` is "other", and none of the categories where the agreement has no "other". In training rows that
    is what this silo does not name itself, whoever else names it: a sum must not tell who is rare.
    """
    other = len(agreed["categories"])
    places = {name: k for k, name in enumerate(agreed["categories"]) if name in known}
    codes = column.values[rows].astype(np.int64)
    fill = None if train is None else _commonest(column, train)
    codes = codes if fill is None else np.where(codes < 0, fill, codes)
    place = np.array([*(places.get(name, other) for name in column.categories), -1])[
        codes
    ]  # -1 stays -1
    block: Matrix = np.equal(place[:, None], np.arange(other + agreed["other"])).astype(np.float64)
    block[place < 0] = np.nan
    return block


def _filled_block(values: NDArray[Any], train: Mask, rows: Mask, apart: bool) -> Matrix:
    """Fill missing numbers by their column's median over training rows; leave them missing where `apart`."""
    chosen: Matrix = values[rows].astype(np.float64)
    for j in np.flatnonzero(np.isnan(chosen).any(0) & (not apart)):
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
    """Return by column what stands in for missing values: median or most frequent category of training rows."""
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


def _vector(given: Any, name: str, length: int) -> Matrix:
    values = np.asarray(given) if isinstance(given, np.ndarray | list | tuple) else np.empty(0)
    if values.dtype.kind not in "fiu" or values.shape != (length,) or not np.isfinite(values).all():
        raise InputError(
            "coordinator-sent-list",
            f"The coordinator sent a {name} that is no list of {length} finite numbers.",
        )
    return values.astype(np.float64)
