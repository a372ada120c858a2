r"""One run, watched from x*; and of a grid the configuration that gets near x* first.

A configuration is better than another if it reaches ‖x − x*‖² ≤ `TARGET` in fewer rounds, or, where neither does, if
it ends nearer. While tuning, a run ends where more of it decides nothing: at the target; at the rounds of the best so
far; where it blows up; at a floor (its least error has fallen by less than 1 % in 30 rounds); and where even at twice
the pace of its last 30 rounds it would not beat the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from scaffpd.experiments.synthetic.grids import Candidate
from scaffpd.experiments.synthetic.settings import TARGET, Bench
from scaffpd.federation import Vector
from scaffpd.training import RoundInfo, Status, train

WINDOW, LEAST = 30, 0.99  # a floor: the least error stays above 0.99 times that of 30 rounds ago
PACE = 2.0  # errors fall ever more slowly, so twice the present pace is generous
ROUNDING = 1e-24  # a floor below is one of arithmetic
EXPLODED = 1e4  # times the error at the start


@dataclass(frozen=True)
class Trace:
    """What a run looked like.

    Attributes:
        errors: ‖x − x*‖² at the start and after every round.
        exchanges: messages to and from clients until then.
    """

    errors: Vector
    exchanges: Vector

    def rounds_to(self, level: float) -> int | None:
        """The first round at or below a level."""
        below = np.flatnonzero(self.errors <= level)
        return int(below[0]) if len(below) else None

    def exchanges_to(self, level: float) -> int | None:
        """The exchanges until that round."""
        rounds = self.rounds_to(level)
        return None if rounds is None else int(self.exchanges[rounds])


@dataclass(frozen=True)
class Attempt:
    """One configuration of a grid, as far as it was followed."""

    candidate: Candidate
    trace: Trace

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better."""
        rounds, last = self.trace.rounds_to(TARGET), float(self.trace.errors[-1])
        return (np.inf, last if np.isfinite(last) else np.inf) if rounds is None else (rounds, 0.0)


def trace(
    candidate: Candidate, bench: Bench, rounds: int, enough: Callable[[list[float]], bool] | None = None
) -> Trace:
    """Run a method for so many rounds, or until `enough` of the errors."""
    errors = [bench.error(bench.cohort.start())]

    def watch(moment: RoundInfo) -> bool:
        errors.append(bench.error(moment.state.x))
        return enough is not None and enough(errors)

    with np.errstate(all="ignore"):
        seed = bench.setting.seed
        result = train(candidate.method, bench.cohort, rounds, seed=seed, progress=False, callbacks=[watch])
    if result.status is Status.INTERRUPTED:  # half a curve is none
        raise KeyboardInterrupt
    return Trace(np.array(errors), result.history["exchanges"][: len(errors)].astype(np.float64))


def tune(grid: Sequence[Candidate], bench: Bench, rounds: int) -> tuple[Attempt, list[Attempt]]:
    """The best of a grid, and all attempts; of equals the first."""
    attempts: list[Attempt] = []
    limit, goal = rounds, np.inf
    for candidate in grid:
        attempt = Attempt(candidate, trace(candidate, bench, limit, partial(decided, limit=limit, goal=goal)))
        attempts.append(attempt)
        reached, last = attempt.rank
        limit, goal = min(limit, max(int(reached) - 1, 1)) if reached < np.inf else limit, max(TARGET, min(goal, last))
    return min(attempts, key=lambda attempt: attempt.rank), attempts


def decided(errors: list[float], limit: int, goal: float) -> bool:
    """Whether more rounds would decide nothing; `goal` is the error to beat within `limit` rounds."""
    last = errors[-1]
    if last <= TARGET or not last <= EXPLODED * errors[0]:
        return True
    if len(errors) <= WINDOW + 20:
        return False
    least, before = min(errors), min(errors[:-WINDOW])
    pace = PACE * np.log(before / least) / WINDOW
    return least > LEAST * before or bool(np.log(least / goal) > pace * (limit + 1 - len(errors)))


def settled(errors: list[float]) -> bool:
    """Whether a run has come to rest at the accuracy of its arithmetic."""
    return len(errors) > WINDOW and min(errors) < ROUNDING and min(errors) > LEAST * min(errors[:-WINDOW])


def at_edge(best: Candidate, grid: Sequence[Candidate]) -> tuple[str, ...]:
    """The knobs whose best value is the smallest or largest of the grid (θ, which has no beyond, left out)."""
    edges = []
    for name, value in best.knobs.items():
        values = {candidate.knobs[name] for candidate in grid}
        if name != "theta" and len(values) > 1 and value in (min(values), max(values)):
            edges.append(name)
    return tuple(edges)
