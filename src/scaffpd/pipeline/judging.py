"""What is measured on rows that are here: scores, calibration, coefficients, what joining brings.

Nothing of it leaves a silo: each judges its own rows, and a notebook those of all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.evidence import INTERCEPT
from scaffpd.data.tabular.agree import Schema, encoded_features, of_pairs
from scaffpd.data.tabular.columns import CATEGORY
from scaffpd.errors import InputError, unknown
from scaffpd.federation import Federation
from scaffpd.models import Linear, Personal
from scaffpd.numbers import AUTO
from scaffpd.pipeline.models import Trained
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.shapes import Shape
from scaffpd.pipeline.sites import Encoding
from scaffpd.study.coefficients import (
    NO_LIKELIHOOD,
    CoefficientTable,
    coefficients,
    level_contrast,
)
from scaffpd.study.gains import Joining
from scaffpd.study.newcomers import Newcomers
from scaffpd.study.proportional import ProportionalHazards, proportional_hazards
from scaffpd.study.verdict import PERSONAL
from scaffpd.tasks.base import HeldOutScores
from scaffpd.training.cohort import Cohort

MOST_NUMBERS = 20_000_000  # rows × columns up to which clients are trained alone as well
MOST_EFFECTS = 300  # columns up to which effects are estimated
CLOSE = 1e-9  # to 0 or 1, but for rounding
MOST_POINTS = 3  # models of a path that have bins and coefficients
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class CoefficientRow:
    """What one standard deviation of a column adds to the output, by model; or its effect."""

    column: str
    label: str = ""
    values: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RunScores(HeldOutScores):
    """All that is measured on held-out rows, of every model, and coefficients."""

    coefficients: Sequence[CoefficientRow] = field(default=(), repr=False)


@dataclass(frozen=True)
class Judged:
    """All that is measured on rows that are here.

    Attributes:
        rows: how they are read.
        joining: what training together brings, or why that is not known; "" where nobody asks.
        scores: beside losses and the task's measure.
        effects: of lines and categories, in units of the columns.
        shapes: curves of numbers, those that are spread most first.
        hazards: whether effects on times to an event are the same at all times.
        newcomers: which one model serves a site that joins later, where that is asked.
        split: whether effects, curves and the test of hazards are of rows that chose nothing.
    """

    rows: Prepared
    joining: Joining | str = ""
    scores: RunScores = field(default_factory=RunScores)
    effects: CoefficientTable | None = None
    shapes: Sequence[Shape] = ()
    hazards: ProportionalHazards | None = None
    newcomers: Newcomers | None = None
    split: bool = False


def held_out_scores(
    prepared: Prepared, models: Sequence[Trained], joining: Joining | str = ""
) -> RunScores:
    """Score a run's linear models, personal ones among them, and the one that is recommended."""
    if not prepared.test:
        return RunScores()
    parameters: dict[str, Sequence[Matrix]] = {
        one.name: [one.own(i) for i in range(len(prepared.names))] for one in models
    }
    if isinstance(joining, Joining) and joining.recommendation in joining.parameters:
        best = joining.recommendation
        parameters.setdefault(best, list(joining.parameters[best][1:]))
    found = {
        name: prepared.task.judged(prepared.model, own, prepared)
        for name, own in parameters.items()
    }
    # of a path with many points, only those that are compared
    few = [one.name for one in models if one.role or len(models) <= MOST_POINTS]
    binned = {*few, joining.recommendation} if isinstance(joining, Joining) else {*few}
    return RunScores(
        [replace(row, model=name) for name, one in found.items() for row in one.scores],
        [replace(row, model=name) for name in found if name in binned for row in found[name].bins],
        [replace(row, model=name) for name, one in found.items() for row in one.curves],
        [replace(row, model=name) for name in found if name in binned for row in found[name].cuts],
        coefficient_rows(prepared, {name: own for name, own in parameters.items() if name in few}),
    )


