"""A progress bar on standard error, where a person is looking."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, Self


class Tally(AbstractContextManager["Tally"]):
    """A bar of runs, or whatever else is counted; nothing at all where nobody looks or Rich is missing.

    Where the output is no terminal but a bar was asked for, Rich prints its last state as one plain line.
    """

    def __init__(self, wanted: bool | None, total: int, what: str = "run") -> None:
        self.bar = _bar(what) if _wanted(wanted) else None
        self.task = None if self.bar is None else self.bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def expect(self, runs: int) -> None:
        """Add so many to the total."""
        if self.bar is not None:
            self.bar.update(self.task, total=self.bar.tasks[0].total + runs)

    def advance(self, text: str, runs: int = 1) -> None:
        """Redraw after so many more runs, the last of which was of `text`."""
        if self.bar is not None:
            self.bar.update(self.task, advance=runs, description=text)


class Progress(Tally):
    """A bar of rounds, with the certificate on its way to tol."""

    def __init__(self, wanted: bool | None, rounds: int, tol: float | None) -> None:
        super().__init__(wanted, rounds, "round")
        self.tol = tol

    def show(self, moment: Any) -> None:
        """Redraw after a round."""
        if self.bar is None:
            return
        state = moment.state
        goal = "" if self.tol is None else f" → {self.tol:.0e}"
        text = f"gap ≤ {state.certificate:.1e}{goal}  worst loss {state.losses.max():.4g}"
        self.bar.update(self.task, completed=moment.rounds, description=text)


def _wanted(wanted: bool | None) -> bool:
    return sys.stderr.isatty() if wanted is None else wanted


def _bar(what: str) -> Any:
    try:
        from rich import console, progress
    except ImportError:
        return None
    columns = (
        progress.TextColumn(f"{what} {{task.completed}}/{{task.total}}"),
        progress.BarColumn(bar_width=24),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    return progress.Progress(*columns, console=console.Console(stderr=True))
