"""A run's models on new rows: the same columns, gaps filled as in training, and scores where the target is there."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.tabular.columns import (
    CATEGORY,
    NUMBER,
    DataColumn,
    FeatureTable,
    Mask,
    Matrix,
    is_missing,
)
from scaffpd.data.tabular.encode import ClientRows, Target, expanded, expanded_names, filled, scaled
from scaffpd.data.tabular.formats import FILE, OpenTable, open_table, stacked
from scaffpd.data.tabular.read import number, read_columns, source_of
from scaffpd.errors import InputError, unknown
from scaffpd.numbers import several
from scaffpd.run import read_json, read_text
from scaffpd.run.scores import Scores, adjusted, by_group
from scaffpd.run.settings.model_file import Setup, predict_encoded, read_model, read_owners

NOBODY = ""  # rows without a client belong together
MODELS = {  # by name, beside a run's config.toml
    "average": "average.safetensors",
    "fair": "model.safetensors",
    "personal": "personal.safetensors",
}


@dataclass(frozen=True)
class Predictions:
    """Predictions for all rows of a file, in its order."""

    clients: list[str]  # whose each row is; empty texts where that is not known
    predicted: list[Any]  # labels or numbers
    shares: NDArray[np.float64] = field(
        repr=False
    )  # the probability of every label; no columns where there is none
    kept: dict[str, list[Any]] = field(repr=False)  # columns of the file that were asked for
    labels: tuple[Any, ...]  # the labels, in the order of `shares`
    truth: list[Any] | None = field(
        repr=False
    )  # the target, `None` where a row has none or the file has no column
    remarks: tuple[str, ...]  # what the model has not seen in training

    @property
    def probability(self) -> NDArray[np.float64]:
        """Of the predicted label; NaN where there is none."""
        return self.shares.max(1) if self.shares.shape[1] else np.full(len(self.predicted), np.nan)

    def scores(self, by: str | None = None) -> list[Scores]:
        """Score every client, or every value of a column that was kept, and all rows together; empty without a target.

        See `label_scores` and `number_scores` for what the numbers are.
        """
        if self.truth is None:
            return []
        values = (
            self.clients
            if by is None
            else ["" if v is None else str(v).strip() for v in self.kept[by]]
        )
        nobody = "(nobody)" if by is None else "(missing)"
        there = np.flatnonzero([value is not None for value in self.truth])
        groups = np.array(
            [nobody if is_missing(values[k]) else values[k] for k in there], dtype=object
        )
        y, guess = ([column[k] for k in there] for column in (self.truth, self.predicted))
        if self.labels:
            place = {label: k for k, label in enumerate(self.labels)}
            y, guess = ([place.get(label, -1) for label in column] for column in (y, guess))
        shares = self.shares[there] if self.labels else None
        found = by_group(np.array(y), np.array(guess), shares, groups, sorted(set(groups)))
        return [{by or "client": group} | own for group, own in found]


def predict(
    run: Path, file: Path, model: str | None = None, keep: Sequence[str] = (), raw: bool = False
) -> Predictions:
    """Apply a model of a run's folder to a table.

    Args:
        run: the folder, or one of its model files.
        file: the rows.
        model: "average", "fair" or "personal" (a client's own, and the shared one for clients that were not there);
            `None` takes the one that the run is about.
        keep: columns of the table to return beside the predictions.
        raw: leave probabilities as they are trained, where the run was recalibrated.
    """
    file_of = _model_file(run, model)
    settings = _data_settings(file_of.with_name("config.toml"))
    if not isinstance(settings.get("client"), str) and (file_of.parent / "config.toml").exists():
        raise InputError(
            "run-trained-table",
            f"The run in {str(file_of.parent)!r} was trained on no table and cannot predict from one.",
        )
    x, setup = read_model(file_of)
    if setup.schema["shape"] is not None or setup.model.get("kind", "linear") != "linear":
        raise InputError(
            "linear-models-tables",
            "Only linear models of tables with named columns predict from tables.",
        )
    known = read_json(file_of.with_name("fills.json"))
    owners = read_owners(file_of)
    table = open_table(file)
    how = {"decimal": settings.get("decimal"), "missing": settings.get("missing", ())}
    if settings.get("client") == FILE not in table.names:
        places = [file.name.split(".")[0], *file.parts[::-1]]
        table = stacked(
            file, [table], [next((one for one in places if one in {*known, *owners}), places[0])]
        )
    for name in keep:
        if name not in table.names:
            raise unknown(f"column of {file.name!r},", name, table.names)
    columns, owner = _columns(table, setup, settings.get("client"), how)
    remarks = _unseen(columns, setup, owner, known)
    if owner is not None:
        columns = _filled(columns, owner, known)
    rows = len(columns[0].values)
    codes = np.zeros(rows, dtype=np.int64) if owner is None else owner.values
    X: Matrix = np.empty((rows, len(expanded_names(dict(setup.schema)))))
    for code in np.unique(codes):
        mine = codes == code
        X[mine] = _encoded(file, FeatureTable(rows, tuple(columns)).take(mine), setup)
    names = (
        [NOBODY] * rows
        if owner is None
        else [NOBODY if k < 0 else owner.categories[k] for k in codes]
    )
    kept = (
        {name: own.to_pylist() for name, own in zip(keep, table.cells(keep, raw=True), strict=True)}
        if keep
        else {}
    )
    labels = tuple(setup.schema["labels"])
    truth, unsure = _truth(table, settings.get("target"), labels, how)
    called = model or next((one for one, name in MODELS.items() if name == file_of.name), "")
    calibrations = read_json(file_of.with_name("calibration.json"))
    if (
        called == "fair" and called not in calibrations
    ):  # the model that a run is about may be called otherwise
        called = next((one for one in calibrations if one not in MODELS), "average")
    own = {} if raw else calibrations.get(called, {})
    if (clients := {*owners, *own}) and (strangers := sum(name not in clients for name in names)):
        if model == "personal" and strangers == rows:
            raise InputError(
                "row-client-model",
                f"No row of {file.name!r} is of a client with a model of its own: leave out --model.",
            )
        by = "the shared model" + (", not recalibrated" if own else "")
        unsure.append(
            f"{several(strangers, 'row')} of no client that was trained on: predicted by {by}."
        )
    found = _answers(X, x, setup, names, owners, own)
    return Predictions(names, *found, kept, labels, truth, (*remarks, *unsure))


def _answers(
    X: Matrix,
    x: NDArray[Any],
    setup: Setup,
    names: Sequence[str],
    owners: Sequence[str],
    calibrations: Mapping[str, Sequence[float]],
) -> tuple[list[Any], NDArray[np.float64]]:
    """Predict by the one model, or every row by its client's own and by the shared one where there is none.

    Outputs of clients with a calibration are adjusted by it.
    """
    if not owners and not calibrations:
        return predict_encoded(X, x, setup)
    place = {name: k + 1 for k, name in enumerate(owners)}
    whose = np.array(names)
    parts = []
    for name in dict.fromkeys(names):
        rows = np.flatnonzero(whose == name)
        adjust = partial(adjusted, parameters=calibrations[name]) if name in calibrations else None
        parts.append(
            (rows, predict_encoded(X[rows], x[place.get(name, 0)] if owners else x, setup, adjust))
        )
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    predicted = [answer for _, (answers, _) in parts for answer in answers]
    return [predicted[k] for k in order], np.concatenate([shares for _, (_, shares) in parts])[
        order
    ]


def _model_file(run: Path, model: str | None) -> Path:
    if not run.is_dir():
        if model is not None:
            raise InputError(
                "model-name-folder",
                f"{str(run)!r} is one model: name the folder of its run to choose another.",
            )
        return run
    if model is None:
        return run / "model.safetensors"
    if model not in MODELS:
        raise unknown("model", model, list(MODELS))
    found = run / MODELS[model]
    if not found.exists() or (model == "fair" and not (run / MODELS["average"]).exists()):
        raise InputError(
            "run-model-beside", f"The run in {str(run)!r} has no {model} model beside its own."
        )
    return found


def _unseen(
    columns: Sequence[DataColumn], setup: Setup, owner: DataColumn | None, known: Mapping[str, Any]
) -> tuple[str, ...]:
    """Say which clients and which categories training did not have."""
    remarks = []
    for column, agreed in zip(columns, setup.schema["columns"], strict=True):
        if column.kind != CATEGORY or agreed["kind"] != CATEGORY:
            continue
        new = [k for k, name in enumerate(column.categories) if name not in agreed["categories"]]
        cells = [column.categories[k] for k in column.values[np.isin(column.values, new)]]
        read = "other" if agreed["other"] else "none of the known ones"
        remarks += _odd(column.name, cells, f"training did not have: read as {read}")
    strangers = (
        []
        if owner is None or not known
        else [name for name in owner.categories if name not in known]
    )
    if strangers:
        names = ", ".join(map(repr, strangers[:5])) + (" and others" if len(strangers) > 5 else "")
        remarks.append(f"Not trained on: {names}; their gaps are filled from the rows at hand.")
    return tuple(remarks)


def _odd(name: str, cells: Sequence[Any], what: str) -> list[str]:
    others = " and others" if len(set(cells)) > 1 else ""
    return (
        [f"{several(len(cells), 'row')} with {name} = {cells[0]!r}{others}, which {what}."]
        if cells
        else []
    )


def _truth(
    table: OpenTable, target: Any, labels: tuple[Any, ...], how: dict[str, Any]
) -> tuple[list[Any] | None, list[str]]:
    """Return the target of every row as the model spells its labels, and remarks; `None` where no row has one."""
    if not isinstance(target, str) or target not in table.names:
        return None, []
    texts = bool(labels) and isinstance(labels[0], str)
    (goal,), _ = read_columns(table, [target], [target] if texts else [], **how)
    cells: list[Any] = goal.values.tolist()
    if goal.kind == CATEGORY:
        spelt = {
            str(label).casefold(): label for label in labels
        }  # True in one format is true in another
        named = [
            cell if cell in labels else spelt.get(cell.casefold(), cell) for cell in goal.categories
        ]
        known = (
            named if texts else [number(cell, how["decimal"] or ".") for cell in goal.categories]
        )
        cells = [None if k < 0 else known[k] for k in goal.values]
    if not texts:
        cells = [
            None if v is None or not math.isfinite(v) else int(v) if labels and v == int(v) else v
            for v in cells
        ]
    strange = [
        goal.categories[k]
        for k, cell in zip(goal.values, cells, strict=True)
        if cell is None and k >= 0
    ]
    new = [cell for cell in cells if labels and cell is not None and cell not in labels]
    said = _odd(target, strange, "is no number: not scored")
    said += _odd(target, new, "training did not have: counted as wrong")
    return (cells if any(cell is not None for cell in cells) else None), said


def promise(run: Path) -> str | None:
    """Return the (ε, δ) that the model was trained with; `None` where its folder states none."""
    try:
        found = read_json((run if run.is_dir() else run.parent) / "summary.json")["privacy"]
        return f"(ε, δ) = ({float(found['epsilon']):.2f}, {float(found['delta']):g})"
    except (ValueError, KeyError, TypeError):
        return None


def _data_settings(file: Path) -> dict[str, Any]:
    """Read [data] of a run's settings; empty where there is none."""
    try:
        found = tomllib.loads(read_text(file)).get("data")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _filled(
    columns: list[DataColumn], owner: DataColumn, known: dict[str, dict[str, float | str]]
) -> list[DataColumn]:
    """Fill the gaps of clients that were trained on as in training."""
    made = []
    for one in columns:
        values = one.values.copy()
        names = list(one.categories)
        gaps = one.missing
        for code, client in enumerate(owner.categories):
            fill = known.get(client, {}).get(one.name)
            mine = gaps & (owner.values == code)
            if fill is None or not mine.any():
                continue
            if isinstance(fill, str):
                names += [] if fill in names else [fill]
            values[mine] = names.index(fill) if isinstance(fill, str) else fill
        kind = (
            CATEGORY
            if names or one.kind == CATEGORY
            else NUMBER
            if not np.isnan(values).all()
            else one.kind
        )
        made.append(DataColumn(one.name, kind, values, tuple(names), one.note))
    return made


def _columns(
    table: OpenTable, setup: Setup, client: str | None, how: dict[str, Any]
) -> tuple[list[DataColumn], DataColumn | None]:
    names = [column["name"] for column in setup.schema["columns"]]
    categories = [
        column["name"] for column in setup.schema["columns"] if column["kind"] == CATEGORY
    ]
    there = table.names
    file = repr(table.path.name)
    for name in names:
        if source_of(table, name) is None:
            near = get_close_matches(name, there, n=1)
            hint = f"; is it {near[0]!r}?" if near else "."
            raise InputError(
                "column-model", f"{file} has no column {name!r}, which the model needs{hint}"
            )
    extra = [client] if client is not None and client in there else []
    found, _ = read_columns(table, [*names, *extra], [*categories, *extra], **how)
    for one, agreed in zip(found, setup.schema["columns"], strict=False):
        if one.kind == CATEGORY and agreed["kind"] != CATEGORY:
            raise InputError(
                "column-texts-such",
                f"Column {one.name!r} of {file} has texts such as {one.categories[0]!r}, and the model was trained on "
                "numbers there.",
            )
    return (found[:-1], found[-1]) if extra else (found, None)


def _encoded(file: Path, own: FeatureTable, setup: Setup) -> Matrix:
    nobody: Mask = np.zeros(own.rows, dtype=bool)
    rows = ClientRows(file.name, own, Target("regression", np.zeros(own.rows)), nobody)
    schema = dict(setup.schema)
    raw = filled(rows, schema, ~nobody, apart=bool(setup.privacy or schema.get("declared")))
    return expanded(
        scaled(raw, setup.mean, setup.deviation if schema["standardise"] else None), schema
    )
