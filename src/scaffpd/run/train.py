"""Train the average model to compare with and the model that was asked for, and score both."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms import Fair
from scaffpd.data import Silos
from scaffpd.data.tabular.agree import CLASSIFICATION
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores
from scaffpd.files import load_or_create
from scaffpd.models import Linear, Personal
from scaffpd.numbers import several
from scaffpd.objectives import Average, Objective
from scaffpd.privacy import Private
from scaffpd.run import read_table
from scaffpd.run.prepare import Prepared, prepare
from scaffpd.run.settings.model_file import answers
from scaffpd.run.settings.run import RunConfig
from scaffpd.study.choosing import WORST, Choice, search, short
from scaffpd.study.coalitions import Coalition, coalition
from scaffpd.study.folds import FOLDS, Folds, among
from scaffpd.study.gains import ALONE, PERSONAL, Joining
from scaffpd.study.joining import PATH, joining
from scaffpd.training.cohort import Cohort
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import Callback, Result, RoundInfo, Status, train
from scaffpd.training.metrics import Spread, disagree, spread

if TYPE_CHECKING:
    from scaffpd.study.comparison.problem import Problem

SECRET = "noise.secret"
OTHERS = 0o077  # permissions that nobody but the owner should have
SPREAD = ("mean", "worst_20", "worst")
Scored = dict[str, float]  # what SPREAD names, after a round
# after so many rounds, score only when their number has grown by 5 %
ALL = 50
PACE = 1.05
AVERAGE = "average"
FAIR = "fair"
MOST_NUMBERS = 20_000_000  # rows × columns up to which clients are trained alone as well
TOL = 1e-6
# clients, and rows × columns, up to which all groups of clients train as well
FEW = 6
FEW_NUMBERS = 200_000
# rows × columns up to which folds choose, in so many rounds
FOLDED = 2_000_000
BUDGET = 300
# rows × columns up to which a table is small, and its splits
SMALL = 50_000
SPLITS = 5


def noise_secret(folder: Path) -> bytes:
    """Return what a private run draws its noise from; a new secret from the operating system where the run is new."""
    file = folder / SECRET
    if not file.exists() and any((folder / "checkpoint").glob("*.npz")):
        raise InputError(
            "run-lost-go",
            f"The run in {str(folder)!r} has lost {SECRET} and cannot go on: start anew with --fresh.",
        )
    if file.exists() and os.name == "posix" and file.stat().st_mode & OTHERS:
        raise InputError(
            "others-owner-read",
            f"Others than its owner can read {str(file)!r}: chmod 600, or start anew with --fresh.",
        )
    return load_or_create(file)


def clear(prepared: Prepared, before: NDArray[Any], after: NDArray[Any]) -> tuple[bool, ...] | None:
    """Tell whether each client's change in accuracy is more than chance, by the rows on which two models disagree.

    `None` without labels, held-out rows or a linear model.
    """
    model = prepared.model
    if prepared.task != CLASSIFICATION or not prepared.test or not isinstance(model, Linear):
        return None
    right = [
        [
            answers(model, model.outputs(x, np.asarray(X, dtype=np.float64)), True)[0] == y
            for x in (before, after)
        ]
        for X, y in prepared.test
    ]
    return tuple(disagree(*pair) for pair in right)


@dataclass(frozen=True)
class Trained:
    """One model."""

    name: str  # such as "average" or "fair"
    role: str  # "before", "after" or "", for comparisons
    algorithm: str  # its name
    objective: Objective | None  # what was minimised; `None` where the algorithm has one of its own
    result: Result = field(repr=False)  # of the run
    scores: dict[int, Scored] = field(repr=False)  # by round, of the rounds that were scored
    train: ClientScores = field(repr=False)  # every client's scores on training rows
    test: ClientScores | None = field(repr=False)  # on held-out rows, where there are some
    strength: float | None = None  # of the objective, on a fairness path
    private: Private | None = field(
        default=None, repr=False
    )  # the model with its noise; `None` where there is none
    # whether each client's change from the model before is more than chance; `None` where it is not known
    clear: tuple[bool, ...] | None = None

    @property
    def shown(self) -> ClientScores:
        """Scores on held-out rows, or on training rows where nothing is held out."""
        return self.train if self.test is None else self.test

    def spread(self, prepared: Prepared) -> Spread:
        """Summarise the clients' scores."""
        return spread(self.shown, self.shown.accuracy, upwards=prepared.measure == "accuracy")


