"""One run of a comparison, in this process or in a worker; the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import joblib
import numpy as np
import torch

from scaffpd.algorithms import Algorithm
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores, Traffic
from scaffpd.study.comparison.grid import Factors, configured
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import Status, train
from scaffpd.training.metrics import Summary

TUNE = "tune"
FINAL = "final"
REFUSED = "refused"

Job = TypeVar("Job")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class MethodRun:
    """One method with one configuration on one seed."""

    method: str  # its label
    seed: int
    phase: str  # "tune" or "final"
    factors: Factors = field(default_factory=dict)  # on the automatic rates, by knob
    rates: dict[str, float] = field(default_factory=dict)  # the rates themselves
    status: str = REFUSED  # as of `train`; "refused" where the method cannot work here
    message: str = ""
    rounds: int = 0
    exchanges: int = 0
    bytes_up: int = 0  # from all clients
    bytes_down: int = 0  # to all clients
    seconds: float = 0.0  # of training
    certificate: float = np.inf  # the proven optimality gap
    weights: list[float] = field(default_factory=list, repr=False)  # λ of every client
    # by split: "train" and "validation" of a tuning run, "train" and "test" of a final one
    scores: dict[str, ClientScores] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> bool:
        """Return whether there is no usable model."""
        return self.status in (REFUSED, Status.DIVERGED)

    @property
    def merit(self) -> tuple[float, ...]:
        """Return what configurations are chosen by, the larger the better.

        The accuracy of the worst fifth; ties by the mean, then by the loss of the worst fifth,
        which regression chooses by in the first place.
        """
        found = Summary.of(self.scores["validation"])
        if found.accuracy is None:
            return -found.loss.worst_20, -found.loss.mean
        return found.accuracy.worst_20, found.accuracy.mean, -found.loss.worst_20


def carry_out(run: MethodRun, method: Algorithm, cohort: Cohort, rounds: int) -> MethodRun:
    """Train and score a method; a refusal is an outcome as well, and so is a bug of one method."""
    try:
        # rates that are too large overflow before they are called diverged
        with np.errstate(all="ignore"):
            return _train(run, method, cohort, rounds)
    except Exception as error:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        return replace(run, message=f"{kind}{error}")


def _train(run: MethodRun, method: Algorithm, cohort: Cohort, rounds: int) -> MethodRun:
    cohort.traffic.restore(Traffic())
    scaled, rates = configured(method, run.factors, cohort)
    # the questions that automatic rates take are paid for, as `init` would have paid for them
    asked = cohort.traffic.snapshot() if scaled is not method else Traffic()
    result = train(scaled, cohort, rounds=rounds, seed=run.seed, progress=False).uninterrupted()
    sent = cohort.traffic
    sent.add(up=asked.bytes_up, down=asked.bytes_down, exchanges=asked.exchanges)
    held = "test" if run.phase == FINAL else "validation"
    return replace(
        run,
        rates=rates,
        status=str(result.status),
        message=result.message,
        rounds=result.rounds,
        exchanges=sent.exchanges,
        bytes_up=sent.bytes_up,
        bytes_down=sent.bytes_down,
        seconds=float(result.history["seconds"][-1]),
        certificate=result.certificate,
        weights=result.weights.tolist(),
        scores={
            "train": cohort.evaluate(result.x, "train"),
            held: cohort.evaluate(result.x, "test"),
        },
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: small matrices gain nothing from more, and lose on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pooled(work: Callable[[Job], Answer], jobs: Sequence[Job], processes: int) -> Iterator[Answer]:
    """Yield what becomes of the jobs, in order, from so many processes of one thread each."""
    pool = joblib.Parallel(n_jobs=min(processes, len(jobs)) or 1, return_as="generator")
    yield from pool(joblib.delayed(_on_one_thread)(work, job) for job in jobs)


def _on_one_thread(work: Callable[[Job], Answer], job: Job) -> Answer:
    with one_thread():
        return work(job)
