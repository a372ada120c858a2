"""A progress bar on standard error, where a person is looking."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any


class Progress(AbstractContextManager["Progress"]):
    """Rounds done and the certificate on its way to tol; nothing at all where nobody looks or Rich is missing.

    Where the output is no terminal but a bar was asked for, Rich prints its last state as one plain line.
    """

    def __init__(self, wanted: bool | None, rounds: int, tol: float | None) -> None:
        self.tol, self.bar, self.task = tol, _bar("round") if _wanted(wanted) else None, None
        if self.bar is not None:
            self.task = self.bar.add_task("starting", total=rounds)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, moment: Any) -> None:
        """Redraw after a round."""
        if self.bar is None:
            return
        state = moment.state
        goal = "" if self.tol is None else f" → {self.tol:.0e}"
        text = f"gap ≤ {state.certificate:.1e}{goal}  worst loss {state.losses.max():.4g}"
        self.bar.update(self.task, completed=moment.rounds, description=text)


class Tally(AbstractContextManager["Tally"]):
    """Runs, or whatever else is counted, done out of all; nothing at all where nobody looks or Rich is missing."""

    def __init__(self, wanted: bool | None, total: int, what: str = "run") -> None:
        self.bar = _bar(what) if _wanted(wanted) else None
        self.task = None if self.bar is None else self.bar.add_task("starting", total=total)

    def __enter__(self) -> Tally:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def expect(self, runs: int) -> None:
        """So many more than was said at first."""
        if self.bar is not None:
            self.bar.update(self.task, total=self.bar.tasks[0].total + runs)

    def advance(self, text: str, runs: int = 1) -> None:
        """Redraw after so many more runs, the last of which was of `text`."""
        if self.bar is not None:
            self.bar.update(self.task, advance=runs, description=text)


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
