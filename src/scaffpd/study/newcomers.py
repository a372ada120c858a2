r"""`newcomers`: which one model serves a site that joins later?

Leave each client out, train on the others (with a ridge by their evidence alone), and take its loss
without a regulariser: L_g,i with objective g. A fair objective is for these losses' worst fifth.

To choose the objective by the losses that judge it would claim too much: with ten clients and six
strengths −2.8 % where the truth is +1.7 %. So the choice is made again inside every fold i, by
leaving out the other clients one by one as well, and client i is served by what they have chosen.
Its objective is recommended where the gain of the worst fifth is above zero in a 95 % interval, by
a bootstrap over clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms import Fair
from scaffpd.errors import InputError
from scaffpd.federation import Federation
from scaffpd.models import Linear
from scaffpd.models.linear import AUTO
from scaffpd.models.personal import regulariser
from scaffpd.numbers import several
from scaffpd.objectives import Average, ChiSquare, CVaR, Objective
from scaffpd.study.path import grid, knee
from scaffpd.study.verdict import AVERAGE, Gain
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import train as run
from scaffpd.training.metrics import Spread, a_fifth
from scaffpd.training.settling import by_evidence

Array = NDArray[np.float64]
Fold = list[int]  # places of clients
FEWEST = 3  # clients: with fewer, none can be left out beside another
LEAST = 15  # clients: with fewer nothing can be said
FOLDS = 20  # beyond as many clients, several are left out at once
DRAWS = 4000  # of the bootstrap
POINTS = 3  # strengths between the average and the worst case
EXACT = 1e-4  # of the loss: the proven gap at which training stops
ROUNDS = 200
USUAL = ChiSquare(rho=0.1)


@dataclass(frozen=True)
class LeftOut:
    """An objective: the losses of clients that it was not trained on."""

    name: str
    mean: float
    worst_20: float
    losses: Sequence[float] = field(default=(), repr=False)  # of every client


@dataclass(frozen=True)
class Newcomers:
    """Which one model serves a site that joins later.

    Attributes:
        points: the objectives, the average first.
        best: the one that all clients would choose, each for another that was left out.
        gain: by how much the loss of the worst fifth of left-out clients is lower than with the
            average model, where the choice is made without them.
        mean: the same of their mean.
        clients: how many there are.
    """

    points: Sequence[LeftOut]
    best: str
    gain: Gain
    mean: Gain
    clients: int

    @property
    def enough(self) -> bool:
        """Whether there are enough clients to say anything."""
        return self.clients >= LEAST

    @property
    def recommendation(self) -> str:
        """The objective for a site that joins later: the average's unless a fair one gains."""
        clear = self.enough and self.gain.low is not None and self.gain.low > 0
        return self.best if clear else AVERAGE

    def sentences(self, word: str) -> list[str]:
        """Return the advice, and what it rests on."""
        many = several(self.clients, word)
        fifth = word if a_fifth(self.clients) == 1 else "fifth"
        start = f"Of {many}, each is left out in turn, and the others choose an objective:"
        rests = (
            f"{start} for the worst-served {fifth} the loss is "
            f"{self.gain.than('with the average model')}, in the mean over them {self.mean.than()}."
        )
        if self.gain.low == self.gain.high == 0:
            rests = f"{start} it is the average every time."
        if not self.enough:
            first = f"Which one model serves a {word} that joins later cannot be said from {many}"
            return [f"{first}: {LEAST} are needed.", rests]
        if self.recommendation == AVERAGE:
            why = "no fair one is shown to serve it better"
            return [f"For a {word} that joins later, use the average model: {why}.", rests]
        return [f"For a {word} that joins later, use the fair model of “{self.best}”.", rests]

    def __str__(self) -> str:
        return " ".join(self.sentences("client"))


