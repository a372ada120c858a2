r"""`joining`: does it pay for a client to train with the others? Five answers to its held-out rows.

constant   the client's mean, or its most frequent label with the shares of all labels
alone      argmin_u Σ_j ℓ_j(u) + (κ_i/2)‖u‖² on its own rows, κ_i by folds of its own rows
average    one model x for all, min_x Σ p_i f_i(x)
fair       one model x for all, min_x max_λ Σ λ_i f_i(x) − ψ(λ)
personal   a model u_i of its own near a shared and fair x: `Personal(model, κ)`, κ by folds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.algorithms.fair import fair
from scaffpd.errors import InputError, count
from scaffpd.models import Linear, Personal
from scaffpd.models.linear import each_of
from scaffpd.models.losses import loss_named
from scaffpd.objectives import Average, ChiSquare, Objective
from scaffpd.study.choosing import MEAN, AnyModel, Choice, Folds, Group, search, short, with_classes
from scaffpd.study.coalitions import among
from scaffpd.study.gains import ALONE, AVERAGE, CONSTANT, FAIR, PERSONAL, Array, Joining
from scaffpd.training.cohort import Cohort, Pair, in_order
from scaffpd.training.loop import train as run
from scaffpd.training.metrics import HeldOutMoments

# κ of personal models, in units of the features' mean square
RIDGES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # κ_i of a model alone
PATH = (math.inf, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0)
Rows = tuple[Array, NDArray[np.float64]]
Answers = dict[str, list[Array]]  # by model, the parameters for every client


def joining(
    train: Sequence[Pair] | Mapping[str, Pair],
    test: Sequence[Pair] | Mapping[str, Pair],
    model: Linear,
    objective: Objective | None = None,
    *,
    names: Sequence[str] | None = None,
    strength: float | None = None,
    seed: int = 0,
    tol: float = 1e-6,
    rounds: int = 1000,
    unit: float = 1.0,
    block: int = 1,
    word: str = "client",
    known: Mapping[str, Array] | None = None,
    choice: Choice | None = None,
) -> Joining:
    """Measure what every client gains from training with the others, on its held-out rows.

    Args:
        train: one (X, y) per client, or a mapping from names to them.
        test: the same of held-out rows.
        model: `Linear(...)`; its l2 is that of the shared models, alone every client chooses its
            own.
        objective: of the fair models; `ChiSquare(rho=0.1)` if not given.
        names: the clients' names.
        strength: κ of the personal models; if not given, `choose` takes one by folds inside the
            clients.
        seed: of folds.
        tol: the proven gap at which training stops.
        rounds: the most rounds of a training.
        unit: what one unit of the target is, for errors of regression.
        block: consecutive held-out rows that count as one for the interval, such as 7 for days of
            weather.
        word: what a client is called.
        known: models of the first split that are trained already: {"average": x, "fair": x}.
        choice: what `choose` has found for the first split, with this l2 and this objective: its κ
            is taken.
    """
    if not isinstance(model, Linear):
        raise InputError(
            "joining-not-linear",
            f"joining compares linear models: give Linear(...), got {model!r}.",
        )
    if objective is not None and not isinstance(objective, Objective):
        raise InputError(
            "not-an-objective",
            f"joining needs an objective such as ChiSquare(rho=0.1), got {objective!r}.",
        )
    if not test:
        raise InputError(
            "joining-without-test-rows",
            "joining needs held-out rows: give test= as one (X, y) per client.",
        )
    count("joining", "block", block)
    goal = ChiSquare(rho=0.1) if objective is None else objective
    clients = Cohort(train, model, names, test=test).names  # refuses what does not fit together
    rows, held = (_arrays(in_order(pairs, list(clients))) for pairs in (train, test))
    full = with_classes(model, [*rows, *held])
    assert isinstance(full, Linear)
    split = JoiningSplit(rows, held, full, goal, tuple(clients), seed, tol, rounds)
    return split.judge(strength, unit, block, word, known or {}, choice)


def _arrays(pairs: list[Pair]) -> list[Rows]:
    return [(np.asarray(X, dtype=np.float64), np.asarray(y)) for X, y in pairs]


@dataclass(frozen=True)
class JoiningSplit:
    """All models on one split."""

    train: list[Rows]
    test: list[Rows]
    model: Linear
    objective: Objective
    names: tuple[str, ...]
    seed: int
    tol: float
    rounds: int

    @cached_property
    def folded(self) -> tuple[Folds, Group]:
        """Training rows that are left out in turn, and the numbers of the clients that have enough
        for that.
        """
        return Folds.where_possible(self.train, self.model, self.names, self.seed)

    def judge(
        self,
        strength: float | None,
        unit: float,
        block: int,
        word: str,
        known: Mapping[str, Array],
        choice: Choice | None = None,
    ) -> Joining:
        """Train all models and let them answer the held-out rows."""
        folds, who = self.folded
        alone, ridges = fit_alone(folds)
        if strength is None:
            chosen = choice or self.choice()
            assert chosen.personal is not None  # the path has finite κ
            strength = chosen.personal
        answers: Answers = {ALONE: alone}
        for name, goal in ((AVERAGE, Average(prior=self.objective.prior)), (FAIR, self.objective)):
            if name == AVERAGE or not isinstance(goal, Average):
                x = known[name] if name in known else self._trained(self.model, goal)[0]
                answers[name] = [x] * len(who)
        x, own = self._trained(Personal(self.model, strength), self.objective)
        assert own is not None
        answers[PERSONAL] = [own[i] for i in who]
        evidence, wrong, measure = self.scored(answers, unit, block)
        score = 1 - wrong.means if measure == "accuracy" else wrong.means
        return Joining(
            tuple(folds.names),
            (CONSTANT, *answers),
            evidence.means,
            score,
            measure,
            tuple((len(self.train[i][1]), len(self.test[i][1])) for i in who),
            evidence,
            wrong,
            ridges,
            float(strength),
            word=word,
            own=np.stack([x, *own]),
            without=tuple(name for name in self.names if name not in folds.names),
        )

    def scored(
        self, answers: Answers, unit: float, block: int
    ) -> tuple[HeldOutMoments, HeldOutMoments, str]:
        """Score the constant answer and these models on held-out rows: losses, errors, and what
        errors are of.
        """
        losses = []
        errors = []
        measure = "accuracy"
        for k, i in enumerate(self.folded[1]):
            X, y = self.test[i]
            outputs = [
                self._constant(i, len(y)),
                *(self.model.outputs(u[k], X) for u in answers.values()),
            ]
            found = [answered(self.model, z, y) for z in outputs]
            losses.append(np.stack([loss for loss, _ in found]))
            rooted = [loss for loss, _ in found]
            if self.model.loss == "poisson":
                rooted = [(loss_named("poisson").mean(z[:, 0]) - y) ** 2 for z in outputs]
            pairs = zip(rooted, found, strict=True)
            errors.append(
                np.stack(
                    [_root(unit, square) if hit is None else 1 - hit for square, (_, hit) in pairs]
                )
            )
            measure = "rmse" if found[0][1] is None else measure
        evidence, wrong = (HeldOutMoments.of(rows, block) for rows in (losses, errors))
        return evidence, wrong, measure

    def choice(self) -> Choice:
        """Let folds choose κ, from one model for all to models that hardly know each other."""
        folds, who = self.folded
        kappas = [short(folds.scale() * value) for value in PATH]
        goal = among(self.objective, who)
        return search(folds, [goal], self.model.l2, kappas, MEAN, self.seed, None)

    def _constant(self, i: int, rows: int) -> Array:
        """Return the same outputs for every row: the mean, or log-odds of the labels (half a row of
        each added).
        """
        y = self.train[i][1]
        loss = self.model.loss
        if loss == "squared":
            target = np.asarray(
                loss_named(loss).encode([y], ["rows"], self.model.classes).arrays[0],
                dtype=np.float64,
            )
            return np.tile(target.mean(0), (rows, 1))
        if loss == "poisson":
            mean = max(float(y.mean()), 0.5 / len(y))  # where nothing was counted, half a one
            return np.full((rows, 1), mean + np.log(-np.expm1(-mean)))
        shares = np.bincount(y.astype(int).ravel(), minlength=self.model.classes or 2) + 0.5
        z = np.log(shares / shares.sum())
        return np.tile(z if loss == "softmax" else z[1:] - z[:1], (rows, 1))

    def _trained(self, model: AnyModel, goal: Objective) -> tuple[Array, Array | None]:
        """Train; return the shared model, and the clients' own where the model is `Personal`."""
        cohort = Cohort(self.train, model, self.names)
        tol = None if 0 in each_of(self.model.l2) else self.tol
        found = run(fair(goal), cohort, self.rounds, tol, progress=False).uninterrupted()
        return found.x, found.personal


