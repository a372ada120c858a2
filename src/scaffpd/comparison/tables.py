"""`Comparison`: all runs, one line per method over all seeds, and a sentence on how a method did."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaffpd.comparison import screen, words
from scaffpd.comparison.journal import write
from scaffpd.comparison.rows import CLIENT_COLUMNS, COSTS, MEASURES, Row, client_rows, csv_text, run_row
from scaffpd.comparison.runs import FINAL, Run
from scaffpd.comparison.setting import Setting
from scaffpd.errors import InputError, unknown
from scaffpd.training import Status

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


@dataclass(frozen=True)
class Line:
    """One method over all seeds.

    Attributes:
        method: its label.
        seeds: how many seeds have a final model.
        failures: why others have none; empty where all have one, and only then is the method ranked.
        local_steps: as the method has them; `None` where it has no such thing.
        batch_size: samples per local gradient; `None` is all.
        mean: over those seeds, of every number of a final run.
        deviation: their standard deviation (n − 1 in the denominator; NaN for a single seed).
    """

    method: str
    seeds: int
    failures: str
    local_steps: int | None
    batch_size: int | None
    mean: dict[str, float]
    deviation: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """What came of `compare`; `print` it, or hand it to a Rich console.

    Attributes:
        setting: what was compared on what.
        runs: every run, those for tuning first.
    """

    setting: Setting
    runs: tuple[Run, ...]

    @property
    def finals(self) -> tuple[Run, ...]:
        """The runs on all training rows."""
        return tuple(run for run in self.runs if run.job.phase == FINAL)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row per run, as in `runs.csv`."""
        return tuple(run_row(self.setting, run) for run in self.runs)

    @cached_property
    def client_rows(self) -> tuple[Row, ...]:
        """One row per client of every final run, as in `clients.csv`."""
        return tuple(row for run in self.finals if run.scores for row in client_rows(run))

    @cached_property
    def table(self) -> tuple[Line, ...]:
        """One line per method: first those that are ranked, by the worst 20 % on test rows, then those that failed."""
        lines = [self._line(label) for label in self.setting.methods]
        return tuple(sorted(lines, key=lambda line: (line.failures != "", *self._rank(line))))

    def line(self, label: str) -> Line:
        """The line of one method."""
        for line in self.table:
            if line.method == label:
                return line
        raise unknown("method", label, self.setting.methods)

    def verdict(self, label: str) -> str:
        """One sentence: whether a method's worst 20 % is the best, or within one standard deviation of the best."""
        return words.verdict(self, self.line(label))

    @cached_property
    def classification(self) -> bool:
        """Whether there are accuracies."""
        return any(not np.isnan(scores.accuracy).all() for run in self.runs for scores in run.scores.values())

    @cached_property
    def clients(self) -> int:
        """N, the number of clients."""
        return max((len(scores.names) for run in self.runs for scores in run.scores.values()), default=0)

    @property
    def measures(self) -> tuple[str, ...]:
        """The numbers over clients that final runs have."""
        kinds = ("accuracy", "loss") if self.classification else ("loss",)
        names = [name for name in MEASURES if not name.endswith("client")]
        return tuple(f"{split}_{kind}_{name}" for split in ("test", "train") for kind in kinds for name in names)

    @property
    def criterion(self) -> str:
        """The number that methods are ranked by."""
        return "test_accuracy_worst_20" if self.classification else "test_loss_worst_20"

    def _rank(self, line: Line) -> tuple[float, float]:
        sign = -1 if self.classification else 1
        first, second = self.criterion, self.criterion.replace("worst_20", "mean")
        return sign * line.mean.get(first, np.inf), sign * line.mean.get(second, np.inf)

    def _line(self, label: str) -> Line:
        pairs = [(run, row) for run, row in zip(self.runs, self.rows, strict=True) if run.job.method == label]
        finals = [(run, row) for run, row in pairs if run.job.phase == FINAL]
        good = [row for run, row in finals if not run.failed]
        values = {name: np.array([row[name] for row in good], dtype=np.float64) for name in (*COSTS, *self.measures)}
        method: Any = self.setting.methods[label]
        return Line(
            method=label,
            seeds=len(good),
            failures=_failures([run for run, _ in finals]),
            local_steps=getattr(method, "local_steps", None),
            batch_size=getattr(method, "batch_size", None),
            mean={name: float(v.mean()) for name, v in values.items() if len(v)},
            deviation={name: float(v.std(ddof=1)) if len(v) > 1 else np.nan for name, v in values.items() if len(v)},
        )

    def to_csv(self, folder: str | os.PathLike[str]) -> None:
        """Write `runs.csv`, `clients.csv` and `table.csv` into a folder."""
        place = Path(folder)
        if not place.is_dir():
            raise InputError(f"The folder {str(place)!r} does not exist.")
        lines = [self._table_row(line) for line in self.table]
        write(place / "runs.csv", csv_text(self.rows, list(self.rows[0])))
        write(place / "clients.csv", csv_text(self.client_rows, CLIENT_COLUMNS))
        write(place / "table.csv", csv_text(lines, list(lines[0])))

    def _table_row(self, line: Line) -> Row:
        row: Row = {"method": line.method, "seeds": line.seeds, "failures": line.failures}
        row |= {"local_steps": line.local_steps, "batch_size": line.batch_size}
        for name in (*COSTS, *self.measures):
            row |= {f"{name}_mean": line.mean.get(name), f"{name}_sd": line.deviation.get(name)}
        return row

    def __str__(self) -> str:
        return screen.text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        yield from screen.rich(self, options.max_width)


def _failures(runs: Sequence[Run]) -> str:
    """What went wrong, and for how many seeds; empty where nothing did."""
    bad = [run for run in runs if run.failed]
    if not bad:
        return ""
    reason = "It diverged with the rates that were chosen." if bad[0].status == Status.DIVERGED else bad[0].message
    return reason if len(bad) == len(runs) else f"On {len(bad)} of {len(runs)} seeds: {reason}"
