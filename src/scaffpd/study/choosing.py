r"""`choose`: how strong the regulariser, fairness and the pull towards the others should be, by folds.

Every client cuts its rows into K folds. For a point (l2, objective, κ) of a grid the models are trained K times, each
time without one fold, and every client scores its own fold: ℓ_ik, its mean loss there without the regulariser.
These N·K numbers per point go up and nothing else. A point's score is Σ_i w_i ℓ_i with ℓ_i = mean_k ℓ_ik, where

    w_i = 1/N (the mean),  or  1/⌈N/5⌉ for the ⌈N/5⌉ clients with the largest ℓ_i and 0 elsewhere (the worst fifth).

The best point has the lowest score. Chosen is the simplest one that is behind it by at most one standard error, where a
larger κ, then a larger l2, then an objective closer to the average is simpler. That error is √(Σ_i s_i²/K), with s_i
the standard deviation over folds of w_i ℓ_ik − w'_i ℓ'_ik, the two points paired by client and fold.

Without a budget all points are tried. With one, l2, κ and the objective are searched one after the other, from the
middle l2 of one average model on, until none of them moves any more or the budget of rounds is spent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError, count, real, unknown
from scaffpd.federation import Vector
from scaffpd.models import Linear, Module, Personal
from scaffpd.objectives import Average, Objective, named
from scaffpd.study.folds import FOLDS, Folds, base_of, held_out_losses, with_strengths
from scaffpd.study.path import WarmStart, grid
from scaffpd.training.metrics import every, worst_fifth

MEAN = "mean"
WORST = "worst fifth"
BY = {MEAN: every, WORST: worst_fifth}
L2S = (1.0, 0.1, 0.01, 0.001)  # in units of the features' mean square
KAPPAS = (math.inf, 1000.0, 100.0, 10.0)  # likewise
STRENGTHS = 3  # of an objective given by its kind, besides the average
ROUNDS = 100
Key = tuple[float, float, int]  # κ, l2, the number of the objective


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid, and how its models do on the rows left out.

    Attributes:
        l2: the regulariser.
        objective: (Λ, ψ).
        strength: κ of `Personal`; infinite for one model for all.
        losses: ℓ_ik, (N, K).
        rounds: rounds made, all folds together.
        behind: by how much its score is above that of the best point.
        error: the standard error of `behind`.
    """

    l2: float
    objective: Objective
    strength: float
    losses: NDArray[np.float64] = field(repr=False)
    rounds: int
    behind: float = 0.0
    error: float = 0.0

    @property
    def key(self) -> tuple[float, int, float]:
        """Its place in the grid."""
        return self.l2, id(self.objective), self.strength

    def terms(self, by: str) -> NDArray[np.float64]:
        """Return w_i ℓ_ik."""
        return BY[by](self.losses.mean(1))[:, None] * self.losses

    def score(self, by: str) -> float:
        """Return Σ_i w_i ℓ_i."""
        return float(self.terms(by).mean(1).sum())

    def row(self) -> dict[str, Any]:
        """Return the point and its scores, as a table has them."""
        row: dict[str, Any] = {
            "kappa": self.strength,
            "l2": self.l2,
            "objective": repr(self.objective),
        }
        for name, by in (("mean", MEAN), ("worst_20", WORST)):
            row |= {
                f"validation_loss_{name}": self.score(by),
                f"validation_loss_{name}_se": _error(self.terms(by)),
            }
        return row

    def words(self) -> str:
        """Describe the point in a few words."""
        goal = (
            "the average" if isinstance(self.objective, Average) else type(self.objective).__name__
        )
        if self.objective.symbol:
            goal += f" with {self.objective.symbol} = {self.objective.strength:.3g}"
        own = (
            "one model for all"
            if math.isinf(self.strength)
            else f"personal models of κ = {self.strength:.4g}"
        )
        return f"l2 = {self.l2:.3g}, {goal}, {own}"


