"""Train the models of a run, score them, and measure on held-out rows what joining brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms import Fair
from scaffpd.algorithms.base import Algorithm
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores
from scaffpd.files import load_or_create
from scaffpd.objectives import Average, Objective
from scaffpd.privacy import Private
from scaffpd.privacy.counts import spent_on_counts
from scaffpd.run.prepare import Prepared, prepare
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.settings.tables import AUTO
from scaffpd.study.gains import AVERAGE, FAIR, PERSONAL, Joining
from scaffpd.study.joining import joining, joint_mode, start_of
from scaffpd.training.cohort import Cohort, ModelSpec
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import Callback, Result, RoundInfo, Status, train
from scaffpd.training.metrics import Spread

SECRET = "noise.secret"
TOL = 1e-6
MOST_NUMBERS = 20_000_000  # rows × columns up to which clients are trained alone as well
# rows × columns up to which a table is small, and its splits
SMALL = 50_000
SPLITS = 5


@dataclass(frozen=True)
class Trained:
    """One model."""

    name: str  # such as "average" or "fair"
    role: str  # "before", "after" or "", for comparisons
    algorithm: str  # its name
    objective: Objective | None  # what was minimised; `None` where the algorithm has one of its own
    model: ModelSpec | None  # with the strengths that it was trained with
    result: Result = field(repr=False)
    train: ClientScores = field(repr=False)
    test: ClientScores | None = field(repr=False)
    strength: float | None = None  # of the objective, on a fairness path

    def own(self, i: int) -> NDArray[np.float64]:
        """Return the parameters that serve a client."""
        found = self.result.personal
        return self.result.x if found is None else np.asarray(found[i])

    def spread(self, prepared: Prepared) -> Spread:
        """Summarise the clients' scores, on held-out rows where there are some."""
        shown = self.train if self.test is None else self.test
        return Spread.of(shown.names, shown.score, prepared.task.measure.upwards)


class Watcher(Protocol):
    """Callbacks during training, such as a screen."""

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """Begin with a model that is about to be trained."""

    def show(self, info: RoundInfo) -> None:
        """Show a round that is done."""


def carry_out(
    config: RunConfig, prepared: Prepared, cohort: Cohort, folder: Path, watcher: Watcher
) -> list[Trained]:
    """Train the models that are asked for; the last may have been interrupted."""
    models: list[Trained] = []
    if config.privacy is not None:
        counts = prepared.counts
        drawn = None if counts is None else counts.secret
        secret = None if config.privacy.seed is not None else noise_secret(folder, drawn)
        cohort = prepared.cohort(config, private(config, prepared, secret))
        if counts is not None and cohort.channel.account is not None:
            cohort.channel.account.charge(counts.releases)
    settings = config.training
    asked = contestants(config)
    if joins(config, prepared):
        sizes = [len(y) for _, y in prepared.train]
        asked.append((PERSONAL, "", Fair(joint_mode(sizes))))
    for name, role, algorithm in asked:
        if name == PERSONAL:
            cohort = prepared.cohort(config, prepared.personal(config))
        tol = settings.tol or None
        if tol is None and role != "after" and _alone_certified(algorithm, config, cohort):
            tol = TOL
        watcher.begin(name, cohort.names, settings.rounds, tol)
        models.append(
            train_model(
                name,
                role,
                algorithm,
                prepared,
                cohort,
                settings.rounds,
                tol,
                settings.seed,
                folder,
                [watcher.show],
            )
        )
        if models[-1].result.status is Status.INTERRUPTED:
            break
    return models


