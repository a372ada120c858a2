r"""`choose`: how strong the regulariser, fairness and the pull towards the others should be, by folds.

Every client cuts its rows into K folds. For every point (l2, objective, κ) of a grid the models are trained K times,
each time without one fold, and every client scores its own fold: ℓ_ik, its mean loss there without the regulariser.
These N·K numbers per point go up and nothing else. A point's score is Σ_i w_i ℓ_i with ℓ_i = mean_k ℓ_ik, where

    w_i = 1/N (the mean),  or  1/⌈N/5⌉ for the ⌈N/5⌉ clients with the largest ℓ_i and 0 elsewhere (the worst fifth).

The best point has the lowest score. Chosen is the simplest one that is behind it by at most one standard error, where a
larger κ, then a larger l2, then an objective closer to the average is simpler. That error is √(Σ_i s_i²/K), with s_i
the standard deviation over folds of w_i ℓ_ik − w'_i ℓ'_ik, the two points paired by client and fold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms import Fair
from scaffpd.cohort import Cohort, named_pairs
from scaffpd.data.silos import generator
from scaffpd.errors import InputError, count, real, unknown
from scaffpd.fairness_path import PARAMETERS, SYMBOLS, along, grid
from scaffpd.federation import Vector
from scaffpd.metrics import a_fifth
from scaffpd.models import Linear, Module, Personal
from scaffpd.objectives import Average, Objective
from scaffpd.training import Status, train

MEAN, WORST = "mean", "worst fifth"
L2S = (1.0, 0.1, 0.01, 0.001)  # in units of the features' mean square
KAPPAS = (math.inf, 1000.0, 100.0, 10.0)  # likewise
STRENGTHS = 3  # of an objective given by its kind, besides the average
TOL = 1e-4  # of the mean loss at x⁰: models that folds tell apart differ by much more


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

    def terms(self, by: str) -> NDArray[np.float64]:
        """w_i ℓ_ik."""
        n, each = len(self.losses), self.losses.mean(1)
        worst = np.argsort(-each, kind="stable")[: n if by == MEAN else a_fifth(n)]
        weights = np.zeros(n)
        weights[worst] = 1 / len(worst)
        return weights[:, None] * self.losses

    def score(self, by: str) -> float:
        """Σ_i w_i ℓ_i."""
        return float(self.terms(by).mean(1).sum())

    def words(self) -> str:
        """The point in a few words."""
        kind, parameter = type(self.objective).__name__, PARAMETERS.get(type(self.objective).__name__)
        goal = "the average" if isinstance(self.objective, Average) else kind
        if parameter is not None:
            goal = f"{kind} with {SYMBOLS[kind]} = {getattr(self.objective, parameter):.3g}"
        own = "one model for all" if math.isinf(self.strength) else f"personal models of strength {self.strength:.4g}"
        return f"l2 = {self.l2:.3g}, {goal}, {own}"


@dataclass(frozen=True)
class Choice:
    """What `choose` has found.

    Attributes:
        model: the model with the chosen l2, `Personal` where κ is finite; give it to a `Cohort`.
        by: "mean" or "worst fifth".
        point: the chosen point of the grid.
        best: the point with the lowest score.
        points: the whole grid, the simplest point first.
        errors: how many standard errors a simpler point may be behind.
    """

    model: Any
    by: str
    point: GridPoint
    best: GridPoint
    points: tuple[GridPoint, ...] = field(repr=False)
    errors: float = 1.0

    l2 = property(lambda self: self.point.l2, doc="The chosen regulariser.")
    strength = property(lambda self: self.point.strength, doc="The chosen κ; infinite for one model for all.")
    objective = property(lambda self: self.point.objective, doc="The chosen objective; give it to `fair(...)`.")
    rounds = property(lambda self: sum(one.rounds for one in self.points), doc="Rounds made for all points and folds.")

    def among(self, keep: Callable[[GridPoint], bool], by: str | None = None) -> Choice:
        """Choose again among some of the points, such as `lambda point: math.isinf(point.strength)`."""
        kept = [point for point in self.points if keep(point)]
        if not kept:
            raise InputError("No point of the grid is kept: choose among some of them.")
        return _chosen(kept, by or self.by, self.errors, self.model)

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for every point: mean and worst fifth with their standard errors, and how far it is behind the best."""
        rows = []
        for one in self.points:
            row: dict[str, Any] = {"l2": one.l2, "objective": repr(one.objective), "strength": one.strength}
            for by in (MEAN, WORST):
                row |= {by.replace(" ", "_"): one.score(by), f"{by.replace(' ', '_')}_error": _error(one.terms(by))}
            rows.append(row | {"behind": one.behind, "behind_error": one.error, "chosen": one is self.point})
        return rows

    @property
    def sentence(self) -> str:
        """What was chosen, and by how much it matters."""
        own, lowest, first, highest = (
            one.score(self.by) for one in (self.point, self.best, self.points[0], max(self.points, key=self._score))
        )
        rule, tried = "the lowest", f"{len(self.points)} points tried"
        if self.point is not self.best:
            rule = (
                f"{100 * (own / lowest - 1):.2g} % above the lowest, within one standard error, and the simplest such"
            )
        matters = f"the highest is {100 * (highest / own - 1):.2g} % above it"
        if self.point is not self.points[0]:
            simplest = (
                f"that of the simplest point ({self.points[0].words()}) is {100 * (first / own - 1):.2g} % above it"
            )
            matters = f"{simplest}, the highest {100 * (highest / own - 1):.2g} %"
        folds = self.point.losses.shape[1]
        return (
            f"Chosen by {folds} folds: {self.point.words()}. Its {self.by} of held-out losses, {own:.4g}, is {rule} of "
            f"{tried}; {matters}."
        )

    def _score(self, point: GridPoint) -> float:
        return point.score(self.by)

    def __str__(self) -> str:
        return self.sentence


