"""A silo's own table: read it as agreed, split it, commit to it, and predict its rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.tabular.agree import Schema
from scaffpd.data.tabular.columns import (
    CATEGORY,
    DATE,
    DataColumn,
    FeatureTable,
    Matrix,
    array_block,
    spelt,
)
from scaffpd.data.tabular.encode import ClientRows, target
from scaffpd.data.tabular.formats import entry_table, entry_target, open_table
from scaffpd.data.tabular.read import read_columns
from scaffpd.data.tabular.survival import survived
from scaffpd.deploy.messages import Array
from scaffpd.errors import InputError
from scaffpd.secure.keys import derived
from scaffpd.settings.methods import load
from scaffpd.settings.model_file import Setup, own_model, predict_encoded
from scaffpd.settings.silo import SiloFile, SiloLimits
from scaffpd.tasks import timed
from scaffpd.tasks.base import Target, Task


class Wanted(NamedTuple):
    """What to read of a table; all of it where nothing is agreed yet."""

    columns: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    task: Task | None = None

    @classmethod
    def of(cls, schema: Schema, task: Task) -> Wanted:
        """Read what a schema names."""
        columns = schema["columns"]
        texts = [column["name"] for column in columns if column["kind"] == CATEGORY]
        names = tuple(column["name"] for column in columns)
        return cls(names, tuple(texts), task)


ANYTHING = Wanted()
TRUTHS = {"true": "1", "false": "0"}  # files of other formats have numbers instead


@dataclass(frozen=True)
class Dataset(ClientRows):
    """All rows of a silo that have a target."""

    goal: DataColumn = field(kw_only=True, repr=False)  # as it is read with nothing agreed

    @classmethod
    def read(cls, file: SiloFile, secret: bytes, wanted: Wanted = ANYTHING) -> Dataset:
        """Read the data that a `silo.toml` names; `secret` chooses the rows to hold out."""
        source = file.data
        owner = f"Silo {file.name!r}"
        if source.entry is not None:
            given = load(file.path.parent, source.entry)
            if not isinstance(given, tuple) or len(given) != 2:
                raise InputError(
                    "entry-of-other-type",
                    f"The entry {source.entry!r} must return (X, y), got {type(given).__name__}.",
                )
            return _from_entry(file, secret, wanted, *given)
        assert source.file is not None
        goals = [source.target] if isinstance(source.target, str) else source.target
        task = timed() if len(goals) > 1 else wanted.task
        if wanted.task is not None and wanted.task.timed != (len(goals) > 1):
            has = "times to an event" if len(goals) > 1 else "no times to an event"
            raise InputError("task-not-agreed", f"{owner} has {has}, unlike the agreement.")
        opened = open_table(source.file)
        needed = dict(zip(goals, ("target",) if task is None else task.roles, strict=False))
        whole, _ = read_columns(opened, goals, (), needed, source.decimal, source.missing)
        names = wanted.columns or [name for name in opened.names if name not in needed]
        found, dropped = read_columns(
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
        if more:
            goal, extra = survived(goal, more[0], more[1] if more[1:] else None, [])
            extra = (*extra, np.zeros(len(goal.values)))[:2]  # on its own clock, from zero on
        goal_read = target(owner, goal, task)
        return _split(file, secret, features, goal_read, whole[0], sum(dropped.values()), extra)

    def check(self, limits: SiloLimits) -> None:
        """Refuse to take part with too few rows: sums over few rows reveal much about each."""
        train = self.rows[0]
        labels = len(self.target.labels)
        if train < limits.rows:
            rows = f"{train} training row{'s' * (train != 1)}"
            raise InputError(
                "too-few-rows",
                f"Silo {self.name!r} has {rows}, and its limits.rows asks for {limits.rows}.",
            )
        if labels > max(2, train // 2):
            raise InputError(
                "label-per-row",
                f"Silo {self.name!r} has {labels} labels for {train} training rows: that is a name "
                "for every row, not a class; choose another target.",
            )

    def commitment(self, salt: bytes) -> str:
        """Return what shows later that the rows are the same, and nothing else."""
        marks = row_marks(self.table, self.target, derived(salt, b"rows"), self.extra)
        content = np.sort(marks).tobytes() + bytes(np.packbits(self.held))
        return hashlib.sha256(salt + content).hexdigest()

    def marks(self, secret: bytes) -> bytes:
        """Return what names the rows, whatever an agreement has read of them or how: targets.

        Labels or numbers, columns and held-out rows are the document's choice, and the same rows
        under another choice have the same gradients.
        """
        found = Counter[str]()
        distinct, counts = np.unique(self.goal.values, return_counts=True)
        for value, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            text = self.goal.categories[value] if self.goal.kind == CATEGORY else spelt(value)
            found[TRUTHS.get(text.lower(), text)] += count
        return hashlib.blake2b(repr(sorted(found.items())).encode(), key=secret).digest()


def row_marks(
    features: FeatureTable, goal: Target, secret: bytes, extra: Sequence[Matrix] = ()
) -> NDArray[np.uint64]:
    """Return a keyed hash of every row's content: a sum of those of its values."""

    def marked(name: str, values: Array) -> NDArray[np.uint64]:
        distinct, place = np.unique(values, return_inverse=True)
        found = [
            hashlib.blake2b(f"{name}\0{value!r}".encode(), key=secret, digest_size=8).digest()
            for value in distinct.tolist()
        ]
        return np.frombuffer(b"".join(found), np.uint64)[place.ravel()]

    labels = np.array(list(goal.labels), dtype=object)
    total = marked("target", labels[goal.values].astype(str) if len(labels) else goal.values)
    for k, values in enumerate(extra):
        total = total + marked(f"target {k}", values)
    if features.block is not None:
        found = [
            hashlib.blake2b(row.tobytes(), key=secret, digest_size=8).digest()
            for row in features.block
        ]
        total = total + np.frombuffer(b"".join(found), np.uint64)
    for column in features.columns:
        cells: Array = column.values
        if column.kind == CATEGORY:
            cells = np.array([*column.categories, ""])[cells.astype(np.int64)]
        total = total + marked(column.name, cells)
    return total


