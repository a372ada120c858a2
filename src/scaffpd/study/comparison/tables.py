"""`Comparison`: all runs, one row per method over all seeds, as CSV files, on the screen and in sentences."""

from __future__ import annotations

import io
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scaffpd.errors import InputError, unknown
from scaffpd.files import csv_text, write_file
from scaffpd.numbers import several
from scaffpd.study.comparison.runs import FINAL, Run
from scaffpd.study.comparison.setting import Setting
from scaffpd.training.loop import Status
from scaffpd.training.metrics import Spread, Summary, a_fifth, client_row

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


SPLITS = ("train", "validation", "test")
MEASURES = tuple(f.name for f in fields(Spread))
COSTS = ("rounds", "exchanges", "bytes_up", "bytes_down", "seconds")
WORK = ("local_steps", "batch_size")
Row = dict[str, Any]


def run_row(setting: Setting, run: Run) -> Row:
    """Return a row of `runs.csv`: which run, its rates, how it ended, what it cost, every measure on every split."""
    method = setting.methods[run.job.method]
    names = list(
        dict.fromkeys(name for label in setting.methods for name in setting.grid(label)[0])
    )
    row: Row = {
        "model": run.job.method,
        "seed": run.job.seed,
        "phase": run.job.phase,
        "point": run.job.point,
    }
    row |= {f"factor_{name}": run.factors.get(name) for name in names}
    row |= {name: run.rates.get(name) for name in names}
    row |= {name: getattr(method, name, None) for name in WORK}
    row |= {name: getattr(run, name) for name in ("status", "message", *COSTS, "certificate")}
    for split in SPLITS:
        summary = Summary.of(run.scores[split]) if split in run.scores else None
        for kind in ("loss", "accuracy"):
            spread = getattr(summary, kind, None)
            row |= {f"{split}_{kind}_{name}": getattr(spread, name, None) for name in MEASURES}
    return row


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1
) -> list[str]:
    """Return the lines of a table whose first `words` columns are set flush left and the others flush right."""
    rule = "|" + "---|" * words + "---:|" * (len(header) - words)
    header, *others = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return [header, rule, *others]


def rank_sentence(comparison: Comparison, line: MethodSummary) -> str:
    """Return whether a method's worst 20 % is the best, or within one standard deviation of the best."""
    what = f"worst-20 % test {'accuracy' if comparison.classification else 'loss'}"
    ranked = [other for other in comparison.table if not other.failures]
    if line.failures:
        return f"{line.method} is not ranked: {line.failures}"
    own = _value(comparison, line)
    best = ranked[0]
    name = comparison.criterion
    if len(ranked) == 1:
        return f"{line.method} is the only method that is ranked, with a {what} of {own}."
    if line.mean[name] == best.mean[name]:
        other = ranked[1] if line is best else best
        return f"{line.method} has the best {what}: {own}, with {other.method} at {_value(comparison, other)}."
    gap = abs(best.mean[name] - line.mean[name])
    deviation = best.deviation[name]
    opening = f"{line.method}'s {what} of {own} is"
    closing = f"the best, {best.method} ({_value(comparison, best)})"
    if math.isnan(deviation):
        size = (
            f"{100 * gap:.1f} points below"
            if comparison.classification
            else f"{gap:{digits(gap)}} above"
        )
        return (
            f"{opening} {size} {closing}; a single seed has no standard deviation to judge that by."
        )
    distance = (
        "within one standard deviation of"
        if gap <= deviation
        else "more than one standard deviation from"
    )
    return f"{opening} {distance} {closing}."


