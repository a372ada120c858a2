r"""The configurations that a method may try: the same number for every method.

A method names its rates in `knobs`, and computes those that were not given in
`automatic(federation)`. Where strengths may be tuned as well, these are ρ of its objective and what
it names in `strengths` (q, μ, θ). With k of them and a budget of n, the grid is the n points of

    { 10^(±z/2) : z ∈ Z^k }

that are nearest to z = (½, …, ½), with + for rates and − for strengths: automatic rates are safe by
theory, hence often cautious, so the grid leans towards larger ones, and towards weaker strengths.
The settings as they are, z = 0, always come first. With one rate and n = 5 the factors are 0.32, 1,
3.2, 10 and 32; with two they are (1, 1), (3.2, 1), (1, 3.2), (3.2, 3.2) and (10, 1).
Methods with nothing to tune run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scaffpd.algorithms import Algorithm
from scaffpd.federation import Federation

Factors = dict[str, float]
RHO = "rho"  # of an objective
TAIL = "tail"  # of Δ-FL, where more than all clients is none


def strengths(method: Algorithm) -> tuple[str, ...]:
    """Return the settings that say how fair a method is (or how strongly it pulls)."""
    has_rho = hasattr(getattr(method, "objective", None), RHO)
    return (*method.strengths, RHO) if has_rho else method.strengths


def grid(method: Algorithm, budget: int, strong: bool = False) -> list[Factors]:
    """Return at most `budget` configurations, as factors on the settings as they are."""
    signs = dict.fromkeys(method.knobs, 1)
    if strong:
        signs |= dict.fromkeys(strengths(method), -1)
    if not signs:
        return [{}]
    reach = next(r for r in itertools.count() if (2 * r + 1) ** len(signs) >= budget)
    points = itertools.product(range(-2 * reach, 2 * reach + 2), repeat=len(signs))
    return [
        {name: 10 ** (sign * k / 2) for (name, sign), k in zip(signs.items(), z, strict=True)}
        for z in sorted(points, key=_order)[:budget]
    ]


def _order(z: tuple[int, ...]) -> tuple[int | bool | tuple[int, ...], ...]:
    """Order by distance from (½, …, ½); among equals z = 0 comes first, then fewer changes."""
    distance = sum((2 * k - 1) ** 2 for k in z)
    return distance, any(z), sum(k < 0 for k in z), sum(map(abs, z)), tuple(-k for k in z)


def configured(
    method: Algorithm, factors: Mapping[str, float], federation: Federation
) -> tuple[Algorithm, dict[str, float]]:
    """Return the method with everything at factor · value, and those values.

    The value is the method's own where its user has set one, else the automatic one for this
    federation. Factors of one leave the method as it is.
    """
    settings: Any = method  # its knobs are fields that only `knobs` names
    own = {n: settings.objective.rho if n == RHO else getattr(settings, n) for n in factors}
    automatic = method.automatic(federation) if None in own.values() else {}
    values = {
        name: float(factor * (automatic[name] if own[name] is None else own[name]))
        for name, factor in factors.items()
    }
    if TAIL in values:
        values[TAIL] = min(values[TAIL], 1.0)
    if all(factor == 1 for factor in factors.values()):
        return method, values
    changes: dict[str, object] = {name: value for name, value in values.items() if name != RHO}
    if factors.get(RHO, 1.0) != 1:
        changes["objective"] = settings.objective.with_strength(values[RHO])
    return replace(settings, **changes), values