def _root(unit: float, loss: Array) -> Array:
    """Return a number for every row whose mean is unit·√L, with the covariances of unit·√L to first
    order.
    """
    root = math.sqrt(loss.mean())
    found: Array = unit * (root + (loss - loss.mean()) / (2 * root)) if root > 0 else 0 * loss
    return found


def answered(model: Linear, z: Array, y: Array) -> tuple[Array, Array | None]:
    """Return the loss of every row with outputs z, and whether the label is right; `None` for
    regression.
    """
    loss = loss_named(model.loss)
    outputs = torch.from_numpy(np.ascontiguousarray(z))
    target = torch.from_numpy(
        np.asarray(loss.encode([y], ["held-out rows"], model.classes).arrays[0])
    )
    hit = loss.correct(outputs, target)
    return loss.value(outputs, target).numpy(), None if hit is None else hit.double().numpy()


def fit_alone(folds: Folds) -> tuple[list[Array], tuple[float, ...]]:
    """Train every client by itself, with the largest κ_i within one standard error of the best.

    The error is that of the mean of paired differences over all of the client's rows, each left out
    once. Returned are the models and κ_i.
    """
    model = folds.model
    assert isinstance(model, Linear)
    clients = range(len(folds.names))
    tried = []
    for kappa in RIDGES:
        held: list[list[Array]] = [[] for _ in clients]
        for k in range(folds.folds):
            models = _ridge(model, folds.rows(k, False), kappa)
            for own, u, (X, y) in zip(held, models, folds.rows(k, True), strict=True):
                own.append(answered(model, model.outputs(u, X), y)[0])
        tried.append(held)
    best = [_simplest(np.stack([np.concatenate(held[i]) for held in tried])) for i in clients]
    fitted = {k: _ridge(model, folds.pairs, RIDGES[k]) for k in set(best)}
    return [fitted[k][i] for i, k in enumerate(best)], tuple(RIDGES[k] for k in best)


def _ridge(model: Linear, pairs: Sequence[Pair], kappa: float) -> Array:
    """Solve argmin_u Σ_j ℓ_j(u) + (κ/2)‖u‖² of every client: a personal model whose shared one is
    zero.
    """
    cohort = Cohort(pairs, Personal(replace(model, l2=0.0), kappa))
    return np.asarray(cohort.own_models(0 * cohort.start()))


def _simplest(losses: Array) -> int:
    """Return the last row of losses whose mean is within one standard error of the best, by paired
    differences.
    """
    above = losses - losses[losses.mean(1).argmin()]
    return int(
        np.flatnonzero(above.mean(1) <= above.std(1, ddof=1) / math.sqrt(losses.shape[1]))[-1]
    )
