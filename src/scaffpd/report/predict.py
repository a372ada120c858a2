"""A run's models on new rows: the same columns, gaps filled as in training, and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.tabular.agree import width
from scaffpd.data.tabular.clients import read_clients, texts_of
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, DataColumn, FeatureTable, Mask, Matrix
from scaffpd.data.tabular.encode import ClientRows
from scaffpd.data.tabular.formats import OpenTable, open_table
from scaffpd.data.tabular.read import number, read_columns
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.errors import InputError, unknown
from scaffpd.fields import read_toml, validated
from scaffpd.numbers import several
from scaffpd.report.record import RunRecord, TableReading, is_run
from scaffpd.settings.model_file import (
    Answer,
    Setup,
    linear,
    predict_encoded,
    read_model,
    read_owners,
)
from scaffpd.study.verdict import MODELS
from scaffpd.tasks.base import ScoreRow, Target, Task

NOBODY = ""  # rows without a client belong together
MOST_COMPARED = 2_000_000  # cells, those trained on included, up to which rows are compared
DIFFERENT = 0.9  # share of training rows that are like no other, where values distinguish rows
Fills = Mapping[str, Mapping[str, float | str]]


@dataclass(frozen=True)
class Predictions:
    """Predictions for all rows of a file, in its order."""

    task: Task
    clients: list[str]  # whose each row is; empty texts where that is not known
    predicted: list[Answer]
    # the probability of every label; no columns where there is none
    shares: Matrix = field(repr=False)
    copied: dict[str, list[object]] = field(repr=False)  # columns that were asked for
    labels: tuple[Answer, ...]  # in the order of `shares`
    # the target; `None` where a row has none, or the file has no such column
    truth: list[Answer | None] | None = field(repr=False)
    remarks: tuple[str, ...]  # what the model has not seen in training
    # of times to an event: the chance to survive each time for which it is known
    survival: Mapping[float, Matrix] | None = field(default=None, repr=False)
    model: str = ""  # which of the run's models
    trained: Mask | None = field(default=None, repr=False)  # rows that it was trained on, if any

    @property
    def probability(self) -> Matrix:
        """Of the predicted label; NaN where there is none."""
        return self.shares.max(1) if self.shares.shape[1] else np.full(len(self.predicted), np.nan)

    def scores(self) -> list[ScoreRow]:
        """Score every client, and all rows together last.

        Empty without a target; see `Task.row_scores` for what the numbers are.
        """
        if self.truth is None:
            return []
        known = {k: value for k, value in enumerate(self.truth) if value is not None}
        names = [self.clients[k] or "(nobody)" for k in known]
        y: Sequence[Answer] = [*known.values()]
        guess: Sequence[Answer] = [self.predicted[k] for k in known]
        if self.labels:
            place = {label: k for k, label in enumerate(self.labels)}
            y, guess = ([place.get(label, -1) for label in own] for own in (y, guess))
        groups = np.array(names, dtype=object)
        shares = self.shares[[*known]]
        return [*self.task.by_group(np.array(y), np.array(guess), shares, groups, sorted({*names}))]


def predict(
    run: Path,
    file: Path,
    model: str | None = None,
    copy: Sequence[str] = (),
    sheet: str | None = None,
) -> Predictions:
    """Apply a model of a run's folder to a table.

    Args:
        run: the folder, or one of its model files.
        file: the rows.
        model: "constant", "alone", "average", "fair" or "personal" (a client's own, and the shared
            one for clients that were not trained on); `None` takes the recommended one.
        copy: columns of the table to return beside the predictions.
        sheet: of a workbook; `None` takes the first.
    """
    file_of = _model_file(run, model)
    record = RunRecord.read(file_of.parent) if is_run(file_of.parent) else None
    used = file_of.stem
    if used == "model" and record is not None:
        used = record.joining.recommendation if record.joining else record.main.name
    if record is not None and record.kind != "deploy" and record.reading is None:
        raise InputError(
            "run-without-table",
            f"The run in {str(file_of.parent)!r} was trained on no table "
            "and cannot predict from one.",
        )
    x, setup = read_model(file_of)
    if setup.schema["shape"] is not None or setup.model.get("kind", "linear") != "linear":
        raise InputError(
            "predict-not-linear",
            "Only linear models that were trained on named columns can predict from tables.",
        )
    reading = (record and record.reading) or TableReading(client="", target="")
    fills: Fills = record.fills if record else {}
    owners = read_owners(file_of)
    table = open_table(file, sheet=sheet)
    for name in copy:
        if name not in table.names:
            raise unknown(f"column of {file.name!r},", name, table.names)
    columns, owner = _columns(table, setup, reading)
    remarks = _unseen(columns, setup, owner, fills)
    before = sum(own.train_rows or 0 for own in record.main.clients) if record else 0
    trained = _trained(file_of.parent, columns, owner, before)
    if trained is not None:
        remarks.append(
            f"{several(int(trained.sum()), 'row')} have the values of rows that were trained on "
            "(column trained): scores of these are too good."
        )
    if owner is not None:
        columns = _filled(columns, owner, fills)
    rows = len(columns[0].values)
    names = [NOBODY] * rows
    if owner is not None:
        names = [NOBODY if k < 0 else owner.categories[k] for k in owner.values]
    whose = np.array(names, dtype=object)
    X: Matrix = np.empty((rows, width(setup.schema)))
    for one in set(names):  # what is still missing is filled from the client's rows at hand
        mine: Mask = whose == one
        X[mine] = _encoded(file, FeatureTable(rows, tuple(columns)).take(mine), setup)
    labels: tuple[Answer, ...] = tuple(setup.schema["labels"])
    truth, unsure = _truth(table, reading, labels)
    strangers = sum(name not in owners for name in names) if owners else 0
    if strangers:
        rows_of = f"{several(strangers, 'row')} of no client that was trained on"
        unsure.append(f"{rows_of}: predicted by the shared model.")
    place = {name: k + 1 for k, name in enumerate(owners)}
    predicted, shares = _answers(X, x, setup, whose, place)
    survival = None
    if setup.task.timed:
        truth = None  # times alone say nothing
        own = [x[place.get(name, 0)] if owners else x for name in names]
        # every client's cumulative hazard until a time, and that time
        hazards = {
            name: (hazard, row.values["horizon"] or 0.0)
            for name, row in (record.score_rows(used) if record else {}).items()
            if (hazard := row.values.get("hazard")) is not None
        }
        risks = np.array(predicted, dtype=np.float64)
        known = [hazards.get(name) for name in names]
        survival = setup.task.chances(linear(setup.model), own, risks, known)
    if "exposure" in setup.model:
        offset, usual = setup.model["exposure"]
        if offset in table.names:
            (logs,), _ = _read(table, [offset], (), reading)
            predicted = (np.array(predicted) * np.exp(logs.values) / usual).tolist()
        else:
            unsure.append(f"No column {offset!r}: counts are for an exposure of {usual:g}.")
    copied = {name: table.columns[name].to_pylist() for name in copy}
    said = (*remarks, *unsure)
    return Predictions(
        setup.task, names, predicted, shares, copied, labels, truth, said, survival, used, trained
    )


def _trained(
    folder: Path, columns: Sequence[DataColumn], owner: DataColumn | None, before: int
) -> Mask | None:
    """Mark rows that the run was trained on, by client and values; `None` where there are none, its
    table is gone or takes long to read, or values do not distinguish rows.

    The table is read again: a run's folder has nothing that tells whether a row was in it.
    """
    file = folder / "config.toml"
    cells = 0 if owner is None else (owner.values.size + before) * len(columns)
    if owner is None or not file.exists() or cells > MOST_COMPARED:
        return None
    try:
        values = read_toml(file, {})
        source = validated(TableSettings, values["data"], file)
        learnt = read_clients(source).clients(values["training"]["seed"]).rows
    except (InputError, KeyError, TypeError):
        return None
    known = []
    for one in learnt:
        own = {column.name: column for column in one.table.take(~one.held).columns}
        if not {column.name for column in columns} <= own.keys():
            return None
        texts = [texts_of(own[column.name]) for column in columns]
        known += [(one.name, *row) for row in zip(*texts, strict=True)]
    rows = zip(texts_of(owner), *map(texts_of, columns), strict=True)
    different = set(known)
    found = np.array([row in different for row in rows])
    return found if found.any() and len(different) > DIFFERENT * len(known) else None


def promise(run: Path) -> str | None:
    """Return the (ε, δ) that the model was trained with; `None` where its folder states none."""
    folder = run if run.is_dir() else run.parent
    found = RunRecord.read(folder).privacy if is_run(folder) else None
    return str(found) if found else None


def _model_file(run: Path, model: str | None) -> Path:
    if not run.is_dir():
        if model is not None:
            raise InputError(
                "model-without-run",
                f"{str(run)!r} holds a single model: give the folder of its run to choose another.",
            )
        return run
    if model is None:
        return run / "model.safetensors"  # the recommended one
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    found = run / f"{model}.safetensors"
    if not found.exists():
        raise InputError(
            "no-such-model", f"The run in {str(run)!r} has no {model} model beside its own."
        )
    return found


def _answers(
    X: Matrix,
    x: Matrix,
    setup: Setup,
    whose: NDArray[np.object_],
    place: Mapping[str, int],
) -> tuple[list[Answer], Matrix]:
    """Predict by the one model, or every row by its client's own, the shared one without."""
    if not place:
        return predict_encoded(X, x, setup)
    order: list[int] = []
    predicted: list[Answer] = []
    shares = []
    for name in dict.fromkeys(whose.tolist()):
        rows = np.flatnonzero(whose == name)
        own, probabilities = predict_encoded(X[rows], x[place.get(name, 0)], setup)
        order += rows.tolist()
        predicted += own
        shares.append(probabilities)
    back = np.argsort(order)
    return [predicted[k] for k in back], np.concatenate(shares)[back]


