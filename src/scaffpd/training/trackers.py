"""`TensorBoard` and `MLflow` track a run, round by round."""

from __future__ import annotations

import math
import os
import re
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scaffpd.errors import InputError, count, needed
from scaffpd.federation import ClientScores, Vector
from scaffpd.training.history import History
from scaffpd.training.loop import RoundInfo
from scaffpd.training.metrics import Summary

LONGEST = 120


def labels(names: Sequence[str]) -> list[str]:
    """Return a label per client; number later ones that would clash, also in file systems that
    ignore case.
    """
    taken: set[str] = set()
    found = []
    for name in names:
        plain = re.sub(r"[^\w.\- ]", "_", name)[:LONGEST].strip(" .") or "_"
        label = plain
        number = 2
        while label.casefold() in taken:
            label = f"{plain}-{number}"
            number = number + 1
        taken.add(label.casefold())
        found.append(label)
    return found


SCALARS = ("certificate", "exchanges", "bytes_up", "bytes_down", "absent", "seconds")


class Tracker(AbstractContextManager["Tracker"], ABC):
    """A callback that writes numbers by name and round, without changing the run.

    Numbers that are not finite (a certificate before there is one) are left out.
    """

    def __init__(self, cohort: Any, every: int) -> None:
        owner = type(self).__name__
        self.cohort, self.every = cohort, count(owner, "every", every)
        if cohort is not None and not hasattr(cohort, "evaluate"):
            raise InputError("cohort-cohort", f"{owner} needs a Cohort for cohort, got {cohort!r}.")
        if cohort is not None and not getattr(cohort, "tested", True):
            raise InputError(
                "scores-held-rows",
                f"{owner} scores held-out rows, and this cohort has none: pass `test=` when you make it.",
            )
        self._history: History | None = None
        self._rounds = 0
        self._labels: list[str] = []

    def __call__(self, info: RoundInfo) -> None:
        """Write the last round; before the first one, the starting point."""
        if info.history is not self._history:
            self._begin(info)
        history = info.history
        state = info.state
        if info.rounds == 1:
            self._try(0, self._row(history, 0, history.first_losses, history.first_weights))
        values = self._row(history, -1, state.losses, state.weights)
        if info.rounds % self.every == 0:
            if info.privacy is not None:
                spent = {"privacy/epsilon": info.privacy.worst, "privacy/delta": info.privacy.delta}
                values |= _finite(spent | self._by_client("epsilon", info.privacy.epsilon))
            values |= (
                {} if self.cohort is None else self._held_out(self.cohort.evaluate(state.x, "test"))
            )
        self._try(info.rounds, values)
        self._rounds = info.rounds

    def _begin(self, info: RoundInfo) -> None:
        if info.rounds == 1 and self._rounds > 0:
            raise InputError(
                "shown-another-run",
                f"This {type(self).__name__} has shown another run already: make one for every run.",
            )
        names = info.history.names
        self._labels = labels(names)
        changed = {
            label: name for label, name in zip(self._labels, names, strict=True) if label != name
        }
        self.open(0 if info.rounds == 1 else info.rounds, changed)
        self._history = info.history

    def _try(self, step: int, values: dict[str, float]) -> None:
        """Write a row, and only warn on failure: a tracker that fails later must not end a long
        run.
        """
        try:
            self.write(step, values)
        except (InputError, OSError) as error:
            warnings.warn(
                f"Round {step} is not shown, and the run goes on. {error}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _row(self, history: History, row: int, losses: Vector, weights: Vector) -> dict[str, float]:
        values = {name: float(history[name][row]) for name in SCALARS}
        values |= {"loss/worst": float(losses.max()), "loss/mean": float(losses.mean())}
        return _finite(
            values | self._by_client("loss", losses) | self._by_client("weight", weights)
        )

    def _held_out(self, scores: ClientScores) -> dict[str, float]:
        found = Summary.of(scores)
        values = {"held-out loss/worst": found.loss.worst, "held-out loss/mean": found.loss.mean}
        values |= self._by_client("held-out loss", scores.loss)
        if found.accuracy is not None:
            own = found.accuracy
            values |= {"held-out accuracy/worst": own.worst, "held-out accuracy/mean": own.mean}
            values |= {"held-out accuracy/worst 20 percent": own.worst_20}
            values |= self._by_client("held-out accuracy", scores.accuracy)
        return _finite(values)

    def _by_client(self, what: str, values: Vector) -> dict[str, float]:
        return {
            f"{what} by client/{label}": float(v)
            for label, v in zip(self._labels, values, strict=True)
        }

    @abstractmethod
    def open(self, first: int, changed: dict[str, str]) -> None:
        """Prepare for a run that starts at row `first`; `changed` maps labels to clients' names."""

    @abstractmethod
    def write(self, step: int, values: dict[str, float]) -> None:
        """Write numbers durably, in case this process is killed next."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Close the tracker."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


class TensorBoard(Tracker):
    """Losses, weights and held-out scores of every client, certificate, bytes and seconds, round by
    round.

    A run that resumes from a checkpoint continues in the same folder, and repeated rounds replace
    the earlier ones. A new run in an old folder replaces the old one on the board; the old files
    stay.

    Args:
        folder: where the event files go.
        cohort: whose held-out rows are to be scored; without one, what the run knows anyway is all
            that is shown.
        every: score them, and count what private clients have spent, every so many rounds.
    """

    def __init__(self, folder: str | os.PathLike[str], cohort: Any = None, every: int = 1) -> None:
        super().__init__(cohort, every)
        self._make = needed("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        try:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        except (TypeError, OSError) as error:
            reason = getattr(error, "strerror", None) or "a path is expected"
            raise InputError(
                "tensorboard-write", f"TensorBoard cannot write into {folder!r}: {reason}."
            ) from None
        self._writer: Any = None
        self._end: Any = None

    def open(self, first: int, changed: dict[str, str]) -> None:
        """Open a new file, which hides earlier rows from `first` on."""
        self.close()
        self._writer = self._make(os.fspath(self.folder), purge_step=first)
        self._end = weakref.finalize(
            self, self._writer.close
        )  # completes the file even if `close` is never called
        if changed:
            shown = {
                label: " ".join(name.replace("|", "\\|").split()) for label, name in changed.items()
            }
            lines = [f"| {label} | {name} |" for label, name in shown.items()]
            self._writer.add_text(
                "clients", "\n".join(["| shown as | name |", "|---|---|", *lines]), first
            )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one scalar each, and flush them to the disk."""
        for name, value in values.items():
            self._writer.add_scalar(
                name, value, step
            )  # single precision: the board's fast reader skips doubles
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        """Close the file; a later round opens another."""
        if self._end is not None:
            self._end()
        self._writer = self._end = self._history = None


# the most in one request to MLflow
METRICS = 1000
TAGS = 100


class MLflow(Tracker):
    """Losses, weights and held-out scores of every client, certificate, bytes and seconds, round by
    round.

    Inside `with mlflow.start_run():` the numbers go to that run, which its owner ends. Otherwise
    the tracker makes a run, and ends it on `close` or when it is deleted.

    Args:
        experiment: the experiment of a new run; made where it is missing.
        run_name: the name of a new run; by default MLflow's choice.
        run_id: an earlier run to continue, for runs that resume from a checkpoint; see
            `tracker.run_id`.
        tracking_uri: where MLflow stores its runs; by default MLflow's own setting.
        cohort: whose held-out rows are to be scored; without one, what the run knows anyway is all
            that is shown.
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
        self._mlflow = needed("mlflow", "mlflow", "mlflow")
        self.experiment = experiment
        self.run_name = run_name
        self.run_id = run_id
        self._client = self._asked(lambda: self._mlflow.MlflowClient(tracking_uri))
        if run_id is not None:
            self._asked(lambda: self._client.get_run(run_id))
        self._elsewhere = tracking_uri is not None
        self._end: Any = None
        self._last = -1

    def open(self, first: int, changed: dict[str, str]) -> None:
        """Choose the run: the named one, the open one, or a new one."""
        active = None if self._elsewhere else self._mlflow.active_run()
        if active is not None and self.run_id in (None, active.info.run_id):
            self.run_id = active.info.run_id
        elif self._end is None:
            self.run_id = self._asked(self._start)
            self._end = weakref.finalize(self, _terminate, self._client, self.run_id)
        self._last = self._asked(self._last_step) if first > 0 else -1
        tags = [
            self._mlflow.entities.RunTag(f"client {label}", name) for label, name in changed.items()
        ]
        for some in _batches(tags, TAGS):
            self._asked(partial(self._client.log_batch, self.run_id, tags=some))

    def _start(self) -> str:
        if self.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            return self.run_id
        found = self._client.get_experiment_by_name(self.experiment)
        where = (
            self._client.create_experiment(self.experiment)
            if found is None
            else found.experiment_id
        )
        return str(self._client.create_run(where, run_name=self.run_name).info.run_id)

    def _last_step(self) -> int:
        """Return the last round that the run has: one that is made a second time is not written
        again.
        """
        return max(
            (known.step for known in self._client.get_metric_history(self.run_id, "exchanges")),
            default=-1,
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers to MLflow and wait until it has them."""
        if step <= self._last:
            return
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()
        ]
        for some in _batches(metrics, METRICS):
            self._asked(partial(self._client.log_batch, self.run_id, metrics=some))

    def close(self, failed: bool = False) -> None:
        """End the run if this tracker made it."""
        if self._end is not None and self._end.detach() is not None:
            self._asked(
                lambda: self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
            )
        self._end = self._history = None

    def _asked(self, question: Callable[[], Any]) -> Any:
        """Ask MLflow, and turn its refusal into a sentence."""
        try:
            return question()
        except self._mlflow.exceptions.MlflowException as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise InputError(
                "mlflow-used-like", f"MLflow cannot be used like this: {reason}."
            ) from None


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _terminate(client: Any, run_id: str) -> None:
    """End a run whose tracker was deleted; ignore errors."""
    with suppress(Exception):
        client.set_terminated(run_id)
