"""What every tracker shows of a run, and when."""

from __future__ import annotations

import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import Any, Self

import numpy as np

from scaffpd.errors import InputError, count, not_installed
from scaffpd.federation import ClientScores, Vector
from scaffpd.history import History
from scaffpd.metrics import a_fifth
from scaffpd.privacy import Spent
from scaffpd.training import RoundInfo

LONGEST = 120


def labels(names: Sequence[str]) -> list[str]:
    """A label for every client; where two would be alike (also in folders that ignore case), the later is numbered."""
    taken: set[str] = set()
    found = []
    for name in names:
        plain = re.sub(r"[^\w.\- ]", "_", name)[:LONGEST].strip(" .") or "_"
        label, number = plain, 2
        while label.casefold() in taken:
            label, number = f"{plain}-{number}", number + 1
        taken.add(label.casefold())
        found.append(label)
    return found


SCALARS = ("certificate", "exchanges", "bytes_up", "bytes_down", "absent", "seconds")


class Tracker(AbstractContextManager["Tracker"], ABC):
    """A callback that writes numbers by name and round. It reads a run and changes nothing in it.

    What is not finite is left out (a certificate before there is one).
    """

    def __init__(self, cohort: Any, every: int) -> None:
        owner = type(self).__name__
        self.cohort, self.every = cohort, count(owner, "every", every)
        if cohort is not None and not hasattr(cohort, "evaluate"):
            raise InputError(f"{owner} needs a Cohort for cohort, got {cohort!r}.")
        if cohort is not None and not getattr(cohort, "tested", True):
            raise InputError(f"{owner} scores held-out rows, and this cohort has none: pass `test=` when you make it.")
        self._history: History | None = None
        self._rounds = 0
        self._labels: list[str] = []

    def __call__(self, moment: RoundInfo) -> None:
        """Write the round that is done; before the first one, the starting point."""
        if moment.history is not self._history:
            self._begin(moment)
        history, state = moment.history, moment.state
        if moment.rounds == 1:
            self._try(0, self._row(history, 0, history.first_losses, history.weights[0]))
        values = self._row(history, -1, state.losses, state.weights)
        if moment.rounds % self.every == 0:
            values |= {} if moment.privacy is None else self._spent(moment.privacy)
            values |= {} if self.cohort is None else self._held_out(self.cohort.evaluate(state.x, "test"))
        self._try(moment.rounds, values)
        self._rounds = moment.rounds

    def _begin(self, moment: RoundInfo) -> None:
        if moment.rounds == 1 and self._rounds > 0:
            raise InputError(f"This {type(self).__name__} has shown another run already: make one for every run.")
        names = moment.history.names
        self._labels = labels(names)
        changed = {label: name for label, name in zip(self._labels, names, strict=True) if label != name}
        self.open(0 if moment.rounds == 1 else moment.rounds, changed)
        self._history = moment.history

    def _try(self, step: int, values: dict[str, float]) -> None:
        """A tracker that fails after it has been opened is no reason to end a long run."""
        try:
            self.write(step, values)
        except (InputError, OSError) as error:
            warnings.warn(f"Round {step} is not shown, and the run goes on. {error}", RuntimeWarning, stacklevel=4)

    def _row(self, history: History, row: int, losses: Vector, weights: Vector) -> dict[str, float]:
        values = {name: float(history[name][row]) for name in SCALARS}
        values |= {"loss/worst": float(losses.max()), "loss/mean": float(losses.mean())}
        return _finite(values | self._by_client("loss", losses) | self._by_client("weight", weights))

    def _held_out(self, scores: ClientScores) -> dict[str, float]:
        values = {"held-out loss/worst": float(scores.loss.max()), "held-out loss/mean": float(scores.loss.mean())}
        values |= self._by_client("held-out loss", scores.loss)
        if not np.isnan(scores.accuracy).all():
            upwards = np.sort(scores.accuracy)
            values |= {
                "held-out accuracy/worst": float(upwards[0]),
                "held-out accuracy/worst 20 percent": float(upwards[: a_fifth(len(upwards))].mean()),
                "held-out accuracy/mean": float(upwards.mean()),
            } | self._by_client("held-out accuracy", scores.accuracy)
        return _finite(values)

    def _spent(self, spent: Spent) -> dict[str, float]:
        values = {"privacy/epsilon": spent.worst, "privacy/delta": spent.delta}
        return _finite(values | self._by_client("epsilon", spent.epsilon))

    def _by_client(self, what: str, values: Vector) -> dict[str, float]:
        return {f"{what} by client/{label}": float(v) for label, v in zip(self._labels, values, strict=True)}

    @abstractmethod
    def open(self, first: int, changed: dict[str, str]) -> None:
        """Be ready for a run whose first row to be shown is `first`; `changed` labels stand for other names."""

    @abstractmethod
    def write(self, step: int, values: dict[str, float]) -> None:
        """Write numbers so that they are there even if this process is killed next."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Nothing more comes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def needed(module: str, extra: str) -> Any:
    """A module of an extra, or a sentence where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise not_installed(extra, extra) from None


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
