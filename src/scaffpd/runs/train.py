"""One run: the average model to compare with, and the model that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from scaffpd.checkpoint import Checkpoint
from scaffpd.cohort import Cohort
from scaffpd.errors import InputError
from scaffpd.objectives import Average
from scaffpd.privacy import Private
from scaffpd.runs.config import RunConfig
from scaffpd.runs.folder import RunFolder
from scaffpd.runs.prepared import Prepared
from scaffpd.runs.secret import noise_secret
from scaffpd.runs.trained import Scorer, Trained, judged, trained
from scaffpd.training import Moment, Status, train

AVERAGE, FAIR = "average", "fair"
TOL = 1e-6


class Watcher(Protocol):
    """Whoever looks on while models are trained."""

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """A model is about to be trained."""

    def show(self, moment: Moment) -> None:
        """A round of it is done."""


def carry_out(
    config: RunConfig, prepared: Prepared, cohort: Cohort, folder: RunFolder, watcher: Watcher
) -> list[Trained]:
    """Train what the settings ask for; a list of one or two models, the last of them perhaps interrupted."""
    models, tol = [], config.training.tol or None
    if config.privacy is not None:
        secret = None if config.privacy.seed is not None else noise_secret(folder.path)
        cohort = prepared.cohort(config, private(config, prepared, secret))
    for name, role, algorithm in contestants(config):
        scorer = Scorer(prepared, cohort, folder.scores(name, prepared.measure))
        watcher.begin(name, cohort.names, config.training.rounds, tol)
        result = train(
            algorithm, cohort, config.training.rounds, tol, config.training.seed, progress=False,
            checkpoint=Checkpoint(folder.checkpoint(name)), callbacks=[scorer, watcher.show],
        )  # fmt: skip
        models.append(trained(name, role, algorithm, result, prepared, cohort, scorer))
        if result.status is Status.INTERRUPTED:
            break
    return judged(models, prepared)


def contestants(config: RunConfig) -> list[tuple[str, str, Any]]:
    """Name, role and algorithm of the models to train, the average one first."""
    asked, objective = config.algorithm, config.objective
    if isinstance(objective, Average):
        return [(AVERAGE, "", asked)]
    name = FAIR if objective is not None else type(asked).__name__
    chosen = (name, "after", asked)
    if not config.training.baseline:
        return [(name, "", asked)]
    prior = None if objective is None else objective.prior
    return [(AVERAGE, "before", config.algorithm_for(Average(prior=prior))), chosen]


def private(config: RunConfig, prepared: Prepared, secret: bytes | None = None) -> Private:
    """The run's model with noise: ε is that of all models that will be trained, together."""
    assert config.privacy is not None
    methods, samples = [method for _, _, method in contestants(config)], [len(y) for _, y in prepared.train]
    return config.privacy.model(prepared.model, methods, config.training.rounds, samples, secret)


def settled(config: RunConfig, cohort: Cohort) -> RunConfig:
    """The settings with a tol: the one asked for, 1e-6 where something can be proven, or 0 where nothing can."""
    tol = config.training.tol
    if tol == 0:
        return config
    if config.privacy is not None:  # nobody is asked before the account is open
        if tol is not None:
            raise InputError("tol needs a certificate, and with noise there is none: leave it out.")
        return replace(config, training=replace(config.training, tol=0.0))
    reason = config.algorithm.uncertified(config.algorithm.init(cohort, config.training.seed, None))
    if reason is not None and tol is not None:
        raise InputError(f"tol needs a certificate, and there is none: {reason} Leave it out.")
    found = TOL if tol is None else tol
    return replace(config, training=replace(config.training, tol=0.0 if reason is not None else found))
