"""`Comparison`: all runs, and one row per method over all seeds."""

from __future__ import annotations

import io
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scaffpd.algorithms import Algorithm
from scaffpd.errors import unknown
from scaffpd.files import csv_text, make_folder, write_file
from scaffpd.numbers import several
from scaffpd.study.comparison.runs import FINAL, MethodRun
from scaffpd.training.loop import Status
from scaffpd.training.metrics import Spread, Summary, a_fifth, client_row

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

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
    local_steps: int | None  # `None` where it has no such thing
    batch_size: int | None  # samples per local gradient; `None` is all
    mean: dict[str, float]  # over those seeds, of every number of a final run
    deviation: dict[str, float]  # n − 1 in the denominator; NaN for a single seed


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; `print` it, or pass it to a Rich console."""

    problem: str
    model: str
    methods: Mapping[str, Algorithm] = field(repr=False)
    seeds: tuple[int, ...]
    rounds: int
    tune: int
    strengths: bool  # whether strengths were tuned as well
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
        for line in self.table:
            if line.method == label:
                return line
        raise unknown("method", label, self.methods)

    @cached_property
    def classification(self) -> bool:
        """Return whether there are accuracies."""
        scores = [s for run in self.runs for s in run.scores.values()]
        return any(not np.isnan(s.accuracy).all() for s in scores)

    @property
    def criterion(self) -> str:
        """The number that methods are ranked by."""
        return f"test_{'accuracy' if self.classification else 'loss'}_worst_20"

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return max((len(s.names) for run in self.runs for s in run.scores.values()), default=0)

    def _line(self, label: str) -> MethodSummary:
        pairs = zip(self.runs, self.rows, strict=True)
        finals = [(run, row) for run, row in pairs if (run.method, run.phase) == (label, FINAL)]
        good = [row for run, row in finals if not run.failed]
        values = {
            name: np.array([row[name] for row in good], dtype=np.float64)
            for name, first in (good[0] if good else {}).items()
            if name in COSTS or (name.startswith(("test_", "train_")) and isinstance(first, float))
        }
        method = self.methods[label]
        return MethodSummary(
            method=label,
            seeds=len(good),
            failures=_failures([run for run, _ in finals]),
            local_steps=getattr(method, "local_steps", None),
            batch_size=getattr(method, "batch_size", None),
            mean={name: float(v.mean()) for name, v in values.items()},
            deviation={
                name: float(v.std(ddof=1)) if len(v) > 1 else math.nan for name, v in values.items()
            },
        )

    def verdict(self, label: str) -> str:
        """Say how a method's worst 20 % compares with the best."""
        line = self.line(label)
        if line.failures:
            return f"{label} is not ranked: {line.failures}"
        name = self.criterion
        best = self.table[0]
        what = f"worst-20 % test {'accuracy' if self.classification else 'loss'}"
        own = f"{label} has {what} {self._shown(line, name)}"
        if line is best:
            return f"{own}, the best."
        far = abs(best.mean[name] - line.mean[name]) > best.deviation[name]
        distance = "more than" if far else "within"
        judged = "" if len(self.seeds) == 1 else f", {distance} one standard deviation from it"
        return f"{own}; the best, {best.method}, has {self._shown(best, name)}{judged}."

    def to_csv(self, folder: str | os.PathLike[str]) -> None:
        """Export `rows` and `client_rows` as runs.csv and clients.csv into a folder."""
        place = make_folder(Path(folder))
        for file, rows in (("runs", self.rows), ("clients", self.client_rows)):
            write_file(place / f"{file}.csv", csv_text(rows, list(rows[0]) if rows else ["model"]))

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((100, 24)).columns
        console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
        with console.capture() as shown:
            console.print(self)
        return "\n".join(line.rstrip() for line in shown.get().splitlines())

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        kind = self.criterion.removesuffix("worst_20")
        measures = {"worst 20 %": "worst_20", "mean": "mean", "best 20 %": "best_20"}
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("method")
        for heading in (*measures, "J", "exchanges", "MB"):
            table.add_column(heading, justify="right", no_wrap=True)
        ranked = [line for line in self.table if not line.failures]
        for line in ranked:
            sent = (line.mean["bytes_up"] + line.mean["bytes_down"]) / 1e6
            table.add_row(
                line.method,
                *(self._shown(line, kind + name) for name in measures.values()),
                "–" if line.local_steps is None else str(line.local_steps),
                f"{line.mean['exchanges']:.0f}",
                f"{sent:.2f}" if 0.005 <= sent < 10 else f"{sent:.3g}",
            )
        if ranked:
            yield table
            yield Text(f"\n{self._caption()}")
        for line in self.table:
            if line.failures:
                yield Text(f"{line.method} is not ranked: {line.failures}")

    def _shown(self, line: MethodSummary, name: str) -> str:
        """Write mean ± deviation, or the mean alone where there is no deviation."""
        mean = line.mean[name]
        deviation = line.deviation[name]
        if self.classification:
            more = "" if math.isnan(deviation) else f" ± {100 * deviation:.1f}"
            return f"{100 * mean:.1f}{more}"
        # powers of ten where three digits behind the point would say nothing
        form = ".3f" if mean == 0 or 1e-2 <= abs(mean) < 1e3 else ".1e"
        return f"{mean:{form}}" + ("" if math.isnan(deviation) else f" ± {deviation:{form}}")

    def _caption(self) -> str:
        several_seeds = f"mean ± standard deviation over {len(self.seeds)} seeds"
        over = several_seeds if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        tuned = "rates and strengths (ρ, q, θ, μ)" if self.strengths else "rates"
        rates = f"{tuned} chosen among at most {self.tune} on validation rows"
        what = "Accuracy in %" if self.classification else "Loss"
        return (
            f"{what} on test rows, {over}, after {several(self.rounds, 'round')}; "
            f"{rates if self.tune > 1 else 'automatic rates'}. Worst and best 20 %: mean over "
            f"the {a_fifth(self.clients)} of {self.clients} clients that fare worst and best. "
            "J: local steps a round (–: not a setting); exchanges and MB (up and down, all "
            "clients): of the whole run."
        )


def _failures(runs: Sequence[MethodRun]) -> str:
    """Say what went wrong, and for how many seeds; return nothing where nothing did."""
    bad = [run for run in runs if run.failed]
    if not bad:
        return ""
    diverged = bad[0].status == Status.DIVERGED
    reason = "It diverged with the rates that were chosen." if diverged else bad[0].message
    return reason if len(bad) == len(runs) else f"On {len(bad)} of {len(runs)} seeds: {reason}"
