r"""`joining`: does it pay for a client to train with the others? Five answers to its held-out rows.

constant   without columns: the client's mean or shares of labels, near those of all
alone      a model of its own rows, with the ridge that these rows speak for
average    one model x for all, min_x Σ p_i f_i(x)
fair       one model x for all, min_x max_λ Σ λ_i f_i(x) − ψ(λ), with the same ridge
personal   u_i near a shared x, min_x Σ (n_i/n) F_i(x): `Personal(model)`, the joint mode

Strengths are those of the model that is given; "auto" sets them by the evidence of all training
rows, so every row is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import fdtrc

from scaffpd.algorithms.fair import fair
from scaffpd.errors import InputError, count
from scaffpd.models import Linear, Personal
from scaffpd.models.concordance import wrong_pairs
from scaffpd.models.losses import loss_named
from scaffpd.models.numerics import CONFIDENCE
from scaffpd.models.periods import at_risk
from scaffpd.models.personal import base_of
from scaffpd.objectives import Average, ChiSquare, Objective
from scaffpd.study.alone import fit_alone
from scaffpd.study.gains import Joining
from scaffpd.study.verdict import ALONE, AVERAGE, CONSTANT, FAIR, PERSONAL
from scaffpd.tasks import solving
from scaffpd.tasks.base import Task
from scaffpd.training.cohort import Cohort, Pair, in_order
from scaffpd.training.loop import Result, uncertified
from scaffpd.training.loop import train as run
from scaffpd.training.metrics import Array, HeldOutMoments

Rows = tuple[Array, Array]


def joining(
    train: Sequence[Pair] | Mapping[str, Pair],
    test: Sequence[Pair] | Mapping[str, Pair],
    model: Linear | Personal,
    objective: Objective | None = None,
    *,
    names: Sequence[str] | None = None,
    tol: float = 1e-6,
    rounds: int = 1000,
    unit: float = 1.0,
    block: int = 1,
    word: str = "client",
    known: Mapping[str, Result] | None = None,
    task: Task | None = None,
) -> Joining:
    """Measure what every client gains from training with the others, on its held-out rows.

    Args:
        train: one (X, y) per client, or a mapping from names to them.
        test: the same of held-out rows.
        model: `Linear(...)`, or `Personal(...)` of one for personal models of another strength than
            the evidence's, or of some columns.
        objective: of the fair model; `ChiSquare(rho=0.1)` if not given.
        names: the clients' names.
        tol: the proven gap at which training stops.
        rounds: the most rounds of a training.
        unit: what one unit of the target is, for errors of regression.
        block: consecutive held-out rows that count as one for the interval, such as 7 for days of
            weather.
        word: what a client is called.
        known: models that are trained already, by name ("average", "fair", "personal").
        task: what is predicted; `None` goes by the loss.
    """
    if not isinstance(model, Linear | Personal) or not isinstance(base_of(model), Linear):
        raise InputError(
            "joining-not-linear",
            f"joining compares linear models: give Linear(...), got {model!r}.",
        )
    goal = ChiSquare(rho=0.1) if objective is None else objective
    if not isinstance(goal, Objective):
        raise InputError(
            "not-an-objective",
            f"joining needs an objective such as ChiSquare(rho=0.1), got {goal!r}.",
        )
    if not test:
        raise InputError(
            "joining-without-test-rows",
            "joining needs held-out rows: give test= as one (X, y) per client.",
        )
    count("joining", "block", block)
    mine = model if isinstance(model, Personal) else Personal(model)
    # refuses what does not fit together
    cohort = Cohort(train, mine.model, names, test=test, settle=False)
    rows, held = (
        [
            (np.asarray(X, dtype=np.float64), np.asarray(y))
            for X, y in in_order(pairs, list(cohort.names))
        ]
        for pairs in (train, test)
    )
    assert isinstance(mine.model, Linear)
    full = replace(mine, model=mine.model.with_classes([y for _, y in [*rows, *held]]))
    split = JoiningSplit(rows, held, full, goal, tuple(cohort.names), tol, rounds, task)
    return split.judge(unit, block, word, known or {})


def joint_mode(sizes: Sequence[int]) -> Average:
    """Return the objective of personal models, Σ (n_i/n) F_i: every row counts once."""
    return Average(prior=np.array(sizes, dtype=float))


@dataclass(frozen=True)
class JoiningSplit:
    """All models on one split."""

    train: list[Rows]
    test: list[Rows]
    personal: Personal
    objective: Objective
    names: tuple[str, ...]
    tol: float
    rounds: int
    task: Task | None = None

    @property
    def model(self) -> Linear:
        """The model that clients share, or make their own."""
        assert isinstance(self.personal.model, Linear)
        return self.personal.model

    def judge(
        self,
        unit: float,
        block: int,
        word: str,
        known: Mapping[str, Result],
        others: bool = True,
    ) -> Joining:
        """Train all models, or of joint ones none but those known, and let them answer the held-out
        rows.
        """
        sizes = [len(y) for _, y in self.train]
        goals = {
            AVERAGE: Average(prior=self.objective.prior),
            FAIR: self.objective,
            PERSONAL: joint_mode(sizes),
        }
        if isinstance(self.objective, Average):
            del goals[FAIR]
        results = {
            name: known[name] if name in known else self._trained(name, goal)
            for name, goal in goals.items()
            if others or name in known
        }
        constant = constants(self.model, [y for _, y in self.train])
        alone, gaps = self._alone()
        answers: dict[str, Array] = {ALONE: alone}
        for name, result in results.items():
            own = result.x if result.personal is None else result.personal
            answers[name] = np.broadcast_to(own, (len(sizes), len(result.x)))
        outputs = [
            [
                self._still(constant[i + 1], X),
                *(self.model.outputs(own[i], X) for own in answers.values()),
            ]
            for i, (X, _) in enumerate(self.test)
        ]
        evidence, score, task = self.scored(outputs, unit, block)
        # a client that was not trained on takes the shared model, instead of alone the average one
        first = next(iter(results.values()))
        strangers = {name: results.get(name, first).x for name in answers}
        parameters = {name: np.stack([strangers[name], *own]) for name, own in answers.items()}
        if self.model.intercept or self.model.timed:  # the same risk for all is no column
            still = np.zeros_like(parameters[ALONE])
            still[:, -constant.shape[1] :] = constant
            parameters = {CONSTANT: still, **parameters}
        return Joining(
            self.names,
            (CONSTANT, *answers),
            evidence.means,
            score,
            task,
            tuple((n, len(y)) for n, (_, y) in zip(sizes, self.test, strict=True)),
            evidence,
            word=word,
            results=results,
            parameters=parameters,
            certificates={ALONE: float(gaps.max())}
            | {name: float(result.certificate) for name, result in results.items()},
            strengths=None if PERSONAL in known else self._own.strengths,
            minimised=self.model.loss,
        )

    def scored(
        self, outputs: Sequence[Sequence[Array]], unit: float, block: int
    ) -> tuple[HeldOutMoments, Array, Task]:
        """Score every client's outputs, model by model: losses, scores, and the task."""
        if self.model.timed:
            wrong = HeldOutMoments.of(wrong_pairs(outputs, [y for _, y in self.test], self.model))
            task = solving(self.model.loss, labelled=False) if self.task is None else self.task
            return wrong, 1 - wrong.means, task
        losses = []
        for own, (_, targets) in zip(outputs, self.test, strict=True):
            y, exposure, w = self.model.parts(targets)
            rates = np.column_stack([y / exposure, exposure]) if self.model.exposed else y
            found = [self.model.row_losses(z, rates) for z in own]
            losses.append(np.stack([w * exposure * loss for loss, _ in found]))
        labelled = any(hit is not None for _, hit in found)
        task = solving(self.model.loss, labelled) if self.task is None else self.task
        scores = [
            [task.client_score(self.model, z, y, unit) for z in own]
            for own, (_, y) in zip(outputs, self.test, strict=True)
        ]
        return HeldOutMoments.of(losses, block), np.transpose(scores), task

    @cached_property
    def _shared(self) -> Cohort:
        return Cohort(self.train, self.model, self.names)

    @cached_property
    def _own(self) -> Cohort:
        return Cohort(self.train, self.personal, self.names)

    def _still(self, constant: Array, X: Array) -> Array:
        """Return outputs of rows whose columns nobody looks at."""
        if self.model.ordered:
            return self.model.outputs(np.append(np.zeros(X.shape[1]), constant), X)
        return np.tile(constant, (len(X), 1))

    def _alone(self) -> tuple[Array, Array]:
        if self.model.summed:
            return fit_alone(self.model, self.train)
        found = []
        for pair in self.train:
            cohort = Cohort([pair], replace(self.model, l2="auto"))
            end = run(fair(Average()), cohort, 200, 1e-6, x0=start_of(cohort), progress=False)
            found.append(end.uninterrupted())
        return np.stack([end.x for end in found]), np.array([end.certificate for end in found])

    def _trained(self, name: str, goal: Objective) -> Result:
        cohort = self._own if name == PERSONAL else self._shared
        tol = None if uncertified(fair(goal), cohort) else self.tol
        x0 = start_of(cohort)
        found = run(fair(goal), cohort, self.rounds, tol, x0=x0, progress=False)
        return found.uninterrupted()


