"""The tables of a run's folder, as rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

import scaffpd
from scaffpd.runs.prepare import Prepared, described
from scaffpd.runs.train import SPREAD, Trained
from scaffpd.tabular.schema import CLASSIFICATION

FORMAT = 1
LAST = ("exchanges", "bytes_up", "bytes_down", "seconds")


def about(one: Trained) -> dict[str, Any]:
    """How a model was trained and how that ended, for `summary.json`."""
    result, last = one.result, {name: one.result.history[name][-1].item() for name in LAST}
    return {
        "name": one.name, "role": one.role, "objective": None if one.objective is None else repr(one.objective),
        "algorithm": "chosen by itself" if one.algorithm == "Fair" else one.algorithm,
        "status": str(result.status), "message": result.message,
        "certificate": float(result.certificate) if np.isfinite(result.certificate) else None,
        "rounds": result.rounds, **last, "strength": one.strength,
    }  # fmt: skip


def summary(
    kind: str, title: str, command: str, prepared: Prepared, models: Sequence[Trained],
    path: Mapping[str, Any] | None = None, verdict: Sequence[str] | None = None, remarks: Sequence[str] = (),
) -> str:  # fmt: skip
    """`summary.json`: what was trained and how it ended; a report starts from it."""
    values = {
        "format": FORMAT, "kind": kind, "title": title, "command": command,
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "version": scaffpd.__version__,
        "task": prepared.task, "measure": prepared.measure, "split": prepared.split,
        "labels": list(prepared.labels), "clients_word": prepared.word, "model": described(prepared.model),
        "data": prepared.about, "models": [about(one) for one in models],
        "privacy": privacy(models), "remarks": [*prepared.remarks, *remarks],
        "verdict": None if verdict is None else list(verdict), "path": path,
    }  # fmt: skip
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def privacy(models: Sequence[Trained]) -> dict[str, Any] | None:
    """What the run has cost its clients' records, all models together, and how; `None` where nothing was private."""
    private, spent = models[-1].private, models[-1].result.privacy
    if private is None or spent is None:
        return None
    return {
        "epsilon": spent.worst, "delta": spent.delta, "budget": private.budget,
        "clients": dict(zip(spent.names, spent.epsilon.tolist(), strict=True)),
        "clip": private.clip, "loss_clip": private.loss_clip, "radius": private.radius,
        "smoothness": private.smoothness, "noise": private.noise, "loss_noise": private.loss_noise,
        "seeded": isinstance(private.secret, int), "models": [one.name for one in models],
    }  # fmt: skip


def rounds(models: Sequence[Trained], measure: str) -> list[dict[str, Any]]:
    """A row for every model and round."""
    rows = []
    for one in models:
        history = one.result.history
        table = {name: history[name].tolist() for name in history.columns}
        scalars = [name for name in table if "[" not in name]
        for k, number in enumerate(table["round"]):
            found = one.scores.get(number)
            scored = {f"{name}_{measure}": "" if found is None else found[name] for name in SPREAD}
            front = {name: table[name][k] for name in scalars}
            rows.append(
                {"model": one.name, **front, **scored, **{name: table[name][k] for name in table if "[" in name}}
            )
    return rows


def clients(models: Sequence[Trained], measure: str) -> list[dict[str, Any]]:
    """A row for every model and client."""
    rows = []
    for one in models:
        for i, name in enumerate(one.result.names):
            train, test = one.train, one.test
            rows.append({
                "model": one.name, "client": name, "train_rows": int(train.counts[i]),
                "test_rows": 0 if test is None else int(test.counts[i]), "weight": float(one.result.weights[i]),
                "train_loss": float(train.loss[i]), "test_loss": "" if test is None else float(test.loss[i]),
                f"train_{measure}": float(train.accuracy[i]),
                f"test_{measure}": "" if test is None else float(test.accuracy[i]),
                "change_clear": "" if one.clear is None else one.clear[i],
                **({} if one.result.privacy is None else {"epsilon": float(one.result.privacy.epsilon[i])}),
            })  # fmt: skip
    return rows


def partition(prepared: Prepared) -> list[dict[str, Any]]:
    """Which client has how many rows of which label."""
    rows = []
    for i, name in enumerate(prepared.names):
        y, held = prepared.train[i][1], prepared.test[i][1] if prepared.test else np.empty(0)
        if prepared.task != CLASSIFICATION:
            rows.append({"client": name, "label": "", "train_rows": len(y), "test_rows": len(held)})
            continue
        for k, label in enumerate(prepared.labels):
            counts = [int((np.asarray(part) == k).sum()) for part in (y, held)]
            rows.append({"client": name, "label": label, "train_rows": counts[0], "test_rows": counts[1]})
    return rows


def points(models: Sequence[Trained], prepared: Prepared) -> list[dict[str, Any]]:
    """A row for every point of a fairness path."""
    rows = []
    for one in models:
        last, found = about(one), one.spread(prepared)
        cells = {name: last[name] for name in ("rounds", *LAST, "certificate")}
        scored = {f"{name}_{prepared.measure}": getattr(found, name) for name in (*SPREAD, "best_20")}
        rows.append({"model": one.name, "strength": "" if one.strength is None else one.strength, **cells, **scored})
    return rows


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
