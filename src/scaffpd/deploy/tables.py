"""The table that a silo.toml names, read by its columns, or cell by cell where there is noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scaffpd.data.tabular.agree import Schema
from scaffpd.data.tabular.cellwise import (
    Cells,
    cells_of,
    label_places,
    numbers,
    open_cells,
    read_cells,
    texts,
)
from scaffpd.data.tabular.columns import (
    CATEGORY,
    DATE,
    DataColumn,
    FeatureTable,
    Mask,
    Matrix,
    array_block,
)
from scaffpd.data.tabular.encode import target
from scaffpd.data.tabular.formats import entry_table, entry_target, open_table
from scaffpd.data.tabular.read import names_in, read_columns, rows_with
from scaffpd.data.tabular.survival import survived
from scaffpd.errors import InputError
from scaffpd.models.losses import LOSSES
from scaffpd.settings.methods import load
from scaffpd.settings.silo import SiloData, SiloFile
from scaffpd.settings.terms import FederationTerms
from scaffpd.tasks import timed
from scaffpd.tasks.base import Target, Task
from scaffpd.training.cohort import Pair

Names = Sequence[str | None]
FARTHEST = 1e100  # beyond it a target is none: its square would be no number


class Wanted(NamedTuple):
    """What to read of a table; all of it where nothing is agreed yet."""

    columns: tuple[str, ...] = ()  # in the agreement's order
    categories: tuple[str, ...] = ()  # those of them that hold categories
    task: Task | None = None
    schema: Schema | None = None
    noisy: bool = False  # whether all that leaves has noise
    curved: bool = False  # whether numbers are cut by thresholds
    loss: str = ""  # of the model, if it is linear

    @classmethod
    def of(
        cls, schema: Schema, task: Task, noisy: bool = False, curved: bool = False, loss: str = ""
    ) -> Wanted:
        columns = schema["columns"]
        texts = [column["name"] for column in columns if column["kind"] == CATEGORY]
        names = tuple(column["name"] for column in columns)
        return cls(names, tuple(texts), task, schema, noisy, curved, loss)

    @classmethod
    def agreed(cls, terms: FederationTerms) -> Wanted:
        loss = str(terms.linear().get("loss", ""))
        noisy = terms.privacy is not None
        return cls.of(terms.encoding(), terms.task, noisy, terms.curved, loss)


ANYTHING = Wanted()


class Found(NamedTuple):
    """What was read."""

    features: FeatureTable  # of rows with a target
    target: Target
    goal: DataColumn  # the target as it is read with nothing agreed
    there: Mask  # of all rows of the table, which have a target
    subjects: Names | None = None  # of all rows, whom they are about
    extra: tuple[Matrix, ...] = ()  # further columns of encoded targets


def column_by_column(file: SiloFile, wanted: Wanted) -> Found:
    source = file.data
    owner = f"Silo {file.name!r}"
    if source.entry is not None:
        return _from_entry(file, wanted)
    assert source.file is not None
    goals = _goals(source)
    task = timed() if len(goals) > 1 else wanted.task
    if wanted.task is not None and wanted.task.timed != (len(goals) > 1):
        has = "times to an event" if len(goals) > 1 else "no times to an event"
        raise InputError("task-not-agreed", f"{owner} has {has}, unlike the agreement.")
    opened = open_table(source.file)
    subjects = None if source.subject is None else names_in(opened, source.subject, source.missing)
    needed = dict(zip(goals, ("target",) if task is None else task.roles, strict=False))
    exposed = task is not None and task.exposed
    if source.offset is not None:
        if not (exposed or task is None):
            raise InputError(
                "offset-without-counts", f"{owner} has data.offset, which only counts have."
            )
        needed[source.offset] = "offset"
    roles = list(dict.fromkeys([*goals, *needed]))
    whole, _ = read_columns(opened, roles, (), needed, source.decimal, source.missing)
    own = (*needed, source.subject)
    names = wanted.columns or [name for name in opened.names if name not in own]
    found, _ = read_columns(
        opened,
        [*needed, *names],
        wanted.categories,
        needed,
        source.decimal,
        source.missing,
    )
    goal, *more = found[: len(needed)]
    features = _without_dates(file, found[len(needed) :])
    extra: tuple[Matrix, ...] = ()
    if exposed:
        extra = (np.exp(more[0].values) if more else np.ones(len(goal.values)),)
    elif len(goals) > 1:
        goal, extra = survived(goal, more[0], more[1] if goals[2:] else None, [])
        extra = (*extra, np.zeros(len(goal.values)))[:2]  # on its own clock, from zero on
    there = rows_with(opened, [*needed], source.missing)
    return Found(features, target(owner, goal, task), whole[0], there, subjects, extra)


def cell_by_cell(file: SiloFile, wanted: Wanted) -> Found:
    """Read what an agreement with noise names: nothing depends on a single cell but that cell."""
    schema = wanted.schema
    assert schema is not None
    assert wanted.task is not None
    source = file.data
    how = source.decimal or ".", source.missing
    given = _given(file)
    features = (
        _block(file, given.block) if schema["shape"] is not None else _columns(given, schema, *how)
    )
    if features.rows != len(given.target):
        raise _unequal(file, features.rows, len(given.target))
    labels = schema["labels"]
    binary = wanted.loss in LOSSES and LOSSES[wanted.loss].binary
    if labels or binary:  # without labels, a binary loss takes the numbers 0 and 1
        values = label_places(given.target, labels or [0, 1], *how)
    else:
        values = numbers(given.target, *how)
    there = np.abs(values) <= FARTHEST  # and a number
    known = Target(
        wanted.task,
        values[there].astype(np.int64) if labels else values[there],
        tuple(labels),  # type: ignore[arg-type]
    )
    subjects = None
    if source.subject is not None:
        _check_named(file, bool(given.table))
        subjects = texts(cells_of(given.table, source.subject, given.of), source.missing)
    goal = read_cells("target", given.target, CATEGORY, *how)
    return Found(features.take(there), known, goal.take(there & ~goal.missing), there, subjects)


class _Given(NamedTuple):
    """Cells as a table, or an operator's own code, has them."""

    of: str  # its name
    target: Cells
    table: dict[str, Cells]  # empty where features have no names
    block: object = None  # features without names