def _unseen(
    columns: Sequence[DataColumn], setup: Setup, owner: DataColumn | None, fills: Fills
) -> list[str]:
    """Say which clients and which categories training did not have."""
    remarks = []
    for column, agreed in zip(columns, setup.schema["columns"], strict=True):
        if column.kind != CATEGORY or agreed["kind"] != CATEGORY:
            continue
        new = [k for k, name in enumerate(column.categories) if name not in agreed["categories"]]
        cells = [column.categories[k] for k in column.values[np.isin(column.values, new)]]
        read = "other" if agreed["other"] else "none of the known ones"
        remarks += _odd(column.name, cells, f"training did not have: read as {read}")
    strangers = [] if owner is None else [name for name in owner.categories if name not in fills]
    if strangers and fills:
        names = ", ".join(map(repr, strangers[:5])) + (" and others" if len(strangers) > 5 else "")
        remarks.append(f"Not trained on: {names}; their gaps are filled from the rows at hand.")
    return remarks


def _odd(name: str, cells: Sequence[object], what: str) -> list[str]:
    if not cells:
        return []
    others = " and others" if len(set(cells)) > 1 else ""
    return [f"{several(len(cells), 'row')} with {name} = {cells[0]!r}{others}, which {what}."]


def _truth(
    table: OpenTable, reading: TableReading, labels: tuple[Answer, ...]
) -> tuple[list[Answer | None] | None, list[str]]:
    """Return the target of every row as the model spells its labels, and remarks."""
    target = reading.target
    if not target or target not in table.names:
        return None, []
    texts = bool(labels) and isinstance(labels[0], str)
    (goal,), _ = _read(table, [target], [target] if texts else [], reading)
    cells: list[Answer | None] = goal.values.tolist()
    if goal.kind == CATEGORY:
        cells = [goal.categories[k] if k >= 0 else None for k in goal.values]
    if not texts:
        cells = [_number(cell, reading.decimal or ".", bool(labels)) for cell in cells]
    pairs = zip(goal.values, cells, strict=True)
    strange = [goal.categories[k] for k, cell in pairs if cell is None and k >= 0]
    new = [cell for cell in cells if labels and cell is not None and cell not in labels]
    remarks = _odd(target, strange, "is no number: not scored")
    remarks += _odd(target, new, "training did not have: counted as wrong")
    return (cells if any(cell is not None for cell in cells) else None), remarks


