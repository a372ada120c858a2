r"""The same tuning budget for every method: a stated grid of factors around its own automatic rates.

A method names what may be tuned in `knobs`, and computes rates that were not given in `automatic(federation)`. A method
that has nothing to tune spends its budget on the strength ρ of its objective, where that has one. With k knobs and a
budget of n, the grid is the n points of

    { 10^(z/2) : z ∈ Z^k }

that are nearest to z = (½, …, ½). The automatic rates, z = 0, are always the first of them; they are safe by theory,
hence often cautious, so the grid leans towards larger ones. With one knob and n = 5 the factors are 0.32, 1, 3.2, 10
and 32; with two knobs and n = 5 they are (1, 1), (3.2, 1), (1, 3.2), (3.2, 3.2) and (10, 1). For ρ, where smaller is
fairer, the factors are their inverses. Methods without any of these run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from scaffpd.errors import InputError
from scaffpd.federation import Federation

Factors = dict[str, float]
STRENGTH = "rho"  # of an objective


def knobs(method: Any) -> tuple[str, ...]:
    """What may be tuned about a method."""
    own = tuple(getattr(type(method), "knobs", ()))
    return own or ((STRENGTH,) if hasattr(getattr(method, "objective", None), STRENGTH) else ())


def grid(method: Any, budget: int) -> list[Factors]:
    """At most `budget` configurations as factors on the automatic rates; the first is the automatic one."""
    names = knobs(method)
    if not names:
        return [{}]
    reach = next(r for r in itertools.count() if (2 * r + 1) ** len(names) >= budget)
    points = itertools.product(range(-2 * reach, 2 * reach + 2), repeat=len(names))
    nearest = sorted(points, key=_order)[:budget]
    return [{name: 10 ** (_sign(name) * k / 2) for name, k in zip(names, z, strict=True)} for z in nearest]


def _sign(name: str) -> int:
    return -1 if name == STRENGTH else 1


def _order(z: tuple[int, ...]) -> tuple[Any, ...]:
    """By distance from (½, …, ½); among equals the automatic rates first, then larger ones, and few at a time."""
    distance = sum((2 * k - 1) ** 2 for k in z)
    return distance, any(z), sum(k < 0 for k in z), sum(map(abs, z)), tuple(-k for k in z)


def configured(method: Any, factors: Mapping[str, float], federation: Federation) -> tuple[Any, dict[str, float]]:
    """The method with every knob at factor · rate, and those rates; factors of one leave the method as it is.

    The rate is the method's own where its user has set one, and the automatic one for this federation elsewhere.
    """
    if STRENGTH in factors:
        rho = factors[STRENGTH] * method.objective.rho
        objective = type(method.objective)(rho, prior=method.objective.prior)
        return replace(method, objective=objective), {STRENGTH: rho}
    own = {name: getattr(method, name) for name in factors}
    automatic = method.automatic(federation) if None in own.values() else {}
    rates = {
        name: float(factor * (automatic[name] if own[name] is None else own[name])) for name, factor in factors.items()
    }
    return (method if all(factor == 1 for factor in factors.values()) else replace(method, **rates)), rates


def check_tunable(label: str, method: Any) -> None:
    """Refuse a method that names knobs which nobody could turn."""
    names = tuple(getattr(type(method), "knobs", ()))
    fields = is_dataclass(method) and all(hasattr(method, name) for name in names)
    if names and not (fields and hasattr(method, "automatic")):
        raise InputError(
            f"The method {label!r} has knobs, so it must be a dataclass with these fields and automatic()."
        )
