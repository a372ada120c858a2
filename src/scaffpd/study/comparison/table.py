"""`Comparison`: all runs, and one line per method over all seeds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from scaffpd.algorithms import Algorithm
from scaffpd.files import csv_text, make_folder, write_file
from scaffpd.numbers import several
from scaffpd.study.comparison.runs import FINAL, MethodRun
from scaffpd.training.loop import Status
from scaffpd.training.metrics import Spread, Summary, client_row

SPLITS = ("train", "validation", "test")
MEASURES = tuple(f.name for f in fields(Spread))
COSTS = ("rounds", "exchanges", "bytes_up", "bytes_down", "seconds")
Row = dict[str, object]


@dataclass(frozen=True)
class MethodSummary:
    """One method over all seeds."""

    method: str  # its label
    seeds: int  # how many seeds have a final model
    failures: str  # why others have none; only where it is empty is the method ranked
    mean: dict[str, float]  # over those seeds, of every number of a final run
    deviation: dict[str, float]  # n − 1 in the denominator; NaN for a single seed


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; `print` it."""

    problem: str
    model: str
    methods: Mapping[str, Algorithm] = field(repr=False)
    seeds: tuple[int, ...]
    rounds: int
    tune: int
    runs: tuple[MethodRun, ...] = field(repr=False)  # those for tuning first

    @property
    def finals(self) -> tuple[MethodRun, ...]:
        """The runs on all training rows."""
        return tuple(run for run in self.runs if run.phase == FINAL)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row per run: its rates, how it ended, what it cost, every measure on every split."""
        names = list(dict.fromkeys(name for run in self.runs for name in run.factors))
        return tuple(self._row(run, names) for run in self.runs)

    def _row(self, run: MethodRun, names: Sequence[str]) -> Row:
        method = self.methods[run.method]
        row: Row = {"model": run.method, "seed": run.seed, "phase": run.phase}
        row |= {f"factor_{name}": run.factors.get(name) for name in names}
        row |= {name: run.rates.get(name) for name in names}
        row |= {name: getattr(method, name, None) for name in ("local_steps", "batch_size")}
        row |= {name: getattr(run, name) for name in ("status", "message", *COSTS, "certificate")}
        for split in SPLITS:
            summary = Summary.of(run.scores[split]) if split in run.scores else None
            for kind in ("loss", "accuracy"):
                spread = getattr(summary, kind, None)
                row |= {f"{split}_{kind}_{name}": getattr(spread, name, None) for name in MEASURES}
        return row

    @cached_property
    def client_rows(self) -> tuple[Row, ...]:
        """One row per client of every final run."""
        return tuple(
            client_row(run.method, client, run.weights[i], run.scores, i) | {"seed": run.seed}
            for run in self.finals
            if run.scores
            for i, client in enumerate(run.scores["train"].names)
        )

    @cached_property
    def table(self) -> tuple[MethodSummary, ...]:
        """One line per method, by the worst 20 % on test rows; failures come last."""
        sign = -1 if self.classification else 1
        names = (self.criterion, self.criterion.replace("worst_20", "mean"))

        def rank(line: MethodSummary) -> tuple[bool | float, ...]:
            return line.failures != "", *(sign * line.mean.get(name, np.inf) for name in names)

        return tuple(sorted(map(self._line, self.methods), key=rank))

    def line(self, label: str) -> MethodSummary:
        """Return the line of one method."""
        return next(line for line in self.table if line.method == label)

    @cached_property
    def classification(self) -> bool:
        """Return whether there are accuracies."""
        scores = [s for run in self.runs for s in run.scores.values()]
        return any(not np.isnan(s.accuracy).all() for s in scores)

    @property
    def criterion(self) -> str:
        """The number that methods are ranked by."""
        return f"test_{'accuracy' if self.classification else 'loss'}_worst_20"

    def _line(self, label: str) -> MethodSummary:
        pairs = zip(self.runs, self.rows, strict=True)
        finals = [(run, row) for run, row in pairs if (run.method, run.phase) == (label, FINAL)]
        good = [row for run, row in finals if not run.failed]
        values = {
            name: np.array([row[name] for row in good], dtype=np.float64)
            for name, first in (good[0] if good else {}).items()
            if name in COSTS or (name.startswith(("test_", "train_")) and isinstance(first, float))
        }
        return MethodSummary(
            method=label,
            seeds=len(good),
            failures=_failures([run for run, _ in finals]),
            mean={name: float(v.mean()) for name, v in values.items()},
            deviation={
                name: float(v.std(ddof=1)) if len(v) > 1 else math.nan for name, v in values.items()
            },
        )

    def to_csv(self, folder: str | os.PathLike[str]) -> None:
        """Export `rows` and `client_rows` as runs.csv and clients.csv into a folder."""
        place = make_folder(Path(folder))
        for file, rows in (("runs", self.rows), ("clients", self.client_rows)):
            write_file(place / f"{file}.csv", csv_text(rows, list(rows[0]) if rows else ["model"]))

    def __str__(self) -> str:
        kind = self.criterion.removesuffix("worst_20")
        lines = [["method", "worst 20 %", "mean", "best 20 %", "exchanges", "MB"]]
        for line in self.table:
            if line.failures:
                continue
            sent = (line.mean["bytes_up"] + line.mean["bytes_down"]) / 1e6
            measures = [self._shown(line, kind + name) for name in ("worst_20", "mean", "best_20")]
            lines.append([line.method, *measures, f"{line.mean['exchanges']:.0f}", f"{sent:.3g}"])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
            for first, *others in lines
        ]
        failed = [f"{line.method}: {line.failures}" for line in self.table if line.failures]
        what = "Accuracy in %" if self.classification else "Loss"
        over = f"mean ± standard deviation over {several(len(self.seeds), 'seed')}"
        caption = f"{what} on test rows, {over}, after {several(self.rounds, 'round')}."
        return "\n".join([*shown, "", caption, *failed])

    def _shown(self, line: MethodSummary, name: str) -> str:
        """Write mean ± deviation, or the mean alone where there is no deviation."""
        numbers = [n for n in (line.mean[name], line.deviation[name]) if not math.isnan(n)]
        if self.classification:
            return " ± ".join(f"{100 * number:.1f}" for number in numbers)
        return " ± ".join(f"{number:.3g}" for number in numbers)


def _failures(runs: Sequence[MethodRun]) -> str:
    """Say what went wrong, and for how many seeds; return nothing where nothing did."""
    bad = [run for run in runs if run.failed]
    if not bad:
        return ""
    diverged = bad[0].status == Status.DIVERGED
    reason = "It diverged with the rates that were chosen." if diverged else bad[0].message
    return reason if len(bad) == len(runs) else f"On {len(bad)} of {len(runs)} seeds: {reason}"