def caption(comparison: Comparison, headings: Collection[str]) -> list[str]:
    """Say what the numbers in columns with these headings are, and who has none."""
    setting = comparison.setting
    N = comparison.clients
    seeds = len(comparison.setting.seeds)
    over = (
        f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else f"seed {setting.seeds[0]}"
    )
    tuned = "rates and strengths (ρ, q, θ, μ)" if setting.strengths else "rates"
    most = 2 * setting.tune if setting.climb else setting.tune
    chosen = f"{tuned} chosen among at most {most} on validation rows"
    if setting.choosing is not None:
        chosen += f" of {'the first seed' if len(setting.choosers) == 1 else f'{len(setting.choosers)} seeds'}"
    rates = chosen if setting.tune > 1 else "automatic rates"
    ends = "worst and best" if "best 20 %" in headings else "worst"
    spreads = " and ".join(name for name in ("sd", "Gini") if name in headings)
    sentences = [
        f"On test rows, {over}, after {several(setting.rounds, 'round')}; {rates}.",
        f"{ends.capitalize()} 20 %: mean over the {a_fifth(N)} of {N} clients that fare {ends}"
        + (f"; {spreads}: over all clients." if spreads else "."),
        "J: local steps a round (–: not a setting), on so many samples each; exchanges and MB (up and down, all "
        "clients): of the whole run.",
    ]
    failed = [
        f"{line.method} is not ranked: {line.failures}"
        for line in comparison.table
        if line.failures
    ]
    return [" ".join(sentences), *failed] if N else failed


def _value(comparison: Comparison, line: MethodSummary) -> str:
    name = comparison.criterion
    words = with_deviation(line.mean[name], line.deviation[name], comparison.classification)
    return f"{words} %" if comparison.classification else words


def with_deviation(mean: float, deviation: float, percent: bool) -> str:
    """Write mean ± deviation, with as many digits, or the mean alone where there is no deviation."""
    form, factor = (".1f", 100) if percent else (digits(mean), 1)
    first = f"{factor * mean:{form}}"
    return first if math.isnan(deviation) else f"{first} ± {factor * deviation:{form}}"


def digits(value: float) -> str:
    """Return a format with three digits behind the point, or powers of ten where they would say nothing."""
    return ".3f" if value == 0 or 1e-2 <= abs(value) < 1e3 else ".1e"


GAP = 2
LABEL = 30  # a longer one may be broken into lines


class TableColumn(NamedTuple):
    """One column."""

    heading: tuple[str, str]  # two lines
    keep: int  # columns with the smallest are left out first where the screen is narrow
    cell: Callable[[MethodSummary], str]  # the text of a method
    # the number behind it, for the best to be bold; `None` where there is no best
    value: Callable[[MethodSummary], float] | None = None
    sign: int = -1  # 1 where larger is better, −1 where smaller is


def columns(comparison: Comparison) -> list[TableColumn]:
    """Return all columns, in the order in which they are shown."""
    main = "accuracy" if comparison.classification else "loss"
    measures = [
        (main, ("accuracy %" if main == "accuracy" else main, "worst 20 %"), "worst_20", 98),
        (main, ("", "mean"), "mean", 97),
        (main, ("", "best 20 %"), "best_20", 90),
        (main, ("", "sd"), "deviation", 60),
        (main, ("", "Gini"), "gini", 30),
    ]
    if comparison.classification:
        measures += [
            ("loss", ("loss", "worst 20 %"), "worst_20", 50),
            ("loss", ("", "mean"), "mean", 40),
        ]
    return [
        TableColumn(("", "method"), 99, lambda row: row.method),
        *(_measure(*measure) for measure in measures),
        TableColumn(
            ("", "J"), 95, lambda row: "–" if row.local_steps is None else str(row.local_steps)
        ),
        TableColumn(
            ("", "batch"), 94, lambda row: "all" if row.batch_size is None else str(row.batch_size)
        ),
        _cost(("ex-", "changes"), lambda row: row.mean["exchanges"], 93),
        _cost(
            ("", "MB"),
            lambda row: (row.mean["bytes_up"] + row.mean["bytes_down"]) / 1e6,
            92,
            digits=2,
        ),
        _cost(("", "seconds"), lambda row: row.mean["seconds"], 20, digits=1),
    ]