def train_model(
    name: str,
    role: str,
    algorithm: Algorithm,
    prepared: Prepared,
    cohort: Cohort,
    rounds: int,
    tol: float | None,
    seed: int = 0,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Train and score one model, going on from a checkpoint where the folder has one."""
    file = "".join(c if c.isalnum() else "-" for c in name)
    result = train(
        algorithm,
        cohort,
        rounds,
        tol,
        seed,
        start_of(cohort),
        progress=False,
        checkpoint=Checkpoint(folder / "checkpoint" / f"{file}.npz") if folder else None,
        callbacks=callbacks,
    )
    return trained(name, role, algorithm, result, prepared, cohort)


def trained(
    name: str,
    role: str,
    algorithm: Algorithm,
    result: Result,
    prepared: Prepared,
    cohort: Cohort,
    strength: float | None = None,
) -> Trained:
    """Score the model that a run has found."""
    return Trained(
        name,
        role,
        type(algorithm).__name__,
        getattr(algorithm, "objective", None),
        cohort.model,
        result,
        prepared.scores(cohort, result.x, "train"),
        prepared.scores(cohort, result.x, "test") if prepared.test else None,
        strength,
    )


def main_model(models: Sequence[Trained]) -> Trained:
    """Return the model that a run is about: the one after, else the one before, else the last."""
    by_role = {one.role: one for one in models}
    return by_role.get("after") or by_role.get("before") or models[-1]


def check_asked(config: RunConfig, prepared: Prepared) -> None:
    """Refuse, before any work, settings of personal models where none are trained."""
    asked = config.model.kappa != AUTO or config.model.personal
    if asked and not joins(config, prepared):
        raise InputError(
            "no-personal-models",
            "--kappa and --personal are for personal models: they need several clients, a model "
            "without noise, and --splits above 0.",
        )
    prepared.differing(config.model.personal)


def joins(config: RunConfig, prepared: Prepared) -> bool:
    """Return whether clients are given models of their own, and compared with staying alone."""
    return config.privacy is None and config.training.splits != 0 and len(prepared.names) > 1


def splits_of(config: RunConfig, prepared: Prepared) -> int:
    """Return the number of random splits: as asked, else 5 of a small table and 1 of others."""
    if config.training.splits is not None:
        return config.training.splits
    table = config.table
    drawn = table and table.split_by is None and isinstance(table.test, float)
    numbers = prepared.numbers + sum(X.shape[0] * X.shape[1] for X, _ in prepared.test)
    return SPLITS if drawn and numbers <= SMALL else 1


def joining_of(
    config: RunConfig,
    prepared: Prepared,
    models: Sequence[Trained],
    phase: Callable[[str, float], None] = lambda *_: None,
) -> Joining | str:
    """Measure what joining brings on held-out rows; or say why not, nothing where nobody asks."""
    splits = splits_of(config, prepared)
    if not splits or not prepared.test or models[-1].result.status is Status.INTERRUPTED:
        return ""
    if config.privacy is not None:
        return "What joining brings is not measured for a private run."
    if not joins(config, prepared):
        return "What joining brings is not measured: there is one client."
    if prepared.numbers > MOST_NUMBERS:
        return (
            f"What joining brings is not measured: {prepared.numbers:,} numbers are more than the "
            f"{MOST_NUMBERS:,} it is for."
        )
    what = "Training every client alone, to see what joining brings"
    try:
        phase(what, 0.0)
        found = [_joining(config, prepared, models)]
        for k in range(1, splits):
            phase(f"{what}: split {k + 1} of {splits}", k / splits)
            other = prepare(config, config.training.seed + k)
            pairs = zip(prepared.test, other.test, strict=True)
            if all(np.array_equal(old[0], new[0]) for old, new in pairs):
                raise InputError(
                    "splits-all-alike",
                    "the held-out rows are the same for every seed, so --splits measures nothing.",
                )
            found.append(_joining(config, other))
    except InputError as error:
        return f"What joining brings is not known: {error}"
    return found[0] if splits == 1 else Joining.mean(found)


def _joining(config: RunConfig, prepared: Prepared, models: Sequence[Trained] = ()) -> Joining:
    training = config.training
    return joining(
        prepared.train,
        prepared.test,
        prepared.personal(config),
        config.goal,
        names=prepared.names,
        tol=training.tol or TOL,
        rounds=training.rounds,
        unit=prepared.unit,
        word=prepared.word,
        task=prepared.task,
        known={one.name: one.result for one in models if one.name in (AVERAGE, FAIR, PERSONAL)},
    )


def contestants(config: RunConfig) -> list[tuple[str, str, Algorithm]]:
    """List name, role and algorithm of the models to train, the average one first."""
    asked = config.method
    objective = config.goal
    if isinstance(objective, Average):
        return [(AVERAGE, "", asked)]
    name = FAIR if objective is not None else type(asked).__name__
    if config.privacy is not None:
        return [(name, "", asked)]
    prior = None if objective is None else objective.prior
    return [(AVERAGE, "before", config.method_for(Average(prior=prior))), (name, "after", asked)]


def noise_secret(folder: Path, new: bytes | None = None) -> bytes:
    """Return what a private run draws its noise from: `new`, or a random one, if the run is new."""
    file = folder / SECRET
    if not file.exists() and any((folder / "checkpoint").glob("*.npz")):
        raise InputError(
            "noise-secret-lost",
            f"The run in {str(folder)!r} has lost {SECRET} and cannot continue: start "
            "over with --fresh.",
        )
    return load_or_create(file, new)


def private(config: RunConfig, prepared: Prepared, secret: bytes | None = None) -> Private:
    """Add noise to the run's model, such that ε covers all models that will be trained."""
    assert config.privacy is not None
    methods = [method for _, _, method in contestants(config)]
    before = 0.0
    if prepared.counts is not None:
        before = spent_on_counts(config.privacy.epsilon, config.privacy.delta)
    asked = config.privacy
    return Private.solved(
        prepared.model,
        asked.epsilon,
        methods,
        config.training.rounds,
        asked.delta,
        before=before,
        clip=asked.clip,
        loss_clip=asked.loss_clip,
        radius=asked.radius,
        smoothness=asked.smoothness,
        secret=secret if asked.seed is None else asked.seed,
    )


def settled(config: RunConfig, cohort: Cohort) -> RunConfig:
    """Settle tol: the one asked for, else 1e-6 where a gap can be proven and 0 where none can."""
    tol = config.training.tol
    if tol == 0:
        return config
    if config.privacy is not None:  # no client is asked before the privacy account is open
        if tol is not None:
            raise InputError(
                "tol-with-noise",
                "tol needs a certificate, and with noise there is none: leave it out.",
            )
        return config.with_tol(0.0)
    reason = _uncertified(config.method, config, cohort)
    if reason is not None and tol is not None:
        raise InputError(
            "tol-without-certificate",
            f"tol needs a certificate, and there is none: {reason} Leave it out.",
        )
    found = TOL if tol is None else tol
    return config.with_tol(0.0 if reason is not None else found)


def _uncertified(algorithm: Algorithm, config: RunConfig, cohort: Cohort) -> str | None:
    """Say why a method has no certificate on these clients."""
    method = algorithm.choice(cohort)
    reason: str | None = method.uncertified(method.init(cohort, config.training.seed, None))
    return reason


def _alone_certified(baseline: Algorithm, config: RunConfig, cohort: Cohort) -> bool:
    """Return whether the average model has a certificate and the one asked for has none."""
    if config.privacy is not None or _uncertified(config.method, config, cohort) is None:
        return False
    return _uncertified(baseline, config, cohort) is None
