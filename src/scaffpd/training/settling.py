"""Strengths that a model leaves to the data ("auto"), found by evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from scaffpd.algorithms.dispersion import dispersion
from scaffpd.algorithms.evidence import (
    CLOSE,
    CUTS,
    INTERCEPT,
    Evidence,
    ModePoint,
    Prior,
    Strengths,
    climbed,
)
from scaffpd.federation import Federation, Vector
from scaffpd.federation.modes import ModesAt
from scaffpd.models.execution import limit_threads
from scaffpd.models.linear import AUTO, Linear, fitted
from scaffpd.models.personal import Personal, base_of
from scaffpd.phases import tell

LEVELS = "levels of periods"  # their group
USUAL = 18

Clients = TypeVar("Clients", bound=Federation)


def by_evidence(
    federation: Federation, model: object, features: int, columns: Sequence[str] | None = None
) -> Strengths | None:
    """Find what the model leaves to the data; `None` if it leaves nothing.

    Args:
        federation: clients with this model.
        model: `Linear(...)`, or `Personal(...)` of one.
        features: the number of features, without the intercept.
        columns: their names, which name the groups if the model does not.
    """
    inner = base_of(model)
    personal = model.strength if isinstance(model, Personal) else np.inf
    if not isinstance(inner, Linear) or AUTO not in (personal, inner.l2):
        return None
    return _climbed(federation, model, features, columns)[1]


def _climbed(
    federation: Federation, model: object, features: int, columns: Sequence[str] | None
) -> tuple[Evidence, Strengths, ModePoint]:
    inner = base_of(model)
    personal = model.strength if isinstance(model, Personal) else np.inf
    assert isinstance(inner, Linear)
    width = features + len(inner.beyond)
    kappa = _given(personal, width, inner.intercept)
    if isinstance(model, Personal):
        kappa[~model.marked(columns, width)] = np.inf
    groups = groups_of(inner, features, columns)
    l2 = _given(inner.l2, width, inner.intercept)
    with limit_threads(federation.channel.work):
        problem = _Watched(federation, groups, inner.loss)
        return problem, *climbed(problem, l2, kappa, (INTERCEPT, CUTS))


class _Watched(Evidence):
    """Says how far it is: a search takes about `USUAL` modes."""

    modes = 0

    def mode(
        self, prior: Prior, x: Tensor, start: ModesAt | None, close: float = CLOSE
    ) -> ModePoint:
        tell("Setting the strength of every column by evidence", min(self.modes / USUAL, 0.95))
        self.modes += 1
        return super().mode(prior, x, start, close)


def dispersed(
    model: object, bound: Callable[[object], tuple[Federation, int, Sequence[str] | None]]
) -> object:
    """Return a model of counts with α by likelihood, where it leaves that to the data.

    Args:
        model: `Linear(...)`, or `Personal(...)` of one.
        bound: binds a model to the clients; returns also the number of features and their names.
    """
    inner = base_of(model)
    if getattr(inner, "dispersion", None) != AUTO:
        return model
    assert isinstance(inner, Linear)
    free = replace(inner, l2=AUTO)

    def modes(alpha: float) -> tuple[Evidence, ModePoint]:
        trial = Personal(replace(free, dispersion=alpha), AUTO)
        federation, features, columns = bound(trial)
        problem, _, point = _climbed(federation, trial, features, columns)
        return problem, point

    settled = replace(inner, dispersion=dispersion(modes))
    return replace(model, model=settled) if isinstance(model, Personal) else settled


def groups_of(model: Linear, features: int, columns: Sequence[str] | None = None) -> list[str]:
    """Return the group of every feature: the model's, else its column; the intercept's last."""
    groups = list(model.groups or columns or map(str, range(features)))
    cuts = (len(model.beyond) - 1) * model.ordered
    return [*groups, *[LEVELS] * len(model.periods), *[CUTS] * cuts, *[INTERCEPT] * model.intercept]


def _given(value: float | Sequence[float] | str, width: int, intercept: bool) -> Vector:
    """Return numbers per feature, NaN where the data decide."""
    if isinstance(value, str):
        return np.full(width, np.nan)
    return np.array(fitted("Linear", "l2", value, width, intercept))


def settled(federation: Clients, model: object, found: Strengths) -> Clients:
    """Return the same clients with these strengths where the model leaves them to the data."""
    inner = base_of(model)
    l2 = found.l2.tolist() if isinstance(inner, Linear) and inner.l2 == AUTO else None
    auto = isinstance(model, Personal) and model.strength == AUTO
    return federation.using(l2, found.strength.tolist() if auto else None)
