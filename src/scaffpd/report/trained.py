"""The folder of `scaffpd train`, `path` or `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaffpd.errors import InputError
from scaffpd.report.data import Event, ModelSummary, ReportData, Score, Share, overall, read_privacy
from scaffpd.report.files import Row, json_object, megabytes, number, table, text, whole
from scaffpd.report.rounds import read_rounds

FORMAT = 1
MARK = "summary.json"


def read_trained(folder: Path) -> ReportData:
    """The story of a run that was made here."""
    summary = json_object(folder / MARK)
    if summary.get("format") != FORMAT:
        raise InputError(
            f"The run in {str(folder)!r} has format {summary.get('format')!r}; this version reads {FORMAT}."
        )
    for name in ("models", "remarks", "verdict", "labels"):
        if not isinstance(summary.get(name) or [], list):
            raise InputError(f"{str(folder / MARK)!r} has no list of {name}; the run has to be made again.")
    if not isinstance(summary.get("path") or {}, dict):
        raise InputError(f"{str(folder / MARK)!r} has no table of its path; the run has to be made again.")
    privacy = read_privacy(summary.get("privacy"))
    measure, split = str(summary.get("measure", "accuracy")), str(summary.get("split", "test"))
    models = tuple(_model(folder, entry) for entry in summary.get("models") or [])
    if not models:
        raise InputError(f"The run in {str(folder)!r} has no models yet: was it interrupted?")
    scores = _scores(folder / "clients.csv", measure, split, [m.name for m in models])
    upwards = measure == "accuracy"
    totals = {name: found for name, rows in scores.items() if (found := overall(rows, upwards)) is not None}
    return ReportData(
        kind=str(summary.get("kind", "train")),
        title=str(summary.get("title") or folder.resolve().name),
        command=str(summary.get("command", "")),
        measure=measure,
        split=split,
        word=" ".join(str(summary.get("clients_word") or "client").split()) or "client",
        models=models,
        scores=scores,
        overall=totals,
        rounds=read_rounds(folder / "rounds.csv", measure),
        partition=read_partition(folder / "partition.csv"),
        events=read_events(folder / "events.csv"),
        settings=_settings(summary) + (() if privacy is None else privacy.settings),
        files=_files(folder),
        remarks=tuple(map(str, summary.get("remarks") or [])),
        verdict=tuple(map(str, summary.get("verdict") or [])),
        path=summary.get("path"),
        privacy=privacy,
    )


def _model(folder: Path, entry: Any) -> ModelSummary:
    if not isinstance(entry, dict) or "name" not in entry:
        raise InputError(f"A model in {str(folder / MARK)!r} has no name.")
    words = {key: str(entry.get(key) or "") for key in ("role", "objective", "algorithm", "status", "message")}
    return ModelSummary(
        name=str(entry["name"]),
        certificate=number(entry, "certificate"),
        rounds=number(entry, "rounds"),
        exchanges=number(entry, "exchanges"),
        megabytes=megabytes(entry),
        seconds=number(entry, "seconds"),
        strength=number(entry, "strength"),
        **words,
    )


def _scores(path: Path, measure: str, split: str, names: list[str]) -> dict[str, tuple[Score, ...]]:
    found: dict[str, list[Score]] = {}
    for row in table(path, "model", "client"):
        if row["model"] not in names:
            raise InputError(f"{str(path)!r} has a model {row['model']!r} that {MARK} does not name.")
        found.setdefault(row["model"], []).append(_score(row, measure, split))
    return {name: tuple(found[name]) for name in names if name in found}


def _score(row: Row, measure: str, split: str) -> Score:
    clear = row.get("change_clear", "")
    return Score(
        client=row["client"],
        value=number(row, f"{split}_{measure}"),
        train_rows=whole(row, "train_rows"),
        test_rows=whole(row, "test_rows"),
        weight=number(row, "weight"),
        deviation=number(row, f"{split}_{measure}_sd"),
        clear=None if clear == "" else clear == "True",
    )


def read_partition(path: Path) -> tuple[Share, ...]:
    """partition.csv; nothing where there is none."""
    return tuple(
        Share(row["client"], row["label"], whole(row, "train_rows") or 0, whole(row, "test_rows") or 0)
        for row in table(path, "client", "label", "train_rows", "test_rows")
    )


def read_events(path: Path) -> tuple[Event, ...]:
    """events.csv; nothing where there is none."""
    return tuple(
        Event(whole(row, "round") or 0, row["silo"], row["what"], row["sentence"])
        for row in table(path, "round", "silo", "what", "sentence")
    )


def _settings(summary: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    pairs = [("Data", summary.get("data")), ("Model", summary.get("model")), ("Task", summary.get("task"))]
    labels = summary.get("labels") or []
    if labels:
        shown = ", ".join(map(str, labels[:12])) + (f" and {len(labels) - 12} more" if len(labels) > 12 else "")
        pairs.append(("Labels", shown))
    pairs += [("Made", summary.get("made")), ("Version", summary.get("version") and f"scaffpd {summary['version']}")]
    return tuple((name, str(value)) for name, value in pairs if value)


def _files(folder: Path) -> tuple[tuple[str, str], ...]:
    named = [(name, text(folder / name)) for name in ("config.toml", "environment.json")]
    return tuple((name, written) for name, written in named if written)