def coefficient_rows(
    prepared: Prepared, parameters: Mapping[str, Sequence[Matrix]]
) -> list[CoefficientRow]:
    """Make a row for every encoded column (and label, of more than two).

    What one deviation adds to the output is the coefficient times the column's standard deviation
    over training rows; for numbers in units of the target, for labels in log-odds (in the outputs
    of least squares). Personal models have their least and largest.
    """
    X = np.concatenate([np.asarray(X, dtype=np.float64) for X, _ in prepared.train])
    scale = X.std(0)[:, None] * prepared.unit
    tables = {}
    for name, own in parameters.items():
        models = own if name == PERSONAL else own[:1]
        shaped = [prepared.model.reshape(x, X.shape[1])[0] * scale for x in models]
        tables[name] = np.stack(shaped)
    many = next(iter(tables.values())).shape[2] > 1
    rows = []
    for j, column in enumerate(prepared.columns):
        for k, label in enumerate(prepared.labels if many else ("",)):
            values: dict[str, float | None] = {}
            for name, table in tables.items():
                added = table[:, j, k]
                if name == PERSONAL:
                    values[f"{name}_low"] = float(added.min())
                    values[f"{name}_high"] = float(added.max())
                else:
                    values[name] = float(added[0])
            rows.append(CoefficientRow(column=column, label=label, values=values))
    return rows


class EffectSettings(Protocol):
    """[model] of a run: what its table of effects is to have."""

    @property
    def effects(self) -> str | None: ...
    @property
    def errors(self) -> str: ...
    @property
    def reference(self) -> Sequence[str]: ...


class PersonalEffects(EffectSettings, Protocol):
    """What a run of a table may say beside it: which columns may differ."""

    @property
    def personal(self) -> Sequence[str]: ...


def reference_levels(schema: Schema | None, names: Sequence[str]) -> list[int]:
    """Return the encoded columns of categories that others of their column are compared with."""
    if not names or schema is None:
        return []
    known = {
        one.name: j
        for j, one in enumerate(encoded_features(schema))
        if not one.step and one.group in _categorical(schema)
    }
    for name in names:
        if name not in known:
            raise unknown("category", name, list(known))
    return [known[name] for name in names]


def _categorical(schema: Schema) -> set[str]:
    return {column["name"] for column in schema["columns"] if column["kind"] == CATEGORY}


def lines_of(encoding: Encoding) -> tuple[Encoding, list[int]]:
    """Return the encoding without steps and pairs, and which columns are left."""
    found = [j for j, one in enumerate(encoded_features(encoding.schema)) if not one.step]
    plain = {name: part for name, part in encoding.schema.items() if name != "pairs"}
    plain["columns"] = [
        {name: part for name, part in column.items() if name != "steps"}
        for column in encoding.schema["columns"]
    ]
    schema = cast(Schema, plain)
    return Encoding(schema, encoding.mean[found], encoding.deviation[found]), found


def effects(
    prepared: Prepared, asked: PersonalEffects, pairs: bool = False
) -> CoefficientTable | None:
    """Estimate lines and categories of a table, without curves, and `pairs` where they are asked
    for, with the steps that these are made of; `None` where that cannot be.
    """
    schema = prepared.schema
    if schema is None or prepared.numbers > MOST_NUMBERS:
        return None
    more = of_pairs(schema) if pairs else set()
    encoded = encoded_features(schema)
    chosen = [j for j, one in enumerate(encoded) if not one.step or one.name in more]
    named = prepared.differing(asked.personal)
    places = {j: k for k, j in enumerate(chosen)} | {INTERCEPT: INTERCEPT}
    differ = None if named is None else [places[j] for j in named if j in places]

    def bound(shape: Linear) -> Federation:
        rows = [(np.asarray(X)[:, chosen], y) for X, y in prepared.train]
        return Cohort(rows, Personal(shape, 1.0, differ), prepared.names)

    about = prepared.encoding, chosen, prepared.model, prepared.labels, asked
    return estimated(bound, *about, prepared.unit, prepared.centre)