def choose(
    clients: Any,
    model: Linear | Module | Personal,
    objective: str | Objective | Sequence[Objective] = "ChiSquare",
    l2: float | Sequence[float] | None = None,
    strength: float | Sequence[float] | None = None,
    by: str = MEAN,
    folds: int = 3,
    errors: float = 1.0,
    rounds: int = 100,
    tol: float | None = None,
    seed: int = 0,
    names: Sequence[str] | None = None,
    device: str = "cpu",
    dtype: Any = None,
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
    """
    if by not in (MEAN, WORST):
        raise unknown("measure", by, (MEAN, WORST))
    if real("choose", "errors", errors) < 0:
        raise InputError(f"choose needs errors >= 0, got {errors!r}.")
    search = _Search.of(clients, model, names, folds, seed, device, dtype)
    linear, scale = isinstance(search.base, Linear), search.scale()
    l2s = _values("l2", l2, [scale * value for value in L2S] if linear else [float(search.base.l2)])
    kappas = _values("strength", strength, [scale * value for value in KAPPAS])
    goals = _objectives(objective, lambda: search.average_losses(l2s[len(l2s) // 2], rounds, tol))
    found: dict[tuple[float, float, int], list[tuple[Vector, int]]] = {}
    for fold in range(folds):
        for key, losses, made in search.along(fold, l2s, kappas, goals, rounds, tol):
            found.setdefault(key, []).append((losses, made))
    points = [
        GridPoint(ridge, goals[k], kappa, np.stack([one for one, _ in each], axis=1), sum(made for _, made in each))
        for (kappa, ridge, k), each in found.items()
    ]
    return _chosen(points, by, errors, search.model)


def _chosen(points: Sequence[GridPoint], by: str, errors: float, model: Any) -> Choice:
    """Return the first point that is behind the best by at most so many standard errors."""
    best = min(points, key=lambda point: point.score(by))
    points = [
        replace(point, behind=point.score(by) - best.score(by), error=_error(point.terms(by) - best.terms(by)))
        for point in points
    ]
    point = next(one for one in points if one.behind <= errors * one.error)
    best = next(one for one in points if one.behind == 0)
    return Choice(with_strengths(model, point.l2, point.strength), by, point, best, tuple(points), errors)


def _error(terms: NDArray[np.float64]) -> float:
    """√(Σ_i s_i²/K)."""
    return float(np.sqrt((terms.var(axis=1, ddof=1) / terms.shape[1]).sum()))


def with_strengths(model: Any, l2: float, kappa: float) -> Any:
    """Return the model with this regulariser and this κ; one model for all where κ is infinite."""
    base = replace(model.model if isinstance(model, Personal) else model, l2=l2)
    return base if math.isinf(kappa) else Personal(base, kappa, getattr(model, "columns", None))


def _values(name: str, given: Any, usual: Sequence[float]) -> list[float]:
    """Check the values to try; the largest comes first."""
    several = usual if given is None else given if isinstance(given, Sequence | np.ndarray) else [given]
    if isinstance(several, str) or not len(several):
        raise InputError(f"choose needs a number or numbers for {name}, got {given!r}.")
    for value in several:
        number, positive = real("choose", name, value), name == "strength"
        if number < 0 or (positive and number == 0) or (not positive and number == math.inf):
            limit = "> 0 (math.inf: one model for all)" if positive else ">= 0 and finite"
            raise InputError(f"choose needs {name} {limit}, got {value!r}.")
    return sorted({float(value) for value in several}, reverse=True)


def _objectives(given: Any, losses: Callable[[], Vector]) -> list[Objective]:
    """Return the objectives to try, the closest to the average first."""
    if isinstance(given, str):
        if given not in SYMBOLS:
            raise unknown("objective", given, SYMBOLS)
        return list(grid(given, losses(), STRENGTHS).values())[:-1]
    several = [given] if isinstance(given, Objective) else list(given) if isinstance(given, Sequence) else []
    if not several or not all(isinstance(one, Objective) for one in several):
        raise InputError(f"choose needs objectives such as 'ChiSquare' or CVaR(0.2), got {given!r}.")
    return several


def fold_numbers(y: Any, folds: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Give every row the number of a fold; folds have the same size, and labels are spread evenly over them."""
    labels, number = np.asarray(y), np.empty(len(y), dtype=np.int64)
    order = random.permutation(len(labels))
    if labels.dtype.kind in "biu" and labels.ndim == 1:
        order = order[np.argsort(labels[order], kind="stable")]
    number[order] = (np.arange(len(labels)) + int(random.integers(folds))) % folds
    return number


@dataclass(frozen=True)
class _Search:
    """Clients and their folds."""

    pairs: list[tuple[Any, Any]]
    names: list[str]
    model: Any
    numbers: list[NDArray[np.int64]]
    seed: int
    device: str
    dtype: Any

    @classmethod
    def of(cls, clients: Any, model: Any, names: Any, folds: int, seed: int, device: str, dtype: Any) -> _Search:
        """Check what was given, and cut the folds."""
        if hasattr(clients, "constants"):
            raise InputError("choose needs the clients' rows, to leave some out: give it a list of pairs (X, y).")
        base = model.model if isinstance(model, Personal) else model
        if not isinstance(base, Linear | Module):
            raise InputError(f"choose needs a model such as Linear(...) or Module(...), got {model!r}.")
        if count("choose", "folds", folds) < 2:
            raise InputError("choose needs folds >= 2: one to leave out, and others to train on.")
        pairs, known = named_pairs(clients, names)
        for name, (_, y) in zip(known, pairs, strict=True):
            if len(y) < folds:
                advice = f"give folds={len(y)}" if len(y) >= 2 else "leave it out"
                rows = f"{len(y)} row{'' if len(y) == 1 else 's'}"
                raise InputError(f"Client {name!r} has {rows}, too few for {folds} folds: {advice}.")
        if isinstance(base, Linear) and base.loss == "softmax" and base.classes is None:  # a fold may lack one
            base = replace(base, classes=1 + max(int(np.max(np.asarray(y))) for _, y in pairs))
            model = replace(model, model=base) if isinstance(model, Personal) else base
        random = generator("choose", seed)
        return cls(pairs, known, model, [fold_numbers(y, folds, random) for _, y in pairs], int(seed), device, dtype)

    @property
    def base(self) -> Any:
        """The model that is, or could be, personal."""
        return self.model.model if isinstance(self.model, Personal) else self.model

    def scale(self) -> float:
        """Σ‖a‖²/(n d), for which every client gives two numbers; 1 for networks."""
        if isinstance(self.base, Module):
            return 1.0
        rows = (np.asarray(X) for X, _ in self.pairs)
        squares, size = np.sum([(np.square(a, dtype=np.float64).sum(), a.size) for a in rows], axis=0)
        return float(squares / size) if 0 < squares < math.inf else 1.0

    def cohort(self, fold: int, l2: float, kappa: float) -> Cohort:
        """The clients without a fold, and that fold as held-out rows."""

        def some(out: bool) -> list[tuple[Any, ...]]:
            rows = [np.flatnonzero((number == fold) == out) for number in self.numbers]
            return [
                tuple(each.iloc[r] if hasattr(each, "iloc") else each[r] for each in pair)
                for pair, r in zip(self.pairs, rows, strict=True)
            ]

        model: Any = with_strengths(self.model, l2, kappa)
        kept: Any = some(False)
        return Cohort(kept, model, self.names, device=self.device, dtype=self.dtype, test=some(True))

    def average_losses(self, l2: float, rounds: int, tol: float | None) -> Vector:
        """The training losses of one average model."""
        cohort = self.cohort(0, l2, math.inf)
        found = train(Fair(Average()), cohort, rounds, self._tol(cohort, l2, tol), self.seed, progress=False)
        return np.asarray(found.history.last_losses)

    def _tol(self, cohort: Cohort, l2: float, tol: float | None) -> float | None:
        if l2 == 0 or isinstance(self.base, Module):
            return None
        return TOL * float(cohort.evaluate(cohort.start()).loss.mean()) if tol is None else tol

    def along(
        self, fold: int, l2s: Sequence[float], kappas: Sequence[float], goals: Sequence[Objective], rounds: int,
        tol: float | None,
    ) -> Iterator[tuple[tuple[float, float, int], Vector, int]]:  # fmt: skip
        """Train for all points without this fold, each from where the last one ended; its losses and its rounds."""
        start = None
        for kappa, l2 in itertools.product(kappas, l2s):
            cohort = self.cohort(fold, l2, kappa)
            limit = self._tol(cohort, l2, tol)
            results = along(goals, cohort, rounds, limit, self.seed, Fair, False, lambda _: (), True, start)
            for k, result in enumerate(results):
                if result.status is Status.INTERRUPTED:
                    raise KeyboardInterrupt
                start = result.x if k == 0 else start
                models = result.x[None] if result.personal is None else result.personal
                losses = cohort.evaluate(result.x, "test").loss - l2 / 2 * np.square(models).sum(1)
                yield (kappa, l2, k), losses, result.rounds
