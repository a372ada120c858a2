r"""From rows to a problem: all that comes from rows is a sum over sites.

curves      how many rows, and of how many sites, lie between edges: thresholds of every number
scale       n, Σx and Σ(x − mean)² of every encoded column
pairs       G and H of the sites' own additive models (`scaffpd.data.pairs`)
strengths   l2 and κ by evidence (`scaffpd.algorithms.evidence`), where the model says "auto"

A notebook, a silo and a coordinator without rows take the same steps; only their `Sites` differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.evidence import Strengths
from scaffpd.data.pairs import ChosenPair, Indicators, Places, chosen_pairs, pair_sums
from scaffpd.data.tabular.agree import (
    Column,
    ColumnPair,
    Schema,
    common,
    curved,
    scale_of,
    width,
)
from scaffpd.data.tabular.columns import CATEGORY, Matrix
from scaffpd.data.tabular.encode import ClientRows
from scaffpd.data.tabular.questions import ColumnSums, RowCounts, RowQuestion
from scaffpd.errors import InputError
from scaffpd.federation import Federation
from scaffpd.federation.border import Shown, summed
from scaffpd.federation.modes import Dispersions, ModesAt, ModeSpread
from scaffpd.models import Linear, Personal
from scaffpd.models.linear import AUTO
from scaffpd.models.losses import loss_named
from scaffpd.models.personal import base_of
from scaffpd.pipeline.sites import Encoding, Model, Sites
from scaffpd.training.settling import by_evidence, dispersed, settled

MOST_INDICATORS = 1500  # beyond which no pairs are looked for: sums are of their squares


@dataclass(frozen=True)
class Plan:
    """What a run asks of columns and strengths.

    Attributes:
        model: of encoded columns, that pairs are looked for beside.
        curves: whether numbers have curves.
        pairs: with curves, the most pairs of columns that act together.
        noisy: whether rows are counted with noise.
        declared: whether the scale is declared, and no sum.
        evidence: whether strengths are left to the rows.
        dispersed: whether the dispersion of counts is.
    """

    model: Callable[[Schema], Model] | None = None
    curves: bool = False
    pairs: int = 0
    noisy: bool = False
    declared: bool = False
    evidence: bool = True
    dispersed: bool = False

    def shows(self) -> list[Shown]:
        """Return all that leaves a site before training."""
        found = [RowCounts.shows[self.noisy]] if self.curves else []
        found += [] if self.declared else ColumnSums.shows
        if self.evidence or self.pairs or self.dispersed:
            found += [*ModesAt.shows, *ModeSpread.shows]
        found += Dispersions.shows if self.dispersed else []
        return [*found, *PairSums.shows] if self.pairs else found


@dataclass(frozen=True)
class Ready:
    """Sites that can train."""

    encoding: Encoding
    asked: Model  # as it was asked for
    model: Model  # with strengths as numbers
    federation: Federation
    strengths: Strengths | None = None  # by evidence


def agreed(schema: Schema, sites: Sites, plan: Plan) -> Encoding:
    """Agree on curves, scale and pairs, one after the other."""
    sides: list[Column] = []
    if plan.curves:
        schema, sides = curved(schema, *sites.counting(schema))
    found = scaled(schema, sites)
    if not plan.pairs or len(sides) < 2:
        return found
    sides = [common(side, schema, found.mean) for side in sides]
    more = with_pairs(found, sides, sites, plan)
    return found if more is schema else scaled(more, sites)


def scaled(schema: Schema, sites: Sites) -> Encoding:
    """Agree on the scale of all columns, by sums or as it was declared."""

    def total(mean: Matrix | None) -> Matrix:
        found = sites.total(ColumnSums(schema, mean))
        found[0] = np.rint(found[0])
        return found

    return Encoding(schema, *scale_of(schema, total))


def settle(encoding: Encoding, sites: Sites, model: Model) -> Ready:
    """Return the sites with a model, whose strengths are settled where it leaves them open."""
    asked = model
    model = with_dispersion(encoding, sites, model)
    federation = sites.federation(encoding, model)
    strengths = [model.strength] if isinstance(model, Personal) else []
    if AUTO not in (*strengths, getattr(base_of(model), "l2", None)):
        return Ready(encoding, asked, model, federation)
    size = federation.dimension * (federation.dimension + 1) // 2
    if size > sites.room:
        raise InputError(
            "model-too-large",
            f"Strengths by evidence need sums of {size:,} numbers, more than an exchange has: use "
            "a smaller model, or l2 and kappa as numbers.",
        )
    found = by_evidence(federation, model, width(encoding.schema))
    assert found is not None
    own = {"l2": found.l2, "strength": found.strength, "x": found.x.numpy(force=True)}
    same = sites.agree("strengths", {}, own)
    found = replace(
        found, l2=same["l2"], strength=same["strength"], x=torch.from_numpy(np.array(same["x"]))
    )
    return Ready(
        encoding, asked, with_strengths(model, found), settled(federation, model, found), found
    )


def with_dispersion(encoding: Encoding, sites: Sites, model: Model) -> Model:
    """Return the model with the dispersion of counts settled where it leaves that open."""
    base = base_of(model)
    if getattr(base, "dispersion", None) != AUTO:
        return model

    def bound(trial: object) -> tuple[Federation, int, None]:
        return sites.federation(encoding, cast(Model, trial)), width(encoding.schema), None

    found = base_of(dispersed(base, bound))
    same = sites.agree("dispersion", {}, {"dispersion": np.array([found.dispersion])})
    base = replace(base, dispersion=float(same["dispersion"][0]))
    return replace(model, model=base) if isinstance(model, Personal) else base


def with_strengths(model: Model, found: Strengths) -> Model:
    base = base_of(model)
    assert isinstance(base, Linear)
    base = replace(base, l2=found.l2.tolist()) if base.l2 == AUTO else base
    if not isinstance(model, Personal):
        return base
    auto = model.strength == AUTO
    return replace(model, model=base, **({"strength": found.strength.tolist()} if auto else {}))


@dataclass(frozen=True, eq=False)
class PairSums(RowQuestion):
    """G and H at every site's own additive model, their upper halves alone."""

    kind = "pairs"
    shows = (
        summed(
            "cells",
            "of every two columns, first and second derivatives of your rows' losses in cells "
            "between thresholds",
            tables=True,
        ),
    )

    encoding: Encoding
    sides: Sequence[Column]
    model: Linear
    own: Tensor | None  # models of the sites that are here, which stay there

    @property
    def size(self) -> int:
        return 1 + sum(len(column.places) for column in indicators_of(self.sides))

    @property
    def outputs(self) -> int:
        return self.model.outputs_each

    @property
    def shape(self) -> tuple[int, ...]:
        return 2, self.outputs, self.size * (self.size + 1) // 2

    def answer(self, rows: ClientRows, place: int) -> Matrix:
        assert self.own is not None
        X, y = rows.encoded(*self.encoding).train
        Z = rows.indicators(self.encoding.schema, self.sides)
        sums = pair_sums(Z, *self.model.slopes(self.own[place], X, y))
        return sums[:, :, *np.triu_indices(self.size)]

    def whole_matrices(self, upper: Matrix) -> Matrix:
        places = np.triu_indices(self.size)
        sums = np.zeros((2, self.outputs, self.size, self.size))
        sums[:, :, *places] = sums[:, :, *places[::-1]] = upper
        return sums