def estimated(
    bound: Callable[[Linear], Federation],
    encoding: Encoding,
    chosen: Sequence[int],
    model: Linear,
    labels: Sequence[str],
    asked: EffectSettings,
    unit: float = 1.0,
    centre: float = 0.0,
) -> CoefficientTable | None:
    """Estimate the effects of the chosen encoded columns; `None` where that cannot be.

    The intercept is that of a row with the mean of every column; a category is the difference from
    the mean over rows, or from a category of one's choice. Of numbers, both are in units of the
    target; of labels, in log-odds, of several against the first; of times to an event, it is a
    logarithm of hazard ratios.
    """
    every = encoded_features(encoding.schema)
    encoded = [every[j] for j in chosen]
    others = labels[1:] if len(labels) > 2 and not model.ordered else ()
    if len(encoded) * max(len(others), 1) > MOST_EFFECTS:
        return None
    groups = [one.group for one in encoded]
    last = list(model.beyond)
    categorical = _categorical(encoding.schema)
    L = level_contrast(
        [*(group if group in categorical else "" for group in groups), *[""] * len(last)],
        np.append(encoding.mean[chosen], [1.0] * len(last)),
        np.append(encoding.deviation[chosen], [1.0] * len(last)),
        [chosen.index(j) for j in reference_levels(encoding.schema, asked.reference)],
    )
    kind = None if asked.effects == AUTO else asked.effects
    federation = bound(replace(model, l2=0.0, groups=tuple(groups)))
    try:
        found = coefficients(federation, unit * L, centre, effects=kind, errors=asked.errors)
    except InputError as error:
        if error.code != NO_LIKELIHOOD:
            raise
        return None
    names = [*(one.name for one in encoded), *last]
    if others:
        names = [f"{name}: {label}" for name in names for label in others]
    return replace(found, names=tuple(names))


def hazards(prepared: Prepared) -> ProportionalHazards | None:
    """Test whether effects of lines and categories on a hazard are the same at all times; `None`
    where that cannot be. Of every category's levels one is left out, which the others are against.
    """
    schema = prepared.schema
    if schema is None or prepared.model.summed or prepared.numbers > MOST_NUMBERS:
        return None
    categorical = _categorical(schema)
    lines: list[int] = []
    first: set[str] = set()
    for j, one in enumerate(encoded_features(schema)):
        if one.step or (one.group in categorical and one.group not in first):
            first.add(one.group)
        else:
            lines.append(j)
    if not lines or len(lines) > MOST_EFFECTS:
        return None
    rows = [(np.asarray(X)[:, lines], y) for X, y in prepared.train]
    cohort = Cohort(rows, replace(prepared.model, l2=0.0, groups=None), prepared.names)
    try:
        found = proportional_hazards(cohort)
    except InputError:  # no events, or columns that say the same
        return None
    return replace(found, names=tuple(prepared.columns[j] for j in lines))


def units(prepared: Prepared) -> dict[str, float]:
    """Return what a step of every line is in units of its column: a deviation if it is a number
    that is not mostly 0 or 1.
    """
    if prepared.schema is None:
        return {}
    categorical = _categorical(prepared.schema)
    X = np.concatenate([np.asarray(X, dtype=np.float64) for X, _ in prepared.train])
    values = X * prepared.encoding.deviation + prepared.encoding.mean
    marks = (np.minimum(abs(values), abs(values - 1)) < CLOSE).mean(0) > 0.5  # no or yes
    return {
        one.name: 1.0 if one.group in categorical or marks[j] else prepared.encoding.deviation[j]
        for j, one in enumerate(encoded_features(prepared.schema))
        if not one.step
    }


def agreed_units(lines: Encoding) -> dict[str, float]:
    """Return the same from what all know: columns of zeros and ones have the variance m(1 − m)."""
    categorical = _categorical(lines.schema)
    m, s = lines.mean, lines.deviation
    one = np.isclose(s**2, m * (1 - m)) | [
        own.group in categorical for own in encoded_features(lines.schema)
    ]
    names = [own.name for own in encoded_features(lines.schema)]
    return dict(zip(names, np.where(one, 1.0, s).tolist(), strict=True))
