"""`TensorBoard` and `MLflow`: where a run is shown."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
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


METRICS, TAGS = 1000, 100  # the most that MLflow takes in one request


class MLflow(Tracker):
    """Losses, weights and held-out scores of every client, certificate, bytes and seconds, round by round.

    Inside `with mlflow.start_run():` the numbers go to that run, which its owner ends. Elsewhere a run is made, and
    ended by `close` or when the tracker is gone.

    Args:
        experiment: the experiment of a new run; made where it is missing.
        run_name: the name of a new run; MLflow thinks of one by default.
        run_id: an earlier run to go on with, for runs that go on from a checkpoint; `tracker.run_id` says which it was.
        tracking_uri: where MLflow keeps its runs; by default where MLflow is set to.
        cohort: whose held-out rows are to be scored; without one, what the run knows anyway is all that is shown.
        every: score them, and count what private clients have spent, every so many rounds.
    """

    def __init__(
        self,
        experiment: str = "scaffpd",
        run_name: str | None = None,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        cohort: Any = None,
        every: int = 1,
    ) -> None:
        super().__init__(cohort, every)
        self._mlflow = needed("mlflow", "mlflow")
        self.experiment, self.run_name, self.run_id = experiment, run_name, run_id
        self._client = self._asked(lambda: self._mlflow.MlflowClient(tracking_uri))
        if run_id is not None:
            self._asked(lambda: self._client.get_run(run_id))
        self._elsewhere = tracking_uri is not None
        self._end: Any = None
        self._last = -1

    def open(self, first: int, changed: dict[str, str]) -> None:
        """Choose the run: the one that was named, the one that is open, or a new one."""
        active = None if self._elsewhere else self._mlflow.active_run()
        if active is not None and self.run_id in (None, active.info.run_id):
            self.run_id = active.info.run_id
        elif self._end is None:
            self.run_id = self._asked(self._start)
            self._end = weakref.finalize(self, _terminate, self._client, self.run_id)
        self._last = self._asked(self._last_step) if first > 0 else -1
        tags = [self._mlflow.entities.RunTag(f"client {label}", name) for label, name in changed.items()]
        for some in _batches(tags, TAGS):
            self._asked(partial(self._client.log_batch, self.run_id, tags=some))

    def _start(self) -> str:
        if self.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            return self.run_id
        found = self._client.get_experiment_by_name(self.experiment)
        where = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        return str(self._client.create_run(where, run_name=self.run_name).info.run_id)

    def _last_step(self) -> int:
        """The last round that the run has: one that is made a second time is not written again."""
        return max((known.step for known in self._client.get_metric_history(self.run_id, "exchanges")), default=-1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hand the numbers to MLflow, and wait until it has them."""
        if step <= self._last:
            return
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        for some in _batches(metrics, METRICS):
            self._asked(partial(self._client.log_batch, self.run_id, metrics=some))

    def close(self, failed: bool = False) -> None:
        """End the run, if it was made here."""
        if self._end is not None and self._end.detach() is not None:
            self._asked(lambda: self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED"))
        self._end = self._history = None

    def _asked(self, question: Callable[[], Any]) -> Any:
        """MLflow's answer, or its refusal in a sentence."""
        try:
            return question()
        except self._mlflow.exceptions.MlflowException as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise InputError(f"MLflow cannot be used like this: {reason}.") from None


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _terminate(client: Any, run_id: str) -> None:
    """End a run whose tracker is gone; nobody is left to hear of a mistake."""
    with suppress(Exception):
        client.set_terminated(run_id)
