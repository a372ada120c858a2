"""Progress bars of runs and of rounds, on standard error; plain lines where rich is missing."""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

from scaffpd.federation import Vector

if TYPE_CHECKING:
    from rich import progress


class Tally(AbstractContextManager["Tally"]):
    """Progress bar that counts runs; silent without a terminal.

    If the output is not a terminal but a bar was requested, the last state is printed as a line.
    """

    def __init__(self, wanted: bool | None, total: int, what: str = "run") -> None:
        self.shown = sys.stderr.isatty() if wanted is None else wanted
        self.what = what
        self.total = total
        self.done = 0
        self.text = "starting"
        self.bar = _bar(what, total) if self.shown and find_spec("rich") else None

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.shown:
            sys.stderr.write(f"{self.what} {self.done}/{self.total}  {self.text}\n")

    def advance(self, text: str) -> None:
        """Redraw after one more run, which was of `text`."""
        self.redraw(self.done + 1, text)

    def redraw(self, done: int, text: str) -> None:
        """Show how many are done, and what is to say about them."""
        self.done, self.text = done, text
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, description=text)


def _bar(what: str, total: int) -> progress.Progress:
    from rich import console, progress

    # of rounds, how many it will take is not known
    time = progress.TimeRemainingColumn() if what == "run" else progress.TimeElapsedColumn()
    columns = (
        progress.TextColumn(f"{what} {{task.completed}}/{{task.total}}"),
        progress.BarColumn(bar_width=24),
        time,
        progress.TextColumn("{task.description}"),
    )
    bar = progress.Progress(*columns, console=console.Console(stderr=True))
    bar.add_task("starting", total=total)
    return bar


class Progress(Tally):
    """Progress bar of rounds, with the certificate on its way to tol."""

    def __init__(self, wanted: bool | None, rounds: int, tol: float | None) -> None:
        super().__init__(wanted, rounds, "round")
        self.tol = tol

    def show(self, rounds: int, certificate: float, losses: Vector) -> None:
        goal = "" if self.tol is None else f" → {self.tol:.0e}"
        text = f"gap ≤ {certificate:.1e}{goal}"
        worst = float(losses.max())
        if not math.isnan(worst):  # it is, if losses were not computed after this round
            text += f"  worst loss {worst:.4g}"
        self.redraw(rounds, text)