def _measure(kind: str, heading: tuple[str, str], measure: str, keep: int) -> TableColumn:
    name = f"test_{kind}_{measure}"
    percent = kind == "accuracy" and measure != "gini"
    larger = percent and measure != "deviation"
    return TableColumn(
        heading,
        keep,
        lambda row: with_deviation(row.mean[name], row.deviation[name], percent),
        lambda row: row.mean[name],
        1 if larger else -1,
    )


def _cost(
    heading: tuple[str, str], value: Callable[[MethodSummary], float], keep: int, digits: int = 0
) -> TableColumn:
    def cell(row: MethodSummary) -> str:
        number = value(row)
        if digits and 0 < number < 10**-digits / 2:
            return f"{number:.0e}"
        return f"{number:.{digits if number < 10 else min(digits, 1)}f}"

    return TableColumn(heading, keep, cell, value)


def fitting(comparison: Comparison, width: int) -> tuple[list[TableColumn], list[MethodSummary]]:
    """Return the columns that fit, and the lines that are ranked."""
    lines = [line for line in comparison.table if not line.failures]
    chosen = columns(comparison)
    while len(chosen) > 3:
        texts = ([*column.heading, *(column.cell(line) for line in lines)] for column in chosen)
        first, *others = (max(map(len, cells)) + GAP for cells in texts)
        if min(first - GAP, LABEL) + sum(others) <= width:
            break
        chosen.remove(min(chosen, key=lambda column: column.keep))
    return chosen, lines


def best_text(column: TableColumn, lines: list[MethodSummary]) -> str | None:
    """Return the text of the best cell: whatever looks the same is as good."""
    if column.value is None or not lines:
        return None
    value = column.value
    return column.cell(max(lines, key=lambda line: column.sign * value(line)))


