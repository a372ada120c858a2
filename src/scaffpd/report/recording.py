"""From trained models and measurements to the record of a run, and its tables as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

from scaffpd.files import csv_text
from scaffpd.machine import environment
from scaffpd.models import Linear
from scaffpd.models.linear import AUTO
from scaffpd.pipeline.judging import CoefficientRow, Judged, units
from scaffpd.pipeline.models import Trained
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.run import Record
from scaffpd.privacy import Private
from scaffpd.report.record import (
    ClientScore,
    HazardRow,
    ModelRecord,
    Overall,
    PathRecord,
    PrivacyRecord,
    RecordPart,
    RoundRecord,
    RunRecord,
    TableReading,
)
from scaffpd.study.coefficients import FIELDS, CoefficientTable
from scaffpd.study.gains import Joining
from scaffpd.study.proportional import ProportionalHazards
from scaffpd.study.verdict import PERSONAL
from scaffpd.tasks.base import Task
from scaffpd.training.history import SCALARS, History

MOST_LABELS = 12  # that are named among the settings
Cell = str | int | float | bool | None
Row = dict[str, Cell]
Part = TypeVar("Part", bound=RecordPart)
APART = "of rows that chose no curve and no pair"
SAME = "conditional on curves and pairs chosen by the same rows"


def record(
    kind: Literal["train", "path", "demo", "deploy"],
    title: str,
    command: str,
    found: Record,
    *,
    config: str = "",
    reading: TableReading | None = None,
    path: PathRecord | None = None,
) -> RunRecord:
    """Make the record of a run as its page and `predict` read it."""
    assert found.own is not None
    prepared = found.own.rows
    effects = found.own.effects
    return RunRecord.now(
        kind=kind,
        title=title,
        command=command,
        task=prepared.task,
        measure=prepared.task.measure,
        split=prepared.split,
        labels=list(prepared.labels),
        word=" ".join(prepared.word.split()) or "client",
        clients=list(prepared.names),
        models=[_model(one, prepared) for one in found.models],
        remarks=list(prepared.remarks),
        path=path,
        privacy=_privacy(found.models),
        **judged_parts(found.own),
        newcomers=found.own.newcomers,
        **({} if effects is None else _effects(effects, prepared)),
        shapes=found.own.shapes,
        shapes_said=APART if found.own.split else SAME,
        hazards=_hazards(found.own.hazards),
        settings=_settings(prepared),
        config=config,
        environment=environment(),
        reading=reading,
        fills={client: dict(own) for client, own in prepared.fills.items()},
    )


def judged_parts(own: Judged) -> dict[str, object]:
    """Return how models serve rows that are here, and what joining brings there or why not."""
    brings = own.joining
    if isinstance(brings, Joining):
        return {**vars(own.scores), "joining": brings.verdict}
    return {**vars(own.scores), "cautions": [brings] if brings else []}


def known(number: float) -> float | None:
    """Return a number that JSON has, and `None` for others."""
    return number if np.isfinite(number) else None


def _effects(found: CoefficientTable, prepared: Prepared) -> dict[str, object]:
    levels = prepared.model.beyond if prepared.task.timed else ()
    return effect_parts(found, prepared.task, units(prepared), levels)


def effect_parts(
    found: CoefficientTable, task: Task, steps: Mapping[str, float], levels: Sequence[str] = ()
) -> dict[str, object]:
    """List effects, and what stands for one step of a column: one deviation of numbers; where
    they are logarithms of ratios these as well, and without levels of periods.
    """
    ratios = {}
    if task.ratios:
        ratios = {"ratio": "estimate", "ratio_low": "low", "ratio_high": "high"}
    rows = [
        CoefficientRow(
            column=str(row["column"]),
            values={name: known(float(row[name])) for name in FIELDS}
            | {"unit": steps.get(str(row["column"]).split(": ")[0], 1.0)}
            | {new: known(float(np.exp(min(float(row[old]), 700)))) for new, old in ratios.items()},
        )
        for row in found.table()
        if row["column"] not in levels
    ]
    return {"effects": rows, "effects_said": found.said, "between_share": found.share}


def _hazards(found: ProportionalHazards | None) -> list[HazardRow]:
    if found is None:
        return []
    columns = {
        "column": found.names,
        "statistic": found.statistic.tolist(),
        "p": found.p.tolist(),
        "times": [found.times.tolist()] * len(found.names),
        "effects": found.effects.T.tolist(),
        "errors": found.errors.T.tolist(),
    }
    return _made(HazardRow, columns)


def _model(one: Trained, prepared: Prepared) -> ModelRecord:
    result = one.result
    kind = type(one.contest.algorithm).__name__
    clients = _client_scores(one)
    values = {
        score.client: score.test_score if prepared.test else score.train_score for score in clients
    }
    ended = ("status", "message", "certificate", "rounds")
    costs = ("exchanges", "bytes_up", "bytes_down", "seconds")
    return ModelRecord.model_validate(
        {name: getattr(one, name) for name in ("name", "role")}
        | {name: getattr(result, name) for name in ended}
        | {name: result.history[name][-1].item() for name in costs}
        | {
            "strength": one.contest.strength,
            "objective": _objective(one),
            "algorithm": "chosen by itself" if kind == "Fair" else kind,
            "overall": Overall.of(values, prepared.task.measure.upwards),
            "clients": clients,
            "history": round_records(result.history),
        }
    )


def _objective(one: Trained) -> str:
    if one.name == PERSONAL:  # its prior is the numbers of rows
        return "the mean over all rows"
    return "" if one.objective is None else repr(one.objective)


def _made(kind: type[Part], columns: Mapping[str, Sequence[object]]) -> list[Part]:
    """Make a record of every row of a table that is given by its columns."""
    rows = zip(*columns.values(), strict=True)
    return [kind.model_validate(dict(zip(columns, row, strict=True))) for row in rows]


def round_records(history: History) -> list[RoundRecord]:
    """Make a record of every round of a history; of very many clients it has no losses."""
    columns = {name: history[name].tolist() for name in SCALARS}
    if history.every_client:
        columns |= {"losses": history.losses.tolist(), "weights": history.weights.tolist()}
    return _made(RoundRecord, columns)


def _client_scores(one: Trained) -> list[ClientScore]:
    names = one.result.names
    columns: dict[str, Sequence[object]] = {
        "client": names,
        "weight": one.result.weights.tolist(),
        "test_rows": [0] * len(names),
    }
    for split, part in one.scores.items():
        columns[f"{split}_rows"] = part.counts.tolist()
        columns[f"{split}_loss"] = part.loss.tolist()
        columns[f"{split}_score"] = part.score.tolist()
    if one.result.privacy is not None:
        columns["epsilon"] = one.result.privacy.epsilon.tolist()
    return _made(ClientScore, columns)


def _privacy(models: Sequence[Trained]) -> PrivacyRecord | None:
    """State what all models together have cost the clients' records."""
    private = models[-1].model
    spent = models[-1].result.privacy
    if not isinstance(private, Private) or spent is None:
        return None
    return PrivacyRecord(
        epsilon=spent.worst,
        delta=spent.delta,
        budget=private.budget,
        clients=dict(zip(spent.names, spent.epsilon.tolist(), strict=True)),
        clips={
            name: value
            for name in ("clip", "loss_clip", "radius", "smoothness")
            if (value := getattr(private, name)) is not None
        },
        noise={
            name: np.atleast_1d(value).tolist()
            for name in ("noise", "loss_noise")
            if (value := getattr(private, name)) is not None
        },
        seeded=isinstance(private.secret, int),
        models=len(models),
    )


