"""One file of rows that a column cuts into clients: each then agrees and encodes as a site of its own would.

Missing values are filled from the client's own training rows, columns are scaled by sums over clients, and no
step looks at the pooled rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from scaffpd.errors import InputError, several
from scaffpd.system import format_bytes, free_memory
from scaffpd.tabular.agree import Json, agree, deviation_of, mean_of, width
from scaffpd.tabular.columns import CATEGORY, DataColumn, FeatureTable, Matrix
from scaffpd.tabular.encode import ClientRows, Encoded, Target, held_rows, target
from scaffpd.tabular.read import column_names, read_columns

DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}")
MANY = 50  # a column of texts with more different ones than this, and than half the rows, holds names, not categories


@dataclass(frozen=True)
class TableFile:
    """A file and what its columns are."""

    file: Path  # CSV (or CSV in gzip) or Parquet
    client: str  # the column that says whose a row is
    target: str  # the column to be predicted
    columns: tuple[str, ...] | None = None  # which columns to use; `None` for all others
    categories: tuple[str, ...] = ()  # columns of numbers that are names of categories
    task: str | None = None  # "classification" or "regression"; `None` to go by the target
    test: float = 0.2  # share of each client's rows that is held out
    seed: int = 0  # chooses them
    standardise: bool = True  # whether columns are scaled
    # between the columns of a CSV file: comma, semicolon, tab or pipe; `None` finds it out
    separator: str | None = None
    decimal: str | None = None  # the decimal mark of a CSV file: point or comma; `None` finds it out


@dataclass(frozen=True)
class Clients:
    """The file as a federation has it."""

    rows: tuple[ClientRows, ...] = field(repr=False)  # of every client
    encoded: tuple[Encoded, ...] = field(repr=False)  # the same, ready to train on
    schema: Json = field(repr=False)  # what was agreed
    mean: Matrix = field(repr=False)  # of every encoded column
    deviation: Matrix = field(repr=False)  # likewise
    remarks: tuple[str, ...]  # what was left out, and why


def read_clients(source: TableFile) -> Clients:
    """Read a file, cut it into clients, and let them agree."""
    goal, owner, features, remarks = _read(source)
    wanted = target(repr(source.file.name), goal, source.task)
    rows = _cut(source, owner, features, wanted, remarks)
    schema = agree({own.name: own.describe() for own in rows}, source.standardise)
    cells = width(schema) * sum(sum(own.rows) for own in rows)
    if 16 * cells > free_memory(torch.device("cpu")):  # the encoded rows, and once more while they are made
        raise InputError(
            f"{source.file.name!r} makes {width(schema)} columns once encoded, {format_bytes(8 * cells)} in all, which "
            "is more than there is room for: choose fewer --columns."
        )
    mean = mean_of({own.name: own.totals(schema) for own in rows}, schema)
    deviation = deviation_of({own.name: own.totals(schema, mean) for own in rows}, mean)
    encoded = tuple(own.encoded(schema, mean, deviation) for own in rows)
    return Clients(tuple(rows), encoded, schema, mean, deviation, tuple(remarks))


def _read(source: TableFile) -> tuple[DataColumn, DataColumn, FeatureTable, list[str]]:
    """Target, client and features of rows that have both a client and a target, and remarks on what is left out.

    Dates, names of rows and columns without a difference are no features, unless they are asked for.
    """
    needed = {source.target: "target", source.client: "client"}
    if len(needed) == 1:
        raise InputError(f"Column {source.client!r} cannot be both the client and the target.")
    for name, what in needed.items():
        if name in (source.columns or ()):
            raise InputError(f"Column {name!r} is the {what}, so it cannot be one to learn from.")
    header = column_names(source.file, source.separator) if source.columns is None else source.columns
    names = [*needed, *(name for name in dict.fromkeys(header) if name not in needed)]
    categories = [*source.categories, source.client]
    (goal, owner, *found), dropped = read_columns(
        source.file, names, categories, needed, source.separator, source.decimal
    )
    remarks = [f"{several(number, 'row')} without {name!r} left out." for name, number in dropped.items() if number]
    remarks += [f"Column {column.name!r} {column.note}." for column in found if column.note]
    useless = {} if source.columns is not None else {column.name: _useless(column) for column in found}
    remarks += [f"Column {name!r} left out: {why}." for name, why in useless.items() if why]
    features = tuple(column for column in found if not useless.get(column.name))
    if not features:
        raise InputError(f"{source.file.name!r} has no columns besides {source.client!r} and {source.target!r}.")
    return goal, owner, FeatureTable(len(goal.values), features), remarks


def _useless(column: DataColumn) -> str | None:
    """Why a column is nothing to learn from, if so."""
    there = column.values[~column.missing]
    different = len(np.unique(there))
    if different < 2:
        return "no values" if different == 0 else "the same value everywhere"
    if column.kind == CATEGORY:
        texts = [column.categories[int(k)] for k in np.unique(there)]
        if sum(bool(DATE.match(text)) for text in texts) > len(texts) / 2:
            return f"dates such as {texts[0]!r}; make numbers of them first"
        if different > MANY and different > len(column.values) / 2:
            return f"{different} different texts in {several(len(column.values), 'row')}"
        return None
    steps = np.diff(np.sort(there))
    if different == len(there) > MANY and np.all(there == np.round(there)) and np.all(steps == 1):
        return "a number for every row, one after the other"
    return None


def _cut(
    source: TableFile, owner: DataColumn, features: FeatureTable, goal: Target, remarks: list[str]
) -> list[ClientRows]:
    counts = owner.counts(np.ones(len(owner.values), dtype=bool))
    least = 2 if source.test > 0 else 1
    small = [name for name, n in zip(owner.categories, counts, strict=True) if 0 < n < least]
    large = [k for k, n in enumerate(counts) if n >= least]
    if len(large) < 2:
        raise InputError(
            f"Column {source.client!r} has {several(len(large), 'client')} with at least {several(least, 'row')}; at "
            "least two are needed."
        )
    if small:
        remarks.append(f"{several(len(small), 'client')} with a single row left out.")
    clients = []
    for k in large:
        name, own = owner.categories[k], owner.values == k
        wanted = Target(goal.task, goal.values[own], goal.labels)
        held = held_rows(name, wanted, source.test, source.seed)
        clients.append(ClientRows(name, features.take(own), wanted, held))
    return clients
