"""What joining brings every client of a run, and who gains from whom, on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.models import Linear, Personal
from scaffpd.objectives import Average
from scaffpd.run.prepare import Prepared, prepare
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import AVERAGE, FAIR, TOL, Trained
from scaffpd.study.choosing import Choice
from scaffpd.study.coalitions import Coalition, coalition
from scaffpd.study.folds import among
from scaffpd.study.gains import ALONE, PERSONAL, Joining
from scaffpd.study.joining import joining
from scaffpd.training.loop import Status

MOST_NUMBERS = 20_000_000  # rows × columns up to which clients are trained alone as well
# clients, and rows × columns, up to which all groups of clients train as well
FEW = 6
FEW_NUMBERS = 200_000
# rows × columns up to which a table is small, and its splits
SMALL = 50_000
SPLITS = 5


def check_asked(config: RunConfig, prepared: Prepared) -> None:
    """Refuse, before any work, what takes held-out rows and linear models without noise."""
    asked = {"--kappa": config.model.strength is not None, "--coalition": config.training.coalition}
    able = prepared.test and isinstance(prepared.model, Linear) and config.privacy is None
    for name in (name for name, wanted in asked.items() if wanted):
        if not able or config.training.splits == 0:
            raise InputError(
                "nothing-to-compare-on",
                f"{name} compares models on held-out rows: it needs a linear model without noise, "
                "--test above 0 and --splits above 0.",
            )


def splits_of(config: RunConfig, prepared: Prepared) -> int:
    """Return the number of random splits: as asked, else 5 of a small table and 1 of others."""
    if config.training.splits is not None:
        return config.training.splits
    data = config.data
    drawn = data.file and data.split_by is None and data.test_file is None
    numbers = prepared.numbers + sum(X.shape[0] * X.shape[1] for X, _ in prepared.test)
    return SPLITS if drawn and numbers <= SMALL else 1


def joining_of(
    config: RunConfig, prepared: Prepared, models: Sequence[Trained], choice: Choice | None = None
) -> Joining | str:
    """Measure what joining brings on held-out rows; or say why not, nothing where nobody asks."""
    splits = splits_of(config, prepared)
    model = prepared.model
    if not splits or not prepared.test or models[-1].result.status is Status.INTERRUPTED:
        return ""
    if config.privacy is not None or not isinstance(model, Linear):
        what = "private run" if config.privacy is not None else "network"
        return (
            f"What joining brings is not measured for a {what}: "
            "that takes linear models without noise."
        )
    if prepared.numbers > MOST_NUMBERS:
        return (
            f"What joining brings is not measured: {prepared.numbers:,} numbers are more than the "
            f"{MOST_NUMBERS:,} it is for."
        )
    known = {one.name: one.result.x for one in models if one.name in (AVERAGE, FAIR)}
    try:
        found = [_joining(config, prepared, known, choice)]
        for k in range(1, splits):
            other = replace(prepare(reseeded(config, config.data.seed + k)), model=model)
            pairs = zip(prepared.test, other.test, strict=True)
            if all(np.array_equal(old[0], new[0]) for old, new in pairs):
                raise InputError(
                    "splits-all-alike",
                    "the held-out rows are the same whatever the seed, so --splits says nothing.",
                )
            found.append(_joining(config, other, {}, strength=found[0].strength))
    except InputError as error:
        return f"What joining brings is not known: {error}"
    return found[0] if splits == 1 else Joining.mean(found)


def _joining(
    config: RunConfig,
    prepared: Prepared,
    known: Mapping[str, NDArray[np.float64]],
    choice: Choice | None = None,
    strength: float | None = None,
) -> Joining:
    training = config.training
    # the folds' path of κ is that of this objective only
    path = (
        choice is not None and len(choice.line) > 1 and type(choice.objective) is type(config.goal)
    )
    return joining(
        prepared.train,
        prepared.test,
        prepared.linear,
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


def reseeded(config: RunConfig, seed: int) -> RunConfig:
    """Return the same run with another choice of held-out rows."""
    again = config.model_copy(update={"data": config.data.model_copy(update={"seed": seed})})
    again._place = config.place
    again._method = config.method
    again._left_out = config.left_out
    return again


def coalition_of(config: RunConfig, prepared: Prepared, found: Joining | str) -> Coalition | None:
    """Measure what every client brings and gets: where it is asked for, or cheap."""
    asked = config.training.coalition
    if not isinstance(found, Joining) or len(found.names) < 2:
        return None
    cheap = len(found.names) <= FEW and prepared.numbers <= FEW_NUMBERS
    if asked is False or (asked is None and not cheap):
        return None
    who = tuple(prepared.names.index(name) for name in found.names)
    goal = config.goal
    if goal is None or found.shown == AVERAGE:
        goal = Average(prior=None if goal is None else goal.prior)
    own = Personal(prepared.model, found.strength) if found.shown == PERSONAL else prepared.model
    alone = getattr(found.evidence, "tables", [found.loss])[0][found.models.index(ALONE)]
    return coalition(
        [prepared.train[i] for i in who],
        [prepared.test[i] for i in who],
        own,
        among(goal, who),
        names=found.names,
        seed=config.training.seed,
        word=prepared.word,
        alone=alone,
    )