class Scorer:
    """A callback that scores the model after every one of the first rounds, then ever more rarely."""

    def __init__(
        self, prepared: Prepared, cohort: Cohort, known: Mapping[int, Scored] | None = None
    ) -> None:
        self.prepared = prepared
        self.cohort = cohort
        self.found = dict(known or {})
        self.next = 0

    def __call__(self, info: RoundInfo) -> None:
        """Score the model after this round, if it is due."""
        if info.rounds >= self.next:
            self.score(info.rounds, info.state.x)
            self.next = info.rounds + 1 if info.rounds < ALL else math.ceil(info.rounds * PACE)

    def score(self, rounds: int, x: Any) -> None:
        """Score x, the model after so many rounds."""
        scores = self.prepared.scores(self.cohort, x, self.prepared.split)
        found = spread(scores, scores.accuracy, upwards=self.prepared.measure == "accuracy")
        self.found[rounds] = {name: getattr(found, name) for name in SPREAD}


def trained(
    name: str,
    role: str,
    algorithm: Any,
    result: Result,
    prepared: Prepared,
    cohort: Cohort,
    scorer: Scorer,
    strength: float | None = None,
) -> Trained:
    """Score the model that a run has found."""
    scorer.score(result.rounds, result.x)
    train = prepared.scores(cohort, result.x, "train")
    test = prepared.scores(cohort, result.x, "test") if prepared.test else None
    objective = getattr(algorithm, "objective", None)
    kind = type(algorithm).__name__
    guard = cohort.model if isinstance(cohort.model, Private) else None
    return Trained(
        name, role, kind, objective, result, dict(scorer.found), train, test, strength, guard
    )


def judged(models: Sequence[Trained], prepared: Prepared) -> list[Trained]:
    """Mark which changes of the model after are more than chance."""
    before = next((one for one in models if one.role == "before"), None)
    if before is None:
        return list(models)
    first = before.result.x
    return [
        replace(m, clear=clear(prepared, first, m.result.x)) if m.role == "after" else m
        for m in models
    ]


def main_model(models: Sequence[Trained]) -> Trained:
    """Return the model that a run is about: the one after, else the one before, else the last."""
    by_role = {one.role: one for one in models}
    return by_role.get("after") or by_role.get("before") or models[-1]


class Watcher(Protocol):
    """Callbacks during training, such as a screen."""

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """Begin with a model that is about to be trained."""

    def show(self, info: RoundInfo) -> None:
        """Show a round that is done."""


def carry_out(
    config: RunConfig, prepared: Prepared, cohort: Cohort, folder: Path, watcher: Watcher
) -> list[Trained]:
    """Train the one or two models that the settings ask for; the last may have been interrupted."""
    models = []
    if config.privacy is not None:
        secret = None if config.privacy.seed is not None else noise_secret(folder)
        cohort = prepared.cohort(config, private(config, prepared, secret))
    for name, role, algorithm in contestants(config):
        tol = config.training.tol or (
            TOL if role == "before" and _alone_certified(algorithm, config, cohort) else None
        )
        watcher.begin(name, cohort.names, config.training.rounds, tol)
        models.append(
            train_model(
                name,
                role,
                algorithm,
                prepared,
                cohort,
                config.training.rounds,
                tol,
                config.training.seed,
                folder,
                [watcher.show],
            )
        )
        if models[-1].result.status is Status.INTERRUPTED:
            break
    return judged(models, prepared)


