"""`TensorBoard` and `MLflow` track a run round by round: callbacks of `train`."""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from scaffpd.errors import InputError, needed
from scaffpd.federation import Vector
from scaffpd.files import make_folder
from scaffpd.training.history import History
from scaffpd.training.loop import RoundInfo

LONGEST = 120


def labels(names: Sequence[str]) -> list[str]:
    """Return a label per client; number those that would clash, also in files without case."""
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


SCALARS = ("certificate", "exchanges", "bytes_up", "bytes_down", "seconds")


class Tracker(AbstractContextManager["Tracker"]):
    """A callback that writes numbers by name and round, without changing the run.

    Numbers that are not finite (a certificate before there is one) are left out.
    """

    def __init__(self) -> None:
        self._history: History | None = None
        self._labels: list[str] = []

    def __call__(self, info: RoundInfo) -> None:
        """Write the last round; before the first one, the starting point."""
        history = info.history
        if history is not self._history:
            if self._history is not None:
                raise InputError(
                    "tracker-used-twice",
                    f"This {type(self).__name__} has already logged another run: make one for "
                    "every run.",
                )
            self._labels = labels(history.names)
            self.open(0 if info.rounds == 1 else info.rounds)
            self._history = history
        if info.rounds == 1:
            self._try(0, self._row(history, 0, history.first_losses, history.first_weights))
        values = self._row(history, -1, info.state.losses, info.state.weights)
        spent = info.privacy
        if spent is not None:
            values |= {"privacy/epsilon": spent.worst, "privacy/delta": spent.delta}
            values |= self._by_client("epsilon", spent.epsilon)
        self._try(info.rounds, values)

    def _try(self, step: int, values: dict[str, float]) -> None:
        """Write a row, and only warn on failure: a full disk must not end a long run."""
        try:
            self.write(step, {name: v for name, v in values.items() if math.isfinite(v)})
        except Exception as error:  # whatever a library raises
            text = f"Round {step} is not shown, and the run goes on. {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _row(self, history: History, row: int, losses: Vector, weights: Vector) -> dict[str, float]:
        values = {name: float(history[name][row]) for name in SCALARS}
        values |= {"loss/worst": float(losses.max()), "loss/mean": float(losses.mean())}
        return values | self._by_client("loss", losses) | self._by_client("weight", weights)

    def _by_client(self, what: str, values: Vector) -> dict[str, float]:
        named = zip(self._labels, values, strict=True)
        return {f"{what} by client/{label}": float(value) for label, value in named}

    def open(self, first: int) -> None:
        """Prepare for a run that starts at row `first`."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write numbers durably, in case this process is killed next."""
        raise NotImplementedError

    def close(self, failed: bool = False) -> None:
        """Close the tracker."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class TensorBoard(Tracker):
    """Losses and weights of every client, certificate, bytes and seconds, round by round.

    A run that resumes from a checkpoint continues in the same folder, and repeated rounds replace
    the earlier ones. A new run in an old folder replaces the old one on the board; the old files
    stay.

    Args:
        folder: where the event files go.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._make = needed("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self.folder = make_folder(Path(folder))

    def open(self, first: int) -> None:
        """Open a new file, which hides earlier rows from `first` on."""
        self._writer = self._make(os.fspath(self.folder), purge_step=first)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one scalar each, and flush them to the disk."""
        for name, value in values.items():
            # single precision: the board's fast reader skips doubles
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        if self._history is not None:
            self._writer.close()


class MLflow(Tracker):
    """Losses and weights of every client, certificate, bytes and seconds, round by round.

    Inside `with mlflow.start_run():` the numbers go to that run, which its owner ends. Otherwise
    the tracker makes a run, and ends it on `close`.

    Args:
        experiment: the experiment of a new run; made where it is missing.
        run_name: the name of a new run; by default MLflow's choice.
        run_id: an earlier run to continue, for runs that resume from a checkpoint; see
            `tracker.run_id`.
        tracking_uri: where MLflow stores its runs; by default MLflow's own setting.
    """

    def __init__(
        self,
        experiment: str = "scaffpd",
        run_name: str | None = None,
        run_id: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__()
        self._mlflow = needed("mlflow", "mlflow", "mlflow")
        self.experiment = experiment
        self.run_name = run_name
        self.run_id = run_id
        self._client = self._mlflow.MlflowClient(tracking_uri)
        self._elsewhere = tracking_uri is not None
        self._ours = False  # whether this tracker ends the run
        self._last = -1

    def open(self, first: int) -> None:
        """Choose the run: the named one, the open one, or a new one."""
        active = None if self._elsewhere else self._mlflow.active_run()
        if active is not None and self.run_id in (None, active.info.run_id):
            self.run_id = active.info.run_id
        else:
            self.run_id = self._start()
            self._ours = True
        if first > 0:  # rounds that the run has already are not written again
            known = self._client.get_metric_history(self.run_id, "exchanges")
            self._last = max((metric.step for metric in known), default=-1)

    def _start(self) -> str:
        if self.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            return self.run_id
        found = self._client.get_experiment_by_name(self.experiment)
        where = found.experiment_id if found else self._client.create_experiment(self.experiment)
        return str(self._client.create_run(where, run_name=self.run_name).info.run_id)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers to MLflow and wait until it has them."""
        if step <= self._last:
            return
        now = int(time.time() * 1000)
        make = self._mlflow.entities.Metric
        metrics = [make(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, failed: bool = False) -> None:
        """End the run if this tracker made it."""
        if self._ours:
            status = "FAILED" if failed else "FINISHED"
            self._client.set_terminated(self.run_id, status)
        self._ours = False
