"""Progress bars of runs and of rounds, on standard error."""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager
from typing import Self

from rich import console, progress

from scaffpd.federation import Vector


class Tally(AbstractContextManager["Tally"]):
    """Progress bar that counts runs; silent without a terminal.

    If the output is not a terminal but a bar was requested, Rich prints its last state as a line.
    """

    def __init__(self, wanted: bool | None, total: int, what: str = "run") -> None:
        shown = sys.stderr.isatty() if wanted is None else wanted
        columns = (
            progress.TextColumn(f"{what} {{task.completed}}/{{task.total}}"),
            progress.BarColumn(bar_width=24),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}"),
        )
        self.bar = progress.Progress(
            *columns, console=console.Console(stderr=True), disable=not shown
        )
        self.task = self.bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def advance(self, text: str) -> None:
        """Redraw after one more run, which was of `text`."""
        self.bar.update(self.task, advance=1, description=text)


class Progress(Tally):
    """Progress bar of rounds, with the certificate on its way to tol."""

    def __init__(self, wanted: bool | None, rounds: int, tol: float | None) -> None:
        super().__init__(wanted, rounds, "round")
        self.tol = tol

    def show(self, rounds: int, certificate: float, losses: Vector) -> None:
        """Redraw after a round."""
        goal = "" if self.tol is None else f" → {self.tol:.0e}"
        text = f"gap ≤ {certificate:.1e}{goal}"
        worst = float(losses.max())
        if not math.isnan(worst):  # it is, if losses were not computed after this round
            text += f"  worst loss {worst:.4g}"
        self.bar.update(self.task, completed=rounds, description=text)
