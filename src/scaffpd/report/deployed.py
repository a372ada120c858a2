"""The folder of a deployed run: one model, silos that come and go."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from scaffpd.report.data import ModelSummary, PrivacyStatement, ReportData, Round, Score, overall
from scaffpd.report.files import Row, json_object, number, table, text, whole
from scaffpd.report.rounds import read_rounds
from scaffpd.report.trained import read_events

MARK = "settings.json"
NAME = "deployed"


def read_deployed(folder: Path) -> ReportData:
    """The story of a run across organisations, finished or not."""
    settings = json_object(folder / MARK)
    about: dict[str, Any] = settings.get("about") or {}
    outcome = json_object(folder / "outcome.json")
    rows = table(folder / "clients.csv", "silo")
    split = "test" if rows and "test rows" in rows[0] else "train"
    measure = "accuracy" if not rows or number(rows[0], f"{split} accuracy") is not None else "loss"
    scores = tuple(_score(row, measure, split) for row in rows)
    total = overall(scores, measure == "accuracy")
    rounds = read_rounds(folder / "rounds.csv", measure, NAME)
    sentence = str(outcome.get("sentence") or "The run has no outcome yet.")
    return ReportData(
        kind="deploy",
        title=f"{_name(folder)}: {len(about.get('list of silos') or rows)} silos",
        command="scaffpd deploy resume federation.toml" if not outcome.get("final") else "",
        measure=measure,
        split=split,
        word="silo",
        models=(_model(about, outcome, rounds, sentence),),
        scores={NAME: scores} if scores else {},
        overall={} if total is None else {NAME: total},
        rounds=rounds,
        events=read_events(folder / "events.csv"),
        settings=_settings(settings, about),
        files=tuple((name, written) for name in (MARK,) if (written := _pretty(text(folder / name)))),
        privacy=_privacy(outcome, rows),
        remarks=(sentence[:1].upper() + sentence[1:],),
    )


def _privacy(outcome: dict[str, Any], rows: list[Row]) -> PrivacyStatement | None:
    """What silos have said that the run has cost."""
    told = outcome.get("privacy")
    epsilon, delta = (number(told, name) if isinstance(told, dict) else None for name in ("epsilon", "delta"))
    if epsilon is None or delta is None:
        return None
    clients = {row["silo"]: spent for row in rows if (spent := number(row, "epsilon")) is not None}
    return PrivacyStatement(epsilon, delta, clients, scored=False)


def _name(folder: Path) -> str:
    """The folder's, or that of the federation around one that is merely called run."""
    place = folder.resolve()
    return place.parent.name if place.name == "run" and place.parent.name else place.name


def _score(row: Row, measure: str, split: str) -> Score:
    return Score(
        client=row["silo"],
        value=number(row, f"{split} {measure}"),
        train_rows=whole(row, "train rows"),
        test_rows=whole(row, "test rows"),
        weight=number(row, "weight"),
    )


def _model(about: dict[str, Any], outcome: dict[str, Any], rounds: tuple[Round, ...], sentence: str) -> ModelSummary:
    algorithm = str(about.get("algorithm or objective", ""))
    objective = re.search(r"objective=(\w+\([^()]*\))", algorithm)
    last = rounds[-1] if rounds else None
    return ModelSummary(
        name=NAME,
        objective=objective.group(1) if objective else "",
        algorithm=algorithm,
        status=str(outcome.get("status") or "running"),
        message=sentence,
        certificate=number(outcome, "certificate"),
        rounds=number(outcome, "rounds") if outcome else float(last.number) if last else None,
        exchanges=last.exchanges if last else None,
        megabytes=last.megabytes if last else None,
    )


def _settings(settings: dict[str, Any], about: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    model = ", ".join(f"{name} = {value}" for name, value in (about.get("model") or {}).items())
    pairs: list[tuple[str, Any]] = [("Silos", ", ".join(about.get("list of silos") or [])), ("Model", model)]
    pairs += [("Method", about.get("algorithm or objective")), ("Rounds at most", settings.get("rounds"))]
    pairs += [("Tolerance", settings.get("tol")), ("Seed", about.get("seed"))]
    pairs += [("Vectors", "masked: the coordinator saw sums over silos" if about.get("way of masking") else None)]
    return tuple((name, str(value)) for name, value in pairs if value not in (None, ""))


def _pretty(written: str) -> str:
    return json.dumps(json.loads(written), indent=2, ensure_ascii=False) if written else ""
