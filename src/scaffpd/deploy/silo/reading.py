"""A silo's data as it lies at the site: read, split into training and held-out rows, and asked for sums only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scaffpd.cohort import Cohort
from scaffpd.deploy.silo.silo_file import Limits, SiloFile
from scaffpd.errors import InputError
from scaffpd.settings.entry import load
from scaffpd.tabular.encode import ClientRows, Target, held_rows, target
from scaffpd.tabular.read import DataColumn, FeatureTable, Mask, Matrix, column, read_csv, read_npz, read_parquet, table
from scaffpd.tabular.schema import PREPARED, VERSION

WANTED = "(X, y), (X_train, y_train, X_test, y_test) or a Cohort of one client"


@dataclass(frozen=True)
class Dataset(ClientRows):
    """All rows of a silo that have a target.

    Attributes:
        cohort: an entry's own `Cohort`, ready to answer; then there is nothing to agree on and the rest is empty.
    """

    cohort: Cohort | None = None

    @classmethod
    def read(cls, file: SiloFile) -> Dataset:
        """Read what a `silo.toml` points to."""
        source, owner = file.source, f"Silo {file.name!r}"
        if source.entry is not None:
            given = load(file.path.parent, source.entry)
            if isinstance(given, Cohort):
                return _prepared(file, given)
            return _from_entry(file, given)
        assert source.file is not None
        if source.file.suffix.lower() == ".csv":
            features, goal, dropped = read_csv(source.file, source.target, source.columns, source.categories)
            return _split(file, features, target(owner, goal, source.task), dropped)
        if source.file.suffix.lower() == ".npz":
            X, y = read_npz(source.file, source.features, source.target)
            return _from_parts(file, [X], [y])
        frame = read_parquet(source.file)
        if source.target not in [str(name) for name in frame.columns]:
            raise InputError(f"{source.file.name!r} has no column {source.target!r}, which data.target names.")
        goal_name = next(name for name in frame.columns if str(name) == source.target)
        return _from_parts(file, [frame.drop(columns=[goal_name])], [frame[goal_name]])

    @property
    def rows(self) -> tuple[int, int]:
        """How many training rows and held-out rows there are."""
        if self.cohort is not None:
            return _rows_of(self.cohort)
        return super().rows

    def check(self, limits: Limits) -> None:
        """Refuse to take part with too few rows: a sum over them would say too much about each."""
        if self.rows[0] < limits.rows:
            raise InputError(
                f"Silo {self.name!r} has {self.rows[0]} training row{'s' * (self.rows[0] != 1)}, and its limits.rows "
                f"asks for {limits.rows}."
            )
        if len(self.target.labels) > max(2, self.rows[0] // 2):
            raise InputError(
                f"Silo {self.name!r} has {len(self.target.labels)} labels for {self.rows[0]} training rows: that is a "
                'name for every row, not a class; choose another target, or task = "regression".'
            )

    def describe(self) -> dict[str, Any]:
        """What the others have to know of this silo's columns and labels, and nothing else."""
        if self.cohort is None:
            return super().describe()
        train, test = self.rows
        return {
            "version": VERSION, "task": PREPARED, "train": train, "test": test, "dimension": self.cohort.dimension,
        }  # fmt: skip


def _from_entry(file: SiloFile, given: Any) -> Dataset:
    if not isinstance(given, tuple | list) or len(given) not in (2, 4):
        raise InputError(f"The entry {file.source.entry!r} must return {WANTED}, got {type(given).__name__}.")
    return _from_parts(file, list(given[0::2]), list(given[1::2]))


def _from_parts(file: SiloFile, X: list[Any], y: list[Any]) -> Dataset:
    """Features and targets of all rows, or of training rows and held-out rows."""
    source, owner = file.source, f"Silo {file.name!r}"
    features = table(owner, X, source.columns, source.categories)
    goal = column(owner, source.target, y)
    sizes = [len(part) for part in y]
    if sizes != [len(part) for part in X]:
        raise InputError(f"{owner} has {[len(part) for part in X]} rows of features, but {sizes} targets.")
    there = ~goal.missing
    if not there.any():
        raise InputError(f"{owner} has no row with a target.")
    goal = DataColumn(goal.name, goal.kind, goal.values[there], goal.categories)
    features = features if there.all() else features.take(there)
    held = None if len(y) == 1 else (np.arange(len(there)) >= sizes[0])[there]
    return _split(file, features, target(owner, goal, source.task), int((~there).sum()), held)


def _split(file: SiloFile, features: FeatureTable, goal: Target, dropped: int, held: Mask | None = None) -> Dataset:
    if features.width == 0:
        raise InputError(f"Silo {file.name!r} has no columns besides its target.")
    if held is None:
        held = held_rows(file.name, goal, file.test, file.seed)
    if held.all():
        raise InputError(f"Silo {file.name!r} has no training rows.")
    return Dataset(file.name, features, goal, held, dropped, file.limits.rarest)


def _prepared(file: SiloFile, cohort: Cohort) -> Dataset:
    if tuple(cohort.names) != (file.name,):
        raise InputError(
            f"The entry {file.source.entry!r} must return a Cohort of one client named {file.name!r}, got one of "
            f"{', '.join(map(repr, cohort.names))}."
        )
    nothing: Matrix = np.empty(0)
    return Dataset(file.name, FeatureTable(0), Target(PREPARED, nothing), np.zeros(0, dtype=bool), cohort=cohort)


def _rows_of(cohort: Cohort) -> tuple[int, int]:
    counts = [int(cohort.evaluate(cohort.start(), "train").counts[0])]
    try:
        counts.append(int(cohort.evaluate(cohort.start(), "test").counts[0]))
    except InputError:
        counts.append(0)
    return counts[0], counts[1]
