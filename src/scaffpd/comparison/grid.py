r"""The same tuning budget for every method: a stated grid of factors around its own automatic rates.

A method names its rates in `knobs`, and computes those that were not given in `automatic(federation)`. Where strengths
may be tuned as well, these are ρ of its objective and what it names in `strengths` (q, μ, θ). With k of them and a
budget of n, the grid is the n points of

    { 10^(±z/2) : z ∈ Z^k }

that are nearest to z = (½, …, ½), with + for rates and − for strengths: automatic rates are safe by theory, hence often
cautious, so the grid leans towards larger ones, and towards weaker strengths. The settings as they are, z = 0, are
always the first. With one rate and n = 5 the factors are 0.32, 1, 3.2, 10 and 32; with two rates and n = 5 they are
(1, 1), (3.2, 1), (1, 3.2), (3.2, 3.2) and (10, 1). Methods with nothing to tune run once.

Whoever lets methods climb goes on from the best point of the grid to its untried neighbours, one step up and down in
each rate and strength, until the best has none left or as many again were tried: no choice is then at the edge of what
was offered, unless the budget says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from scaffpd.errors import InputError
from scaffpd.federation import Federation

Factors = dict[str, float]
RHO, TAIL = "rho", "tail"  # of an objective; of Δ-FL, where more than all clients is none


def rates(method: Any) -> tuple[str, ...]:
    """The rates that may be tuned."""
    return tuple(getattr(type(method), "knobs", ()))


def strengths(method: Any) -> tuple[str, ...]:
    """What says how fair a method is (or how strongly it pulls)."""
    own = tuple(getattr(type(method), "strengths", ()))
    return (*own, RHO) if hasattr(getattr(method, "objective", None), RHO) else own


def grid(method: Any, budget: int, strong: bool = False) -> list[Factors]:
    """At most `budget` configurations as factors on the settings as they are, which come first."""
    signs = dict.fromkeys(rates(method), 1) | (dict.fromkeys(strengths(method), -1) if strong else {})
    if not signs:
        return [{}]
    reach = next(r for r in itertools.count() if (2 * r + 1) ** len(signs) >= budget)
    points = itertools.product(range(-2 * reach, 2 * reach + 2), repeat=len(signs))
    nearest = sorted(points, key=_order)[:budget]
    return [{name: 10 ** (sign * k / 2) for (name, sign), k in zip(signs.items(), z, strict=True)} for z in nearest]


def neighbours(lattice: Sequence[Factors], point: int) -> list[int]:
    """The numbers of the points that differ from one by a single step of half a decade."""
    place = {_steps(factors): k for k, factors in enumerate(lattice)}
    here = _steps(lattice[point])
    around = [(*here[:k], step + s, *here[k + 1 :]) for k, step in enumerate(here) for s in (-1, 1)]
    return [place[z] for z in around if z in place]


def _steps(factors: Factors) -> tuple[int, ...]:
    return tuple(round(2 * math.log10(factor)) for factor in factors.values())


def _order(z: tuple[int, ...]) -> tuple[Any, ...]:
    """By distance from (½, …, ½); among equals the settings as they are first, then fewer changes at a time."""
    distance = sum((2 * k - 1) ** 2 for k in z)
    return distance, any(z), sum(k < 0 for k in z), sum(map(abs, z)), tuple(-k for k in z)


def configured(method: Any, factors: Mapping[str, float], federation: Federation) -> tuple[Any, dict[str, float]]:
    """The method with everything at factor · value, and those values; factors of one leave the method as it is.

    The value is the method's own where its user has set one, and the automatic one for this federation elsewhere.
    """
    own = {name: method.objective.rho if name == RHO else getattr(method, name) for name in factors}
    automatic = method.automatic(federation) if None in own.values() else {}
    values = {
        name: float(factor * (automatic[name] if own[name] is None else own[name])) for name, factor in factors.items()
    }
    if TAIL in values:
        values[TAIL] = min(values[TAIL], 1.0)
    if all(factor == 1 for factor in factors.values()):
        return method, values
    changes: dict[str, Any] = {name: value for name, value in values.items() if name != RHO}
    if factors.get(RHO, 1.0) != 1:
        changes["objective"] = type(method.objective)(values[RHO], prior=method.objective.prior)
    return replace(method, **changes), values


def check_tunable(label: str, method: Any) -> None:
    """Refuse a method that names knobs which nobody could turn."""
    names = rates(method)
    fields = is_dataclass(method) and all(hasattr(method, name) for name in names)
    if names and not (fields and hasattr(method, "automatic")):
        raise InputError(
            f"The method {label!r} has knobs, so it must be a dataclass with these fields and automatic()."
        )
