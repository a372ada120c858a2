r"""`joining`: does it pay for a client to train with the others? Five answers to its held-out rows, side by side.

constant   the client's mean, or its most frequent label with the shares of all labels
alone      argmin_u Σ_j ℓ_j(u) + (κ_i/2)‖u‖² on its own rows, κ_i by folds of its own rows
average    one model x for all, min_x Σ p_i f_i(x)
fair       one model x for all, min_x max_λ Σ λ_i f_i(x) − ψ(λ)
personal   a model u_i of its own near a shared and fair x: `Personal(model, κ)`, κ by folds (`choose`)

All models answer the same held-out rows, so gains are paired: the mean of ℓ_j(alone) − ℓ_j(model) over rows j, with
Student's t interval. Given splits=K, rows are split anew K times, and the interval is over splits, corrected for rows
that splits share (Nadeau and Bengio 2003): sd·√(1/K + n₂/n₁) with n₂ rows held out and n₁ trained on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.fair import fair
from scaffpd.errors import InputError, count
from scaffpd.federation.questions import Question, Reply
from scaffpd.models import Linear, Personal
from scaffpd.models.losses import loss_named
from scaffpd.models.personal import personalise
from scaffpd.numbers import plural
from scaffpd.objectives import Average, ChiSquare, Objective
from scaffpd.study.choosing import MEAN, ROUNDS, Choice, GridPoint, search, short
from scaffpd.study.folds import FOLDS, Folds, Group, Pair, among, answered, fit_alone, with_classes
from scaffpd.training.cohort import Cohort, in_order
from scaffpd.training.loop import train as run
from scaffpd.training.metrics import (
    NO,
    NOISE,
    YES,
    HeldOutMoments,
    PairedDifference,
    RelativeGain,
    SplitTables,
    Weights,
    a_fifth,
    every,
    worst_fifth,
)

Array = NDArray[np.float64]
MODELS = CONSTANT, ALONE, AVERAGE, FAIR, PERSONAL = (
    "constant",
    "alone",
    "average",
    "fair",
    "personal",
)
PATH = (
    math.inf,
    1000.0,
    300.0,
    100.0,
    30.0,
    10.0,
    3.0,
)  # κ of personal models, in units of the features' mean square
WHOM = {"mean": every, "worst_20": worst_fifth}
CALLED = {
    AVERAGE: "one average model",
    FAIR: "one fair model",
    PERSONAL: "personal, fair models",
    ALONE: "alone",
}


@dataclass(frozen=True)
class Joining:
    """Gain of every client from training with the others.

    Attributes:
        names: the clients.
        models: those compared, of constant, alone, average, fair and personal.
        loss: mean held-out loss without a regulariser, (models × clients).
        score: accuracy or, for regression, root mean squared error, (models × clients).
        measure: "accuracy" or "rmse".
        rows: (trained on, held out) of every client.
        evidence: what intervals of losses are made from.
        errors: the same of the share of wrong labels or, for regression, of root mean squared errors.
        ridges: κ_i that every client has chosen alone.
        strength: κ of the personal models.
        splits: how many splits this is the mean of.
        word: what a client is called.
        own: the shared model first, then the personal ones, client by client, (1 + clients × d) on the first split;
            `None` where silos keep theirs.
        without: clients with too few rows for folds, which train with the others and are not compared.
        kappa_path: rows of `kappa_path.csv`, on the first split: from one model for all to everybody alone (κ = 0) the
            losses on folds of training rows, which κ folds choose, and that of the personal models; empty where κ was
            given.
    """

    names: tuple[str, ...]
    models: tuple[str, ...]
    loss: Array = field(repr=False)
    score: Array = field(repr=False)
    measure: str
    rows: tuple[tuple[int, int], ...] = field(repr=False)
    evidence: HeldOutMoments | SplitTables = field(repr=False)
    errors: HeldOutMoments | SplitTables = field(repr=False)
    ridges: tuple[float, ...] = field(repr=False)
    strength: float
    splits: int = 1
    word: str = "client"
    kappa_path: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    own: Array | None = field(default=None, repr=False)
    without: tuple[str, ...] = ()

    @classmethod
    def mean(cls, several: Sequence[Joining]) -> Self:
        """Take the mean over splits of the same clients."""
        first = several[0]
        if len(several) < 2:
            raise InputError("mean-over-splits", "A mean over splits needs at least two of them.")
        if any(one.names != first.names for one in several):
            raise InputError(
                "another-split-leaves",
                "another split leaves other clients rows enough for folds: take one split.",
            )
        tables, scores = (
            np.stack([getattr(one, what) for one in several]) for what in ("loss", "score")
        )
        overlap = sum(held for _, held in first.rows) / sum(trained for trained, _ in first.rows)
        errors = 1 - scores if first.measure == "accuracy" else scores
        return cls(
            first.names,
            first.models,
            tables.mean(0),
            scores.mean(0),
            first.measure,
            first.rows,
            SplitTables(tables, overlap),
            SplitTables(errors, overlap),
            first.ridges,
            first.strength,
            len(several),
            first.word,
            first.kappa_path,
            first.own,
            first.without,
        )

    def gain(self, model: str, over: str = ALONE, of: Weights | None = None) -> RelativeGain:
        """Return the gain over all clients, each counting the same; `of` makes other weights from a model's losses."""
        return RelativeGain.of(self.evidence.difference(*self._places(over, model), of or every))

    def change(self, model: str, over: str = ALONE, of: Weights | None = None) -> PairedDifference:
        """Return the gain in accuracy (as a share) or error (in units of the target); better is positive in either."""
        return self.errors.difference(*self._places(over, model), of or every)

    def _places(self, one: str, other: str) -> tuple[int, int]:
        return self.models.index(one), self.models.index(other)

    def gains(self, model: str, over: str = ALONE) -> list[RelativeGain]:
        """Return the gain of every client."""
        one = np.eye(len(self.names))
        return [self.gain(model, over, lambda _, i=i: one[i]) for i in range(len(self.names))]  # type: ignore[misc]

    def losers(self, model: str) -> int:
        """Count the clients that a model costs clearly, against training alone."""
        return sum(gain.pays == NO for gain in self.gains(model))

    def better(self, model: str, than: str) -> bool:
        """Return whether its loss is clearly lower in the mean or for the worst-served fifth, and higher in neither."""
        found = {self.gain(model, than, of).pays for of in (every, worst_fifth)}
        return YES in found and NO not in found

    @cached_property
    def recommendation(self) -> str:
        """Alone, average, fair or personal: the simplest that no other is clearly better than.

        A model that clearly costs fewer clients something is better too, unless it is clearly worse for all.
        """
        chosen = ALONE
        for model in (m for m in (AVERAGE, FAIR, PERSONAL) if m in self.models):
            spares = chosen != ALONE and self.losers(model) < self.losers(chosen)
            worse = NO in {self.gain(model, chosen, of).pays for of in (every, worst_fifth)}
            if self.better(model, chosen) or (spares and not worse):
                chosen = model
        return chosen

    @property
    def sentence(self) -> str:
        """Describe the recommendation and the gains, with intervals."""
        best = self.recommendation
        if best == ALONE:
            gain = self.gain(self.shown)
            start = "Joining brings no clear gain" if gain.pays == NOISE else "Stay alone"
            whose = f"with {CALLED[self.shown]} the loss"
            return f"{start}: {whose} is {gain.than(ALONE)} ({gain.range})."
        gain = self.gain(best)
        whose = "the loss"
        if gain.pays != YES:
            gain = self.gain(best, of=worst_fifth)
            whose = f"the loss of {self._fifth}"
        start = "Keep one average model" if best == AVERAGE else f"Join with {CALLED[best]}"
        return f"{start}: {whose} is {gain.than(ALONE)} ({gain.range}); {self._who(best)}."

    @property
    def details(self) -> str:
        """The same against one average model."""
        shown = self.shown if self.shown != AVERAGE else self.models[-1]
        mean = self.gain(shown, AVERAGE)
        worst = self.gain(shown, AVERAGE, worst_fifth)
        first = f"On held-out rows, {self._who(shown)}. " if self.recommendation == ALONE else ""
        alone, average = (
            self.change(shown, over).in_units(self.measure, CALLED[over])
            for over in (ALONE, AVERAGE)
        )
        name = "accuracy" if self.measure == "accuracy" else "error"
        return (
            f"{first}Against one average model, the mean loss with {CALLED[shown]} is {mean.words} ({mean.range}); "
            f"for {self._fifth} it is {worst.words} ({worst.range}). Mean {name} is {alone}, and {average}."
        )

    @property
    def caution(self) -> str:
        """Name the clients that have too few rows to be compared; empty where there are none."""
        names = ", ".join(self.without[:5]) + (
            f" and {len(self.without) - 5} more" if self.without[5:] else ""
        )
        why = f"with fewer than {FOLDS} rows to train on, too few for folds, a {self.word} only trains with the others"
        return f"What joining brings is not known at {names}: {why}." if names else ""

    @property
    def shown(self) -> str:
        """The model that sentences are about: the one recommended, else the last."""
        return self.recommendation if self.recommendation != ALONE else self.models[-1]

    @property
    def _fifth(self) -> str:
        k = a_fifth(len(self.names))
        return f"the worst-served {self.word if k == 1 else f'fifth of {plural(self.word)}'}"

    def _who(self, model: str) -> str:
        """Say who gains, such as "4 of 12 clients clearly gain, none clearly loses"."""
        found = [gain.pays for gain in self.gains(model)]
        gain = found.count(YES)
        lose = found.count(NO)
        who = f"of {len(found)} {plural(self.word)}"
        gaining = (
            f"{gain} {who} clearly gain{'s' if gain == 1 else ''}"
            if gain
            else f"none {who} clearly gains"
        )
        return f"{gaining}, {lose or 'none'} clearly lose{'' if lose > 1 else 's'}"

    def table(self) -> list[dict[str, Any]]:
        """Return a row for every client and model: loss, accuracy or error, gains over alone and over the average."""
        rows = []
        for (i, name), (k, model) in itertools.product(
            enumerate(self.names), enumerate(self.models)
        ):
            one = np.eye(len(self.names))[i]
            against = [over for over in (ALONE, AVERAGE) if over != model]
            gains = {over: self.gain(model, over, lambda _, one=one: one) for over in against}  # type: ignore[misc]
            row: dict[str, Any] = {
                "client": name,
                "model": model,
                "train_rows": self.rows[i][0],
                "test_rows": self.rows[i][1],
                "test_loss": float(self.loss[k, i]),
                f"test_{self.measure}": float(self.score[k, i]),
            }
            for over in (ALONE, AVERAGE):
                row |= _cells(f"gain_over_{over}", gains.get(over))
            row["pays"] = gains[ALONE].pays if ALONE in gains else ""
            for over in (ALONE, AVERAGE):
                change = None
                if over in gains:
                    change = self.change(model, over, lambda _, one=one: one).ends  # type: ignore[misc]
                row |= _cells(f"{self.measure}_gain_over_{over}", change)
            rows.append(row)
        return rows

    def summary(self) -> dict[str, Any]:
        """Return what a run's summary says of it."""
        overall = []
        for k, model in enumerate(self.models):
            over: dict[str, Any] = {}
            for (which, of), other in itertools.product(WHOM.items(), (ALONE, AVERAGE)):
                if other != model:
                    over[f"gain_over_{other}_{which}"] = _finite(self.gain(model, other, of), None)
                    change = self.change(model, other, of).ends
                    over[f"{self.measure}_gain_over_{other}_{which}"] = _finite(change, None)
            mean, worst = (float(of(self.loss[k]) @ self.loss[k]) for of in (every, worst_fifth))
            overall.append(
                {
                    "model": model,
                    "test_loss_mean": mean,
                    "test_loss_worst_20": worst,
                    "clearly_lose": self.losers(model),
                    **over,
                }
            )
        return {
            "recommendation": self.recommendation,
            "sentence": self.sentence,
            "details": self.details,
            "interval": self.method,
            "splits": self.splits,
            "kappa": self.strength,
            "models": overall,
        }

    @property
    def method(self) -> str:
        """Describe how intervals were computed."""
        if self.splits > 1:
            return f"Student's t over {self.splits} random splits, corrected for the rows that splits share, at 95 %"
        block = getattr(self.evidence, "block", 1)
        rows = "held-out rows" if block == 1 else f"blocks of {block} held-out rows"
        return f"Student's t over {rows}, paired, at 95 %"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.sentence, self.details)))