def start_of(cohort: Cohort) -> Array | None:
    """Return where the evidence has found the mode: training starts near its optimum."""
    return None if cohort.strengths is None else cohort.strengths.x.numpy(force=True)


def constants(model: Linear, targets: Sequence[Array]) -> Array:
    """Return outputs that know no column: of a client that nothing is known of, and of every one.

    They are those of the mean (Σ_j y_ij + m ȳ)/(n_i + m), of shares where y are labels: m rows of
    everybody's are added, m = σ²/τ² with the variance σ² of rows within clients and τ² between
    them, by moments. Clients whose means differ by no more than chance (an F test) get that of all.
    """
    if model.timed:  # every risk is alike
        return np.tile(_levels(model, targets), (1 + len(targets), 1))
    loss = loss_named(model.loss)
    labels = loss.labels
    split = [model.parts(y) for y in targets]
    targets = [y / exposure if model.exposed else y for y, exposure, _ in split]
    shares = [w * exposure for _, exposure, w in split]
    if labels:
        classes = np.arange(model.classes or 2)
        parts = [(y.ravel()[:, None] == classes).astype(float) for y in targets]
    else:
        encoded = (loss.encode([y], ["rows"], model.classes).arrays[0] for y in targets)
        parts = [np.asarray(y, float).reshape(len(y), -1) for y in encoded]
    n = np.array([len(part) for part in parts], dtype=float)[:, None]
    means = np.stack([w @ part / w.sum() for part, w in zip(parts, shares, strict=True)])
    centre = (n * means).sum(0) / n.sum()
    within = sum(float(((p - m) ** 2).sum()) for p, m in zip(parts, means, strict=True))
    variance = within / max(n.sum() - len(n), 1)
    between = float((n * (means - centre) ** 2).sum())
    freedom = len(n) - 1, max(n.sum() - len(n), 1)
    spread = between - freedom[0] * variance
    spread /= max(n.sum() - float((n**2).sum() / n.sum()), 1e-300)
    columns = max(means.shape[1] - labels, 1)
    ratio = between / max(freedom[0] * variance, 1e-300)
    chance = float(fdtrc(freedom[0] * columns, freedom[1] * columns, ratio)) > 1 - CONFIDENCE
    extra = math.inf if chance or spread <= 0 else variance / spread
    own = centre + (means - centre) * n / (n + extra)
    mean: Array = np.concatenate([centre[None], own])
    rows = n.sum()
    if labels:  # a label that a client has not had is rare, not impossible
        rows = np.concatenate([[[rows]], np.minimum(n + extra, rows)])
    return loss.link(mean, 0.5 / rows)


def _levels(model: Linear, targets: Sequence[Array]) -> Array:
    """Return the log-odds of an event in every period, of all clients; a zero without periods."""
    if not model.periods:
        return np.zeros(1)
    parts = [at_risk(y[:, : 2 + model.entry], model.periods) for y in targets]
    there, seen = (np.sum([own[k].sum(0) for own in parts], 0) for k in (0, 1))
    return np.asarray(np.log((seen + 0.5) / (there - seen + 0.5)))
