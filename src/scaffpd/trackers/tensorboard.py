"""`TensorBoard`: a run as event files that `tensorboard --logdir` shows."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError
from scaffpd.trackers.tracker import Tracker, needed


class TensorBoard(Tracker):
    """Losses, weights and held-out scores of every client, certificate, bytes and seconds, round by round.

    A run that goes on from a checkpoint goes on in the same folder: rounds that are made a second time replace the
    first. A run that starts anew in an old folder replaces the old one on the screen; its files stay.

    Args:
        folder: where the event files go.
        cohort: whose held-out rows are to be scored; without one, what the run knows anyway is all that is shown.
        every: score them, and count what private clients have spent, every so many rounds.
    """

    def __init__(self, folder: str | os.PathLike[str], cohort: Any = None, every: int = 1) -> None:
        super().__init__(cohort, every)
        self._make = needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        try:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        except (TypeError, OSError) as error:
            reason = getattr(error, "strerror", None) or "a path is expected"
            raise InputError(f"TensorBoard cannot write into {folder!r}: {reason}.") from None
        self._writer: Any = None
        self._end: Any = None

    def open(self, first: int, changed: dict[str, str]) -> None:
        """A new file, which hides earlier rows from `first` on."""
        self.close()
        self._writer = self._make(os.fspath(self.folder), purge_step=first)
        self._end = weakref.finalize(self, self._writer.close)  # also where nobody closes: files end whole
        if changed:
            lines = [f"| {label} | {_cell(name)} |" for label, name in changed.items()]
            self._writer.add_text("clients", "\n".join(["| shown as | name |", "|---|---|", *lines]), first)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One scalar each, and on the disk."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # single precision: the board's fast reader skips doubles
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        """Close the file; a round that comes later opens another."""
        if self._end is not None:
            self._end()
        self._writer = self._end = self._history = None


def _cell(name: str) -> str:
    """A name in a cell of a Markdown table."""
    return " ".join(name.replace("|", "\\|").split())