def with_pairs(found: Encoding, sides: Sequence[Column], sites: Sites, plan: Plan) -> Schema:
    """Return the schema with the products of pairs that pay beside the sites' additive models."""
    columns = indicators_of(sides)
    assert plan.model is not None
    model = base_of(plan.model(found.schema))
    assert isinstance(model, Linear)
    question = PairSums(found, sides, model, None)
    d = question.outputs * (width(found.schema) + 1)
    largest = max(int(np.prod(question.shape)), d * (d + 1) // 2)
    if sum(len(one.places) for one in columns) > MOST_INDICATORS or largest > sites.room:
        return found.schema
    ready = settle(found, sites, Personal(model, AUTO))
    assert ready.strengths is not None
    question = replace(question, own=sites.own(ready.federation, ready.strengths.x))
    sums = question.whole_matrices(sites.total(question))
    noise = 2 * ready.strengths.sigma2 if loss_named(model.loss).quadratic else 1.0
    chosen = chosen_pairs(columns, sums / noise, plan.pairs)
    pairs = [[list(pair.columns), *map(list, pair.cuts)] for pair in chosen]
    sites.agree("pairs", {"pairs": pairs}, {})
    return paired(found.schema, sides, chosen)


def indicators_of(sides: Sequence[Column]) -> list[Indicators]:
    """Number the steps and categories that columns may be cut by, from 1 on."""
    columns = []
    place = 1
    for side in sides:
        after = place + len(side["categories"] if side["kind"] == CATEGORY else side["steps"])
        columns.append(Indicators(tuple(range(place, after)), side["kind"] != CATEGORY))
        place = after
    return columns


def paired(schema: Schema, sides: Sequence[Column], chosen: Sequence[ChosenPair]) -> Schema:
    """Return the schema with the chosen pairs; the same one if there are none."""
    columns = indicators_of(sides)
    pairs: list[ColumnPair] = []
    for pair in chosen:
        left, right = (
            _part(sides[k], columns[k].places, cuts)
            for k, cuts in zip(pair.columns, pair.cuts, strict=True)
        )
        pairs.append({"left": left, "right": right})
    return {**schema, "pairs": pairs} if pairs else schema


def _part(side: Column, places: Places, cuts: Places) -> Column:
    """Return a column with the steps or categories that cut it."""
    chosen = [place - places[0] for place in cuts]
    if side["kind"] == CATEGORY:
        return {**side, "categories": [side["categories"][k] for k in chosen]}
    return {**side, "steps": [side["steps"][k] for k in chosen]}