def described(model: Linear) -> str:
    ridge = "by evidence" if model.l2 == AUTO else f"{np.max(model.l2):g}"
    return f"{model.called}, ridge {ridge}{'' if model.beyond else ', no intercept'}"


def _settings(prepared: Prepared) -> dict[str, str]:
    labels = ", ".join(prepared.labels[:MOST_LABELS])
    more = len(prepared.labels) - MOST_LABELS
    found = {
        "Data": prepared.about,
        "Model": described(prepared.model),
        "Task": prepared.task.name,
        "Labels": labels + (f" and {more} more" if more > 0 else ""),
    }
    return {name: value for name, value in found.items() if value}


def exports(run: RunRecord) -> dict[str, str]:
    """Write the tables of a record as CSV, by file name; no command reads them back."""
    models = [(model, {"model": model.name}) for model in run.models]
    tables: dict[str, list[Row]] = {
        "rounds.csv": [
            {**name, **_cells(run, one), **_vectors(run, one)}
            for model, name in models
            for one in model.history
        ],
        "clients.csv": [
            {**name, **_cells(run, score)} for model, name in models for score in model.clients
        ],
        "joining.csv": [_cells(run, row) for row in run.joining.rows] if run.joining else [],
        "newcomers.csv": [
            {"objective": point.name, "client": client, "test_loss": loss}
            for point in (run.newcomers.points if run.newcomers else ())
            for client, loss in zip(run.clients, point.losses, strict=True)
        ],
        "scores.csv": [_cells(run, row) for row in run.scores],
        "coefficients.csv": [_cells(run, row) for row in run.coefficients],
        "effects.csv": [{"column": row.column, **row.values} for row in run.effects],
    }
    return {
        name: csv_text(rows, list(dict.fromkeys(key for row in rows for key in row)))
        for name, rows in tables.items()
        if rows
    }


def _cells(run: RunRecord, part: object) -> Row:
    """Return the fields of a part as cells: a gain has three, a score the measure's name."""
    cells: Row = {}
    for name, value in vars(part).items():
        column = name.replace("score", run.measure.name)
        if name == "gains":
            for over, gain in value.items():
                ends = {"": gain.value, "_low": gain.low, "_high": gain.high}
                cells |= {f"gain_over_{over}{end}": cell for end, cell in ends.items()}
        elif name == "pays":
            cells |= {f"pays_over_{over}": outcome for over, outcome in value.items()}
        elif isinstance(value, dict):
            cells |= value
        elif not isinstance(value, list):
            cells[column] = value
    return cells


def _vectors(run: RunRecord, one: RoundRecord) -> Row:
    """Return every client's loss and weight in a round, as loss[NAME] and weight[NAME]."""
    return {
        f"{what}[{client}]": value
        for what, values in (("loss", one.losses), ("weight", one.weights))
        for client, value in zip(run.clients, values, strict=False)
    }
