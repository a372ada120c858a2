"""A run's model on new rows: the same columns, gaps filled as in training, for new clients from the rows at hand."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.config.model_file import Setup, predict_encoded, read_model
from scaffpd.errors import InputError
from scaffpd.tabular.columns import CATEGORY, NUMBER, DataColumn, FeatureTable, Mask, Matrix
from scaffpd.tabular.encode import ClientRows, Target, filled, scaled
from scaffpd.tabular.formats import open_table
from scaffpd.tabular.read import OF_DATE, read_columns

NOBODY = ""  # rows without a client belong together


@dataclass(frozen=True)
class Predictions:
    """Predictions for all rows of a file, in its order."""

    clients: list[str]  # whose each row is; empty texts where that is not known
    predicted: list[Any]  # labels or numbers
    probability: NDArray[np.float64]  # of the predicted label; NaN where there is none


def predict(run: Path, file: Path) -> Predictions:
    """Apply the model of a run's folder to a table."""
    file_of = run / "model.safetensors" if run.is_dir() else run
    settings = _beside(run, "config.toml", lambda text: tomllib.loads(text).get("data"))
    if not isinstance(settings.get("client"), str) and (file_of.parent / "config.toml").exists():
        raise InputError(f"The run in {str(file_of.parent)!r} was trained on no table and cannot predict from one.")
    x, setup = read_model(file_of)
    if setup.schema["shape"] is not None or setup.model.get("kind", "linear") != "linear":
        raise InputError("Only linear models of tables with named columns predict from tables.")
    columns, owner = _columns(file, setup, settings.get("client"), settings.get("decimal"))
    if owner is not None:
        columns = _filled(columns, owner, _beside(run, "fills.json", json.loads))
    rows = len(columns[0].values)
    codes = np.zeros(rows, dtype=np.int64) if owner is None else owner.values
    X: Matrix = np.empty((rows, len(setup.mean)))
    for code in np.unique(codes):
        mine = codes == code
        X[mine] = _encoded(file, FeatureTable(rows, tuple(columns)).take(mine), setup)
    names = [NOBODY] * rows if owner is None else [NOBODY if k < 0 else owner.categories[k] for k in codes]
    return Predictions(names, *predict_encoded(X, x, setup))


def promise(run: Path) -> str | None:
    """Return the (ε, δ) that the model was trained with; `None` where its folder states none."""
    try:
        found = _beside(run, "summary.json", json.loads)["privacy"]
        return f"(ε, δ) = ({float(found['epsilon']):.2f}, {float(found['delta']):g})"
    except (ValueError, KeyError, TypeError):
        return None


def _beside(run: Path, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Read a table from a file beside the model; empty where there is none."""
    try:
        found = parse(((run if run.is_dir() else run.parent) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _filled(columns: list[DataColumn], owner: DataColumn, known: dict[str, dict[str, float | str]]) -> list[DataColumn]:
    """Fill the gaps of clients that were trained on as in training."""
    made = []
    for one in columns:
        values, names, gaps = one.values.copy(), list(one.categories), one.missing
        for code, client in enumerate(owner.categories):
            fill = known.get(client, {}).get(one.name)
            mine = gaps & (owner.values == code)
            if fill is None or not mine.any():
                continue
            if isinstance(fill, str):
                names += [] if fill in names else [fill]
            values[mine] = names.index(fill) if isinstance(fill, str) else fill
        kind = CATEGORY if names else NUMBER if not np.isnan(values).all() else one.kind
        made.append(DataColumn(one.name, kind, values, tuple(names), one.note))
    return made


def _columns(
    file: Path, setup: Setup, client: str | None, decimal: str | None
) -> tuple[list[DataColumn], DataColumn | None]:
    names = [column["name"] for column in setup.schema["columns"]]
    categories = [column["name"] for column in setup.schema["columns"] if column["kind"] == CATEGORY]
    table = open_table(file)
    there = table.names
    for name in names:
        if name not in there and not (OF_DATE.fullmatch(name) and name.rpartition(" (")[0] in there):
            near = get_close_matches(name, there, n=1)
            hint = f"; is it {near[0]!r}?" if near else "."
            raise InputError(f"{file.name!r} has no column {name!r}, which the model needs{hint}")
    extra = [client] if client is not None and client in there else []
    found, _ = read_columns(table, [*names, *extra], [*categories, *extra], decimal=decimal)
    for one, agreed in zip(found, setup.schema["columns"], strict=False):
        if one.kind == CATEGORY and agreed["kind"] != CATEGORY:
            raise InputError(
                f"Column {one.name!r} of {file.name!r} has texts such as {one.categories[0]!r}, and the model was "
                "trained on numbers there."
            )
    return (found[:-1], found[-1]) if extra else (found, None)


def _encoded(file: Path, own: FeatureTable, setup: Setup) -> Matrix:
    nobody: Mask = np.zeros(own.rows, dtype=bool)
    rows = ClientRows(file.name, own, Target("regression", np.zeros(own.rows)), nobody)
    raw = filled(rows, dict(setup.schema), ~nobody)
    return scaled(raw, setup.mean, setup.deviation if setup.schema["standardise"] else None)
