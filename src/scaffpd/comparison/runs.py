"""One run of a comparison: a method with given rates on the rows of one seed, and what came of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from scaffpd.certificate import certify
from scaffpd.cohort import Cohort
from scaffpd.comparison.grid import Factors, configured
from scaffpd.comparison.setting import Setting
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores, Traffic
from scaffpd.metrics import MEGABYTE, Spread, Summary
from scaffpd.training import Result, Status, train

TUNE, FINAL = "tune", "final"
SPLITS = {TUNE: ("train", "validation"), FINAL: ("train", "test")}
NUMBERS = ("loss", "accuracy", "counts")
KEPT = 4  # cohorts, in main memory
REFUSED, SKIPPED = "refused", "skipped"
FAILED = (REFUSED, SKIPPED, str(Status.DIVERGED))


class Job(NamedTuple):
    """Which run: a method's label, a seed, "tune" or "final", and the number of the configuration in the grid."""

    method: str
    seed: int
    phase: str
    point: int


@dataclass(frozen=True)
class Run:
    """What came of a job.

    Attributes:
        job: which run it was.
        factors: on the automatic rates, by knob.
        rates: the rates themselves.
        status: as of `train`; "refused" where the method cannot work on this problem, "skipped" where no configuration
            survived tuning.
        message: the same in a sentence.
        rounds: communication rounds made.
        exchanges: request-reply turns.
        megabytes_up: from all clients.
        megabytes_down: to all clients.
        seconds: of training.
        certificate: the proven optimality gap; infinite where nothing is proven.
        weights: λ of every client.
        scores: per client, by split: "train" and "validation" of a tuning run, "train" and "test" of a final one.
    """

    job: Job
    factors: Factors
    rates: dict[str, float]
    status: str
    message: str
    rounds: int = 0
    exchanges: int = 0
    megabytes_up: float = 0.0
    megabytes_down: float = 0.0
    seconds: float = 0.0
    certificate: float = np.inf
    weights: list[float] = field(default_factory=list, repr=False)
    scores: dict[str, ClientScores] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> bool:
        """Whether there is no model to speak of."""
        return self.status in FAILED

    def merit(self, select: str) -> tuple[float, ...] | None:
        """What configurations are chosen by, on validation rows: the larger, the better; `None` for failures."""
        if self.failed:
            return None
        summary = Summary.of(self.scores["validation"])
        if summary.accuracy is None:
            return (-_of(summary.loss, select), -summary.loss.mean)
        return (_of(summary.accuracy, select), summary.accuracy.mean, -_of(summary.loss, select))

    def to_json(self) -> str:
        """One line that `from_json` reads back exactly."""
        table = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        table["scores"] = {
            split: {"names": s.names} | {name: getattr(s, name).tolist() for name in NUMBERS}
            for split, s in self.scores.items()
        }
        return json.dumps(table)

    @classmethod
    def from_json(cls, line: str) -> Run:
        """The run that `to_json` wrote."""
        table: dict[str, Any] = json.loads(line)
        scores = {
            split: ClientScores(tuple(s["names"]), *(np.array(s[name]) for name in NUMBERS))
            for split, s in table["scores"].items()
        }
        return cls(**{**table, "job": Job(*table["job"]), "scores": scores})


def _of(spread: Spread, measure: str) -> float:
    return float(getattr(spread, measure))


class Bench:
    """A setting ready to run: cohorts are bound to their rows once, and one at a time where memory is a device's."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.room = KEPT if setting.problem.device == "cpu" else 1
        self.kept: dict[tuple[int, str], Cohort] = {}

    def cohort(self, seed: int, phase: str) -> Cohort:
        """The clients of one seed, with validation rows in the place of test rows for tuning."""
        if (seed, phase) not in self.kept:
            while len(self.kept) >= self.room:
                del self.kept[next(iter(self.kept))]
            problem, fraction = self.setting.problem, self.setting.validation
            self.kept[seed, phase] = problem.cohort(seed) if phase == FINAL else problem.rehearsal(seed, fraction)
        return self.kept[seed, phase]

    def carry_out(self, job: Job) -> Run:
        """Train and score; what a method refuses to do is an outcome as well."""
        factors = self.setting.lattice[job.method][job.point]
        try:
            with np.errstate(all="ignore"):  # rates that are too large overflow before they are called diverged
                return self._train(job, factors)
        except InputError as error:
            return Run(job, factors, {}, REFUSED, str(error))
        except Exception as error:  # one method's bug is not the end of the others
            reason = f"It raised {type(error).__name__}: {error} (seed {job.seed}, configuration {job.point})."
            return Run(job, factors, {}, REFUSED, reason)

    def _train(self, job: Job, factors: Factors) -> Run:
        cohort = self.cohort(job.seed, job.phase)
        cohort.traffic.restore(Traffic())
        method, rates = configured(self.setting.methods[job.method], factors, cohort)
        asked = cohort.traffic.snapshot() if method is not self.setting.methods[job.method] else Traffic()
        result = train(method, cohort, rounds=self.setting.rounds, seed=job.seed, progress=False)
        if result.status is Status.INTERRUPTED:  # half a run is none
            raise KeyboardInterrupt
        cohort.traffic.add(up=asked.bytes_up, down=asked.bytes_down, exchanges=asked.exchanges)  # as `init` would have
        sent, seconds = cohort.traffic, float(result.history["seconds"][-1])
        scores = {
            name: cohort.evaluate(result.x, split)
            for name, split in zip(SPLITS[job.phase], ("train", "test"), strict=True)
        }
        return Run(
            job, factors, rates, str(result.status), result.message, result.rounds, sent.exchanges,
            sent.bytes_up / MEGABYTE, sent.bytes_down / MEGABYTE, seconds, proven(method, cohort, result),
            result.weights.tolist(), scores,
        )  # fmt: skip


def proven(method: Any, cohort: Cohort, result: Result) -> float:
    """The certificate of a run; of one in single precision on rows of a table, computed again in double precision.

    With a weak regulariser μ, rounding δ of the gradient costs δ²/2μ, which can exceed everything else.
    """
    single = cohort.start().dtype == torch.float32
    if not (single and cohort.doubles and np.isfinite(result.certificate) and hasattr(method, "objective")):
        return result.certificate
    exact = cohort.exact()
    at = exact.gradients(torch.from_numpy(result.x).to(exact.start()))
    mu, size = cohort.constants().strong_convexity, float(at.sum(result.weights).norm())
    return certify(method.objective, at.losses, result.weights, size, mu, at.rounding).gap