def _without_dates(file: SiloFile, columns: Sequence[DataColumn]) -> FeatureTable:
    for one in columns:
        if one.kind == DATE:
            raise InputError(
                "date-column",
                f"Column {one.name!r} of silo {file.name!r} {one.note}: list the columns "
                "to use in data.columns, and leave it out.",
            )
    return FeatureTable(len(columns[0].values) if columns else 0, tuple(columns))


def _from_entry(file: SiloFile, secret: bytes, wanted: Wanted, X: Any, y: Any) -> Dataset:
    source = file.data
    owner = f"Silo {file.name!r}"
    entry = source.entry or ""
    if hasattr(X, "columns"):  # a data frame
        frame = entry_table(entry, X)
        names = wanted.columns or frame.names
        features = _without_dates(file, read_columns(frame, names, wanted.categories)[0])
    elif wanted.columns:
        raise InputError(
            "features-without-names",
            f"{owner} has features without names, but the agreement names columns.",
        )
    else:
        features = array_block(owner, X)
    (goal,), _ = read_columns(entry_target(entry, y), ["y"])
    if len(X) != len(y):
        raise InputError(
            "rows-do-not-match", f"{owner} has {len(X)} rows of features, but {len(y)} targets."
        )
    there = ~goal.missing
    if not there.any():
        raise InputError("no-targets", f"{owner} has no row with a target.")
    goal = goal.take(there)
    read = target(owner, goal, wanted.task)
    return _split(file, secret, features.take(there), read, goal, int((~there).sum()))


def _split(
    file: SiloFile,
    secret: bytes,
    features: FeatureTable,
    goal: Target,
    whole: DataColumn,
    dropped: int,
    extra: tuple[Matrix, ...] = (),
) -> Dataset:
    """Hold out rows by a keyed hash of their content: no row's place depends on others."""
    if features.width == 0:
        raise InputError("no-columns", f"Silo {file.name!r} has no columns besides its target.")
    marks = row_marks(features, goal, derived(secret, b"split"), extra)
    held = marks < np.uint64(int(file.data.test * 2**64))
    if held.all():
        raise InputError("no-training-rows", f"Silo {file.name!r} has no training rows.")
    return Dataset(file.name, features, goal, held, dropped, extra=extra, goal=whole)


def predict(data: Dataset, x: Array, setup: Setup) -> dict[str, Sequence[object] | Array]:
    """Predict all rows of a silo with a target, in the file's order, and return columns.

    It takes the linear model x, or the silo's personal model near x.
    """
    if setup.model.get("kind", "linear") != "linear":
        raise InputError(
            "not-a-linear-model",
            "Only linear models can predict from tables: run a network with its own code.",
        )
    scale = setup.mean, setup.deviation
    separate = bool(setup.privacy)
    own = own_model(setup.model, x, *data.encoded(setup.schema, *scale, separate).train)
    X = data.matrix(setup.schema, *scale, np.ones(len(data.held), dtype=bool), separate)
    predicted, shares = predict_encoded(X, own, setup)
    labels = data.target.labels
    places = data.target.values.tolist()
    return {
        "target": [labels[k] for k in places] if labels else places,
        "predicted": predicted,
        "probability": shares.max(1) if shares.shape[1] else np.full(len(X), np.nan),
        "held out": data.held.tolist(),
    }
