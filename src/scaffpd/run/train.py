"""Train the average model to compare with and the model that was asked for, and score both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.base import Algorithm
from scaffpd.data.tabular.settings import CLASSIFICATION
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores
from scaffpd.files import load_or_create
from scaffpd.models import Linear
from scaffpd.objectives import Average, Objective
from scaffpd.privacy import Private
from scaffpd.run.prepare import Prepared
from scaffpd.run.settings.model_file import answers
from scaffpd.run.settings.run import RunConfig
from scaffpd.training.cohort import Cohort
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import Callback, Result, RoundInfo, Status, train
from scaffpd.training.metrics import Spread, disagree, spread

SECRET = "noise.secret"
OTHERS = 0o077  # permissions that nobody but the owner should have
AVERAGE = "average"
FAIR = "fair"
TOL = 1e-6


@dataclass(frozen=True)
class Trained:
    """One model."""

    name: str  # such as "average" or "fair"
    role: str  # "before", "after" or "", for comparisons
    algorithm: str  # its name
    objective: Objective | None  # what was minimised; `None` where the algorithm has one of its own
    result: Result = field(repr=False)
    train: ClientScores = field(repr=False)
    test: ClientScores | None = field(repr=False)
    strength: float | None = None  # of the objective, on a fairness path
    private: Private | None = field(default=None, repr=False)  # the model with its noise
    # whether each client's change from the model before is more than chance, where that is known
    clear: tuple[bool, ...] | None = None

    def spread(self, prepared: Prepared) -> Spread:
        """Summarise the clients' scores, on held-out rows where there are some."""
        shown = self.train if self.test is None else self.test
        return spread(shown, shown.accuracy, upwards=prepared.upwards)


class Watcher(Protocol):
    """Callbacks during training, such as a screen."""

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """Begin with a model that is about to be trained."""

    def show(self, info: RoundInfo) -> None:
        """Show a round that is done."""


def carry_out(
    config: RunConfig, prepared: Prepared, cohort: Cohort, folder: Path, watcher: Watcher
) -> list[Trained]:
    """Train the one or two models that are asked for; the last may have been interrupted."""
    models: list[Trained] = []
    if config.privacy is not None:
        secret = None if config.privacy.seed is not None else noise_secret(folder)
        cohort = prepared.cohort(config, private(config, prepared, secret))
    settings = config.training
    for name, role, algorithm in contestants(config):
        tol = settings.tol or None
        if tol is None and role == "before" and _alone_certified(algorithm, config, cohort):
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
    return judged(models, prepared)


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
        result,
        prepared.scores(cohort, result.x, "train"),
        prepared.scores(cohort, result.x, "test") if prepared.test else None,
        strength,
        cohort.model if isinstance(cohort.model, Private) else None,
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


def clear(
    prepared: Prepared, before: NDArray[np.float64], after: NDArray[np.float64]
) -> tuple[bool, ...] | None:
    """Return whether each client's change in accuracy is more than chance (McNemar's test).

    It goes by the rows on which two models disagree; `None` without labels, held-out rows or a
    linear model.
    """
    model = prepared.model
    if prepared.task != CLASSIFICATION or not prepared.test or not isinstance(model, Linear):
        return None
    found = []
    for X, y in prepared.test:
        rows = np.asarray(X, dtype=np.float64)
        right = [answers(model, model.outputs(x, rows), True)[0] == y for x in (before, after)]
        found.append(disagree(*right))
    return tuple(found)


def main_model(models: Sequence[Trained]) -> Trained:
    """Return the model that a run is about: the one after, else the one before, else the last."""
    by_role = {one.role: one for one in models}
    return by_role.get("after") or by_role.get("before") or models[-1]


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


def noise_secret(folder: Path) -> bytes:
    """Return what a private run draws its noise from, a new secret where the run is new."""
    file = folder / SECRET
    if not file.exists() and any((folder / "checkpoint").glob("*.npz")):
        raise InputError(
            "noise-secret-lost",
            f"The run in {str(folder)!r} has lost {SECRET} and cannot go on: "
            "start anew with --fresh.",
        )
    if file.exists() and os.name == "posix" and file.stat().st_mode & OTHERS:
        raise InputError(
            "noise-secret-readable",
            f"Others than its owner can read {str(file)!r}: chmod 600, or start anew with --fresh.",
        )
    return load_or_create(file)


def private(config: RunConfig, prepared: Prepared, secret: bytes | None = None) -> Private:
    """Add noise to the run's model, such that ε covers all models that will be trained."""
    assert config.privacy is not None
    methods = [method for _, _, method in contestants(config)]
    return config.private_model(prepared.model, methods, secret)


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
