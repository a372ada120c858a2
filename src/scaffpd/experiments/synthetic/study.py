"""All runs of the four figures: which there are, how one is carried out, and what came of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context

import torch

from scaffpd.algorithms import DRFA
from scaffpd.comparison.runs import one_thread
from scaffpd.experiments.synthetic import grids
from scaffpd.experiments.synthetic.grids import Candidate, candidates, constants, drifting, longest
from scaffpd.experiments.synthetic.settings import J, Plan, Setting, bench
from scaffpd.experiments.synthetic.tuning import Attempt, Trace, at_edge, settled, trace, tune
from scaffpd.progress import Tally

SAMPLED = 3  # of five clients, for DRFA as it was published
FAN = (0, 5)  # DRFA at automatic rates 2^−k: fast and biased
SHORT = 0.01  # times 1/max_i L_i: a local rate that a single step makes little of
SHORT_RATE = "Scaff-PD, one short local rate"


@dataclass(frozen=True)
class Job:
    """One method on one problem.

    Attributes:
        setting: the problem.
        method: a name of `grids.METHODS`, or `SHORT_RATE`.
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
        *(Job(s, name, plan.limit(s), stride=plan.stride) for s in plan.settings for name in grids.METHODS),
        *(Job(s, grids.DRFA_, plan.limit(s), halvings=k) for s in plan.rho_settings for k in FAN),
        *(Job(s, grids.SCAFF_PD, plan.limit(s), steps) for s in (plan.paper, plan.hard) for steps in plan.local_steps),
        *(Job(plan.paper, SHORT_RATE, plan.rounds, steps, stride=plan.stride) for steps in plan.local_steps),
    ]
    alone = dict.fromkeys(replace(job, stride=1) if job.method == grids.SCAFF_PD else job for job in everything)
    return sorted(alone, key=_cost, reverse=True)


def _cost(job: Job) -> int:
    tuned = job.halvings is None and job.method not in (grids.SCAFF_PD, grids.APD, grids.MINIMAX)
    return job.rounds * (20 if job.method in (grids.DRFA_, grids.AFL_) and tuned else 10 if tuned else 1)


def carry_out(job: Job) -> list[Curve]:
    """Tune the method, and run it to the end."""
    place = bench(job.setting)
    if job.halvings is not None:
        base = DRFA(place.objective, local_steps=job.local_steps)
        single = drifting(base, base.automatic(place.cohort), job.halvings, 1.0)
        return [Curve(job, fan(job.halvings), single.knobs, trace(single, place, job.rounds, settled))]
    grid = _grid(job)
    best, attempts = tune(grid, place, job.rounds) if len(grid) > 1 else (None, [])
    chosen = grid[0] if best is None else best.candidate
    line = trace(chosen, place, job.rounds, settled)
    curves = [Curve(job, job.method, chosen.knobs, line, at_edge(chosen, grid), tuple(attempts))]
    if job.method == grids.DRFA_:
        published = Candidate(replace(chosen.method, clients_per_round=SAMPLED), chosen.knobs)
        curves.append(Curve(job, sampled(), chosen.knobs, trace(published, place, job.rounds, settled)))
    return curves


def fan(halvings: int) -> str:
    """The name of DRFA with a local rate that was not tuned."""
    return f"DRFA, local rate 1/{2**halvings}L" if halvings else "DRFA, local rate 1/L"


def sampled() -> str:
    """The name of DRFA as published."""
    return f"DRFA, {SAMPLED} clients drawn"


def _grid(job: Job) -> list[Candidate]:
    place = bench(job.setting)
    if job.method != SHORT_RATE:
        return candidates(job.method, place, job.local_steps)[:: job.stride]
    points = product((1.0,), grids.SIGMAS, grids.THETA)
    return list(constants(place, job.local_steps, SHORT * longest(place), points))[:: job.stride]


def study(plan: Plan, processes: int = 1, progress: bool | None = None) -> Study:
    """Carry out all jobs; the numbers do not depend on the number of processes."""
    todo = jobs(plan)
    done: dict[Job, list[Curve]] = {}
    with Tally(progress, len(todo)) as bar:
        for curves in _work(todo, min(processes, len(todo))):
            done[curves[0].job] = curves
            bar.advance(f"{curves[0].label}; {curves[0].job.setting.name}")
    return Study(plan, tuple(curve for job in todo for curve in done[job]))


def _work(todo: Sequence[Job], processes: int) -> Iterator[list[Curve]]:
    if processes > 1:
        with get_context("spawn").Pool(processes, _prepare) as pool:
            yield from pool.imap_unordered(carry_out, todo)
        return
    for job in todo:
        with one_thread():
            curves = carry_out(job)
        yield curves


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the parent ends the others
    torch.set_num_threads(1)