def _finite(values: Iterable[float], nothing: Any) -> list[Any]:
    return [value if math.isfinite(value) else nothing for value in values]


def _cells(name: str, found: Sequence[float] | None) -> dict[str, Any]:
    """Return a value and the ends of its interval; empty cells where there is none."""
    return dict(
        zip(
            (name, f"{name}_low", f"{name}_high"), _finite(found or [math.nan] * 3, ""), strict=True
        )
    )


def joining(
    train: Sequence[Pair] | Mapping[str, Pair],
    test: Sequence[Pair] | Mapping[str, Pair],
    model: Linear,
    objective: Objective | None = None,
    *,
    names: Sequence[str] | None = None,
    strength: float | None = None,
    splits: int = 1,
    seed: int = 0,
    tol: float = 1e-6,
    rounds: int = 1000,
    unit: float = 1.0,
    block: int = 1,
    word: str = "client",
    known: Mapping[str, Any] | None = None,
    choice: Choice | None = None,
) -> Joining:
    """Measure what every client gains from training with the others, on its held-out rows.

    Args:
        train: one (X, y) per client, or a mapping from names to them.
        test: the same of held-out rows.
        model: `Linear(...)`; its l2 is that of the shared models, alone every client chooses its own.
        objective: of the fair models; `ChiSquare(rho=0.1)` if not given.
        names: the clients' names.
        strength: κ of the personal models; if not given, `choose` takes one by folds inside the clients.
        splits: with more than one, pool every client's rows, split them anew so often, and give intervals over splits.
        seed: of folds and splits.
        tol: the proven gap at which training stops.
        rounds: the most rounds of a training.
        unit: what one unit of the target is, for errors of regression.
        block: consecutive held-out rows that count as one for the interval, such as 7 for days of weather.
        word: what a client is called.
        known: models of the first split that are trained already: {"average": x, "fair": x}.
        choice: what `choose` has found for the first split, with this l2 and this objective: its κ is taken.
    """
    if not isinstance(model, Linear):
        raise InputError(
            "joining-compares-linear",
            f"joining compares linear models: give Linear(...), got {model!r}.",
        )
    if objective is not None and not isinstance(objective, Objective):
        raise InputError(
            "joining-objective-such",
            f"joining needs an objective such as ChiSquare(rho=0.1), got {objective!r}.",
        )
    if not test:
        raise InputError(
            "joining-held-rows", "joining needs held-out rows: give test= as one (X, y) per client."
        )
    for name, value in (("splits", splits), ("block", block)):
        count("joining", name, value)
    goal = ChiSquare(rho=0.1) if objective is None else objective
    clients = Cohort(train, model, names, test=test).names  # refuses what does not fit together
    rows, held = (_arrays(in_order(pairs, list(clients))) for pairs in (train, test))
    first = JoiningSplit(
        rows, held, with_classes(model, [*rows, *held]), goal, tuple(clients), seed, tol, rounds
    )
    several = []
    for k in range(splits):
        contest = first if k == 0 else first.split_anew(seed + k)
        given = (dict(known or {}), choice) if k == 0 else ({}, None)
        several.append(contest.judge(strength, unit, block, word, *given))
    return several[0] if splits == 1 else Joining.mean(several)


