"""Runs as rows of plain numbers and words, and rows as comma-separated text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from scaffpd.comparison.runs import Run
from scaffpd.comparison.setting import Setting
from scaffpd.metrics import Spread, Summary

SPLITS = ("train", "validation", "test")
MEASURES = tuple(f.name for f in fields(Spread))
COSTS = ("rounds", "exchanges", "megabytes_up", "megabytes_down", "seconds")
WORK = ("local_steps", "batch_size")
CLIENT_COLUMNS = (
    *("method", "seed", "client", "weight", "train_samples", "train_loss", "train_accuracy"),
    *("test_samples", "test_loss", "test_accuracy"),
)
Row = dict[str, Any]


def run_row(setting: Setting, run: Run) -> Row:
    """One row of `runs.csv`: which run, its rates, how it ended, what it cost, and every measure on every split."""
    method = setting.methods[run.job.method]
    names = list(dict.fromkeys(name for label in setting.methods for name in setting.grid(label)[0]))
    row: Row = dict(run.job._asdict()) | {f"factor_{name}": run.factors.get(name) for name in names}
    row |= {name: run.rates.get(name) for name in names}
    row |= {name: getattr(method, name, None) for name in WORK}
    row |= {name: getattr(run, name) for name in ("status", "message", *COSTS, "certificate")}
    for split in SPLITS:
        summary = Summary.of(run.scores[split]) if split in run.scores else None
        for kind in ("loss", "accuracy"):
            spread = getattr(summary, kind, None)
            row |= {f"{split}_{kind}_{name}": getattr(spread, name, None) for name in MEASURES}
    return row


def client_rows(run: Run) -> list[Row]:
    """The rows of `clients.csv` of one final run."""
    rows = []
    for i, client in enumerate(run.scores["train"].names):
        row: Row = {"method": run.job.method, "seed": run.job.seed, "client": client, "weight": run.weights[i]}
        for split in ("train", "test"):
            scores = run.scores[split]
            row[f"{split}_samples"] = int(scores.counts[i])
            row[f"{split}_loss"] = float(scores.loss[i])
            row[f"{split}_accuracy"] = float(scores.accuracy[i])
        rows.append(row)
    return rows


def csv_text(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Floats are written so that they read back exactly; what there is not, or is not a number, is an empty cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(columns)
    writer.writerows([_cell(row[name]) for name in columns] for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value