def newcomers(
    cohort: Cohort,
    objectives: Objective | Mapping[str, Objective] = USUAL,
    *,
    seed: int = 0,
    without: Callable[[Fold], Cohort] | None = None,
    phase: Callable[[float], object] = lambda _: None,
) -> Newcomers:
    """Leave every client out, and say which one model serves it.

    Args:
        cohort: clients with one linear model.
        objectives: by name, the average first; or one of which three strengths are tried, and the
            worst case (beside `ChiSquare` also `CVaR(0.5)`).
        seed: of folds and of the bootstrap.
        without: returns the clients as they are encoded without the rows of some of them.
        phase: is called with the share that is done.
    """
    if not isinstance(cohort.model, Linear):
        raise InputError(
            "newcomers-not-linear",
            f"newcomers needs clients with one Linear(...), got {cohort.model!r}.",
        )
    n = len(cohort.names)
    if n < FEWEST:
        raise InputError(
            "newcomers-too-few", f"newcomers leaves clients out: it needs {FEWEST}, there are {n}."
        )
    # a gap can be proven where every coefficient has a ridge
    ridge = float(np.min(np.asarray(cohort.model.l2, dtype=np.float64))) > 0
    level = EXACT * float(cohort.losses(cohort.start()).mean())
    first = run(Fair(Average()), cohort, ROUNDS, level if ridge else None, progress=False)
    average = first.uninterrupted().history.last_losses
    goals = objectives
    if isinstance(goals, Objective):
        goals = candidates(goals, average)
    tol = EXACT * float(average.mean()) if ridge else None
    random = np.random.default_rng(seed)
    folds = [part.tolist() for part in np.array_split(random.permutation(n), min(n, FOLDS))]
    outer = np.empty((len(goals), n))
    nested = np.empty(n)
    for k, fold in enumerate(folds):
        phase(k / len(folds))
        made = cohort if without is None else without(fold)
        every, start = _settled(made, fold, cohort.strengths is not None)
        outer[:, fold], ends = _left_out(every, fold, fold, goals, [start] * len(goals), tol)
        inner = np.empty_like(outer)
        for other in folds[:k] + folds[k + 1 :]:
            inner[:, other] = _left_out(every, other, fold + other, goals, ends, tol)[0]
        nested[fold] = outer[chosen(np.delete(inner, fold, axis=1)), fold]
    draws = random.integers(n, size=(DRAWS, n))
    points = [
        LeftOut(name, spread.mean, spread.worst_20, own.tolist())
        for name, own, spread in zip(goals, outer, map(_spread, outer), strict=True)
    ]
    worst, mean = (_gain(of, outer[0], nested, draws) for of in (_worst, _mean))
    return Newcomers(points, points[chosen(outer)].name, worst, mean, n)


def candidates(objective: Objective, average: Array) -> dict[str, Objective]:
    """Return objectives of the scale of these losses, the average first and the worst case last."""
    found = grid(objective, average, POINTS)
    name, worst = found.popitem()
    if isinstance(objective, ChiSquare):
        found["α = 0.5"] = CVaR(0.5, prior=objective.prior)
    return {**found, name: worst}


def chosen(losses: Array) -> int:
    """Return the objective that gains more for the worst fifth than it costs the mean."""
    return knee([_spread(own) for own in losses], upwards=False)


def _spread(losses: Array) -> Spread:
    return Spread.of([""] * len(losses), losses, upwards=False)


def _settled(made: Cohort, fold: Fold, auto: bool) -> tuple[Cohort, Array | None]:
    """Return all clients with a ridge by the evidence of the others alone, and its mode."""
    model = made.model
    assert isinstance(model, Linear)
    split = made.channel.train
    asked = replace(model, l2=AUTO) if auto else model
    found = by_evidence(_others(made, fold), asked, split.shape[0], split.columns)
    if found is None:
        return made, None
    return made.using(found.l2.tolist()), found.x.numpy(force=True)


def _others(every: Cohort, left: Fold) -> Federation:
    return Federation(every.channel.only(sorted({*range(len(every.names))} - {*left})))


def _left_out(
    every: Cohort,
    fold: Fold,
    left: Fold,
    goals: Mapping[str, Objective],
    starts: Sequence[Array | None],
    tol: float | None,
) -> tuple[Array, list[Array]]:
    """Train on all but those left; return losses in the fold, (objectives × clients), and every x,
    near which the same objective on fewer clients has its optimum.
    """
    rest = _others(every, left)
    ends = [
        run(Fair(goal), rest, ROUNDS, tol, x0=x0, progress=False).uninterrupted().x
        for goal, x0 in zip(goals.values(), starts, strict=True)
    ]
    losses = [every.evaluate(x).loss[fold] - regulariser(every.model, x) for x in ends]
    return np.stack(losses), ends


def _worst(losses: Array) -> Array:
    """Return the mean of the largest fifth, over the last axis."""
    return np.asarray(np.sort(losses, axis=-1)[..., -a_fifth(losses.shape[-1]) :].mean(-1))


def _mean(losses: Array) -> Array:
    return np.asarray(losses.mean(-1))


def _gain(of: Callable[[Array], Array], base: Array, own: Array, draws: NDArray[np.int64]) -> Gain:
    """Return by which share a level is lower, with its interval over draws of clients."""
    shares = 1 - of(own[draws]) / of(base[draws])
    low, high = np.quantile(shares, (0.025, 0.975)).tolist()
    return Gain(float(1 - of(own) / of(base)), low, high)