@dataclass(frozen=True)
class Choice:
    """Result of `choose`.

    Attributes:
        model: the model with the chosen l2, `Personal` where κ is finite; give it to a `Cohort`.
        by: "mean" or "worst fifth".
        point: the chosen point of the grid.
        best: the point with the lowest score.
        points: the whole grid, the simplest point first.
        errors: how many standard errors a simpler point may be behind.
        tried: all points, those that may not be chosen included.
    """

    model: Any
    by: str
    point: GridPoint
    best: GridPoint
    points: tuple[GridPoint, ...] = field(repr=False)
    errors: float = 1.0
    tried: tuple[GridPoint, ...] = field(default=(), repr=False)

    l2 = property(lambda self: self.point.l2, doc="The chosen regulariser.")
    strength = property(
        lambda self: self.point.strength, doc="The chosen κ; infinite for one model for all."
    )
    objective = property(
        lambda self: self.point.objective, doc="The chosen objective; give it to `fair(...)`."
    )
    rounds = property(
        lambda self: sum(one.rounds for one in self.tried),
        doc="Rounds made for all points and folds.",
    )

    def among(self, keep: Callable[[GridPoint], bool], by: str | None = None) -> Choice:
        """Choose again among some of the points, such as `lambda point: math.isinf(point.strength)`."""
        kept = [point for point in self.points if keep(point)]
        if not kept:
            raise InputError(
                "point-grid-kept", "No point of the grid is kept: choose among some of them."
            )
        return _chosen(kept, by or self.by, self.errors, self.model)

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for every point: mean and worst fifth with their standard errors, and how far it is behind the best."""
        return [
            one.row()
            | {"behind": one.behind, "behind_error": one.error, "chosen": one is self.point}
            for one in self.points
        ]

    def with_point(self, point: GridPoint) -> Choice:
        """Return the same grid with another point chosen."""
        chosen = next(one for one in self.points if one.losses is point.losses)
        return replace(
            self, point=chosen, model=with_strengths(self.model, chosen.l2, chosen.strength)
        )

    @property
    def line(self) -> tuple[GridPoint, ...]:
        """The points with the chosen l2 and objective, from one model for all to models that hardly know the others."""
        return tuple(
            one for one in self.points if one.l2 == self.l2 and one.objective is self.objective
        )

    @property
    def kappa_path(self) -> list[dict[str, Any]]:
        """Rows of `kappa_path.csv`: κ, its held-out losses with their standard errors, and whether it was chosen."""
        return [one.row() | {"chosen": one is self.point} for one in self.line]

    @property
    def sentence(self) -> str:
        """Describe the choice, and by how much it matters."""
        own = self.point.score(self.by)
        lowest = self.best.score(self.by)
        rule = "the lowest"
        folds = self.point.losses.shape[1]
        if self.point is not self.best:
            above = f"{100 * (own / lowest - 1):.2g} % above the lowest"
            rule = f"{above}, within one standard error, and the simplest such"
        told = [f"{name} by up to {_percents(cost)}" for name, cost in self.matters.items()]
        matters = f"; it moves with {', '.join(told)}" if told else ""
        return (
            f"Chosen by {folds} folds: {self.point.words()}. Its {self.by} of held-out losses, {own:.4g}, is {rule} of "
            f"{len(self.tried)} points tried in {self.rounds} rounds{matters}."
        )

    @property
    def matters(self) -> dict[str, float]:
        """By what share the score changes at most where l2, the objective or κ is another and the rest the same."""
        found = dict[str, float]()
        for axis, name in enumerate(("l2", "the objective", "κ")):
            lines: dict[Any, list[float]] = {}
            for point in self.tried:
                lines.setdefault((*point.key[:axis], *point.key[axis + 1 :]), []).append(
                    point.score(self.by)
                )
            if any(len(line) > 1 for line in lines.values()):
                found[name] = max(max(line) / min(line) - 1 for line in lines.values())
        return found

    def __str__(self) -> str:
        return self.sentence


def choose(
    clients: Any,
    model: Linear | Module | Personal,
    objective: str | Objective | Sequence[Objective] = "ChiSquare",
    l2: float | Sequence[float] | None = None,
    strength: float | Sequence[float] | None = None,
    by: str = MEAN,
    folds: int = FOLDS,
    errors: float = 1.0,
    rounds: int = ROUNDS,
    tol: float | None = None,
    seed: int = 0,
    names: Sequence[str] | None = None,
    device: str = "cpu",
    dtype: Any = None,
    budget: int | None = None,
) -> Choice:
    """Choose l2, the objective's strength and κ of `Personal` together, by folds inside each client.

    Args:
        clients: one (X, y) pair per site, training rows only; or a mapping from names to pairs.
        model: `Linear(...)` or `Module(...)`, whose l2 is chosen; or `Personal(...)` of one, whose columns stay.
        objective: "ChiSquare", "Tilted", "ChiSquareBall", "CVaR" or "QFair": the average and three strengths that go
            by how far the clients' losses are apart. Or an objective, or several, the closest to the average first.
        l2: what to try; by default four values in units of the features' mean square, for networks their own.
        strength: the κ to try; `math.inf` is one model for all. By default infinity and three others.
        by: judge by the "mean" over clients or by the "worst fifth" of them.
        folds: K; every client needs as many rows.
        errors: how many standard errors a simpler point may be behind; 0 takes the lowest score.
        rounds: the most rounds for each point and fold.
        tol: the certified gap to train to; by default 1e-4 of the loss at the start, where one can be proven.
        seed: seeds the folds and all else.
        names: the clients' names.
        device: as for `Cohort`.
        dtype: as for `Cohort`.
        budget: the most rounds of all points and folds together; then strengths are searched one after the other.
    """
    if not isinstance(model, Linear | Module | Personal):
        raise InputError(
            "choose-model-such",
            f"choose needs a model such as Linear(...) or Module(...), got {model!r}.",
        )
    rows = Folds.of(clients, model, names, folds, seed, device, dtype)
    free = isinstance(objective, str)
    goal = named(objective) if isinstance(objective, str) else objective
    return search(rows, goal, l2, strength, by, errors, rounds, tol, seed, budget, free=free)


def search(
    trials: Any,
    objective: Any,
    l2: Any,
    strength: Any,
    by: str,
    errors: float,
    rounds: int,
    tol: float | None,
    seed: int,
    budget: int | None,
    fairly: bool = False,
    free: bool = False,
) -> Choice:
    """Try points, all of a grid or as many as the budget allows, and choose one; arguments are those of `choose`.

    `trials` are `Folds`, or silos that train and answer as these do.

    `fairly` is for whoever wants a fair objective anyway: the average is tried, not chosen, l2 and the strength of the
    objective are those of the best point, and the one standard error rule is left for κ.

    `free` also tries the average and other strengths of the objective, where it has some; its prior and its cap stay.
    """
    if by not in BY:
        raise unknown("measure", by, BY)
    if real("choose", "errors", errors) < 0:
        raise InputError("choose-errors", f"choose needs errors >= 0, got {errors!r}.")
    base = base_of(trials.model)
    scale = trials.scale()
    usual = (
        [short(scale * value) for value in L2S] if isinstance(base, Linear) else [float(base.l2)]
    )
    l2s = _values("l2", l2, usual)
    kappas = _values("strength", strength, [short(scale * value) for value in KAPPAS])
    if budget is not None and count("choose", "budget", budget) < trials.folds * max(
        len(l2s), len(kappas)
    ):
        least = trials.folds * max(len(l2s), len(kappas))
        raise InputError(
            "choose-budget-least",
            f"choose needs a budget of at least {least} rounds for {trials.folds} folds, got {budget}.",
        )
    found = _Search(trials, by, rounds, tol, seed, budget)
    found.walk(kappas, l2s, objective, free)
    choice = _chosen(found.candidates(fairly), by, errors, trials.model)
    point = choice.best if fairly else choice.point
    if budget is not None and found.line(kappas, point):
        choice = _chosen(found.candidates(fairly), by, errors, trials.model)
    line = choice.with_point(choice.best).line
    choice = choice.with_point(_chosen(line, by, errors, trials.model).point) if fairly else choice
    return replace(choice, tried=tuple(found.points))


def _percents(share: float) -> str:
    """Write two digits of a share, without an exponent."""
    value = 100 * max(share, 0.0)
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def short(value: float) -> float:
    """Round to two digits, enough for a number that is typed again."""
    return float(f"{value:.2g}")


class _Search:
    """The points that have been tried."""

    def __init__(
        self, trials: Any, by: str, rounds: int, tol: float | None, seed: int, budget: int | None
    ) -> None:
        self.trials = trials
        self.by = by
        self.rounds = rounds
        self.tol = tol
        self.seed = seed
        self.left = math.inf if budget is None else float(budget)
        self.goals: list[Objective] = []
        self.tried: dict[Key, GridPoint] = {}
        self.average: dict[
            tuple[float, float], Vector
        ] = {}  # training losses of the first objective, by (κ, l2)
        self._x: dict[int, Any] = {}  # where the next run without a fold starts

    @property
    def points(self) -> list[GridPoint]:
        """All of them, the simplest first."""
        return [
            self.tried[key]
            for key in sorted(self.tried, key=lambda key: (-key[0], -key[1], key[2]))
        ]

    def candidates(self, fairly: bool) -> list[GridPoint]:
        """Return the points that may be chosen: all, or those of fair objectives where there are some."""
        fair = [point for point in self.points if not isinstance(point.objective, Average)]
        return fair if fairly and fair else self.points

    def walk(
        self, kappas: Sequence[float], l2s: Sequence[float], objective: Any, free: bool
    ) -> None:
        """Try the whole grid; or, with a budget, one strength after the other."""
        here = kappas[0], l2s[len(l2s) // 2], 0
        self.goals = _given(objective)
        if free := free and self.goals[0].strengths is not None:
            self.goals = [Average(prior=objective.prior)]
        if math.isinf(self.left):
            if free:
                self.run([here])
                self._strengths(objective, here)
            self.run(list(itertools.product(kappas, l2s, range(len(self.goals)))))
            return
        before: Key | None = None
        while here != before:
            before = here
            for axis, values in ((1, l2s), (0, kappas), (2, None)):
                if values is None and free and len(self.goals) == 1:
                    self._strengths(objective, here)
                line: Any = range(len(self.goals)) if values is None else values
                keys = [(*here[:axis], value, *here[axis + 1 :]) for value in line]
                if not self.run(keys):
                    return
                here = min(keys, key=lambda key: self.tried[key].score(self.by))

    def line(self, kappas: Sequence[float], point: GridPoint) -> bool:
        """Try all κ with the l2 and the objective of a point; tell whether the budget was large enough."""
        k = next(k for k, goal in enumerate(self.goals) if goal is point.objective)
        return self.run([(kappa, point.l2, k) for kappa in kappas])

    def _strengths(self, objective: Objective, here: Key) -> None:
        """Add strengths of an objective, by how far apart the losses of the average model are."""
        self.goals += list(grid(objective, self.average[here[:2]], STRENGTHS).values())[1:-1]

    def run(self, keys: Sequence[Key]) -> bool:
        """Train for these points without one fold after the other; tell whether the budget was large enough."""
        new = [key for key in keys if key not in self.tried]
        runs = len(new) * self.trials.folds
        found = dict[Key, list[tuple[Vector, int]]]()
        if runs > self.left:
            return False
        for fold in range(self.trials.folds):
            for (kappa, l2), group in itertools.groupby(new, lambda key: key[:2]):
                keys = list(group)
                for key, losses, made in self._without(fold, kappa, l2, keys, runs):
                    found.setdefault(key, []).append((losses, made))
                runs -= len(keys)
        for (kappa, l2, k), each in found.items():
            losses = np.stack([one for one, _ in each], axis=1)
            self.tried[kappa, l2, k] = GridPoint(
                l2, self.goals[k], kappa, losses, sum(made for _, made in each)
            )
        return True

    def _without(self, fold: int, kappa: float, l2: float, keys: Sequence[Key], runs: int) -> Any:
        """Yield losses and rounds for some objectives, each from where the last one ended; so many runs are left."""
        clients = self.trials.clients(fold, l2, kappa)
        limit = self.trials.tolerance(clients, l2) if self.tol is None else self.tol
        start = WarmStart(self._x.get(fold))
        for place, key in enumerate(keys):
            rounds = int(min(self.rounds, self.left // (runs - place)))
            method = self.trials.method(self.goals[key[2]])
            result = start.train(
                method, clients, rounds, limit, self.seed, False, ()
            ).uninterrupted()
            if key[2] == 0 or fold not in self._x:
                self._x[fold] = result.x
            if key[2] == 0 and fold == 0:
                self.average[kappa, l2] = np.asarray(result.history.last_losses)
            self.left -= result.rounds
            yield key, held_out_losses(clients, result.x, l2), result.rounds


def _chosen(points: Sequence[GridPoint], by: str, errors: float, model: Any) -> Choice:
    """Return the first point that is behind the best by at most so many standard errors."""
    best = min(points, key=lambda point: point.score(by))
    points = [
        replace(
            point,
            behind=point.score(by) - best.score(by),
            error=_error(point.terms(by) - best.terms(by)),
        )
        for point in points
    ]
    point = next(one for one in points if one.behind <= errors * one.error)
    best = next(one for one in points if one.behind == 0)
    return Choice(
        with_strengths(model, point.l2, point.strength),
        by,
        point,
        best,
        tuple(points),
        errors,
        tuple(points),
    )


def _error(terms: NDArray[np.float64]) -> float:
    """Return √(Σ_i s_i²/K)."""
    return float(np.sqrt((terms.var(axis=1, ddof=1) / terms.shape[1]).sum()))


def _values(name: str, given: Any, usual: Sequence[float]) -> list[float]:
    """Check the values to try; the largest comes first."""
    several = (
        usual if given is None else given if isinstance(given, Sequence | np.ndarray) else [given]
    )
    if isinstance(several, str) or not len(several):
        raise InputError(
            "choose-number-numbers", f"choose needs a number or numbers for {name}, got {given!r}."
        )
    for value in several:
        number = real("choose", name, value)
        positive = name == "strength"
        if number < 0 or (positive and number == 0) or (not positive and number == math.inf):
            limit = "> 0 (math.inf: one model for all)" if positive else ">= 0 and finite"
            raise InputError("choose-values", f"choose needs {name} {limit}, got {value!r}.")
    return sorted({float(value) for value in several}, reverse=True)


def _given(objective: Any) -> list[Objective]:
    """Return the objectives to try, the closest to the average first."""
    listed = isinstance(objective, Sequence)
    several = [objective] if isinstance(objective, Objective) else list(objective) if listed else []
    if not several or not all(isinstance(one, Objective) for one in several):
        raise InputError(
            "choose-objectives-such",
            f"choose needs objectives such as 'ChiSquare' or CVaR(0.2), got {objective!r}.",
        )
    return several