def _number(cell: Answer | None, decimal: str, label: bool) -> Answer | None:
    """Return a finite number, a label as a whole one; else `None`."""
    cell = number(cell, decimal) if isinstance(cell, str) else cell
    if not isinstance(cell, int | float) or not math.isfinite(cell):
        return None
    return int(cell) if label and cell == int(cell) else cell


def _filled(columns: list[DataColumn], owner: DataColumn, fills: Fills) -> list[DataColumn]:
    """Fill the gaps of clients that were trained on as in training."""
    made = []
    for one in columns:
        values = one.values.copy()
        names = list(one.categories)
        for code, client in enumerate(owner.categories):
            fill = fills.get(client, {}).get(one.name)
            mine = one.missing & (owner.values == code)
            if fill is None or not mine.any():
                continue
            if isinstance(fill, str):
                names += [] if fill in names else [fill]
            values[mine] = names.index(fill) if isinstance(fill, str) else fill
        kind = one.kind
        if names:
            kind = CATEGORY
        elif kind != CATEGORY and not np.isnan(values).all():
            kind = NUMBER
        made.append(DataColumn(one.name, kind, values, tuple(names), one.note))
    return made


def _read(
    table: OpenTable, names: Sequence[str], categories: Sequence[str], reading: TableReading
) -> tuple[list[DataColumn], dict[str, int]]:
    return read_columns(table, names, categories, None, reading.decimal, reading.missing)


def _columns(
    table: OpenTable, setup: Setup, reading: TableReading
) -> tuple[list[DataColumn], DataColumn | None]:
    """Read the model's columns and, where the table has it, that of the clients."""
    schema = setup.schema["columns"]
    names = [column["name"] for column in schema]
    categories = [column["name"] for column in schema if column["kind"] == CATEGORY]
    file = repr(table.path.name)
    for name in names:
        if name not in table.names:
            near = get_close_matches(name, table.names, n=1)
            hint = f"; is it {near[0]!r}?" if near else "."
            raise InputError(
                "column-missing", f"{file} has no column {name!r}, which the model needs{hint}"
            )
    client = reading.client
    extra = [client] if client and client in table.names else []
    found, _ = _read(table, [*names, *extra], [*categories, *extra], reading)
    for one, agreed in zip(found, schema, strict=False):
        if one.kind == CATEGORY and agreed["kind"] != CATEGORY:
            raise InputError(
                "texts-for-numbers",
                f"Column {one.name!r} of {file} has text such as {one.categories[0]!r}, "
                "but the model was trained on numbers there.",
            )
    return (found[:-1], found[-1]) if extra else (found, None)


def _encoded(file: Path, own: FeatureTable, setup: Setup) -> Matrix:
    nobody: Mask = np.zeros(own.rows, dtype=bool)
    rows = ClientRows(file.name, own, Target(setup.task, np.zeros(own.rows)), nobody)
    return rows.matrix(setup.schema, setup.mean, setup.deviation, ~nobody, bool(setup.privacy))
