r"""`choose`: the strengths of the regulariser, of fairness and of the pull towards x, by folds.

Every client cuts its rows into K folds. For a point (l2, objective, κ) of a grid the models are
trained K times, each time without one fold, and every client scores its own fold: ℓ_ik, its mean
loss there without the regulariser. These N·K numbers per point go up and nothing else. A point's
score is Σ_i w_i ℓ_i with ℓ_i = mean_k ℓ_ik, where

    w_i = 1/N (the mean),  or  1/⌈N/5⌉ for the ⌈N/5⌉ clients with the largest ℓ_i and 0 elsewhere.

One rule: l2 and the objective are those of the lowest score (fair objectives before the average, if
some are tried); κ is the largest that is behind the best κ by at most one standard error. That
error is √(Σ_i s_i²/K), with s_i the standard deviation over folds of w_i ℓ_ik − w'_i ℓ'_ik, the two
points paired by client and fold.

Without a budget all points are tried. With one, l2, κ and the objective are searched one after the
other, from the middle l2 of one average model on, until none moves or the rounds are spent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.algorithms import Fair
from scaffpd.data.silos import checked_seed, enough_rows, fold_numbers
from scaffpd.errors import InputError, count, real, unknown
from scaffpd.federation import Vector
from scaffpd.models import Linear, Module, Personal, regulariser
from scaffpd.objectives import Average, Objective, named
from scaffpd.study.path import WarmStart, grid
from scaffpd.training.cohort import Cohort, Pair, named_pairs
from scaffpd.training.metrics import every, worst_fifth

MEAN = "mean"
WORST = "worst fifth"
BY = {MEAN: every, WORST: worst_fifth}
L2S = (1.0, 0.1, 0.01, 0.001)  # in units of the features' mean square
FOLDS = 3
TOL = 1e-4  # of the mean loss at x⁰: models whose folds differ at all differ by much more
KAPPAS = (math.inf, 1000.0, 100.0, 10.0)  # likewise
STRENGTHS = 3  # of an objective given by its kind, besides the average
ROUNDS = 100  # the most of one point without one fold
AnyModel = Linear | Module | Personal
Group = tuple[int, ...]  # numbers of clients
Key = tuple[float, float, int]  # κ, l2, the number of the objective


def base_of(model: AnyModel) -> Linear | Module:
    """Return the model that is, or could be, personal."""
    return model.model if isinstance(model, Personal) else model


def with_strengths(model: AnyModel, l2: float, kappa: float) -> AnyModel:
    """Return the model with this regulariser and this κ; one model for all if κ is infinite."""
    base = replace(base_of(model), l2=l2)
    return base if math.isinf(kappa) else Personal(base, kappa, getattr(model, "columns", None))


def with_classes(model: AnyModel, pairs: Sequence[Pair]) -> AnyModel:
    """Return the model with its number of classes: a fold, or a group, may not have all of them."""
    base = base_of(model)
    if not isinstance(base, Linear) or base.loss != "softmax" or base.classes is not None:
        return model
    base = replace(base, classes=max(2, 1 + max(int(np.max(np.asarray(y))) for _, y in pairs)))
    return replace(model, model=base) if isinstance(model, Personal) else base


@dataclass(frozen=True)
class Folds:
    """Clients in this process, and the rows that each of them leaves out in turn."""

    pairs: list[Pair]
    names: list[str]
    model: AnyModel
    numbers: list[NDArray[np.int64]]
    folds: int
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        clients: Sequence[Pair] | Mapping[str, Pair],
        model: AnyModel,
        names: Sequence[str] | None = None,
        folds: int = FOLDS,
        seed: int = 0,
    ) -> Folds:
        """Check what was given, and cut the folds."""
        if not isinstance(model, Linear | Module | Personal):
            raise InputError(
                "not-a-model",
                f"choose needs a model such as Linear(...) or Module(...), got {model!r}.",
            )
        if count("choose", "folds", folds) < 2:
            raise InputError(
                "one-fold", "choose needs folds >= 2: one to leave out, and others to train on."
            )
        pairs, known = named_pairs(clients, names)
        for name, (_, y) in zip(known, pairs, strict=True):
            enough_rows(f"Client {name!r}", len(y), folds)
        seed = checked_seed("choose", seed)
        numbers = [
            fold_numbers(name, y, folds, seed) for name, (_, y) in zip(known, pairs, strict=True)
        ]
        return cls(pairs, known, with_classes(model, pairs), numbers, folds)

    @classmethod
    def where_possible(
        cls, pairs: Sequence[Pair], model: AnyModel, names: Sequence[str], seed: int
    ) -> tuple[Folds, Group]:
        """Cut folds of the clients that have rows enough for them, and return their numbers."""
        who = tuple(i for i, (_, y) in enumerate(pairs) if len(y) >= FOLDS)
        if not who:
            raise InputError(
                "too-few-rows-for-folds", f"nobody has the {FOLDS} training rows that folds need."
            )
        chosen = [pairs[i] for i in who], with_classes(model, pairs), [names[i] for i in who]
        return cls.of(*chosen, FOLDS, seed), who

    def rows(self, fold: int, out: bool) -> list[Pair]:
        """Return every client's rows in a fold (`out`), or all others."""
        chosen = [np.flatnonzero((number == fold) == out) for number in self.numbers]
        return [
            tuple(part.iloc[own] if hasattr(part, "iloc") else part[own] for part in pair)
            for pair, own in zip(self.pairs, chosen, strict=True)
        ]

    def scale(self) -> float:
        """Return Σ‖a‖²/(n d), for which every client gives two numbers; 1 for networks."""
        if isinstance(base_of(self.model), Module):
            return 1.0
        features = (np.asarray(X) for X, _ in self.pairs)
        squares, size = np.sum(
            [(np.square(a, dtype=np.float64).sum(), a.size) for a in features], axis=0
        )
        return float(squares / size) if 0 < squares < math.inf else 1.0

    def tolerance(self, clients: Cohort, l2: float) -> float | None:
        """Return the certified gap to train to, a small share of the first loss; `None` where
        nothing can be proven.
        """
        if l2 == 0 or isinstance(base_of(self.model), Module):
            return None
        return TOL * float(clients.losses(clients.start()).mean())

    def clients(self, fold: int, l2: float, kappa: float) -> Cohort:
        """Bind the clients without a fold, and that fold as held-out rows."""
        model = with_strengths(self.model, l2, kappa)
        held = self.rows(fold, True)
        return Cohort(self.rows(fold, False), model, self.names, self.device, test=held)


