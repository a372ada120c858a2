"""All runs of the four synthetic figures: which there are, how one is carried out, and what came of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

from experiments.synthetic import tuning
from experiments.synthetic.problem import J, Plan, Setting, bench
from experiments.synthetic.tuning import (
    Attempt,
    Candidate,
    Trace,
    at_edge,
    best_in_hindsight,
    settled,
    trace,
)
from scaffpd.algorithms import DRFA
from scaffpd.models.execution import pooled
from scaffpd.training.progress import Tally

SAMPLED = 3  # of five clients, for DRFA as it was published
DRAWN = f"DRFA, {SAMPLED} clients drawn"
FAN = {
    0: "DRFA, local rate 1/L",
    5: "DRFA, local rate 1/32L",
}  # automatic rates times 2^−k: fast and biased
SHORT = 0.01  # times 1/max_i L_i: a local rate that a single step makes little of
SHORT_RATE = "Scaff-PD, one short local rate"


@dataclass(frozen=True)
class Job:
    """One method on one problem.

    Attributes:
        setting: the problem.
        method: a name of `tuning.METHODS`, or `SHORT_RATE`.
        rounds: of the run, and at most of each configuration before it.
        local_steps: J.
        halvings: DRFA as it is with a local rate 2^−k of the automatic one; `None` tunes it.
        stride: every how manyth point of the grid is tried.
    """

    setting: Setting
    method: str
    rounds: int
    local_steps: int = J
    halvings: int | None = None
    stride: int = 1

    @property
    def cost(self) -> int:
        """Roughly how long it takes."""
        tuned = self.halvings is None and self.method not in (
            tuning.SCAFF_PD,
            tuning.APD,
        )
        return self.rounds * (
            20 if self.method in (tuning.DRFA_, tuning.AFL_) and tuned else 10 if tuned else 1
        )


@dataclass(frozen=True)
class Curve:
    """A run, and how its configuration was found.

    Attributes:
        job: what was asked for.
        label: the method's name.
        knobs: the point of the grid; empty where there is none.
        trace: the errors.
        edge: the knobs that are at the edge of the grid.
        attempts: all configurations tried.
    """

    job: Job
    label: str
    knobs: dict[str, float]
    trace: Trace
    edge: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Study:
    """All curves of a plan."""

    plan: Plan
    curves: tuple[Curve, ...] = field(repr=False)

    def find(self, setting: Setting, label: str, local_steps: int = J) -> Curve:
        """One curve."""
        where = (setting, label, local_steps)
        return next(c for c in self.curves if (c.job.setting, c.label, c.job.local_steps) == where)


def jobs(plan: Plan) -> list[Job]:
    """Everything that is to be run, what takes longest first."""
    everything = [
        *(
            Job(s, name, plan.limit(s), stride=plan.stride)
            for s in plan.settings
            for name in tuning.METHODS
        ),
        *(Job(s, tuning.DRFA_, plan.limit(s), halvings=k) for s in plan.rho_settings for k in FAN),
        *(
            Job(s, tuning.SCAFF_PD, plan.limit(s), steps)
            for s in (plan.paper, plan.hard)
            for steps in plan.local_steps
        ),
        *(
            Job(plan.paper, SHORT_RATE, plan.rounds, steps, stride=plan.stride)
            for steps in plan.local_steps
        ),
    ]
    alone = dict.fromkeys(
        replace(job, stride=1) if job.method == tuning.SCAFF_PD else job for job in everything
    )
    return sorted(alone, key=lambda job: job.cost, reverse=True)


def carry_out(job: Job) -> list[Curve]:
    """Tune the method, and run it to the end."""
    place = bench(job.setting)
    if job.halvings is not None:
        base = DRFA(place.objective, local_steps=job.local_steps)
        single = tuning.drifting(base, base.automatic(place.cohort), job.halvings, 1.0)
        return [
            Curve(job, FAN[job.halvings], single.knobs, trace(single, place, job.rounds, settled))
        ]
    grid = _grid(job)
    best, attempts = best_in_hindsight(grid, place, job.rounds) if len(grid) > 1 else (None, [])
    chosen = grid[0] if best is None else best.candidate
    line = trace(chosen, place, job.rounds, settled)
    curves = [Curve(job, job.method, chosen.knobs, line, at_edge(chosen, grid), tuple(attempts))]
    if job.method == tuning.DRFA_:
        published = Candidate(replace(chosen.method, clients_per_round=SAMPLED), chosen.knobs)
        curves.append(Curve(job, DRAWN, chosen.knobs, trace(published, place, job.rounds, settled)))
    return curves


def _grid(job: Job) -> list[Candidate]:
    place = bench(job.setting)
    if job.method != SHORT_RATE:
        return tuning.candidates(job.method, place, job.local_steps)[:: job.stride]
    points = product((1.0,), tuning.SIGMAS, tuning.THETA)
    return list(tuning.constants(place, job.local_steps, SHORT * tuning.longest(place), points))[
        :: job.stride
    ]


def study(plan: Plan, processes: int = 1, progress: bool | None = None) -> Study:
    """Carry out all jobs; the numbers do not depend on the number of processes."""
    todo = jobs(plan)
    done: dict[Job, list[Curve]] = {}
    with Tally(progress, len(todo)) as bar:
        for curves in pooled(carry_out, todo, processes):
            done[curves[0].job] = curves
            bar.advance(f"{curves[0].label}; {curves[0].job.setting.name}")
    return Study(plan, tuple(curve for job in todo for curve in done[job]))
