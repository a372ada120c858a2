r"""Who competes, and the same number of configurations for everybody that has something to tune:
`SIZE`.

- DRFA and AFL: η_ℓ = 2^−k / max_i L_i for k = 0 and for k = 4, 4.5 … 13; dual rate 0.01, 0.1 or 1
  times the automatic one for that η_ℓ. As published, the server averages the clients' models
  (server rate 1), every client takes part in every round, and gradients are full: nothing but drift
  stands in their way.
- DRFA, server rate free: η_ℓ = 2^−k / max_i L_i, k = 4, 5 … 13; server rate η_g such that η_g J η_ℓ
  is 0.5, 1 or 2 times 1/max_i L_i; dual rate 1 or 10 times the automatic one. Not DRFA as
  published: with small η_ℓ it becomes GDA.
- GDA, extragradient: τ = 2^k / (2 max_i L_i), k = −2, −1.5 … 2.5; σ = 10^k times the automatic one
  for that τ, k = −2, −1 … 3 (with χ² penalty, a large σ is the best response).
- Scaff-PD and APD with constants: η_ℓ = 1/max_i L_i; τ = η_g J η_ℓ with η_g = 0.5, 0.7, 1, 1.4, 2
  or 2.8 (J = 1 for APD); σ = 10^k times the automatic one of GDA, k = −2, −1 … 2; θ = 0 or 1.

Scaff-PD and APD (accelerated primal-dual: Scaff-PD without local steps) have nothing to tune.

A configuration is better than another if it reaches ‖x − x*‖² ≤ `TARGET` in fewer rounds, or, where
neither does, if it ends nearer. While tuning, a run ends where more of it decides nothing: at the
target; at the rounds of the best so far; where it blows up; at a floor (its least error has fallen
by less than 1 % in 30 rounds); and where even at twice the pace of its last 30 rounds it would not
beat the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from experiments.central import Extragradient, GradientDescentAscent
from experiments.synthetic.problem import TARGET, Bench
from scaffpd.algorithms import AFL, DRFA, ScaffPD
from scaffpd.algorithms.steps import Fixed
from scaffpd.federation import Vector
from scaffpd.training.loop import RoundInfo, train

SIZE = 60
HALVINGS = (
    *sorted((k / 2 for k in range(8, 27)), key=lambda k: abs(k - 10)),
    0.0,
)  # likely ones first: quicker
DUAL = (0.1, 1.0, 0.01)  # the middle first: of equals, the first is chosen
FREE_HALVINGS = tuple(range(4, 14))
FREE_REACH = (2.0, 1.0, 0.5)
FREE_DUAL = (1.0, 10.0)
CENTRAL = tuple(2.0 ** (k / 2) for k in range(5, -5, -1))
CENTRAL_DUAL = (1.0, 10.0, 0.1, 100.0, 0.01, 1000.0)
GLOBAL = (2.8, 2.0, 1.4, 1.0, 0.7, 0.5)
SIGMAS = (1.0, 10.0, 0.1, 100.0, 0.01)
THETA = (0.0, 1.0)

SCAFF_PD = "Scaff-PD"
CONSTANTS = "Scaff-PD, constants"
DRFA_ = "DRFA"
FREE = "DRFA, server rate free"
AFL_ = "AFL, local steps"
GDA = "GDA"
EXTRA = "extragradient"
APD = "APD"
APD_CONSTANTS = "APD, constants"

# a floor: the least error stays above 0.99 times that of 30 rounds ago
WINDOW = 30
LEAST = 0.99
PACE = 2.0  # errors fall ever more slowly, so twice the present pace is generous
ROUNDING = 1e-24  # a floor below is one of arithmetic
EXPLODED = 1e4  # times the error at the start


class Candidate(NamedTuple):
    """A method at one point of its grid, and where on the grid that is."""

    method: Any
    knobs: dict[str, float]


def candidates(name: str, bench: Bench, local_steps: int) -> list[Candidate]:
    """The grid of a method; a single point where there is nothing to tune."""
    return list(METHODS[name](bench, local_steps))


def drifting(base: DRFA | AFL, own: dict[str, float], halvings: float, dual: float) -> Candidate:
    """DRFA or AFL at one point of their grid; `own` are the automatic rates of `base`, the dual one
    ∝ 1/η_ℓ.
    """
    factor = 2.0**-halvings
    rates = {
        "local_rate": factor * own["local_rate"],
        "dual_rate": dual * own["dual_rate"] / factor,
    }
    return Candidate(replace(base, **rates), {"local_rate": factor, "dual_rate": dual})


def _drifting(kind: type[DRFA] | type[AFL], bench: Bench, local_steps: int) -> Iterator[Candidate]:
    base = kind(bench.objective, local_steps=local_steps)
    own = base.automatic(bench.cohort)
    return (drifting(base, own, halvings, dual) for dual, halvings in product(DUAL, HALVINGS))


def _free(bench: Bench, local_steps: int) -> Iterator[Candidate]:
    """The server rate η_g = reach/(J 2^−k); the automatic dual rate is ∝ 1/η_g too."""
    base = DRFA(bench.objective, local_steps=local_steps)
    own = base.automatic(bench.cohort)
    for halvings, reach, dual in product(FREE_HALVINGS, FREE_REACH, FREE_DUAL):
        server = reach * 2.0**halvings / local_steps
        method = drifting(replace(base, server_rate=server), own, halvings, dual / server).method
        yield Candidate(method, {"local_rate": 2.0**-halvings, "reach": reach, "dual_rate": dual})


def _central(
    kind: type[GradientDescentAscent] | type[Extragradient], bench: Bench, local_steps: int
) -> Iterator[Candidate]:
    base = kind(bench.objective)
    own = base.automatic(bench.cohort)
    for server, dual in product(CENTRAL, CENTRAL_DUAL):
        rates = {
            "server_rate": server * own["server_rate"],
            "dual_rate": dual * own["dual_rate"] / server,
        }
        yield Candidate(replace(base, **rates), {"server_rate": server, "dual_rate": dual})


def constants(
    bench: Bench, local_steps: int, local_rate: float, points: Iterable[tuple[float, float, float]]
) -> Iterator[Candidate]:
    """Scaff-PD with τ = η_g J η_ℓ, σ and θ from triples (η_g, σ / automatic, θ)."""
    automatic = GradientDescentAscent(bench.objective).automatic(bench.cohort)["dual_rate"]
    for eta, sigma, theta in points:
        steps = Fixed(eta * local_steps * local_rate, sigma * automatic, theta, local_rate)
        method = ScaffPD(bench.objective, local_steps=local_steps, steps=steps)
        yield Candidate(method, {"eta_g": eta, "sigma": sigma, "theta": theta})


def longest(bench: Bench) -> float:
    """η_ℓ = 1/max_i L_i."""
    return 1 / float(bench.cohort.constants().smoothness.max())


def _scaff_pd(bench: Bench, local_steps: int) -> Iterator[Candidate]:
    return constants(bench, local_steps, longest(bench), product(GLOBAL, SIGMAS, THETA))


METHODS: dict[str, Callable[[Bench, int], Iterator[Candidate]]] = {
    SCAFF_PD: lambda bench, J: iter([Candidate(ScaffPD(bench.objective, local_steps=J), {})]),
    CONSTANTS: _scaff_pd,
    DRFA_: partial(_drifting, DRFA),
    FREE: _free,
    AFL_: partial(_drifting, AFL),
    GDA: partial(_central, GradientDescentAscent),
    EXTRA: partial(_central, Extragradient),
    APD: lambda bench, _: iter([Candidate(ScaffPD(bench.objective, local_steps=1), {})]),
    APD_CONSTANTS: lambda bench, _: _scaff_pd(bench, 1),
}


@dataclass(frozen=True)
class Trace:
    """One run: ‖x − x*‖² at the start and after every round, and the messages to and from clients
    until then.
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


