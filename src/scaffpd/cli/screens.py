"""Output of commands: prose, lists, tables, and the rounds of a running job."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from threading import Event, Thread
from typing import TYPE_CHECKING, Self

from scaffpd.numbers import seconds
from scaffpd.phases import hear

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from scaffpd.fields import Json
    from scaffpd.training.loop import RoundInfo

WIDEST = 100  # columns: longer lines of prose are hard to read
LINES = 25  # of a run's result
MOST = 12  # rows of a table whose others are in a file
PAUSE = 10.0  # seconds between two plain lines


def terminal(errors: bool = False, quiet: bool = False) -> Console:
    """Return what is printed on; rich is loaded here, and not for `--help`."""
    from rich.console import Console

    return Console(stderr=errors, quiet=quiet, highlight=False)


def say(console: Console, *lines: str) -> None:
    for line in filter(None, lines):
        console.print(line, markup=False, width=min(console.width, WIDEST))


def section(console: Console, title: str | None, *lines: str) -> None:
    console.print()
    if title is not None:
        console.print(title, style="bold", markup=False)
    say(console, *lines)


def facts(console: Console, lines: Mapping[str, str | Text]) -> None:
    _grid(console, list(lines.items()), gap=2)


def bullets(console: Console, lines: Sequence[str]) -> None:
    _grid(console, [("-", printable(line)) for line in lines], gap=1)


def _grid(console: Console, rows: Sequence[tuple[str, str | Text]], gap: int) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, gap, 0, 0))
    grid.add_column(no_wrap=True)
    for name, text in rows:
        grid.add_row(Text(name), Text(text) if isinstance(text, str) else text)
    console.print(grid, width=min(console.width, WIDEST))


def printable(text: str) -> Text:
    """Return text from a file without what could steer a terminal."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in text))


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[Text | str]],
    file: str = "",
    most: int = MOST,
) -> None:
    """Print a table without walls: names on the left, numbers flush right.

    A name that does not fit beside the numbers is cut, never broken. Of many rows, the first and
    the last are shown where the others are in a `file`.
    """
    from rich import box
    from rich.table import Table

    gap = 1 if console.width < WIDEST else 2
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column(heads[0], no_wrap=True, overflow="ellipsis", min_width=12)
    for name in heads[1:]:
        width = max(map(len, name.splitlines()), default=0)
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    shown = rows
    if file and len(rows) > most + 2:  # a line says so
        half = max(most // 2, 1)
        table.caption = f"the first and last {half} of {len(rows)}; all are in {file}"
        shown = [*rows[:half], *rows[-half:]]
    for row in shown:
        table.add_row(printable(str(row[0])), *row[1:])
    console.print(table)


class RoundsScreen:
    """What a run is doing: a phase with the share that is done, and the rounds of training.

    A terminal has one line that changes, with a bar and the time left; a pipe has a line every
    `pause` seconds. Both are on standard error (`errors`): standard output has the result alone.
    """

    def __init__(self, quiet: bool = False, errors: bool = True, pause: float = PAUSE) -> None:
        from rich import progress

        self.console = terminal(errors, quiet)
        live = self.console.is_terminal and not quiet
        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        )
        self.bar = progress.Progress(
            *columns, console=self.console, transient=True, disable=not live
        )
        self.pause = pause
        self.over = Event()
        self.done = 0.0
        self.last = ""  # what was shown last
        self.knows = False  # whether the phase says how much of it is done
        self.said = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        hear(self.within)
        if self.bar.disable and not self.console.quiet and self.pause:
            Thread(target=self._ticking, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        hear(None)
        self.over.set()
        self.bar.stop()

    def _ticking(self) -> None:
        """Say what is under way in a long phase that says nothing itself."""
        while not self.over.wait(self.pause / 4):
            if self.last and time.monotonic() - self.said >= self.pause:
                self._tell()

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)
        self.said = time.monotonic()

    def phase(self, text: str, done: float = 0.0) -> None:
        """Show what is under way, and which share of it is done; 0 begins anew."""
        self.knows = done > 0.0
        self._show(text, done)

    def within(self, text: str, done: float) -> None:
        """Show a step of a phase that does not know its own share."""
        if not self.knows:
            self._show(text, 0.0 if text != self.last else done)

    def _show(self, text: str, done: float) -> None:
        tasks = self.bar.task_ids
        if self.done == 0.0:  # how long people took to begin tells nothing
            self.began = time.monotonic()
            self.base = done
        if done == 0.0 or not tasks:
            for task in tasks:
                self.bar.remove_task(task)
            tasks = [self.bar.add_task(text, total=None)]
        self.bar.update(tasks[0], description=text, completed=done, total=1.0 if done else None)
        self.last, self.done = text, done
        if self.bar.disable and time.monotonic() - self.said >= self.pause:
            self._tell()

    def _tell(self) -> None:
        left = ""
        spent = time.monotonic() - self.began
        if spent > 1.0 and self.base < self.done < 1:  # rounds may arrive together
            left = f", about {seconds(spent * (1 - self.done) / (self.done - self.base))} left"
        self.say(f"{self.last}{left}")

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        self.model = model
        self.names = tuple(names)
        self.rounds = rounds
        self.tol = tol
        self.first = math.inf  # the first certified gap
        self.phase(f"Training {model}".strip())

    def show(self, info: RoundInfo) -> None:
        gap = float(info.state.certificate)
        proven = gap if math.isfinite(gap) else None
        losses = info.state.losses.tolist()
        self.watch({"round": info.rounds, "certificate": proven, "losses": losses})

    def watch(self, line: Json) -> None:
        """Show a line of a run's progress: a round, or something that happened to a silo."""
        if "event" in line:
            self.say(f"round {line['event']['round']}: {line['event']['sentence']}")
            return
        gap = line["certificate"]
        wanted = "" if self.tol is None else f" of {self.tol:.0e} wanted"
        proven = "no certificate" if gap is None else f"certified gap {gap:.1e}{wanted}"
        losses = line["losses"]
        loss = ""
        if not any(one is None or math.isnan(one) for one in losses):
            worst, name = max(zip(losses, self.names, strict=True), key=itemgetter(0))
            loss = f"  loss: mean {sum(losses) / len(losses):.4f}, worst {worst:.4f} ({name})"
        title = f"{self.model} round {line['round']}".strip()
        self.phase(f"{title}  {proven}{loss}", self._share(line["round"], gap))
        self.knows = False  # what comes next may not

    def _share(self, done: int, gap: float | None) -> float:
        """Return how much of the way is done: in digits of the gap, or in rounds."""
        share = done / self.rounds
        if gap is not None and self.tol:
            self.first = self.first if math.isfinite(self.first) else gap
            ahead = math.log(max(self.first, self.tol) / self.tol)
            share = max(share, 1 - math.log(max(gap, self.tol) / self.tol) / ahead if ahead else 1)
        return min(max(share, 1e-3), 1.0)
