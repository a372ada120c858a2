"""A table that a column cuts into clients: each then agrees and encodes as a site of its own would.

Missing values are filled from the client's own training rows, columns are scaled by sums over clients, and no
step looks at the pooled rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.data.tabular import encode
from scaffpd.data.tabular.agree import (
    CLASSIFICATION,
    REGRESSION,
    Json,
    agree,
    declared_scale,
    deviation_of,
    mean_of,
)
from scaffpd.data.tabular.columns import (
    CATEGORY,
    DATE,
    DataColumn,
    FeatureTable,
    Mask,
    Matrix,
    spelt,
    telling_columns,
)
from scaffpd.data.tabular.encode import ClientRows, Encoded, Target
from scaffpd.data.tabular.formats import open_table, stacked
from scaffpd.data.tabular.read import check_dates, date_part, date_parts, read_columns
from scaffpd.errors import InputError, unknown
from scaffpd.machine import free_memory
from scaffpd.numbers import format_bytes, several

MANY = 50  # a column of texts with more different ones than this, and than half the rows, holds names, not categories
DIGITS = 6  # whole numbers of at least so many digits, as many in every row and never the same, are names of rows
NAMED = re.compile(
    r"(^|[_\W])(id|ids|uuid|guid|identifier|index|rownames)($|[_\W])|[a-z]I[dD]$", re.IGNORECASE
)
MOST_GROUPS = 50  # values of a column that rows are scored by
PART = "(part)"  # the column that tells rows of a test file from the others


@dataclass(frozen=True)
class TableFile:
    """A table and what its columns are."""

    file: Path  # a file in one of the formats that `open_table` knows, or a folder of such files
    client: str  # the column with every row's client
    target: str  # the column to be predicted
    columns: tuple[str, ...] | None = None  # which columns to use; `None` for all others
    categories: tuple[str, ...] = ()  # columns of numbers that are names of categories
    task: str | None = None  # "classification" or "regression"; `None` to go by the target
    test: float = 0.2  # share of each client's rows that is held out
    seed: int = 0  # chooses them
    # a column of dates or numbers, whose latest rows are held out, or of groups, which are held out whole
    split_by: str | None = None
    more_files: tuple[Path, ...] = ()  # tables with the same columns, below the first
    test_file: Path | None = (
        None  # a table of held-out rows; then `test`, `seed` and `split_by` say nothing
    )
    dates: bool = (
        False  # whether to learn from the day of the year, the weekday and the hour of dates
    )
    standardise: bool = True  # whether columns are scaled
    ranges: Mapping[str, Any] | None = (
        None  # known ranges of columns, by which they are scaled (see `agree`)
    )
    groups: tuple[
        str, ...
    ] = ()  # columns to score held-out rows by, whether or not they are learnt from
    features: str | None = (
        None  # "splines", "interactions" or "rff": what is made of the columns, see `encode`
    )
    # between the columns of a CSV file: comma, semicolon, tab or pipe; `None` finds it out
    separator: str | None = None
    decimal: str | None = (
        None  # the decimal mark of a CSV file: point or comma; `None` finds it out
    )
    missing: tuple[
        str | float, ...
    ] = ()  # values that stand for missing ones in all columns but the client's


@dataclass(frozen=True)
class Clients:
    """The file as a federation has it."""

    rows: tuple[ClientRows, ...] = field(repr=False)  # of every client
    encoded: tuple[Encoded, ...] = field(repr=False)  # the same, ready to train on
    schema: Json = field(repr=False)  # what was agreed
    mean: Matrix = field(repr=False)  # of every encoded column
    deviation: Matrix = field(repr=False)  # likewise
    remarks: tuple[str, ...]  # what was left out, and why
    # of held-out rows, client by client: values of the columns to score by, as texts
    groups: Mapping[str, list[NDArray[Any]]] = field(default_factory=dict, repr=False)


def read_clients(source: TableFile) -> Clients:
    """Read a table, cut it into clients, and let them agree."""
    found = _read(source)
    wanted = encode.target(repr(source.file.name), found.goal, source.task)
    if len(np.unique(wanted.values)) == 1 and wanted.task == REGRESSION:
        raise InputError(
            "rows-target-right",
            f"All rows have the target {wanted.values[0]:g}: is {source.target!r} the right column?",
        )
    remarks = [
        *found.remarks,
        *_task(source, wanted),
        *_alike("Labels", source.target, wanted.labels),
    ]
    remarks += _alike("Clients", source.client, found.owner.categories)
    remarks += [f"Target {source.target!r} {wanted.note}."] if wanted.note else []
    remarks += telling_columns(
        found.features.columns, wanted.values, wanted.task == CLASSIFICATION, found.owner.values
    )
    rows = _cut(source, found, wanted, remarks)
    schema = agree({own.name: own.describe() for own in rows}, source.standardise, source.ranges)
    schema = encode.with_expansion(schema, source.features)
    made = len(encode.expanded_names(schema))
    cells = made * sum(sum(own.rows) for own in rows)
    if 16 * cells > free_memory(
        torch.device("cpu")
    ):  # the encoded rows, and once more while they are made
        raise InputError(
            "makes-columns-once",
            f"{source.file.name!r} makes {made} columns once encoded, {format_bytes(8 * cells)} in all, which "
            "is more than there is room for: choose fewer --columns.",
        )
    if (scale := declared_scale(schema)) is None:
        mean = mean_of({own.name: own.totals(schema) for own in rows}, schema)
        scale = mean, deviation_of({own.name: own.totals(schema, mean) for own in rows}, mean)
    mean, deviation = scale
    encoded = tuple(own.encoded(schema, mean, deviation) for own in rows)
    groups = _groups(found, rows)
    return Clients(tuple(rows), encoded, schema, mean, deviation, tuple(remarks), groups)


def _task(source: TableFile, wanted: Target) -> list[str]:
    """Say how the target was understood, where it could be meant otherwise."""
    if source.task is not None or (
        wanted.task == CLASSIFICATION and isinstance(wanted.labels[0], str)
    ):
        return []
    name = f"Target {source.target!r}"
    if wanted.task == CLASSIFICATION:
        many = f"{name} is read as {len(wanted.labels)} labels; --task regression otherwise."
        return [] if len(wanted.labels) == 2 else [many]
    different = np.unique(wanted.values)
    if len(different) > MANY or np.any(different != np.round(different)):
        return []
    counts = "counts or " if different[0] >= 0 else ""
    reach = f"{different[0]:g} to {different[-1]:g}"
    return [f"{name} is read as numbers, {reach}; --task {counts}classification otherwise."]


def _alike(what: str, column: str, names: Iterable[object]) -> list[str]:
    """Say which names differ in capitals alone; of the first such ones."""
    alike: dict[str, list[str]] = {}
    for name in map(str, names):
        alike.setdefault(name.casefold(), []).append(repr(name))
    twins = next((" and ".join(twins) for twins in alike.values() if len(twins) > 1), "")
    return (
        [f"{what} {twins} of {column!r} are read as different ones: write them alike."]
        if twins
        else []
    )


@dataclass(frozen=True)
class _Rows:
    """All rows that have a client, a target and what they are split by."""

    goal: DataColumn
    owner: DataColumn
    features: FeatureTable
    by: DataColumn | None  # what rows are split by
    tested: Mask | None  # which rows are of the test file
    remarks: list[str]
    groups: list[DataColumn]


def _read(source: TableFile) -> _Rows:
    """Read the columns, and say what is left out: dates, names of rows and columns without a difference."""
    needed = {
        source.target: "label" if source.task == CLASSIFICATION else "target",
        source.client: "client",
    }
    if len(needed) == 1:
        raise InputError(
            "column-both-client",
            f"Column {source.client!r} cannot be both the client and the target.",
        )
    for name, what in needed.items():
        if name in (source.columns or ()):
            raise InputError(
                "column-learn", f"Column {name!r} is the {what}, so it cannot be one to learn from."
            )
    table = open_table(source.file, source.separator, source.more_files)
    if source.test_file is not None:
        table = stacked(
            source.file,
            [table, open_table(source.test_file, source.separator)],
            ["train", "test"],
            PART,
        )
    parts = [PART] if source.test_file is not None else []
    extra = [source.split_by] if source.split_by and source.split_by not in needed else []
    needed |= dict.fromkeys(extra, "split")
    for name in source.groups:
        if name not in table.names:
            raise unknown(f"column of {source.file.name!r},", name, table.names)
    learnt = dict.fromkeys(source.columns or table.names)
    names = [
        *needed,
        *(name for name in learnt | dict.fromkeys(source.groups) if name not in {*needed, PART}),
    ]
    categories = [*source.categories, source.client, *parts]
    columns, dropped = read_columns(
        table, [*names, *parts], categories, needed, source.decimal, source.missing
    )
    found = {column.name: column for column in columns}
    own = [column for column in columns if column.name in learnt.keys() - {*needed, PART}]
    if source.dates:
        dates = [column for column in columns if column.kind == DATE and column.name in learnt]
        own += [date_part(column, name, table) for column in dates for name in date_parts(column)]
    remarks = list(table.remarks)
    remarks += [
        f"{several(number, 'row')} without {name!r} left out."
        for name, number in dropped.items()
        if number
    ]
    features = _features(source, own, remarks)
    tested = (
        None
        if PART not in found
        else np.asarray(found[PART].values == found[PART].categories.index("test"))
    )
    by = found.get(source.split_by or "")
    if by is not None and by.kind == CATEGORY and by.name not in categories:
        check_dates(by)
    if by is not None and source.test and not parts:
        how = (
            "whole groups drawn at random"
            if by.kind == CATEGORY
            else "the latest rows of every client"
        )
        remarks.append(f"Held out by {by.name!r}: {how}.")
    groups = [found[name] for name in source.groups]
    return _Rows(found[source.target], found[source.client], features, by, tested, remarks, groups)


def _groups(found: _Rows, rows: list[ClientRows]) -> dict[str, list[NDArray[Any]]]:
    """Cut the columns to score by into clients, held-out rows alone."""
    cut: dict[str, list[NDArray[Any]]] = {}
    for column in found.groups:
        values = np.array(_texts(column), dtype=object)
        if (different := len(set(values.tolist()))) > MOST_GROUPS:
            raise InputError(
                "column-different-values",
                f"Column {column.name!r} has {different} different values: --groups takes up to {MOST_GROUPS}.",
            )
        owner = found.owner
        cut[column.name] = [
            values[owner.values == owner.categories.index(own.name)][own.held] for own in rows
        ]
    return cut


def _texts(column: DataColumn) -> list[str]:
    """Write the values of a column."""
    if column.kind == CATEGORY:
        return ["(missing)" if k < 0 else column.categories[k] for k in column.values]
    if column.kind == DATE:
        days = np.round(86400 * column.values).astype("datetime64[s]").astype(str)  # NaN is NaT
        return [
            "(missing)" if day == "NaT" else day.removesuffix("T00:00:00") for day in days.tolist()
        ]
    return ["(missing)" if np.isnan(v) else spelt(v) for v in column.values]


def _features(source: TableFile, columns: list[DataColumn], remarks: list[str]) -> FeatureTable:
    """Leave out what is nothing to learn from, unless it is asked for by name."""
    kept = []
    for column in columns:
        if column.kind == DATE and source.dates:
            continue  # what is made of it stays
        asked = source.columns is not None and column.kind != DATE
        why = None if asked else useless(column)
        if why:
            remarks.append(f"Column {column.name!r} left out: {why}.")
        else:
            kept.append(column)
            remarks += [f"Column {column.name!r} {column.note}."] if column.note else []
    if not kept:
        why = " ".join(remark for remark in remarks if remark.startswith("Column "))
        raise InputError(
            "columns-besides-columns",
            f"{source.file.name!r} has no columns besides {source.client!r} and {source.target!r}. {why}".rstrip(),
        )
    return FeatureTable(len(kept[0].values), tuple(kept))


def useless(column: DataColumn) -> str | None:
    """Say why a column is nothing to learn from; `None` where it is."""
    there = column.values[~column.missing]
    distinct = np.unique(there)
    if column.kind == DATE and len(distinct):
        return f"it {column.note}; --dates learns from weekday and season"
    if len(distinct) < 2:
        return "no values" if len(distinct) == 0 else "the same value everywhere"
    if column.kind == CATEGORY:
        if len(distinct) == len(there) >= 10 or (
            len(distinct) > MANY and len(distinct) > len(column.values) / 2
        ):
            return f"{len(distinct)} different texts in {several(len(column.values), 'row')}"
        return None
    return (
        "a name for every row, not a quantity"
        if _names_rows(column.name, there, distinct)
        else None
    )


def _names_rows(name: str, there: NDArray[Any], distinct: NDArray[Any]) -> bool:
    """Return whether whole numbers are identifiers: consecutive, named so, too long, or all equally long."""
    if np.any(distinct != np.round(distinct)) or len(there) <= MANY:
        return False
    if (
        np.abs(distinct).max() > 2**53
    ):  # no whole number of this size is exact, so none was measured
        return True
    digits = np.unique(np.floor(np.log10(np.maximum(np.abs(distinct), 1))))
    alike = len(digits) == 1 and digits[0] + 1 >= DIGITS
    return len(distinct) == len(there) and bool(
        np.all(np.diff(distinct) == 1) or alike or NAMED.search(name)
    )


def _cut(source: TableFile, found: _Rows, goal: Target, remarks: list[str]) -> list[ClientRows]:
    owner = found.owner
    counts = owner.counts(np.ones(len(owner.values), dtype=bool))
    least = 1 if source.test == 0 else 2
    small = [name for name, n in zip(owner.categories, counts, strict=True) if 0 < n < least]
    large = [k for k, n in enumerate(counts) if n >= least]
    if len(large) < 2:
        raise InputError(
            "column-least-least",
            f"Column {source.client!r} has {several(len(large), 'client')} with at least {several(least, 'row')}; at "
            "least two are needed.",
        )
    if small:
        remarks.append(f"{several(len(small), 'client')} with a single row left out.")
    clients = []
    for k in large:
        name = owner.categories[k]
        own = owner.values == k
        wanted = Target(goal.task, goal.values[own], goal.labels)
        clients.append(
            ClientRows(
                name, found.features.take(own), wanted, _held(source, found, name, wanted, own)
            )
        )
    return clients


def _held(source: TableFile, found: _Rows, name: str, wanted: Target, own: Mask) -> Mask:
    """Choose the rows of one client to hold out."""
    if source.test_file is not None and found.tested is not None:
        held = found.tested[own]
        if held.all() or not held.any():
            lacking = source.file if held.all() else source.test_file
            raise InputError(
                "client-rows-both",
                f"Client {name!r} has no rows in {lacking.name!r}; both tables need rows of every client.",
            )
        return held
    if found.by is None or source.test == 0:
        return encode.held_rows(name, wanted, source.test, source.seed)
    return encode.held_whole(name, found.by.take(own), source.test, source.seed)
