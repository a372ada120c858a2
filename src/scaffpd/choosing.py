r"""`choose`: how strong the regulariser, fairness and the pull towards the others should be, by folds.

Every client cuts its rows into K folds. For every point (l2, objective, κ) of a grid the models are trained K times,
each time without one fold, and every client scores its own fold: ℓ_ik, its mean loss there without the regulariser.
These N·K numbers per point go up and nothing else. A point's score is Σ_i w_i ℓ_i with ℓ_i = mean_k ℓ_ik, where

    w_i = 1/N (the mean),  or  w_i = 1/⌈N/5⌉ for the ⌈N/5⌉ clients with the largest ℓ_i and 0 elsewhere (the worst fifth).

The best point has the lowest score. One standard error rule: the simplest point that is behind by no more than the
standard error of its distance is chosen, where a larger κ, then a larger l2, then an objective closer to the average
is simpler. The error of Σ_i (w_i ℓ_i − w'_i ℓ'_i), paired by client and fold, is √(Σ_i s_i²/K), with s_i the standard
deviation over folds of client i's term.
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

Pair = tuple[Any, Any]
MEAN, WORST = "mean", "worst fifth"
L2S = (1.0, 0.1, 0.01, 0.001)  # in units of the features' mean square
KAPPAS = (math.inf, 1000.0, 100.0, 10.0)  # likewise
STRENGTHS = 3  # of an objective given by its kind, besides the average
TOL = 1e-4  # of the mean loss at x⁰: folds tell models apart that differ by much more


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid, and how its models do on the rows left out.

    Attributes:
        l2: the regulariser.
        objective: (Λ, ψ).
        strength: κ of `Personal`; infinite for one model for all.
        losses: ℓ_ik, (N, K).
        mean: over clients and folds.
        worst_fifth: over the ⌈N/5⌉ clients with the largest losses.
        behind: by how much its score is above that of the best point.
        error: the standard error of `behind`.
        rounds: rounds made, all folds together.
    """

    l2: float
    objective: Objective
    strength: float
    losses: NDArray[np.float64] = field(repr=False)
    mean: float
    worst_fifth: float
    rounds: int
    behind: float = 0.0
    error: float = 0.0

    @property
    def standard_errors(self) -> tuple[float, float]:
        """Those of the mean and of the worst fifth."""
        return tuple(_error(_weights(self.losses, by)[:, None] * self.losses) for by in (MEAN, WORST))  # type: ignore[return-value]

    def score(self, by: str) -> float:
        """What the point is judged by: "mean" or "worst fifth"."""
        return self.mean if by == MEAN else self.worst_fifth

    def words(self) -> str:
        """The point in a few words."""
        kind = type(self.objective).__name__
        parameter = PARAMETERS.get(kind)
        goal = "the average" if isinstance(self.objective, Average) else kind
        goal = f"{kind} with {SYMBOLS[kind]} = {getattr(self.objective, parameter):.3g}" if parameter else goal
        own = "one model for all" if math.isinf(self.strength) else f"personal models of strength {self.strength:.3g}"
        return f"l2 = {self.l2:.3g}, {goal}, {own}"