def _arrays(pairs: list[Pair]) -> list[tuple[Array, NDArray[Any]]]:
    return [(np.asarray(X, dtype=np.float64), np.asarray(y)) for X, y in pairs]


@dataclass(frozen=True)
class JoiningSplit:
    """All models on one split."""

    train: list[tuple[Array, NDArray[Any]]]
    test: list[tuple[Array, NDArray[Any]]]
    model: Linear
    objective: Objective
    names: tuple[str, ...]
    seed: int
    tol: float
    rounds: int

    def split_anew(self, seed: int) -> JoiningSplit:
        """Hold out other rows of every client, as many as before."""
        random = np.random.default_rng(seed)
        train = []
        test = []
        for (X, y), (X_held, y_held) in zip(self.train, self.test, strict=True):
            A = np.concatenate([X, X_held])
            b = np.concatenate([y, y_held])
            order = random.permutation(len(b))
            kept = np.sort(order[: len(y)])
            held = np.sort(order[len(y) :])
            train.append((A[kept], b[kept]))
            test.append((A[held], b[held]))
        return replace(self, train=train, test=test, seed=seed)

    @cached_property
    def folded(self) -> tuple[Folds, Group]:
        """Training rows that are left out in turn, and the numbers of the clients that have enough for that."""
        return Folds.where_possible(self.train, self.model, self.names, self.seed)

    def judge(
        self,
        strength: float | None,
        unit: float,
        block: int,
        word: str,
        known: Mapping[str, Any],
        choice: Choice | None = None,
    ) -> Joining:
        """Train all models and let them answer the held-out rows."""
        folds, who = self.folded
        alone = fit_alone(folds)
        path = list[dict[str, Any]]()
        if strength is None:
            chosen = choice or self.choice()
            strength = finite(chosen).strength
            by_itself = GridPoint(0.0, Average(), 0.0, alone.losses, 0).row()
            path = [*chosen.kappa_path, by_itself | {"l2": "", "objective": "", "chosen": False}]
            path = [row | {"personal": row["kappa"] == strength} for row in path]
        answers: dict[str, Any] = {ALONE: alone.models}
        for name, goal in ((AVERAGE, Average(prior=self.objective.prior)), (FAIR, self.objective)):
            if name == AVERAGE or not isinstance(goal, Average):
                x = known[name] if name in known else self._trained(self.model, goal)[0]
                answers[name] = [x] * len(who)
        x, own = self._trained(Personal(self.model, strength), self.objective)
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
            alone.ridges,
            float(strength),
            word=word,
            kappa_path=tuple(path),
            own=np.stack([x, *own]),
            without=tuple(name for name in self.names if name not in folds.names),
        )

    def scored(
        self, answers: Mapping[str, Any], unit: float, block: int
    ) -> tuple[HeldOutMoments, HeldOutMoments, str]:
        """Score the constant answer and these models on held-out rows: losses, errors, and what errors are of."""
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
        return search(folds, goal, self.model.l2, kappas, MEAN, 1.0, ROUNDS, None, self.seed, None)

    def _constant(self, i: int, rows: int) -> Array:
        """Return the same outputs for every row: the mean, or log-odds of the labels (half a row of each added)."""
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

    def _trained(self, model: Any, goal: Objective) -> tuple[Any, Any]:
        """Train, and return the shared model, and the clients' own where the model is `Personal`."""
        cohort = Cohort(self.train, model, self.names)
        tol = self.tol if self.model.l2 > 0 else None
        found = run(fair(goal), cohort, self.rounds, tol, progress=False).uninterrupted()
        return found.x, found.personal


