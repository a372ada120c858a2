"""A silo's own table: read it, split it, sum its columns, and predict its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.tabular.agree import PREPARED, VERSION, Description
from scaffpd.data.tabular.columns import (
    DATE,
    DataColumn,
    FeatureTable,
    Mask,
    Matrix,
    array_block,
)
from scaffpd.data.tabular.encode import ClientRows, Target, held_rows, target
from scaffpd.data.tabular.formats import entry_column, entry_table, open_table
from scaffpd.data.tabular.read import read_columns
from scaffpd.data.tabular.settings import CLASSIFICATION
from scaffpd.deploy.messages import Array
from scaffpd.errors import InputError
from scaffpd.run.settings.methods import load
from scaffpd.run.settings.model_file import Setup, own_model, predict_encoded
from scaffpd.run.settings.silo import SiloFile, SiloLimits
from scaffpd.training.cohort import Cohort

WANTED = "(X, y), (X_train, y_train, X_test, y_test) or a Cohort of one client"


@dataclass(frozen=True)
class Dataset(ClientRows):
    """All rows of a silo that have a target."""

    # an entry's own `Cohort`, which needs no agreement on columns; the other fields are then empty
    cohort: Cohort | None = None

    @classmethod
    def read(cls, file: SiloFile) -> Dataset:
        """Read the data that a `silo.toml` names."""
        source = file.data
        owner = f"Silo {file.name!r}"
        if source.entry is not None:
            given = load(file.path.parent, source.entry)
            if isinstance(given, Cohort):
                return _prepared(file, given)
            if not isinstance(given, tuple | list) or len(given) not in (2, 4):
                raise InputError(
                    "entry-of-other-type",
                    f"The entry {source.entry!r} must return {WANTED}, got {type(given).__name__}.",
                )
            return _from_parts(file, list(given[0::2]), list(given[1::2]))
        assert source.file is not None
        opened = open_table(source.file)
        wanted = source.target
        names = source.columns or [name for name in opened.names if name != wanted]
        needed = {wanted: "label" if source.task == CLASSIFICATION else "target"}
        (goal, *columns), dropped = read_columns(
            opened, [wanted, *names], source.categories, needed, source.decimal, source.missing
        )
        features = _without_dates(file, columns)
        return _split(file, features, target(owner, goal, source.task), dropped[wanted])

    @property
    def rows(self) -> tuple[int, int]:
        """Numbers of training rows and held-out rows."""
        if self.cohort is None:
            return super().rows
        x = self.cohort.start()
        try:
            test = int(self.cohort.evaluate(x, "test").counts[0])
        except InputError:
            test = 0
        return int(self.cohort.evaluate(x, "train").counts[0]), test

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
                'for every row, not a class; choose another target, or task = "regression".',
            )

    def describe(self) -> Description:
        """Return the description of columns and labels that the others need, and nothing else."""
        if self.cohort is None:
            return super().describe()
        train, test = self.rows
        return {
            "version": VERSION,
            "task": PREPARED,
            "train": train,
            "test": test,
            "labels": [],
            "columns": [],
            "shape": None,
            "dimension": self.cohort.dimension,
        }


def _without_dates(file: SiloFile, columns: Sequence[DataColumn]) -> FeatureTable:
    for one in columns:
        if one.kind == DATE:
            raise InputError(
                "date-column",
                f"Column {one.name!r} of silo {file.name!r} {one.note}: list in data.columns "
                "the columns to use, without it.",
            )
    return FeatureTable(len(columns[0].values) if columns else 0, tuple(columns))


def _from_parts(file: SiloFile, X: list[Any], y: list[Any]) -> Dataset:
    """Take features and targets of all rows, or of training rows and held-out rows."""
    source = file.data
    owner = f"Silo {file.name!r}"
    entry = source.entry or ""
    if hasattr(X[0], "columns"):  # a data frame
        frame = entry_table(entry, X)
        names = source.columns or frame.names
        features = _without_dates(file, read_columns(frame, names, source.categories)[0])
    elif source.columns or source.categories:
        raise InputError(
            "features-without-names",
            f"{owner} has features without names, so data.columns and data.categories cannot be "
            "used.",
        )
    else:
        features = array_block(owner, X)
    (goal,), _ = read_columns(entry_column(entry, source.target, y), [source.target])
    sizes = [len(part) for part in y]
    if sizes != [len(part) for part in X]:
        raise InputError(
            "rows-do-not-match",
            f"{owner} has {[len(part) for part in X]} rows of features, but {sizes} targets.",
        )
    there = ~goal.missing
    if not there.any():
        raise InputError("no-targets", f"{owner} has no row with a target.")
    if not there.all():
        features = features.take(there)
        goal = goal.take(there)
    held = None if len(y) == 1 else (np.arange(len(there)) >= sizes[0])[there]
    return _split(file, features, target(owner, goal, source.task), int((~there).sum()), held)


def _split(
    file: SiloFile, features: FeatureTable, goal: Target, dropped: int, held: Mask | None = None
) -> Dataset:
    if features.width == 0:
        raise InputError("no-columns", f"Silo {file.name!r} has no columns besides its target.")
    if held is None:
        held = held_rows(file.name, goal, file.split.test, 0)
    if held.all():
        raise InputError("no-training-rows", f"Silo {file.name!r} has no training rows.")
    return Dataset(file.name, features, goal, held, dropped, file.limits.rarest)


def _prepared(file: SiloFile, cohort: Cohort) -> Dataset:
    if tuple(cohort.names) != (file.name,):
        raise InputError(
            "entry-of-other-type",
            f"The entry {file.data.entry!r} must return a Cohort of one client named "
            f"{file.name!r}, got one of {', '.join(map(repr, cohort.names))}.",
        )
    nothing: Matrix = np.empty(0)
    return Dataset(
        file.name,
        FeatureTable(0),
        Target(PREPARED, nothing),
        np.zeros(0, dtype=bool),
        cohort=cohort,
    )


class SitePredictions(NamedTuple):
    """Targets and predictions of all rows that have a target, in the file's order."""

    targets: list[Any]
    predicted: list[Any]
    probability: NDArray[np.float64]
    held: NDArray[np.bool_]


def predict(data: Dataset, x: Array, setup: Setup) -> SitePredictions:
    """Predict all rows of a silo with the linear model x, or with its personal model near x."""
    if setup.model.get("kind", "linear") != "linear" or data.cohort is not None:
        raise InputError(
            "not-a-linear-model",
            "Only linear models predict from tables; predict with a network's own code.",
        )
    ready = data.encoded(setup.schema, setup.mean, setup.deviation, separate=bool(setup.privacy))
    X: NDArray[np.float64] = np.empty((len(data.held), *ready.train[0].shape[1:]))
    X[~data.held] = ready.train[0]
    if ready.test is not None:
        X[data.held] = ready.test[0]
    predicted, shares = predict_encoded(X, own_model(setup.model, x, *ready.train), setup)
    probability = shares.max(1) if shares.shape[1] else np.full(len(X), np.nan)
    labels = data.target.labels
    places = data.target.values
    truth = [labels[k] for k in places] if labels else places.tolist()
    return SitePredictions(truth, predicted, probability, data.held)