def train_model(
    name: str,
    role: str,
    algorithm: Any,
    prepared: Prepared,
    cohort: Cohort,
    rounds: int,
    tol: float | None,
    seed: int = 0,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Train and score one model, going on from a checkpoint where the folder has one."""
    scorer = Scorer(prepared, cohort, earlier_scores(folder, name, prepared) if folder else None)
    file = "".join(c if c.isalnum() else "-" for c in name)
    checkpoint = Checkpoint(folder / "checkpoint" / f"{file}.npz") if folder else None
    result = train(
        algorithm,
        cohort,
        rounds,
        tol,
        seed,
        progress=False,
        checkpoint=checkpoint,
        callbacks=[scorer, *callbacks],
    )
    return trained(name, role, algorithm, result, prepared, cohort, scorer)


def earlier_scores(folder: Path, model: str, prepared: Prepared) -> dict[int, Scored]:
    """Read the scores of an earlier part of the run, by round."""
    try:
        score = f"{prepared.split}_{prepared.measure}"
        rows = read_table(folder / "rounds.csv", "model", "round", split=prepared.split)
        scored = [row for row in rows if row["model"] == model and row[f"{score}_mean"] is not None]
        return {
            row["round"]: {name: float(row[f"{score}_{name}"]) for name in SPREAD} for row in scored
        }
    except (ValueError, KeyError, TypeError):  # of a run that was cut off: score again
        return {}


def contestants(config: RunConfig) -> list[tuple[str, str, Any]]:
    """List name, role and algorithm of the models to train, the average one first."""
    asked = config.method
    objective = config.goal
    if isinstance(objective, Average):
        return [(AVERAGE, "", asked)]
    name = FAIR if objective is not None else type(asked).__name__
    chosen = (name, "after", asked)
    if not config.training.baseline:
        return [(name, "", asked)]
    prior = None if objective is None else objective.prior
    return [(AVERAGE, "before", config.method_for(Average(prior=prior))), chosen]


def private(config: RunConfig, prepared: Prepared, secret: bytes | None = None) -> Private:
    """Add noise to the run's model, such that ε covers all models that will be trained."""
    assert config.privacy is not None
    methods = [method for _, _, method in contestants(config)]
    return config.privacy.model(prepared.model, methods, config.training.rounds, secret)


def joining_of(
    config: RunConfig, prepared: Prepared, models: Sequence[Trained], choice: Choice | None = None
) -> Joining | str:
    """Measure what joining brings every client on held-out rows; or say why not, empty where nobody asks."""
    splits = splits_of(config, prepared)
    model = prepared.model
    if not splits or not prepared.test or models[-1].result.status is Status.INTERRUPTED:
        return ""
    if config.privacy is not None or not isinstance(model, Linear):
        what = "private run" if config.privacy is not None else "network"
        return f"What joining brings is not measured for a {what}: that takes linear models without noise."
    numbers = sum(X.shape[0] * X.shape[1] for X, _ in prepared.train)
    if numbers > MOST_NUMBERS:
        return f"What joining brings is not measured: {numbers:,} numbers are more than the {MOST_NUMBERS:,} it is for."
    known = {one.name: one.result.x for one in models if one.name in (AVERAGE, FAIR)}
    try:
        found = [_joining(config, prepared, known, choice)]
        for k in range(1, splits):
            other = replace(prepare(reseeded(config, config.data.seed + k)), model=model)
            if all(
                np.array_equal(old[0], new[0])
                for old, new in zip(prepared.test, other.test, strict=True)
            ):
                raise InputError(
                    "held-rows-same",
                    "the held-out rows are the same whatever the seed, so --splits says nothing.",
                )
            found.append(_joining(config, other, {}, strength=found[0].strength))
    except InputError as error:
        return f"What joining brings is not known: {error}"
    return found[0] if splits == 1 else Joining.mean(found)


def splits_of(config: RunConfig, prepared: Prepared) -> int:
    """Return the number of random splits: as many as asked for, else 5 of a small table and 1 of others."""
    if config.training.splits is not None:
        return config.training.splits
    numbers = sum(X.shape[0] * X.shape[1] for X, _ in [*prepared.train, *prepared.test])
    drawn = config.data.file and config.data.split_by is None and config.data.test_file is None
    return SPLITS if drawn and numbers <= SMALL else 1


def check_asked(config: RunConfig, prepared: Prepared) -> None:
    """Refuse, before any work, what held-out rows and linear models without noise are needed for."""
    asked = {"--kappa": config.model.strength is not None, "--coalition": config.training.coalition}
    able = prepared.test and isinstance(prepared.model, Linear) and config.privacy is None
    for name in (name for name, wanted in asked.items() if wanted):
        if not able or config.training.splits == 0:
            raise InputError(
                "compares-models-held",
                f"{name} compares models on held-out rows: it needs a linear model without noise, --test above 0 and "
                "--splits above 0.",
            )


def coalition_of(config: RunConfig, prepared: Prepared, found: Joining | str) -> Coalition | None:
    """Measure what every client brings and gets: where it is asked for, or where clients are few and tables small."""
    asked = config.training.coalition
    if not isinstance(found, Joining) or len(found.names) < 2:
        return None
    numbers = sum(X.shape[0] * X.shape[1] for X, _ in prepared.train)
    cheap = 2 <= len(found.names) <= FEW and numbers <= FEW_NUMBERS
    if asked is False or (asked is None and not cheap):
        return None
    who = tuple(prepared.names.index(name) for name in found.names)
    train, test = ([part[i] for i in who] for part in (prepared.train, prepared.test))
    goal = (
        config.goal
        if config.goal and found.shown != AVERAGE
        else Average(prior=getattr(config.goal, "prior", None))
    )
    model = Personal(prepared.model, found.strength) if found.shown == PERSONAL else prepared.model
    return coalition(
        train,
        test,
        model,
        among(goal, who),
        names=found.names,
        seed=config.training.seed,
        word=prepared.word,
        alone=getattr(found.evidence, "tables", [found.loss])[0][found.models.index(ALONE)],
    )


def _joining(
    config: RunConfig,
    prepared: Prepared,
    known: Mapping[str, Any],
    choice: Choice | None = None,
    strength: float | None = None,
) -> Joining:
    training = config.training
    path = (
        choice is not None and len(choice.line) > 1 and type(choice.objective) is type(config.goal)
    )
    return joining(
        prepared.train,
        prepared.test,
        prepared.model,
        config.goal,
        names=prepared.names,
        seed=training.seed,
        tol=training.tol or TOL,
        rounds=training.rounds,
        unit=prepared.unit,
        word=prepared.word,
        known=known,
        choice=choice if path else None,
        strength=None if path else strength or config.model.strength,
    )


def strengthened(
    config: RunConfig, prepared: Prepared, choosing: Choosing | None = None
) -> tuple[RunConfig, Prepared, Choice | None]:
    """Fill in l2, the objective's strength and κ where settings give none: by folds (`choosing`), or the usual ones.

    The usual ones are for tables alone; κ is then left to `joining`.
    """
    able = isinstance(prepared.model, Linear) and config.privacy is None
    if choosing is not None and not able:
        raise InputError(
            "choose-takes-linear",
            "--choose takes linear models without differential privacy, whose ε the folds would spend.",
        )
    if choosing is not None and not config.left_out:
        raise InputError(
            "choose-finds-nothing",
            "--choose finds nothing to choose: leave --l2, --strength or --kappa out.",
        )
    if not able or not config.left_out or (choosing is None and not config.data.file):
        return config, prepared, None
    if choosing is not None:
        choice = choosing.choice(config, prepared)
        l2 = choice.l2
        goal = _goal(config, choice)
        said = [choice.sentence]
        kappa = choice.personal
        if (folded := len(choice.point.losses)) < len(prepared.names):
            said = [
                said[0].replace(
                    "folds", f"folds of the {several(folded, 'client')} with rows enough", 1
                )
            ]
        if (
            kappa is not None
            and math.isinf(choice.strength)
            and prepared.test
            and splits_of(config, prepared)
        ):
            said.append(
                f"Personal models are shown too, to compare, with the best κ that is finite, {kappa:.4g}."
            )
    else:
        choice = None
        kappa = None
        l2, goal, *said = _usual(config, prepared)
    model = replace(prepared.model, l2=l2)
    prepared = replace(prepared, model=model, remarks=(*prepared.remarks, *said))
    return config.with_strengths(l2, goal, kappa), prepared, choice


@dataclass(frozen=True)
class Choosing:
    """Choice of strengths: the measure, and the number of rounds."""

    by: str = WORST
    budget: int = BUDGET

    def choice(self, config: RunConfig, prepared: Prepared) -> Choice:
        """Choose by folds of the training rows."""
        rows, who = Folds.where_possible(
            prepared.train, prepared.model, prepared.names, config.training.seed
        )
        rows = replace(rows, device=config.training.device)
        goal = among(config.goal or Average(), who)
        free = "strength" in config.left_out
        l2 = None if "l2" in config.left_out else config.model.l2
        kappas = [short(rows.scale() * value) for value in PATH]
        if "kappa" not in config.left_out:
            kappas = [math.inf, float(config.model.strength or math.inf)]
        seed = config.training.seed
        return search(rows, goal, l2, kappas, self.by, seed, self.budget, free)


def choosable(config: RunConfig, prepared: Prepared) -> bool:
    """Return whether folds choose strengths unasked: of a table that is not too large, with rows for folds."""
    numbers = sum(X.shape[0] * X.shape[1] for X, _ in prepared.train)
    able = isinstance(prepared.model, Linear) and config.privacy is None and bool(config.data.file)
    enough = sum(len(y) >= FOLDS for _, y in prepared.train) >= min(2, len(prepared.train))
    return able and bool(config.left_out - {"kappa"}) and numbers <= FOLDED and enough


def _goal(config: RunConfig, choice: Choice) -> dict[str, Any] | None:
    """Return [objective] with the chosen strength."""
    if "strength" not in config.left_out or choice.objective.strengths is None:
        return config.objective
    return {**(config.objective or {}), choice.objective.parameter: choice.objective.strength}


def _usual(config: RunConfig, prepared: Prepared) -> tuple[Any, ...]:
    """Return l2 and the objective for a table whose settings leave them out, and sentences on what was filled in.

    l2 = 0.3 d/n, at least 0.001: with as many columns as rows, 0.001 fits the noise of all of them. ρ is the standard
    deviation of L_i under the average model: one deviation worse off than the mean is about twice the weight.
    """
    l2 = config.model.l2
    goal = config.objective
    said = []
    if "l2" in config.left_out:
        n = sum(len(y) for _, y in prepared.train)
        d = prepared.train[0][0].shape[1]
        l2 = max(1e-3, short(0.3 * d / n))
        said.append(f"l2 = {l2:g}, by the numbers of rows and columns.")
    if (
        "strength" in config.left_out
        and goal is not None
        and goal["kind"] in ("ChiSquare", "Tilted")
    ):
        cohort = Cohort(
            prepared.train,
            replace(prepared.model, l2=l2),
            prepared.names,
            device=config.training.device,
        )
        found = train(
            Fair(Average()), cohort, 100, 1e-4 if l2 > 0 else None, progress=False
        ).uninterrupted()
        rho = short(float(found.history.last_losses.std()))
        if rho > TOL:
            goal = {**goal, "rho": rho}
            said.append(
                f"ρ = {rho:g}, the standard deviation of the clients' losses under the average model."
            )
    return l2, goal, *said


def problem_of(config: RunConfig, seeds: Sequence[int]) -> Problem:
    """Return what methods are compared on: the clients of a run, of which every seed holds out other rows."""
    from scaffpd.study.comparison.problem import Problem  # which training does without

    if config.model.network is not None or config.privacy is not None:
        raise InputError(
            "compare-takes-linear", "compare takes linear models without differential privacy."
        )
    first = prepare(config)
    if not first.test:
        raise InputError(
            "compare-scores-methods",
            "compare scores methods on held-out rows: leave --test out, or give a share above 0.",
        )
    _, first, _ = strengthened(config, first)
    parts = {
        seed: first if seed == config.data.seed else prepare(reseeded(config, seed))
        for seed in seeds
    }
    silos = {
        seed: Silos(own.names, own.train, own.test, own.columns) for seed, own in parts.items()
    }
    name = f"{config.name}, {several(len(first.names), 'client')}"
    return Problem(silos.__getitem__, first.model, name, config.training.device)


def reseeded(config: RunConfig, seed: int) -> RunConfig:
    """Return the same run with another choice of held-out rows."""
    again = config.model_copy(update={"data": config.data.model_copy(update={"seed": seed})})
    again._place = config.place
    again._method = config.method
    again._left_out = config.left_out
    return again


def settled(config: RunConfig, cohort: Cohort) -> RunConfig:
    """Settle tol: the one asked for, else 1e-6 where a gap can be proven and 0 where none can."""
    tol = config.training.tol
    if tol == 0:
        return config
    if config.privacy is not None:  # no client is asked before the privacy account is open
        if tol is not None:
            raise InputError(
                "tol-certificate-noise",
                "tol needs a certificate, and with noise there is none: leave it out.",
            )
        return config.with_tol(0.0)
    reason = _uncertified(config.method, config, cohort)
    if reason is not None and tol is not None:
        raise InputError(
            "tol-certificate-none",
            f"tol needs a certificate, and there is none: {reason} Leave it out.",
        )
    found = TOL if tol is None else tol
    return config.with_tol(0.0 if reason is not None else found)


def _uncertified(algorithm: Any, config: RunConfig, cohort: Cohort) -> str | None:
    """Say why a method has no certificate on these clients."""
    method = algorithm.choice(cohort)
    reason: str | None = method.uncertified(method.init(cohort, config.training.seed, None))
    return reason


def _alone_certified(baseline: Any, config: RunConfig, cohort: Cohort) -> bool:
    """Return whether the average model has a certificate and the model that was asked for has none."""
    if config.privacy is not None or _uncertified(config.method, config, cohort) is None:
        return False
    return _uncertified(baseline, config, cohort) is None
