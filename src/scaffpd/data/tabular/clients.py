"""A table that a column cuts into clients: each then agrees and encodes as a site of its own would.

Missing values are filled from the client's own training rows, columns are scaled by sums over
clients, and no step looks at the pooled rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.tabular import encode
from scaffpd.data.tabular.agree import (
    Column,
    Schema,
    category_order,
    declared,
    width,
)
from scaffpd.data.tabular.columns import (
    CATEGORY,
    DATE,
    NUMBER,
    DataColumn,
    FeatureTable,
    Mask,
    Matrix,
    Values,
    leaking_columns,
    numbers_of,
    spelt,
)
from scaffpd.data.tabular.encode import ClientRows
from scaffpd.data.tabular.formats import open_table, stacked
from scaffpd.data.tabular.read import DAY, read_columns
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.data.tabular.survival import recognised, survived
from scaffpd.errors import InputError, unknown
from scaffpd.numbers import several
from scaffpd.tasks.base import Target, Task

# a column of texts with more different ones than this, and than half the rows, holds names
MANY = 50
# whole numbers of at least so many digits, as many in every row and never the same, name rows
DIGITS = 6
NAMES = r"(?i:(^|[_\W])(id|ids|uuid|guid|identifier{})($|[_\W]))|[a-z]I[dD]$"
NAMED = re.compile(NAMES.format("|index|rownames"))
SUBJECTS = re.compile(NAMES.format(""))  # whose values may repeat: no age_at_index
MOST_GROUPS = 50  # values of a column that rows are scored by
PART = "(part)"  # the column that tells rows of a test file from the others
MISSING = "(missing)"  # the group of rows without a value


@dataclass(frozen=True)
class Clients:
    """The file as a federation has it, before anything is agreed by sums."""

    rows: tuple[ClientRows, ...] = field(repr=False)  # of every client
    schema: Schema = field(repr=False)  # labels and the union of categories
    remarks: tuple[str, ...]  # what was left out, and why
    # of held-out rows, client by client: values of the columns to score by, as texts
    groups: Mapping[str, list[NDArray[np.object_]]] = field(default_factory=dict, repr=False)
    exposure: float | None = None  # the usual one, that counts are for

    @property
    def task(self) -> Task:
        return self.rows[0].target.task


@dataclass(frozen=True)
class ClientTable:
    """A table that has been read, to be cut into clients for any split."""

    source: TableSettings
    found: _Rows = field(repr=False)
    wanted: Target
    remarks: tuple[str, ...] = field(repr=False)

    def clients(self, seed: int = 0) -> Clients:
        """Cut it into clients; the seed chooses held-out rows."""
        remarks = [*self.remarks]
        rows = _cut(self.source, self.found, self.wanted, remarks, seed)
        usual = None
        if self.source.offset is not None:
            rows, usual = _exposed(self.source, self.found, rows)
        schema = _agreed(self.source, rows)
        groups = _groups(self.found, rows)
        return Clients(tuple(rows), schema, tuple(remarks), groups, usual)


def read_clients(source: TableSettings) -> ClientTable:
    found = _read(source)
    found = replace(found, goal=ordered(found.goal, source.wanted, source.order))
    wanted = encode.target(repr(source.file[0].name), found.goal, source.wanted)
    if not wanted.labels and len(np.unique(wanted.values)) == 1:
        raise InputError(
            "constant-target",
            f"All rows have the target {wanted.values[0]:g}: is {source.target!r} the right "
            "column?",
        )
    looked = [found.goal, *found.features.columns] if source.time is None else []
    remarks = (
        *found.remarks,
        *recognised(looked, found.goal.name),
        *_task(source, wanted),
        *([f"Target {source.target!r} {wanted.note}."] if wanted.note else []),
        *leaking_columns(
            found.features.columns, wanted.values, bool(wanted.labels), found.owner.values
        ),
    )
    return ClientTable(source, found, wanted, remarks)


def _agreed(source: TableSettings, rows: Sequence[ClientRows]) -> Schema:
    """Return what all clients follow: their labels, and the union of their categories."""
    target = rows[0].target
    if len(target.labels) == 1:
        raise InputError(
            "constant-target",
            f"All rows of all clients have the label {target.labels[0]!r}: is it the right target?",
        )
    columns: list[Column] = []
    for k, column in enumerate(rows[0].table.columns):
        if column.kind != CATEGORY:
            columns.append({"name": column.name, "kind": NUMBER})
            continue
        own, other = zip(*(one.categories(one.table.columns[k]) for one in rows), strict=True)
        named = sorted({name for names in own for name in names}, key=category_order)
        columns.append(
            {"name": column.name, "kind": CATEGORY, "categories": named, "other": any(other)}
        )
    schema: Schema = {
        "task": "classification" if target.labels else "regression",
        "labels": cast("list[str]", [*target.labels]),
        "columns": columns,
        "shape": None,
    }
    if not width(schema):
        raise InputError("no-features", "No client has a feature with values.")
    return declared(schema, source.ranges) if source.ranges else schema


def _exposed(
    source: TableSettings, found: _Rows, rows: list[ClientRows]
) -> tuple[list[ClientRows], float]:
    """Give counts their exposures, in units of the mean of training rows; and return that mean."""
    if not rows[0].target.task.exposed:
        raise InputError(
            "offset-without-counts", "--offset is the log exposure of counts: use --task counts."
        )
    owner = found.owner
    own = [np.exp(found.offset[owner.values == owner.categories.index(one.name)]) for one in rows]
    training = [e[~one.held] for e, one in zip(own, rows, strict=True)]
    usual = float(np.concatenate(training).mean())
    pairs = zip(own, rows, strict=True)
    return [replace(one, extra=(e / usual, *one.extra)) for e, one in pairs], usual


def _task(source: TableSettings, wanted: Target) -> list[str]:
    """Say how the target was understood, where it could be meant otherwise."""
    if source.task or source.time or (wanted.labels and isinstance(wanted.labels[0], str)):
        return []
    name = f"Target {source.target!r}"
    if wanted.labels:
        many = f"{name} is read as {len(wanted.labels)} labels; --task regression otherwise."
        return [] if len(wanted.labels) == 2 else [many]
    different = np.unique(wanted.values)
    if len(different) > MANY or np.any(different != np.round(different)):
        return []
    counts = "counts or " if different[0] >= 0 else ""
    reach = f"{different[0]:g} to {different[-1]:g}"
    return [f"{name} is read as numbers, {reach}; --task {counts}classification otherwise."]


def ordered(goal: DataColumn, wanted: Task | None, order: Sequence[str]) -> DataColumn:
    """Put the texts of a target into their order, which nobody can guess."""
    known = goal.categories
    asked = wanted is not None and wanted.ordered
    if not asked and not order:
        return goal
    if not asked or sorted(order) != sorted(known if known or order else ()):
        given = f"--order has {', '.join(order)}" if order else "there is no --order"
        raise InputError(
            "order-of-texts",
            f"Target {goal.name!r} has {', '.join(known) or 'no texts'}, and {given}: --task "
            "ordinal needs all texts of its target, from the least to the most. Numbers have one.",
        )
    if not order:
        return goal
    place = np.array([order.index(text) for text in known])
    return replace(goal, categories=tuple(order), values=place[goal.values].astype(np.int32))


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
    weight: Matrix
    offset: Matrix
    survival: tuple[Matrix, ...] = ()  # events, and entries


def _read(source: TableSettings) -> _Rows:
    role = "target" if source.wanted is None else source.wanted.roles[0]
    needed = {source.target: role, source.client: "client"}
    if len(needed) == 1:
        raise InputError(
            "client-is-target",
            f"Column {source.client!r} cannot be both the client and the target.",
        )
    for name, what in needed.items():
        if name in source.columns:
            raise InputError(
                "column-of-two-roles",
                f"Column {name!r} is the {what}, so it cannot be a feature.",
            )
    table = open_table(*source.file, sheet=source.sheet)
    parts = [PART] if isinstance(source.test, Path) else []
    if isinstance(source.test, Path):
        if source.split_by is not None:
            raise InputError(
                "two-splits",
                "--split-by has nothing to split: the held-out rows are a table of their own.",
            )
        both = [table, open_table(source.test, sheet=source.sheet)]
        table = stacked(source.file[0], both, ["train", "test"], PART)
    roles = (
        *((source.split_by, "split"), (source.weight, "weight"), (source.offset, "offset")),
        *((source.event, "event"), (source.entry, "entry")),
    )
    for one, what in roles:
        if one is not None:
            needed.setdefault(one, what)
    for name in (*source.groups, *source.drop):
        if name not in table.names:
            raise unknown(f"column of {source.file[0].name!r},", name, table.names)
    left = {*needed, PART, *source.drop}
    learnt = [name for name in source.columns or table.names if name not in left]
    names = dict.fromkeys([*needed, *learnt, *source.groups, *parts])
    categories = [*source.categories, source.client, *parts]
    columns, dropped = read_columns(
        table, list(names), categories, needed, source.decimal, source.missing
    )
    found = {column.name: column for column in columns}
    own = [found[name] for name in dict.fromkeys(learnt)]
    remarks = list(table.remarks)
    remarks += [
        f"{several(number, 'row')} without {name!r} left out."
        for name, number in dropped.items()
        if number
    ]
    features = _features(source, own, remarks)
    tested = None
    if parts:
        tested = np.asarray(found[PART].values == found[PART].categories.index("test"))
    by = found.get(source.split_by or "")
    if by is not None and source.test:
        for cell in filter(DAY.fullmatch, by.categories):
            raise InputError(
                "dates-without-order",
                f"Dates of {by.name!r} cannot be ordered ({cell!r}); write them as 2023-09-07.",
            )
        groups = "whole groups drawn at random"
        how = groups if by.kind == CATEGORY else "the latest rows of every client"
        remarks.append(f"Held out by {by.name!r}: {how}.")
    goal = found[source.target]
    survival: tuple[Matrix, ...] = ()
    if source.event is not None:
        goal, survival = survived(goal, found[source.event], found.get(source.entry or ""), remarks)
    return _Rows(
        goal,
        found[source.client],
        features,
        by,
        tested,
        remarks,
        [found[name] for name in source.groups],
        np.empty(0) if source.weight is None else numbers_of(found[source.weight]),
        np.empty(0) if source.offset is None else numbers_of(found[source.offset]),
        survival,
    )


def _groups(found: _Rows, rows: list[ClientRows]) -> dict[str, list[NDArray[np.object_]]]:
    """Cut the columns to score by into clients, held-out rows alone."""
    cut: dict[str, list[NDArray[np.object_]]] = {}
    owner = found.owner
    for column in found.groups:
        values = np.array(texts_of(column), dtype=object)
        different = len(set(values.tolist()))
        if different > MOST_GROUPS:
            raise InputError(
                "too-many-groups",
                f"Column {column.name!r} has {different} different values: --groups takes up to "
                f"{MOST_GROUPS}.",
            )
        cut[column.name] = [
            values[owner.values == owner.categories.index(own.name)][own.held] for own in rows
        ]
    return cut


def texts_of(column: DataColumn) -> list[str]:
    if column.kind == CATEGORY:
        return [MISSING if k < 0 else column.categories[k] for k in column.values]
    if column.kind == DATE:
        days = np.round(86400 * column.values).astype("datetime64[s]").astype(str)  # NaN is NaT
        return [MISSING if d == "NaT" else d.removesuffix("T00:00:00") for d in days.tolist()]
    return [MISSING if np.isnan(v) else spelt(v) for v in column.values]


def _features(source: TableSettings, columns: list[DataColumn], remarks: list[str]) -> FeatureTable:
    """Leave out what is nothing to learn from, unless it is asked for by name."""
    used = []
    for column in columns:
        asked = source.columns and column.kind != DATE
        why = None if asked else useless(column)
        if why:
            remarks.append(f"Column {column.name!r} left out: {why}.")
        else:
            used.append(column)
            remarks += [f"Column {column.name!r} {column.note}."] if column.note else []
        subjects = 0 if source.split_by or source.test == 0 else _subjects(column)
        if subjects:
            remarks.append(
                f"Column {column.name!r} repeats {subjects:,} values: if it names subjects, "
                f"--split-by {column.name} keeps the rows of each on one side."
            )
    if not used:
        why = " ".join(remark for remark in remarks if remark.startswith("Column "))
        raise InputError(
            "nothing-to-learn-from",
            f"{source.file[0].name!r} has no columns besides {source.client!r} and "
            f"{source.target!r}. {why}".rstrip(),
        )
    return FeatureTable(len(used[0].values), tuple(used))


def useless(column: DataColumn) -> str | None:
    """Say why a column is nothing to learn from; `None` where it is."""
    there = column.values[~column.missing]
    distinct: Matrix = np.unique(there).astype(np.float64)
    if column.kind == DATE and len(distinct):
        return f"it {column.note}"
    if len(distinct) < 2:
        return "no values" if len(distinct) == 0 else "the same value everywhere"
    if column.kind == CATEGORY:
        each = len(distinct) == len(there) >= 10
        if each or (len(distinct) > MANY and len(distinct) > len(column.values) / 2):
            return f"{len(distinct)} different texts in {several(len(column.values), 'row')}"
        return None
    named = _names_rows(column.name, there, distinct)
    return "names, not quantities" if named else None


def _subjects(column: DataColumn) -> int:
    """Return how many names a column called an id has, where most of them stand in several rows."""
    there, rows = np.unique(column.values[~column.missing], return_counts=True)
    repeated = SUBJECTS.search(column.name) and len(there) >= MANY and np.median(rows) > 1
    return len(there) if repeated else 0


def _names_rows(name: str, there: Values, distinct: Matrix) -> bool:
    """Tell identifiers from whole numbers: consecutive, named so, too long, or equally long."""
    if np.any(distinct != np.round(distinct)) or len(there) <= MANY:
        return False
    if np.abs(distinct).max() > 2**53:  # whole numbers this large are not exact: none was measured
        return True
    if SUBJECTS.search(name):
        return True
    digits = np.unique(np.floor(np.log10(np.maximum(np.abs(distinct), 1))))
    alike = len(digits) == 1 and digits[0] + 1 >= DIGITS
    return len(distinct) == len(there) and bool(
        np.all(np.diff(distinct) == 1) or alike or NAMED.search(name)
    )


def _cut(
    source: TableSettings, found: _Rows, goal: Target, remarks: list[str], seed: int
) -> list[ClientRows]:
    owner = found.owner
    counts = owner.counts(np.ones(len(owner.values), dtype=bool))
    least = 1 if source.test == 0 else 2
    small = [name for name, n in zip(owner.categories, counts, strict=True) if 0 < n < least]
    large = [k for k, n in enumerate(counts) if n >= least]
    if len(large) < 2:
        raise InputError(
            "too-few-clients",
            f"Column {source.client!r} has {several(len(large), 'client')} with at least "
            f"{several(least, 'row')}; at least two are needed.",
        )
    if small:
        remarks.append(f"{several(len(small), 'client')} with a single row left out.")
    clients = []
    for k in large:
        name = owner.categories[k]
        own = owner.values == k
        wanted = replace(goal, values=goal.values[own], note="")
        if isinstance(source.test, Path):
            assert found.tested is not None
            held = found.tested[own]
            if held.all() or not held.any():
                lacking = source.file[0] if held.all() else source.test
                raise InputError(
                    "client-without-rows",
                    f"Client {name!r} has no rows in {lacking.name!r}; both tables need rows of "
                    "every client.",
                )
        elif found.by is None or source.test == 0:
            drawn = wanted.values if wanted.labels else np.zeros(own.sum())
            if found.survival:  # events on both sides
                drawn = found.survival[0][own]
            held = encode.held_rows(name, drawn.astype(np.int64), source.test, seed)
        else:
            held = encode.held_whole(name, found.by.take(own), source.test, seed)
        extra = tuple(column[own] for column in found.survival)
        if source.weight is not None:  # whole numbers would be taken for numbers of equal rows
            extra += (found.weight[own] / (found.weight[own][~held].mean() or 1.0),)
        clients.append(ClientRows(name, found.features.take(own), wanted, held, extra=extra))
    return clients
