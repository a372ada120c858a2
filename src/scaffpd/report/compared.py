"""The folder of `scaffpd compare --out`: many methods, several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError
from scaffpd.report.data import ModelSummary, Overall, ReportData, Score, overall
from scaffpd.report.files import Row, json_object, megabytes, number, table, text, whole

MARK = "table.csv"
PLAIN = ("FedAvg", "SCAFFOLD", "FedProx")  # what a fair method is held against: the first that took part
SAME_ROWS = "Every dot is a mean over {seeds} seeds."
OTHER_ROWS = (
    "Clients are other groups of rows under every seed, so this chart and the table of clients are seed {seed} alone; "
    "the verdict and the trade-off are means over {seeds} seeds."
)


def read_compared(folder: Path) -> ReportData:
    """The story of a comparison."""
    lines = table(folder / MARK, "method", "seeds", "failures")
    if not lines:
        raise InputError(f"The comparison in {str(folder)!r} has no methods.")
    measure = "accuracy" if lines[0].get("test_accuracy_mean_mean") else "loss"
    totals = {line["method"]: found for line in lines if (found := _overall(line, measure)) is not None}
    models = _roles([_model(line) for line in lines], totals, upwards=measure == "accuracy")
    rows = table(folder / "clients.csv", "method", "seed", "client")
    scores, note = _scores(rows, measure, [m.name for m in models])
    totals = {name: _named(one, scores.get(name, ()), measure) for name, one in totals.items()}
    about = json_object(folder / "about.json")
    setting: dict[str, Any] = about.get("setting") or {}
    title = str(setting.get("problem") or folder.resolve().name)
    return ReportData(
        kind="compare",
        title=title if len(models) == 1 else f"{title}: {len(models)} methods",
        command=text(folder / "command.txt").strip(),
        measure=measure,
        split="test",
        word="client",
        models=_described(models, setting),
        scores=scores,
        overall=totals,
        settings=_settings(setting, about.get("versions") or {}),
        notes=(("clients", note),) if note else (),
    )


def _overall(line: Row, measure: str) -> Overall | None:
    found = {name: number(line, f"test_{measure}_{name}") for name in ("mean_mean", "worst_20_mean", "worst_mean")}
    if any(value is None for value in found.values()):
        return None
    return Overall(
        mean=found["mean_mean"] or 0.0,
        worst_20=found["worst_20_mean"] or 0.0,
        worst=found["worst_mean"] or 0.0,
        worst_client="",
        mean_sd=number(line, f"test_{measure}_mean_sd"),
        worst_20_sd=number(line, f"test_{measure}_worst_20_sd"),
    )


def _named(one: Overall, scores: Sequence[Score], measure: str) -> Overall:
    """With the name of the worst-served client, where clients are the same under every seed."""
    found = overall(scores, measure == "accuracy")
    steady = found is not None and any(score.deviation is not None for score in scores)
    return replace(one, worst_client=found.worst_client) if found is not None and steady else one


def _model(line: Row) -> ModelSummary:
    return ModelSummary(
        name=line["method"],
        rounds=number(line, "rounds_mean"),
        exchanges=number(line, "exchanges_mean"),
        megabytes=megabytes(line, "megabytes_up_mean", "megabytes_down_mean", unit=1.0),
        seconds=number(line, "seconds_mean"),
        status=f"{line['seeds']} seeds" if line["seeds"] != "1" else "1 seed",
        failure=line["failures"],
    )


def _roles(models: list[ModelSummary], totals: dict[str, Overall], upwards: bool) -> tuple[ModelSummary, ...]:
    """A plain method is "before"; the one that serves the worst-served best is "after"."""
    sign = 1 if upwards else -1
    ranked = sorted(
        (n for m in models if not m.failure and (n := m.name) in totals), key=lambda n: -sign * totals[n].worst_20
    )
    before = next((name for name in PLAIN if name in ranked), None) or (
        max(ranked, key=lambda name: sign * totals[name].mean) if ranked else None
    )
    after = next((name for name in ranked if name != before), None)
    given = {before: "before", after: "after"}
    return tuple(replace(m, role=given.get(m.name, "")) for m in models)


def _scores(rows: list[Row], measure: str, names: list[str]) -> tuple[dict[str, tuple[Score, ...]], str]:
    """Means over seeds where clients keep their rows' number under every seed; else the first seed."""
    seeds = sorted({row["seed"] for row in rows}, key=lambda seed: (len(seed), seed))
    sizes: dict[str, set[str]] = {}
    for row in rows:
        sizes.setdefault(row["client"], set()).add(row.get("train_samples", ""))
    same = all(len(found) == 1 for found in sizes.values())
    chosen = seeds if same else seeds[:1]
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row["seed"] in chosen:
            groups.setdefault(row["method"], {}).setdefault(row["client"], []).append(row)
    scores = {
        name: tuple(_score(client, found, measure) for client, found in groups[name].items())
        for name in names
        if name in groups
    }
    if len(seeds) < 2:
        return scores, ""
    return scores, (SAME_ROWS if same else OTHER_ROWS).format(seeds=len(seeds), seed=seeds[0])


def _score(client: str, rows: list[Row], measure: str) -> Score:
    def mean(name: str) -> float | None:
        values = [v for row in rows if (v := number(row, name)) is not None]
        return sum(values) / len(values) if values else None

    values = [v for row in rows if (v := number(row, f"test_{measure}")) is not None]
    centre = mean(f"test_{measure}")
    spread = (
        math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))
        if centre is not None and len(values) > 1
        else None
    )
    return Score(
        client=client, value=centre, deviation=spread,
        train_rows=whole(rows[0], "train_samples"), test_rows=whole(rows[0], "test_samples"),
        weight=mean("weight"),
    )  # fmt: skip


def _described(models: Sequence[ModelSummary], setting: dict[str, Any]) -> tuple[ModelSummary, ...]:
    methods = setting.get("methods") or {}
    return tuple(replace(model, algorithm=str(methods.get(model.name, ""))) for model in models)


def _settings(setting: dict[str, Any], versions: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    pairs = [("Problem", setting.get("problem")), ("Model", setting.get("model")), ("Rounds", setting.get("rounds"))]
    pairs += [("Seeds", ", ".join(map(str, setting.get("seeds") or []))), ("Tuning", _tuning(setting))]
    pairs += [("Versions", ", ".join(f"{name} {value}" for name, value in versions.items()))]
    return tuple((name, str(value)) for name, value in pairs if value)


def _tuning(setting: dict[str, Any]) -> str:
    budget = setting.get("tune")
    if not budget:
        return ""
    return "none: automatic rates" if budget == 1 else f"{budget} configurations a method, chosen on validation rows"