def _given(file: SiloFile) -> _Given:
    source = file.data
    if source.file is None:
        X, y = _loaded(file)
        target = np.asarray(y, dtype=object).ravel().tolist()
        if not hasattr(X, "columns"):
            return _Given(str(source.entry), target, {}, X)
        return _Given(str(source.entry), target, {str(n): X[n].tolist() for n in X.columns})
    goals = _goals(source)
    if len(goals) > 1:
        raise InputError(
            "task-not-agreed",
            f"Silo {file.name!r} has times to an event, unlike the agreement.",
        )
    table = open_cells(source.file)
    return _Given(source.file.name, cells_of(table, goals[0], source.file.name), table)


def _columns(
    given: _Given, schema: Schema, decimal: str, missing: Sequence[object]
) -> FeatureTable:
    columns = tuple(
        read_cells(name, cells_of(given.table, name, given.of), column["kind"], decimal, missing)
        for column in schema["columns"]
        for name in [column["name"]]
    )
    return FeatureTable(len(columns[0].values) if columns else 0, columns)


def _block(file: SiloFile, given: object) -> FeatureTable:
    """Return an array of features, in which what is no number is missing."""
    cells = np.asarray(given)
    if cells.dtype.kind not in "fiub":
        cells = numbers(cells.ravel().tolist()).reshape(cells.shape)
    with np.errstate(invalid="ignore"):
        block = np.where(np.isfinite(cells), cells, np.nan)
    return array_block(f"Silo {file.name!r}", block)


def _goals(source: SiloData) -> list[str]:
    return [source.target] if isinstance(source.target, str) else source.target


def _loaded(file: SiloFile) -> Pair:
    entry = file.data.entry
    assert entry is not None
    given = load(file.path.parent, entry)
    if not isinstance(given, tuple) or len(given) != 2:
        raise InputError(
            "entry-of-other-type",
            f"The entry {entry!r} must return (X, y), got {type(given).__name__}.",
        )
    return given


def _check_named(file: SiloFile, named: bool) -> None:
    if not named:
        raise InputError(
            "subject-without-columns",
            f"{file.path.name!r} names data.subject, but the features of {file.data.entry!r} have "
            "no names: return a data frame.",
        )


def _unequal(file: SiloFile, rows: int, targets: int) -> InputError:
    return InputError(
        "rows-do-not-match",
        f"Silo {file.name!r} has {rows} rows of features, but {targets} targets.",
    )


def _without_dates(file: SiloFile, columns: Sequence[DataColumn]) -> FeatureTable:
    for one in columns:
        if one.kind == DATE:
            raise InputError(
                "date-column",
                f"Column {one.name!r} of silo {file.name!r} {one.note}: list the columns "
                "to use in data.columns, and leave it out.",
            )
    return FeatureTable(len(columns[0].values) if columns else 0, tuple(columns))


def _from_entry(file: SiloFile, wanted: Wanted) -> Found:
    X, y = _loaded(file)
    owner = f"Silo {file.name!r}"
    entry = file.data.entry or ""
    subject = file.data.subject
    subjects = None
    if hasattr(X, "columns"):  # a data frame
        frame = entry_table(entry, X)
        subjects = None if subject is None else names_in(frame, subject)
        names = wanted.columns or [name for name in frame.names if name != subject]
        features = _without_dates(file, read_columns(frame, names, wanted.categories)[0])
    elif wanted.columns:
        raise InputError(
            "features-without-names",
            f"{owner} has features without names, but the agreement names columns.",
        )
    else:
        _check_named(file, subject is None)
        features = array_block(owner, X)
    (goal,), _ = read_columns(entry_target(entry, y), ["y"])
    if len(X) != len(y):
        raise _unequal(file, len(X), len(y))
    there = ~goal.missing
    if not there.any():
        raise InputError("no-targets", f"{owner} has no row with a target.")
    goal = goal.take(there)
    read = target(owner, goal, wanted.task)
    return Found(features.take(there), read, goal, there, subjects)