class Attempt(NamedTuple):
    """One configuration of a grid, as far as it was followed."""

    candidate: Candidate
    trace: Trace

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better."""
        rounds = self.trace.rounds_to(TARGET)
        last = float(self.trace.errors[-1])
        return (np.inf, last if np.isfinite(last) else np.inf) if rounds is None else (rounds, 0.0)


def trace(
    candidate: Candidate,
    bench: Bench,
    rounds: int,
    enough: Callable[[list[float]], bool] | None = None,
) -> Trace:
    """Run a method for so many rounds, or until `enough` of the errors."""
    errors = [bench.error(bench.cohort.start())]

    def watch(moment: RoundInfo) -> bool:
        errors.append(bench.error(moment.state.x))
        return enough is not None and enough(errors)

    with np.errstate(all="ignore"):
        seed = bench.setting.seed
        result = train(
            candidate.method, bench.cohort, rounds, seed=seed, progress=False, callbacks=[watch]
        )
    result.uninterrupted()
    return Trace(np.array(errors), result.history["exchanges"][: len(errors)].astype(np.float64))


def best_in_hindsight(
    grid: Sequence[Candidate], bench: Bench, rounds: int
) -> tuple[Attempt, list[Attempt]]:
    """The best of a grid, and all attempts; of equals the first.

    This is not `compare`'s tuner, which chooses by validation rows after a fixed number of rounds:
    here x* is known, fewest rounds to it win, and a run that cannot win any more is given up.
    """
    attempts: list[Attempt] = []
    limit = rounds
    goal = np.inf
    for candidate in grid:
        attempt = Attempt(
            candidate, trace(candidate, bench, limit, partial(decided, limit=limit, goal=goal))
        )
        attempts.append(attempt)
        reached, last = attempt.rank
        limit = min(limit, max(int(reached) - 1, 1)) if reached < np.inf else limit
        goal = max(TARGET, min(goal, last))
    return min(attempts, key=lambda attempt: attempt.rank), attempts


def decided(errors: list[float], limit: int, goal: float) -> bool:
    """Whether more rounds would decide nothing; `goal` is to be beaten within `limit` rounds."""
    last = errors[-1]
    if last <= TARGET or not last <= EXPLODED * errors[0]:
        return True
    if len(errors) <= WINDOW + 20:
        return False
    least = min(errors)
    before = min(errors[:-WINDOW])
    pace = PACE * np.log(before / least) / WINDOW
    return least > LEAST * before or bool(np.log(least / goal) > pace * (limit + 1 - len(errors)))


def settled(errors: list[float]) -> bool:
    """Whether a run has come to rest at the accuracy of its arithmetic."""
    return (
        len(errors) > WINDOW
        and min(errors) < ROUNDING
        and min(errors) > LEAST * min(errors[:-WINDOW])
    )


def at_edge(best: Candidate, grid: Sequence[Candidate]) -> tuple[str, ...]:
    """The knobs whose best value is the smallest or largest of the grid (θ, which has no beyond,
    left out).
    """
    values = {
        name: {candidate.knobs[name] for candidate in grid}
        for name in best.knobs
        if name != "theta"
    }
    return tuple(n for n, v in values.items() if len(v) > 1 and best.knobs[n] in (min(v), max(v)))