def held_out_losses(clients: Cohort, x: Vector) -> Vector:
    """Return the mean losses of held-out rows, without a regulariser."""
    return clients.evaluate(x, "test").loss - regulariser(clients.model, np.asarray(x, np.float64))


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid, and how its models do on the rows left out.

    Attributes:
        l2: the regulariser.
        objective: (Λ, ψ).
        strength: κ of `Personal`; infinite for one model for all.
        losses: ℓ_ik, (N, K).
        rounds: rounds made, all folds together.
    """

    l2: float
    objective: Objective
    strength: float
    losses: NDArray[np.float64] = field(repr=False)
    rounds: int

    def terms(self, by: str) -> NDArray[np.float64]:
        """Return w_i ℓ_ik."""
        return BY[by](self.losses.mean(1))[:, None] * self.losses

    def score(self, by: str) -> float:
        """Return Σ_i w_i ℓ_i."""
        return float(self.terms(by).mean(1).sum())

    def words(self) -> str:
        """Describe the point in a few words."""
        average = isinstance(self.objective, Average)
        goal = "the average" if average else type(self.objective).__name__
        if self.objective.symbol:
            goal += f" with {self.objective.symbol} = {self.objective.strength:.3g}"
        shared = math.isinf(self.strength)
        own = "one model for all" if shared else f"personal models of κ = {self.strength:.4g}"
        return f"l2 = {self.l2:.3g}, {goal}, {own}"


@dataclass(frozen=True)
class Choice:
    """Result of `choose`.

    Attributes:
        model: the model with the chosen l2, `Personal` if κ is finite; give it to a `Cohort`.
        by: "mean" or "worst fifth".
        point: the chosen point of the grid.
        tried: all points, the simplest first.
    """

    model: AnyModel
    by: str
    point: GridPoint
    tried: tuple[GridPoint, ...] = field(repr=False)

    @property
    def l2(self) -> float:
        """The chosen regulariser."""
        return self.point.l2

    @property
    def strength(self) -> float:
        """The chosen κ; infinite for one model for all."""
        return self.point.strength

    @property
    def objective(self) -> Objective:
        """The chosen objective; give it to `fair(...)`."""
        return self.point.objective

    @property
    def rounds(self) -> int:
        """Rounds made for all points and folds."""
        return sum(point.rounds for point in self.tried)

    @property
    def line(self) -> tuple[GridPoint, ...]:
        """The points with the chosen l2 and objective, from one model for all to nearly alone."""
        return tuple(
            one for one in self.tried if one.l2 == self.l2 and one.objective is self.objective
        )

    @property
    def personal(self) -> float | None:
        """The κ for personal models, even if one for all might do; `None` if none was tried."""
        finite = [point for point in self.line if math.isfinite(point.strength)]
        return simplest(finite, self.by).strength if finite else None

    @property
    def table(self) -> list[dict[str, object]]:
        """A row for every point: mean and worst fifth with their standard errors."""
        return [
            {
                "kappa": one.strength,
                "l2": one.l2,
                "objective": repr(one.objective),
                "validation_loss_mean": one.score(MEAN),
                "validation_loss_mean_se": _error(one.terms(MEAN)),
                "validation_loss_worst_20": one.score(WORST),
                "validation_loss_worst_20_se": _error(one.terms(WORST)),
                "chosen": one is self.point,
            }
            for one in self.tried
        ]

    @property
    def sentence(self) -> str:
        """Describe the choice."""
        own = self.point.score(self.by)
        folds = self.point.losses.shape[1]
        return (
            f"Chosen by {folds} folds: {self.point.words()}. Its {self.by} of held-out losses is "
            f"{own:.4g}; {len(self.tried)} points were tried in {self.rounds} rounds."
        )

    def __str__(self) -> str:
        return self.sentence


def choose(
    clients: Sequence[Pair] | Mapping[str, Pair],
    model: AnyModel,
    objective: str | Objective | Sequence[Objective] = "ChiSquare",
    l2: float | Sequence[float] | None = None,
    strength: float | Sequence[float] | None = None,
    by: str = MEAN,
    *,
    folds: int = FOLDS,
    seed: int = 0,
    names: Sequence[str] | None = None,
    budget: int | None = None,
) -> Choice:
    """Choose l2, the objective's strength and κ of `Personal` together, by folds in each client.

    Args:
        clients: one (X, y) pair per site, training rows only; or a mapping from names to pairs.
        model: `Linear(...)` or `Module(...)`; or `Personal(...)` of one, whose columns stay.
        objective: "ChiSquare", "Tilted", "ChiSquareBall", "CVaR" or "QFair": the average and three
            strengths by how far the clients' losses differ. Or an objective, or several, the
            closest to the average first.
        l2: what to try; by default four values in units of the features' mean square, for
            networks their own.
        strength: the κ to try; `math.inf` is one model for all. By default infinity and three
            others.
        by: judge by the "mean" over clients or by the "worst fifth" of them.
        folds: K; every client needs as many rows.
        seed: seeds the folds and all else.
        names: the clients' names.
        budget: the most rounds of all points and folds together; then strengths are searched one
            after the other.
    """
    rows = Folds.of(clients, model, names, folds, seed)
    given = named(objective) if isinstance(objective, str) else objective
    goals = list(given) if isinstance(given, Sequence) else [given]
    if not goals or not all(isinstance(goal, Objective) for goal in goals):
        raise InputError(
            "not-an-objective",
            f"choose needs objectives such as 'ChiSquare' or CVaR(0.2), got {objective!r}.",
        )
    return search(rows, goals, l2, strength, by, seed, budget, isinstance(objective, str))


def search(
    trials: Folds,
    goals: Sequence[Objective],
    l2: ArrayLike | None,
    strength: ArrayLike | None,
    by: str,
    seed: int,
    budget: int | None,
    free: bool = False,
) -> Choice:
    """Try points, all of a grid or as many as the budget allows, and choose one.

    Arguments are those of `choose`. `free` tries the average and other strengths of the only goal,
    if it has some; its prior and its cap stay.
    """
    if by not in BY:
        raise unknown("measure", by, BY)
    base = base_of(trials.model)
    scale = trials.scale()
    usual = [short(scale * v) for v in L2S] if isinstance(base, Linear) else [float(base.l2)]
    l2s = _values("l2", l2, usual)
    kappas = _values("strength", strength, [short(scale * value) for value in KAPPAS])
    if budget is not None:
        least = trials.folds * max(len(l2s), len(kappas))
        if count("choose", "budget", budget) < least:
            raise InputError(
                "budget-too-small",
                f"choose needs a budget of at least {least} rounds for {trials.folds} folds.",
            )
    found = _Search(trials, by, seed, budget)
    found.walk(kappas, l2s, goals, free)
    fair = [point for point in found.points if not isinstance(point.objective, Average)]
    best = min(fair or found.points, key=lambda point: point.score(by))
    k = next(k for k, goal in enumerate(found.goals) if goal is best.objective)
    found.run([(kappa, best.l2, k) for kappa in kappas])  # if the budget is large enough
    line = [one for one in found.points if (one.l2, one.objective) == (best.l2, best.objective)]
    point = simplest(line, by)
    model = with_strengths(trials.model, point.l2, point.strength)
    return Choice(model, by, point, tuple(found.points))


def simplest(points: Sequence[GridPoint], by: str) -> GridPoint:
    """Return the first point that is behind the best by at most one standard error."""
    best = min(points, key=lambda point: point.score(by))
    return next(
        one
        for one in points
        if one.score(by) - best.score(by) <= _error(one.terms(by) - best.terms(by))
    )


def short(value: float) -> float:
    """Round to two digits, enough for a number that is typed again."""
    return float(f"{value:.2g}")


class _Search:
    """The points that have been tried."""

    def __init__(self, trials: Folds, by: str, seed: int, budget: int | None) -> None:
        self.trials = trials
        self.by = by
        self.seed = seed
        self.left = math.inf if budget is None else float(budget)
        self.goals: list[Objective] = []
        self.tried: dict[Key, GridPoint] = {}
        # training losses of the first objective, by (κ, l2)
        self.average: dict[tuple[float, float], Vector] = {}
        self._x: dict[int, Vector] = {}  # where the next run without a fold starts

    @property
    def points(self) -> list[GridPoint]:
        """All of them, the simplest first: a larger κ, then a larger l2, then near the average."""
        keys = sorted(self.tried, key=lambda key: (-key[0], -key[1], key[2]))
        return [self.tried[key] for key in keys]

    def walk(
        self,
        kappas: Sequence[float],
        l2s: Sequence[float],
        goals: Sequence[Objective],
        free: bool,
    ) -> None:
        """Try the whole grid; or, with a budget, one strength after the other."""
        here = kappas[0], l2s[len(l2s) // 2], 0
        self.goals = list(goals)
        goal = goals[0]
        free = free and goal.strengths is not None
        if free:
            self.goals = [Average(prior=goal.prior)]
        if math.isinf(self.left):
            if free:
                self.run([here])
                self._add_strengths(goal, here)
            self.run(list(itertools.product(kappas, l2s, range(len(self.goals)))))
            return
        before: Key | None = None
        while here != before:
            before = here
            for axis in ("l2", "kappa", "objective"):
                kappa, l2, k = here
                if axis == "l2":
                    keys = [(kappa, value, k) for value in l2s]
                elif axis == "kappa":
                    keys = [(value, l2, k) for value in kappas]
                else:
                    if free and len(self.goals) == 1:
                        self._add_strengths(goal, here)
                    keys = [(kappa, l2, number) for number in range(len(self.goals))]
                if not self.run(keys):
                    return
                here = min(keys, key=lambda key: self.tried[key].score(self.by))

    def _add_strengths(self, objective: Objective, here: Key) -> None:
        """Add strengths of an objective, by how far the losses of the average model differ."""
        self.goals += list(grid(objective, self.average[here[:2]], STRENGTHS).values())[1:-1]

    def run(self, keys: Sequence[Key]) -> bool:
        """Train for these points without one fold after the other; `False` if rounds run out."""
        new = [key for key in keys if key not in self.tried]
        runs = len(new) * self.trials.folds
        if runs > self.left:
            return False
        found = dict[Key, list[tuple[Vector, int]]]()
        for fold in range(self.trials.folds):
            for (kappa, l2), group in itertools.groupby(new, lambda key: key[:2]):
                some = list(group)
                for key, losses, made in self._without(fold, kappa, l2, some, runs):
                    found.setdefault(key, []).append((losses, made))
                runs -= len(some)
        for key, each in found.items():
            losses = np.stack([one for one, _ in each], axis=1)
            made = sum(rounds for _, rounds in each)
            self.tried[key] = GridPoint(key[1], self.goals[key[2]], key[0], losses, made)
        return True

    def _without(
        self, fold: int, kappa: float, l2: float, keys: Sequence[Key], runs: int
    ) -> Iterator[tuple[Key, Vector, int]]:
        """Yield losses and rounds for some objectives, each from where the last one ended.

        So many `runs` are left to share the budget.
        """
        clients = self.trials.clients(fold, l2, kappa)
        limit = self.trials.tolerance(clients, l2)
        start = WarmStart(self._x.get(fold))
        for place, key in enumerate(keys):
            rounds = int(min(ROUNDS, self.left // (runs - place)))
            method = Fair(self.goals[key[2]])
            result = start.train(method, clients, rounds, limit, self.seed).uninterrupted()
            if key[2] == 0 or fold not in self._x:
                self._x[fold] = result.x
            if key[2] == 0 and fold == 0:
                self.average[kappa, l2] = np.asarray(result.history.last_losses)
            self.left -= result.rounds
            yield key, held_out_losses(clients, result.x), result.rounds


def _error(terms: NDArray[np.float64]) -> float:
    """Return √(Σ_i s_i²/K)."""
    return float(np.sqrt((terms.var(axis=1, ddof=1) / terms.shape[1]).sum()))


def _values(name: str, given: ArrayLike | None, usual: Sequence[float]) -> list[float]:
    """Check the values to try; the largest comes first."""
    several = usual if given is None else np.atleast_1d(np.asarray(given, dtype=object)).tolist()
    for value in several:
        number = real("choose", name, value)
        positive = name == "strength"
        if number < 0 or (positive and number == 0) or (not positive and number == math.inf):
            limit = "> 0 (math.inf: one model for all)" if positive else ">= 0 and finite"
            raise InputError(
                "strength-out-of-range", f"choose needs {name} {limit}, got {value!r}."
            )
    return sorted({float(value) for value in several}, reverse=True)
