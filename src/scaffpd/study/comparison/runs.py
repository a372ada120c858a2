"""One run of a comparison, in this process or in a worker process that has one thread; the numbers are the same."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from scaffpd.algorithms.certificate import certify, length
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores, Traffic
from scaffpd.study.comparison.setting import Factors, Setting, configured
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import Result, Status, train
from scaffpd.training.metrics import Summary

TUNE = "tune"
FINAL = "final"
SPLITS = {TUNE: ("train", "validation"), FINAL: ("train", "test")}
NUMBERS = ("loss", "accuracy", "counts")
COHORTS = 4  # that a runner holds in main memory
REFUSED = "refused"
SKIPPED = "skipped"
FAILED = (REFUSED, SKIPPED, str(Status.DIVERGED))


class RunKey(NamedTuple):
    """Which run: a method's label, a seed, "tune" or "final", and the number of the configuration in the grid."""

    method: str
    seed: int
    phase: str
    point: int


@dataclass(frozen=True)
class Run:
    """Result of a job."""

    job: RunKey  # which run it was
    factors: Factors  # on the automatic rates, by knob
    rates: dict[str, float]  # the rates themselves
    # as of `train`; "refused" where the method cannot work on this problem, "skipped" where no configuration
    # survived tuning
    status: str
    message: str  # the same in a sentence
    rounds: int = 0  # communication rounds made
    exchanges: int = 0  # request-reply turns
    bytes_up: int = 0  # from all clients
    bytes_down: int = 0  # to all clients
    seconds: float = 0.0  # of training
    certificate: float = np.inf  # the proven optimality gap; infinite where nothing is proven
    weights: list[float] = field(default_factory=list, repr=False)  # λ of every client
    # per client, by split: "train" and "validation" of a tuning run, "train" and "test" of a final one
    scores: dict[str, ClientScores] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> bool:
        """Return whether there is no usable model."""
        return self.status in FAILED

    def merit(self, select: str) -> tuple[float, ...] | None:
        """Return what configurations are chosen by, on validation rows: the larger, the better; `None` for failures."""
        if self.failed:
            return None
        summary = Summary.of(self.scores["validation"])
        if summary.accuracy is None:
            return (-getattr(summary.loss, select), -summary.loss.mean)
        return (
            getattr(summary.accuracy, select),
            summary.accuracy.mean,
            -getattr(summary.loss, select),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` reads back exactly."""
        table = {f.name: getattr(self, f.name) for f in fields(self)}
        table["scores"] = {
            split: {"names": s.names} | {name: getattr(s, name).tolist() for name in NUMBERS}
            for split, s in self.scores.items()
        }
        return table

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Run:
        """Return the run that `to_json` was made of."""
        for way in ("up", "down"):  # as earlier versions wrote it
            if f"megabytes_{way}" in table:
                table[f"bytes_{way}"] = round(1e6 * table.pop(f"megabytes_{way}"))
        scores = {
            split: ClientScores(tuple(s["names"]), *(np.array(s[name]) for name in NUMBERS))
            for split, s in table["scores"].items()
        }
        return cls(**{**table, "job": RunKey(*table["job"]), "scores": scores})


class Runner:
    """Carry out the runs of a setting; cohorts are bound to their rows once, and held one at a time on a device."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.most = COHORTS if setting.problem.device == "cpu" else 1
        self.cohorts: dict[tuple[int, str], Cohort] = {}

    def cohort(self, seed: int, phase: str) -> Cohort:
        """Return the clients of one seed, with validation rows in the place of test rows for tuning."""
        if (seed, phase) not in self.cohorts:
            while len(self.cohorts) >= self.most:
                del self.cohorts[next(iter(self.cohorts))]
            problem = self.setting.problem
            fraction = self.setting.validation
            self.cohorts[seed, phase] = (
                problem.cohort(seed) if phase == FINAL else problem.rehearsal(seed, fraction)
            )
        return self.cohorts[seed, phase]

    def carry_out(self, job: RunKey) -> Run:
        """Train and score a method; a refusal is an outcome as well."""
        factors = self.setting.lattice[job.method][job.point]
        try:
            with np.errstate(
                all="ignore"
            ):  # rates that are too large overflow before they are called diverged
                return self._train(job, factors)
        except Exception as error:  # one method's bug is not the end of the others
            bug = f"It raised {type(error).__name__}: {error} (seed {job.seed}, configuration {job.point})."
            return Run(
                job, factors, {}, REFUSED, str(error) if isinstance(error, InputError) else bug
            )

    def _train(self, job: RunKey, factors: Factors) -> Run:
        cohort = self.cohort(job.seed, job.phase)
        cohort.traffic.restore(Traffic())
        method, rates = configured(self.setting.methods[job.method], factors, cohort)
        asked = (
            cohort.traffic.snapshot()
            if method is not self.setting.methods[job.method]
            else Traffic()
        )
        result = train(
            method, cohort, rounds=self.setting.rounds, seed=job.seed, progress=False
        ).uninterrupted()
        cohort.traffic.add(
            up=asked.bytes_up, down=asked.bytes_down, exchanges=asked.exchanges
        )  # as `init` would have
        sent = cohort.traffic
        seconds = float(result.history["seconds"][-1])
        scores = {
            name: cohort.evaluate(result.x, split)
            for name, split in zip(SPLITS[job.phase], ("train", "test"), strict=True)
        }
        return Run(
            job,
            factors,
            rates,
            str(result.status),
            result.message,
            result.rounds,
            sent.exchanges,
            sent.bytes_up,
            sent.bytes_down,
            seconds,
            proven(method, cohort, result),
            result.weights.tolist(),
            scores,
        )


def proven(method: Any, cohort: Cohort, result: Result) -> float:
    """Return the certificate of a run; of one in single precision on rows of a table, computed anew in double.

    With a weak regulariser μ, rounding δ of the gradient costs δ²/2μ, which can exceed everything else.
    """
    single = cohort.start().dtype == torch.float32
    if not (
        single
        and cohort.doubles
        and np.isfinite(result.certificate)
        and hasattr(method, "objective")
    ):
        return result.certificate
    exact = cohort.exact()
    at = exact.gradients(torch.from_numpy(result.x).to(exact.start()))
    mu = cohort.constants().strong_convexity
    size = length(at.sum(result.weights))
    return certify(method.objective, at.losses, result.weights, size, mu, at.rounding).gap


NO_START = (
    "A worker process could not start: in a script that defines what it compares, keep what it does under "
    '`if __name__ == "__main__":`, or use processes=1.'
)
KILLED = "A worker process was killed, perhaps for want of memory; with `out`, the same call goes on where it stopped."
_function: Any = None  # of a worker process


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: small matrices gain nothing from more, and lose time on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Pool:
    """Processes that carry out jobs by one function, under a name for messages; one process needs none.

    Every worker holds the reading end of one pipe and ends with it: when the pool is left, or when the parent is gone.
    """

    def __init__(self, carry_out: Callable[[Any], Any], processes: int, name: str) -> None:
        self.carry_out, self.payload = carry_out, _packed(carry_out, name) if processes > 1 else b""
        context = get_context("spawn")
        self.reader, self.writer = context.Pipe(duplex=False)
        about = self.reader, self.payload
        self.executor = (
            ProcessPoolExecutor(processes, context, _prepare, about) if processes > 1 else None
        )
        self.trouble: Exception = InputError("init", NO_START)  # until the workers have started

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)
        self.reader.close()

    def work(self, jobs: Sequence[Any]) -> Iterator[Any]:
        """Yield what becomes of these jobs, in whatever order they are done."""
        if self.executor is None or len(jobs) <= 1:
            for job in jobs:
                with one_thread():
                    run = self.carry_out(job)
                yield run
            return
        try:
            with (
                _ignoring_interrupts(),
                nullcontext() if b"__main__" in self.payload else _hidden_main(),
            ):
                ready = self.executor.submit(int)
                futures = [self.executor.submit(_carry_out, job) for job in jobs]
            ready.result()
            self.trouble = RuntimeError(KILLED)
            yield from (future.result() for future in as_completed(futures))
        except BrokenProcessPool:
            raise self.trouble from None


def _prepare(pipe: Connection, payload: bytes) -> None:
    """Make this process a worker."""
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    _function = pickle.loads(payload)


def _end_with(pipe: Connection) -> None:
    """End this process with its pipe, on which nothing is ever sent."""
    pipe.poll(None)
    os._exit(0)


def _carry_out(job: Any) -> Any:
    try:
        return _function(job)
    except Exception as error:  # of a type that the parent may be unable to read
        raise error if type(error) is InputError else RuntimeError(traceback.format_exc()) from None


def _packed(carry_out: Any, name: str) -> bytes:
    try:
        return pickle.dumps(carry_out)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            "problem-method-sent",
            f"The problem {name!r} or a method cannot be sent to other processes ({error}): "
            "use functions at the top level of a module, or processes=1.",
        ) from None


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which reaches all of them; the parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the caller's script, which a spawned process would run again and which nothing here needs."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
