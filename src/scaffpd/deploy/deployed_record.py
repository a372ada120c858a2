"""The record of a deployed run, finished or not: one model, silos that come and go."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

import scaffpd
from scaffpd.deploy.deployed_run import MODEL, OUTCOME, DeployedRun, Outcome
from scaffpd.numbers import capital
from scaffpd.run.record import (
    ClientScore,
    EventRecord,
    JoiningRecord,
    ModelRecord,
    Overall,
    PrivacyRecord,
    RoundRecord,
    RunRecord,
)

CLIENTS = "clients.json"
JOINING = "joining.json"
SCORES = TypeAdapter(list[ClientScore])


def client_scores(rows: Sequence[Mapping[str, Any]]) -> list[ClientScore]:
    """Make scores of the rows of `clients.csv`; a silo without accuracies is scored by its loss."""
    labels = any(row["train_accuracy"] == row["train_accuracy"] for row in rows)
    found = []
    for row in rows:
        own: dict[str, Any] = {name: row[name] or None for name in ("train_rows", "test_rows")}
        own |= {name: row[name] for name in ("client", "weight", "train_loss", "test_loss")}
        for split in ("train", "test"):
            own[f"{split}_score"] = row[f"{split}_{'accuracy' if labels else 'loss'}"]
        found.append(ClientScore(**own, epsilon=row.get("epsilon") or None))
    return found


def deployed_record(folder: DeployedRun) -> RunRecord:
    """Make the record of the run in a folder, as far as it has come."""
    settings = folder.read("settings.json") or {}
    about = settings.get("about") or {}
    ended: Outcome | None = folder.read(OUTCOME, Outcome)
    scores: list[ClientScore] = folder.read(CLIENTS, list[ClientScore]) or []
    lines, events = folder.entries()
    silos = list(about.get("list of silos") or [score.client for score in scores])
    history = _rounds(lines, silos)
    tested = any(score.test_score is not None for score in scores)
    labels = any(score.train_score != score.train_loss for score in scores)
    sentence = capital(ended.sentence if ended else _so_far(history))
    method = str(about.get("algorithm or objective") or "")
    objective = re.search(r"objective=(\w+\([^()]*\))", method)
    last = history[-1] if history else RoundRecord(round=0)
    values = {s.client: s.test_score if tested else s.train_score for s in scores}
    model = ModelRecord(
        name=MODEL,
        objective=objective.group(1) if objective else "",
        algorithm=method,
        status=ended.status if ended else "running",
        message=sentence,
        certificate=ended.certificate if ended else last.certificate,
        rounds=ended.rounds if ended else last.round,
        exchanges=last.exchanges,
        bytes_up=last.bytes_up,
        bytes_down=last.bytes_down,
        overall=Overall.of(values, labels),
        clients=scores,
        history=history,
    )
    place = folder.path.resolve()
    # a folder that is merely called run is named after the federation around it
    title = place.parent.name if place.name == "run" and place.parent.name else place.name
    shape = ", ".join(f"{key} = {value}" for key, value in (about.get("model") or {}).items())
    shown = {
        "Silos": ", ".join(silos),
        "Model": shape,
        "Method": method,
        "Rounds at most": settings.get("rounds"),
        "Tolerance": settings.get("tol"),
        "Seed": about.get("seed"),
        "Vectors": about.get("way of masking") and "masked: the coordinator saw sums over silos",
    }
    spent = ended.privacy if ended else None
    return RunRecord(
        kind="deploy",
        title=f"{title}: {len(silos)} silos",
        command="" if ended and ended.final else "scaffpd deploy resume federation.toml",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=scaffpd.__version__,
        measure="accuracy" if labels else "loss",
        split="test" if tested else "train",
        word="silo",
        clients=silos,
        models=[model],
        remarks=[sentence],
        privacy=_privacy(spent, scores) if spent else None,
        joining=folder.read(JOINING, JoiningRecord),
        events=[EventRecord(**event) for event in events],
        settings={name: str(value) for name, value in shown.items() if value not in (None, "")},
    )


def _rounds(lines: Sequence[Mapping[str, Any]], silos: Sequence[str]) -> list[RoundRecord]:
    """Make the rounds of progress.jsonl; of one that was made twice, the later.

    A segment counts its traffic from zero: what the earlier ones have sent is added.
    """
    latest = {line["round"]: line for line in lines}
    found: list[RoundRecord] = []
    segment = 0
    before = RoundRecord(round=0)
    for number in sorted(latest):
        line = latest[number]
        if line["segment"] != segment:
            segment = line["segment"]
            before = found[-1] if found else before
        losses = dict(zip(line["members"], line["losses"], strict=True))
        weights = dict(zip(line["members"], line["weights"], strict=True))
        found.append(
            RoundRecord(
                round=number,
                certificate=line["certificate"],
                exchanges=before.exchanges + line["exchanges"],
                bytes_up=before.bytes_up + line["bytes_up"],
                bytes_down=before.bytes_down + line["bytes_down"],
                absent=len(line["absent"]),
                seconds=line["seconds"],
                losses=[losses.get(silo) for silo in silos],
                weights=[weights.get(silo) for silo in silos],
            )
        )
    return found


def _so_far(rounds: Sequence[RoundRecord]) -> str:
    if not rounds:
        return "The run has made no round yet."
    gap = "nothing is certified yet"
    if rounds[-1].certificate is not None:
        gap = f"the certified gap is {rounds[-1].certificate:.1e}"
    return f"The run has no outcome yet: round {rounds[-1].round} is done, {gap}."


def _privacy(spent: Mapping[str, float], scores: Sequence[ClientScore]) -> PrivacyRecord:
    """State what the run has cost, by its silos' own statements."""
    return PrivacyRecord(
        epsilon=spent["epsilon"],
        delta=spent["delta"],
        clients={s.client: s.epsilon for s in scores if s.epsilon is not None},
        scored=False,
    )