def rich_table(comparison: Comparison, width: int) -> Iterator[Any]:
    """Yield a Rich table and its caption."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    chosen, lines = fitting(comparison, width)
    padding = (0, GAP - 1, 0, 0)  # the box adds a blank between columns
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for i, column in enumerate(chosen):
        table.add_column("\n".join(column.heading), justify="right" if i else "left", no_wrap=i > 0)
    best = [best_text(column, lines) for column in chosen]
    for line in lines:
        cells = [(column.cell(line), text) for column, text in zip(chosen, best, strict=True)]
        table.add_row(*(Text(cell, style="bold" if cell == text else "") for cell, text in cells))
    if lines:
        yield table
        yield ""
    yield from (Text(sentence) for sentence in caption(comparison, {c.heading[1] for c in chosen}))


@dataclass(frozen=True)
class MethodSummary:
    """One method over all seeds."""

    method: str  # its label
    seeds: int  # how many seeds have a final model
    failures: (
        str  # why others have none; empty where all have one, and only then is the method ranked
    )
    local_steps: int | None  # as the method has them; `None` where it has no such thing
    batch_size: int | None  # samples per local gradient; `None` is all
    mean: dict[str, float]  # over those seeds, of every number of a final run
    deviation: dict[
        str, float
    ]  # their standard deviation (n − 1 in the denominator; NaN for a single seed)


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; `print` it, or pass it to a Rich console.

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
        return tuple(
            client_row(run.job.method, client, run.weights[i], run.scores, i)
            | {"seed": run.job.seed}
            for run in self.finals
            if run.scores
            for i, client in enumerate(run.scores["train"].names)
        )

    @cached_property
    def table(self) -> tuple[MethodSummary, ...]:
        """One line per method: first those that are ranked, by the worst 20 % on test rows, then those that failed."""
        lines = [self._line(label) for label in self.setting.methods]
        return tuple(sorted(lines, key=lambda line: (line.failures != "", *self._rank(line))))

    def line(self, label: str) -> MethodSummary:
        """Return the line of one method."""
        for line in self.table:
            if line.method == label:
                return line
        raise unknown("method", label, self.setting.methods)

    def verdict(self, label: str) -> str:
        """Say whether a method's worst 20 % is the best, or within one standard deviation of the best."""
        return rank_sentence(self, self.line(label))

    @cached_property
    def classification(self) -> bool:
        """Return whether there are accuracies."""
        return any(
            not np.isnan(scores.accuracy).all()
            for run in self.runs
            for scores in run.scores.values()
        )

    @cached_property
    def clients(self) -> int:
        """N, the number of clients."""
        return max(
            (len(scores.names) for run in self.runs for scores in run.scores.values()), default=0
        )

    @property
    def measures(self) -> tuple[str, ...]:
        """The numbers over clients that final runs have."""
        kinds = ("accuracy", "loss") if self.classification else ("loss",)
        names = [name for name in MEASURES if not name.endswith("client")]
        return tuple(
            f"{split}_{kind}_{name}"
            for split in ("test", "train")
            for kind in kinds
            for name in names
        )

    @property
    def criterion(self) -> str:
        """The number that methods are ranked by."""
        return "test_accuracy_worst_20" if self.classification else "test_loss_worst_20"

    def _rank(self, line: MethodSummary) -> tuple[float, float]:
        sign = -1 if self.classification else 1
        first = self.criterion
        second = self.criterion.replace("worst_20", "mean")
        return sign * line.mean.get(first, np.inf), sign * line.mean.get(second, np.inf)

    def _line(self, label: str) -> MethodSummary:
        pairs = [
            (run, row)
            for run, row in zip(self.runs, self.rows, strict=True)
            if run.job.method == label
        ]
        finals = [(run, row) for run, row in pairs if run.job.phase == FINAL]
        good = [row for run, row in finals if not run.failed]
        values = {
            name: np.array([row[name] for row in good], dtype=np.float64)
            for name in (*COSTS, *self.measures)
        }
        method: Any = self.setting.methods[label]
        return MethodSummary(
            method=label,
            seeds=len(good),
            failures=_failures([run for run, _ in finals]),
            **{name: getattr(method, name, None) for name in WORK},
            mean={name: float(v.mean()) for name, v in values.items() if len(v)},
            deviation={
                name: float(v.std(ddof=1)) if len(v) > 1 else np.nan
                for name, v in values.items()
                if len(v)
            },
        )

    def to_csv(self, folder: str | os.PathLike[str]) -> None:
        """Write `runs.csv`, `clients.csv` and `table.csv` into a folder."""
        place = Path(folder)
        if not place.is_dir():
            raise InputError("folder-exist", f"The folder {str(place)!r} does not exist.")
        tables = {
            "runs": self.rows,
            "clients": self.client_rows,
            "table": [self._table_row(row) for row in self.table],
        }
        none = client_row("", "", 0, {}, 0) | {
            "seed": 0
        }  # of clients, where every method has failed
        for name, rows in tables.items():
            write_file(place / f"{name}.csv", csv_text(rows, list(rows[0] if rows else none)))

    def _table_row(self, line: MethodSummary) -> Row:
        row: Row = {"model": line.method} | {
            name: getattr(line, name) for name in ("seeds", "failures", *WORK)
        }
        for name in (*COSTS, *self.measures):
            row |= {f"{name}_mean": line.mean.get(name), f"{name}_sd": line.deviation.get(name)}
        return row

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((100, 24)).columns
        console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
        with console.capture() as shown:
            console.print(self)
        return "\n".join(line.rstrip() for line in shown.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        yield from rich_table(self, options.max_width)


def _failures(runs: Sequence[Run]) -> str:
    """Say what went wrong, and for how many seeds; return nothing where nothing did."""
    bad = [run for run in runs if run.failed]
    if not bad:
        return ""
    reason = (
        "It diverged with the rates that were chosen."
        if bad[0].status == Status.DIVERGED
        else bad[0].message
    )
    return reason if len(bad) == len(runs) else f"On {len(bad)} of {len(runs)} seeds: {reason}"