@dataclass(frozen=True)
class Choice:
    """What `choose` has found.

    Attributes:
        model: the model with the chosen l2, `Personal` where κ is finite; give it to a `Cohort`.
        objective: the chosen one; give it to `fair(...)`.
        l2: the regulariser.
        strength: κ; infinite for one model for all.
        by: "mean" or "worst fifth".
        point: the chosen point of the grid.
        best: the point with the lowest score.
        points: the whole grid, the simplest point first.
        errors: how many standard errors a simpler point may be behind.
    """

    model: Any
    objective: Objective
    by: str
    point: GridPoint
    best: GridPoint
    points: tuple[GridPoint, ...] = field(repr=False)
    errors: float = 1.0

    @property
    def l2(self) -> float:
        """The chosen regulariser."""
        return self.point.l2

    @property
    def strength(self) -> float:
        """The chosen κ."""
        return self.point.strength

    @property
    def rounds(self) -> int:
        """Rounds made for all points and folds."""
        return sum(point.rounds for point in self.points)

    def among(self, keep: Callable[[GridPoint], bool], by: str | None = None) -> Choice:
        """Choose again among some of the points, such as `lambda point: math.isinf(point.strength)`."""
        kept = [point for point in self.points if keep(point)]
        if not kept:
            raise InputError("None of the points of the grid is kept: choose among some of them.")
        return _chosen(kept, by or self.by, self.errors, self.model)

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for every point."""
        rows = []
        for one in self.points:
            mean, worst = one.standard_errors
            rows.append({
                "l2": one.l2, "objective": repr(one.objective), "strength": one.strength, "mean": one.mean,
                "mean_error": mean, "worst_fifth": one.worst_fifth, "worst_fifth_error": worst,
                "behind": one.behind, "behind_error": one.error, "chosen": one is self.point,
            })  # fmt: skip
        return rows

    @property
    def sentence(self) -> str:
        """What was chosen, and by how much it matters."""
        score, simplest, worst = self.point.score(self.by), self.points[0], max(p.score(self.by) for p in self.points)
        share = [100 * (other / score - 1) if score > 0 else 0.0 for other in (simplest.score(self.by), worst)]
        rule = "the lowest of"
        if self.point is not self.best:
            rule = f"the simplest of those within one standard error of the lowest ({self.best.score(self.by):.4g}) of"
        than = (
            "It is also the simplest"
            if self.point is simplest
            else f"The simplest ({simplest.words()}) is {_percent(share[0])}"
        )
        return (
            f"Chosen by {self.point.losses.shape[1]} folds: {self.point.words()}. Its {self.by} of held-out losses is "
            f"{score:.4g}, {rule} {len(self.points)} tried. {than}, the worst one is {_percent(share[1])}."
        )

    def __str__(self) -> str:
        return self.sentence


def _percent(share: float) -> str:
    return f"{abs(share):.2g} % {'higher' if share >= 0 else 'lower'}"


def choose(
    clients: Sequence[Pair],
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
        clients: one (X, y) pair per site, training rows only.
        model: `Linear(...)` or `Module(...)`, whose l2 is chosen; or `Personal(...)` of one, whose columns stay.
        objective: "ChiSquare", "Tilted", "ChiSquareBall", "CVaR" or "QFair": the average and three strengths that go
            by how far the clients' losses are apart. Or an objective, or several, the closest to the average first.
        l2: the value or values to try; by default four, in units of the mean square of the features.
        strength: the κ to try; `math.inf` is one model for all. By default four, infinity among them.
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
    search = _Search.of(clients, model, names, folds, seed, device, dtype)
    if by not in (MEAN, WORST):
        raise unknown("measure", by, (MEAN, WORST))
    if real("choose", "errors", errors) < 0:
        raise InputError(f"choose needs errors >= 0, got {errors!r}.")
    scale = search.scale()
    l2s = _values("l2", l2, [scale * value for value in L2S])
    kappas = _values("strength", strength, [scale * value for value in KAPPAS])
    goals = _objectives(objective, lambda: search.spread(l2s[len(l2s) // 2], rounds, tol))
    found: dict[tuple[float, float, int], list[tuple[Vector, int]]] = {}
    for fold in range(folds):
        for key, losses, made in search.along(fold, l2s, kappas, goals, rounds, tol):
            found.setdefault(key, []).append((losses, made))
    points = []
    for (kappa, ridge, k), each in found.items():
        losses = np.stack([one for one, _ in each], axis=1)
        mean, worst = (float(_weights(losses, which) @ losses.mean(1)) for which in (MEAN, WORST))
        points.append(GridPoint(ridge, goals[k], kappa, losses, mean, worst, sum(made for _, made in each)))
    return _chosen(points, by, errors, search.model)


def _chosen(points: Sequence[GridPoint], by: str, errors: float, model: Any) -> Choice:
    """Return the first point that is behind the best by no more than so many standard errors."""
    best = min(points, key=lambda point: point.score(by))
    terms = [_weights(point.losses, by)[:, None] * point.losses for point in points]
    least = terms[points.index(best)]
    points = [
        replace(point, behind=point.score(by) - best.score(by), error=_error(own - least))
        for point, own in zip(points, terms, strict=True)
    ]
    best = min(points, key=lambda point: point.behind)
    point = next(one for one in points if one.behind <= errors * one.error)
    return Choice(_with(model, point.l2, point.strength), point.objective, by, point, best, tuple(points), errors)


def _weights(losses: NDArray[np.float64], by: str) -> Vector:
    """w_i."""
    n, each = len(losses), losses.mean(1)
    if by == MEAN:
        return np.full(n, 1 / n)
    weights, worst = np.zeros(n), np.argsort(-each, kind="stable")[: a_fifth(n)]
    weights[worst] = 1 / len(worst)
    return weights


def _error(terms: NDArray[np.float64]) -> float:
    """√(Σ_i s_i²/K)."""
    return float(np.sqrt((terms.var(axis=1, ddof=1) / terms.shape[1]).sum()))


def _values(name: str, given: Any, usual: Sequence[float]) -> list[float]:
    """The values to try, the largest first."""
    if given is None:
        return list(usual)
    several = list(given) if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str) else [given]
    for value in several:
        if name == "strength" and value == math.inf:
            continue
        if not 0 <= real("choose", name, value) < math.inf or (name == "strength" and value == 0):
            limit = "> 0 (math.inf: one model for all)" if name == "strength" else ">= 0 and finite"
            raise InputError(f"choose needs {name} {limit}, got {value!r}.")
    if not several:
        raise InputError(f"choose needs at least one {name} to try.")
    return sorted(set(map(float, several)), reverse=True)


def _objectives(given: Any, losses: Callable[[], Vector]) -> list[Objective]:
    """The objectives to try, the closest to the average first."""
    if isinstance(given, str):
        if given not in SYMBOLS:
            raise unknown("objective", given, SYMBOLS)
        return list(grid(given, losses(), STRENGTHS).values())[:-1]
    several = [given] if isinstance(given, Objective) else list(given) if isinstance(given, Sequence) else []
    if not several or not all(isinstance(one, Objective) for one in several):
        raise InputError(f"choose needs objectives such as 'ChiSquare' or CVaR(0.2), got {given!r}.")
    return several


def _with(model: Any, l2: float, kappa: float) -> Any:
    """The model with this regulariser and this strength."""
    base = replace(model.model if isinstance(model, Personal) else model, l2=l2)
    return base if math.isinf(kappa) else Personal(base, kappa, getattr(model, "columns", None))


def fold_numbers(y: Any, folds: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Give every row the number of a fold; folds have the same size, and labels are spread evenly over them."""
    labels, number = np.asarray(y), np.empty(len(y), dtype=np.int64)
    order = random.permutation(len(labels))
    if labels.dtype.kind in "biu" and labels.ndim == 1:
        order = order[np.argsort(labels[order], kind="stable")]
    number[order] = (np.arange(len(labels)) + int(random.integers(folds))) % folds
    return number