@dataclass(frozen=True, eq=False)
class JoiningScores(Question):
    """Scores of a silo on its held-out rows: of a constant, of its own model, and of three models of the run.

    Means of losses and of errors (wrong labels, or the root mean squared error), and their covariances over rows.
    """

    kind = "joining_scores"
    scalars = ("train_rows", "test_rows")

    average: Tensor
    fair: Tensor
    personal: Tensor
    strength: float
    seed: int

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes for losses, then for errors."""
        k = len(MODELS)
        return {"means": (2, k), "covariances": (2, k, k)}

    def answer(self, clients: Any) -> Reply:
        """Refuse: only a silo answers, by `own_scores`."""
        raise InputError(
            "clients-process-compared", "Clients in this process are compared by sp.joining(...)."
        )


def own_scores(
    name: str,
    train: Pair,
    test: Pair,
    model: Linear,
    x: Mapping[str, Any],
    strength: float,
    seed: int,
) -> dict[str, Array]:
    """Answer `JoiningScores` for one silo, from its rows and the models x of a run."""
    own = JoiningSplit([train], [test], model, Average(), (name,), seed, 0.0, 1)
    personal = personalise(x[PERSONAL], *train, Personal(model, strength))
    answers = {
        ALONE: fit_alone(own.folded[0]).models,
        AVERAGE: [x[AVERAGE]],
        FAIR: [x[FAIR]],
        PERSONAL: [personal],
    }
    found = own.scored(answers, 1.0, 1)[:2]
    return {
        "means": np.stack([one.means[:, 0] for one in found]),
        "covariances": np.stack([one.covariances[0] for one in found]),
        "scalars": np.array([float(len(train[1])), float(len(test[1]))]),
    }


def of_silos(
    told: Mapping[str, Mapping[str, Array]], measure: str, strength: float, word: str = "silo"
) -> Joining:
    """Put what silos say of themselves together."""
    parts = list(told.values())
    blocks = np.array([int(part["scalars"][1]) for part in parts])
    evidence, wrong = (
        HeldOutMoments(
            np.stack([part["means"][k] for part in parts], axis=1),
            np.stack([part["covariances"][k] for part in parts]),
            blocks,
        )
        for k in (0, 1)
    )
    score = 1 - wrong.means if measure == "accuracy" else wrong.means
    rows = tuple((int(part["scalars"][0]), int(part["scalars"][1])) for part in parts)
    return Joining(
        tuple(told),
        MODELS,
        evidence.means,
        score,
        measure,
        rows,
        evidence,
        wrong,
        (),
        strength,
        word=word,
    )


def _root(unit: float, loss: Array) -> Array:
    """Return a number for every row whose mean is unit·√L, with the covariances of unit·√L to first order."""
    root = math.sqrt(loss.mean())
    found: Array = unit * (root + (loss - loss.mean()) / (2 * root)) if root > 0 else 0 * loss
    return found


def finite(choice: Choice) -> Choice:
    """Choose the κ of personal models, where one model for all might do as well."""
    line = {id(point) for point in choice.line if math.isfinite(point.strength)}
    return choice.among(lambda point: id(point) in line)
