"""The rows of one client: describe their columns, sum them, fill gaps and encode them as agreed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.curves import with_steps
from scaffpd.data.silos import held_out
from scaffpd.data.tabular.agree import (
    LONGEST,
    MOST_CATEGORIES,
    CategoryColumn,
    Column,
    ColumnPair,
    Schema,
    features,
)
from scaffpd.data.tabular.columns import (
    CATEGORY,
    UNKNOWN,
    DataColumn,
    FeatureTable,
    Mask,
    Matrix,
    Values,
)
from scaffpd.errors import InputError
from scaffpd.tasks import suiting
from scaffpd.tasks.base import Pair, Target, Task

SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


def target(owner: str, column: DataColumn, task: Task | None) -> Target:
    """Read a column without missing values; texts and few whole numbers are labels by default."""
    return (task or suiting(column)).read(owner, column)


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
    # exposures and weights of rows: further columns of encoded targets
    extra: tuple[Matrix, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> tuple[int, int]:
        return int((~self.held).sum()), int(self.held.sum())

    def in_units(self, unit: float, centre: float) -> ClientRows:
        """Return the rows with a target of numbers in other units; what stands behind it stays."""
        values: Matrix = (self.target.values.astype(np.float64) - centre) / unit
        return replace(self, target=replace(self.target, values=values))

    def categories(self, column: DataColumn) -> tuple[list[str], bool]:
        """Return the categories of training rows, and whether there are others."""
        pairs = zip(column.categories, column.counts(~self.held), strict=True)
        named = [name for name, count in pairs if count and len(name) <= LONGEST]
        named = named if len(named) <= MOST_CATEGORIES else []
        present = column.counts(np.ones(len(self.held), dtype=bool)) > 0
        return named, int(present.sum()) > len(named)

    def totals(self, schema: Schema, mean: Matrix | None = None) -> Matrix:
        """Sum the training rows: n and Σx of each encoded column, or n and Σ(x − mean)²."""
        X = self._filled(schema, ~self.held)
        there = ~np.isnan(X).any(0)
        with np.errstate(over="ignore", invalid="ignore"):
            values = X.sum(0) if mean is None else ((X - mean) ** 2).sum(0)
        values = np.where(there, values, 0.0)
        if not np.isfinite(values).all():
            at = features(schema)[int((~np.isfinite(values)).argmax())]
            raise InputError(
                "numbers-too-large",
                f"Silo {self.name!r} has numbers in column {at!r} that are too large to be added.",
            )
        return np.stack([len(X) * there, values])

    def sorted_numbers(self, schema: Schema) -> list[Matrix]:
        """Sort the numbers of training rows, column by column, for `counted` to count."""
        own = {column.name: column for column in self.table.columns}
        found = []
        for agreed in schema["columns"]:
            if agreed["kind"] != CATEGORY:
                column = own[agreed["name"]]
                there = column.values[~self.held & ~column.missing].astype(np.float64)
                low, high = agreed.get("range", (-np.inf, np.inf))
                found.append(np.sort(np.clip(there, low, high)))
        return found

    def encoded(
        self, schema: Schema, mean: Matrix, deviation: Matrix, separate: bool = False
    ) -> Encoded:
        """Encode training and held-out rows as agreed, with their targets; see `matrix`."""
        y = self.target.values
        if self.target.labels:
            place = {label: k for k, label in enumerate(schema["labels"])}
            if not all(label in place for label in self.target.labels):
                raise InputError(
                    "label-not-agreed",
                    f"Silo {self.name!r} has a label that the agreement does not have.",
                )
            y = np.array([place[label] for label in self.target.labels], dtype=np.int64)[y]
        targets = np.column_stack([np.float64(y), *self.extra]) if self.extra else y

        def part(rows: Mask) -> Pair:
            X = self.matrix(schema, mean, deviation, rows, separate)
            return X.reshape(len(X), *self.table.shape) if self.table.shape else X, targets[rows]

        test = part(self.held) if self.held.any() else None
        return Encoded(part(~self.held), test, features(schema))

    def matrix(
        self,
        schema: Schema,
        mean: Matrix,
        deviation: Matrix,
        rows: Mask,
        separate: bool = False,
    ) -> Matrix:
        """Encode some rows: filled and standardised.

        Where rows are to be `separate`, none has a part in how another one is encoded: missing
        values are the agreed mean, and categories are named by the agreement alone. So it is too
        where ranges are declared.
        """
        X = self._filled(schema, rows, separate or bool(schema.get("declared")))
        return (np.where(np.isnan(X), mean, X) - mean) / deviation

    def _filled(self, schema: Schema, rows: Mask, separate: bool = False) -> Matrix:
        """Encode rows, not yet scaled; NaN is left only in columns without a training value here.

        Every missing value stays NaN where rows are to be `separate`.
        """
        if schema["shape"] is not None:
            if self.table.block is None or list(self.table.shape) != schema["shape"]:
                raise InputError(
                    "features-not-agreed",
                    f"Silo {self.name!r} does not have the features of the agreement.",
                )
            return self._numbers(self.table.block, rows, schema.get("range"), separate)
        blocks = self._blocks(schema, rows, separate)
        products = []
        for pair in schema.get("pairs", ()):
            left, right = (_cut(schema, blocks, pair[side]) for side in SIDES)
            product = (left[:, :, None] * right[:, None, :]).reshape(len(left), -1)
            products.append(product if self.acts(schema, pair) else np.full_like(product, np.nan))
        return np.concatenate([*blocks.values(), *products], 1)

    def acts(self, schema: Schema, pair: ColumnPair) -> bool:
        """Return whether rows here have the products of a pair; else they are missing."""
        return True

    def _blocks(self, schema: Schema, rows: Mask, separate: bool) -> dict[str, Matrix]:
        own = {column.name: column for column in self.table.columns}
        blocks = {}
        for agreed in schema["columns"]:
            name = agreed["name"]
            column = own.get(name)
            if column is None or column.kind not in (agreed["kind"], UNKNOWN):
                raise InputError(
                    "column-not-agreed",
                    f"Silo {self.name!r} has no column {name!r} of the kind that the agreement "
                    "names.",
                )
            if agreed["kind"] == CATEGORY:
                blocks[name] = self._one_hot(column, agreed, rows, separate)
            else:
                line = self._numbers(column.values[:, None], rows, agreed.get("range"), separate)
                blocks[name] = with_steps(line, [agreed.get("steps", [])])
        return blocks

    def indicators(self, schema: Schema, sides: Sequence[Column]) -> Matrix:
        """Return zeros and ones of training rows: what columns may be cut by in pairs."""
        blocks = self._blocks(schema, ~self.held, separate=False)
        Z = np.concatenate([_cut(schema, blocks, side) for side in sides], 1)
        return np.where(np.isnan(Z), 0.0, Z)

    def _numbers(
        self, values: Values, rows: Mask, span: list[float] | None, separate: bool
    ) -> Matrix:
        """Fill missing numbers by their median over training rows, unless `separate`; clip."""
        chosen: Matrix = values[rows].astype(np.float64)
        for j in np.flatnonzero(np.isnan(chosen).any(0) & (not separate)):
            median = _median(values[~self.held, j])
            if median is not None:
                chosen[np.isnan(chosen[:, j]), j] = median
        return chosen if span is None else np.clip(chosen, span[0], span[1])

    def _one_hot(
        self, column: DataColumn, agreed: CategoryColumn, rows: Mask, separate: bool
    ) -> Matrix:
        """Make zeros and ones per agreed category.

        Gaps get the most frequent category of training rows, unless `separate`. What is not known
        is "other", and none of the categories where the agreement has no "other".
        """
        other = len(agreed["categories"])
        if column.kind != CATEGORY:  # not a single value
            return np.full((int(rows.sum()), other + agreed["other"]), np.nan)
        places = {name: k for k, name in enumerate(agreed["categories"])}
        codes = column.values[rows].astype(np.int64)
        fill = None if separate else _commonest(column, ~self.held)
        codes = codes if fill is None else np.where(codes < 0, fill, codes)
        # code -1, a gap that nothing fills, takes the last entry
        place = np.array([*(places.get(name, other) for name in column.categories), -1])[codes]
        block: Matrix = np.equal(place[:, None], np.arange(other + agreed["other"])).astype(float)
        block[place < 0] = np.nan
        return block


def _cut(schema: Schema, blocks: Mapping[str, Matrix], side: Column) -> Matrix:
    block = blocks[side["name"]]
    if side["kind"] != CATEGORY:
        return with_steps(block[:, :1], [side["steps"]])[:, 1:]
    agreed = next(column for column in schema["columns"] if column["name"] == side["name"])
    assert agreed["kind"] == CATEGORY
    return block[:, [agreed["categories"].index(name) for name in side["categories"]]]


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


def held_rows(name: str, labels: NDArray[np.int64], fraction: float, seed: int) -> Mask:
    if fraction > 0 and len(labels) < 2:
        raise InputError(
            "client-of-one-row",
            f"{name!r} has a single row, which cannot be split; use test = 0.",
        )
    return held_out(labels, fraction, _generator(seed, name))


def _generator(seed: int, name: str) -> np.random.Generator:
    # by the client's name, so that other clients' rows do not change which of its rows are drawn
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16]))


def _median(values: Values) -> float | None:
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