def _rows(values: Any, chosen: NDArray[np.int64]) -> Any:
    """Some rows of an array, a tensor, a table or a data frame."""
    return values.iloc[chosen] if hasattr(values, "iloc") else values[chosen]


@dataclass(frozen=True)
class _Search:
    """Clients and their folds."""

    pairs: list[Pair]
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
        pairs, known = named_pairs(clients, names)
        if count("choose", "folds", folds) < 2:
            raise InputError("choose needs folds >= 2: one to leave out, and others to train on.")
        for name, (_, y) in zip(known, pairs, strict=True):
            if len(y) < folds:
                most = min(len(each) for _, each in pairs)
                advice = f"folds={most}" if most >= 2 else "more rows of it, or leave it out"
                raise InputError(
                    f"Client {name!r} has {len(y)} row{'' if len(y) == 1 else 's'} for {folds} folds: give {advice}."
                )
        if isinstance(base, Linear) and base.loss == "softmax" and base.classes is None:
            base = replace(base, classes=1 + max(int(np.max(np.asarray(y))) for _, y in pairs))
            model = replace(model, model=base) if isinstance(model, Personal) else base
        random = generator("choose", seed)
        return cls(pairs, known, model, [fold_numbers(y, folds, random) for _, y in pairs], int(seed), device, dtype)

    def scale(self) -> float:
        """The mean square of the features, Σ‖a‖²/(n d); two numbers of every client. 1 for networks."""
        if not isinstance(self.model, Linear | Personal) or isinstance(getattr(self.model, "model", None), Module):
            return 1.0
        sums = [(float(np.square(a, dtype=np.float64).sum()), a.size) for a in (np.asarray(X) for X, _ in self.pairs)]
        total = sum(squares for squares, _ in sums) / sum(size for _, size in sums)
        return total if 0 < total < math.inf else 1.0

    def cohort(self, fold: int, l2: float, kappa: float) -> Cohort:
        """The clients without a fold, and that fold as held-out rows."""
        parts = [
            [
                tuple(_rows(each, np.flatnonzero(keep(own))) for each in pair)
                for pair, own in zip(self.pairs, self.numbers, strict=True)
            ]
            for keep in (lambda own: own != fold, lambda own: own == fold)
        ]
        model = _with(self.model, l2, kappa)
        return Cohort(parts[0], model, self.names, device=self.device, dtype=self.dtype, test=parts[1])

    def spread(self, l2: float, rounds: int, tol: float | None) -> Vector:
        """The losses of the average model."""
        cohort = self.cohort(0, l2, math.inf)
        return train(Fair(Average()), cohort, rounds, self._tol(cohort, l2, tol), progress=False).history.losses[-1]

    def _tol(self, cohort: Cohort, l2: float, tol: float | None) -> float | None:
        base = self.model.model if isinstance(self.model, Personal) else self.model
        if l2 == 0 or not isinstance(base, Linear):
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
