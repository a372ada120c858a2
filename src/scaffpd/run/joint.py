"""What joining brings every client of a run, on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.models import Linear
from scaffpd.run.prepare import Prepared, prepare
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import AVERAGE, FAIR, TOL, Trained
from scaffpd.study.choosing import Choice
from scaffpd.study.gains import Joining
from scaffpd.study.joining import joining
from scaffpd.training.loop import Status

MOST_NUMBERS = 20_000_000  # rows × columns up to which clients are trained alone as well
# rows × columns up to which a table is small, and its splits
SMALL = 50_000
SPLITS = 5


def check_asked(config: RunConfig, prepared: Prepared) -> None:
    """Refuse, before any work, what takes held-out rows and linear models without noise."""
    able = prepared.test and isinstance(prepared.model, Linear) and config.privacy is None
    if config.model.kappa is not None and (not able or config.training.splits == 0):
        raise InputError(
            "nothing-to-compare-on",
            "--kappa compares models on held-out rows: it needs a linear model without noise, "
            "--test above 0 and --splits above 0.",
        )


def splits_of(config: RunConfig, prepared: Prepared) -> int:
    """Return the number of random splits: as asked, else 5 of a small table and 1 of others."""
    if config.training.splits is not None:
        return config.training.splits
    table = config.table
    drawn = table and table.split_by is None and isinstance(table.test, float)
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
            other = replace(prepare(config, config.training.seed + k), model=model)
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
        strength=None if path else strength or config.model.kappa,
    )
