r"""Setting of a comparison, checked before any work, with the same tuning budget for every method.

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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.errors import InputError, count, real, unknown
from scaffpd.federation import Federation
from scaffpd.objectives.base import Objective
from scaffpd.study.comparison.problem import Problem

Factors = dict[str, float]
P = TypeVar("P")  # a point of a lattice
# of an objective; of Δ-FL, where more than all clients is none
RHO = "rho"
TAIL = "tail"


def strengths(method: Any) -> tuple[str, ...]:
    """Return the settings that say how fair a method is (or how strongly it pulls)."""
    return (
        (*method.strengths, RHO)
        if hasattr(getattr(method, "objective", None), RHO)
        else method.strengths
    )


def grid(method: Any, budget: int, strong: bool = False) -> list[Factors]:
    """Return at most `budget` configurations, as factors on the settings as they are, which come first."""
    signs = dict.fromkeys(method.knobs, 1) | (
        dict.fromkeys(strengths(method), -1) if strong else {}
    )
    if not signs:
        return [{}]
    reach = next(r for r in itertools.count() if (2 * r + 1) ** len(signs) >= budget)
    points = itertools.product(range(-2 * reach, 2 * reach + 2), repeat=len(signs))
    nearest = sorted(points, key=_order)[:budget]
    return [
        {name: 10 ** (sign * k / 2) for (name, sign), k in zip(signs.items(), z, strict=True)}
        for z in nearest
    ]


def around(z: tuple[int, ...], signs: Sequence[int] = (-1, 1)) -> list[tuple[int, ...]]:
    """Return the points of Z^k that are one step from z along one axis, one axis after the other."""
    return [(*z[:k], step + s, *z[k + 1 :]) for k, step in enumerate(z) for s in signs]


def neighbours(lattice: Sequence[Factors], point: int) -> list[int]:
    """Return the numbers of the points that differ from one by a single step of half a decade."""
    place = {_steps(factors): k for k, factors in enumerate(lattice)}
    return [place[z] for z in around(_steps(lattice[point])) if z in place]


def climb(
    merits: Mapping[P, Any], near: Callable[[P], Iterable[P]], most: int
) -> tuple[P | None, list[P]]:
    """Return the best point, the first of equals, and its untried neighbours, `most` in all; failures are `None`."""
    good = {point: merit for point, merit in merits.items() if merit is not None}
    best = max(good, key=good.__getitem__, default=None)
    new = [] if best is None else [point for point in near(best) if point not in merits]
    return best, new[: max(0, most - len(merits))]


def _steps(factors: Factors) -> tuple[int, ...]:
    return tuple(round(2 * math.log10(factor)) for factor in factors.values())


def _order(z: tuple[int, ...]) -> tuple[Any, ...]:
    """Order by distance from (½, …, ½); among equals the settings as they are first, then fewer changes at a time."""
    distance = sum((2 * k - 1) ** 2 for k in z)
    return distance, any(z), sum(k < 0 for k in z), sum(map(abs, z)), tuple(-k for k in z)


def configured(
    method: Any, factors: Mapping[str, float], federation: Federation
) -> tuple[Any, dict[str, float]]:
    """Return the method with everything at factor · value, and those values; factors of one leave it as it is.

    The value is the method's own where its user has set one, and the automatic one for this federation elsewhere.
    """
    own = {name: method.objective.rho if name == RHO else getattr(method, name) for name in factors}
    automatic = method.automatic(federation) if None in own.values() else {}
    values = {
        name: float(factor * (automatic[name] if own[name] is None else own[name]))
        for name, factor in factors.items()
    }
    if TAIL in values:
        values[TAIL] = min(values[TAIL], 1.0)
    if all(factor == 1 for factor in factors.values()):
        return method, values
    changes: dict[str, Any] = {name: value for name, value in values.items() if name != RHO}
    if factors.get(RHO, 1.0) != 1:
        changes["objective"] = method.objective.with_strength(values[RHO])
    return replace(method, **changes), values


SELECTIONS = ("worst_20", "worst", "mean")
LATTICE = 1000  # configurations within reach of a climb
LONGEST = 48  # characters of a label made from a repr
PLAIN = (int, float, str, type(None))


@dataclass(frozen=True)
class Setting:
    """Methods, problem and budget of a comparison."""

    methods: Any  # the methods by their labels; a list gets labels
    problem: Any  # the `Problem`: data and model
    seeds: Any  # one partition, one training seed and one choice of rates each
    rounds: int  # of every run
    tune: int  # configurations that every method may try
    validation: (
        float  # the share of every client's training rows that a choice of rates is scored on
    )
    select: str  # the measure over clients that is chosen by: "worst_20", "worst" or "mean"
    strengths: bool = False  # whether the budget may also go to how fair a method is: ρ, q, θ, μ
    choosing: int | None = (
        None  # how many seeds choose rates for all; `None` lets each choose its own
    )
    climb: bool = False  # whether the best of the grid is followed beyond its edge

    def __post_init__(self) -> None:
        """Check what a user handed to `compare`."""
        if not isinstance(self.problem, Problem):
            given = type(self.problem).__name__
            raise InputError(
                "compare-problem-such",
                f"compare needs a problem such as Problem(data, model, name), got {given}.",
            )
        if not 0 < real("compare", "validation", self.validation) < 1:
            raise InputError(
                "compare-validation", f"compare needs 0 < validation < 1, got {self.validation!r}."
            )
        if self.select not in SELECTIONS:
            raise unknown("selection", self.select, SELECTIONS)
        for name in ("rounds", "tune", *([] if self.choosing is None else ["choosing"])):
            object.__setattr__(self, name, count("compare", name, getattr(self, name)))
        for name, kind in (("validation", float), ("strengths", bool), ("climb", bool)):
            object.__setattr__(self, name, kind(getattr(self, name)))
        object.__setattr__(self, "methods", labelled(self.methods))
        object.__setattr__(self, "seeds", _checked_seeds(self.seeds))

    @property
    def choosers(self) -> tuple[int, ...]:
        """The seeds that rates are chosen by."""
        chosen: tuple[int, ...] = self.seeds[: self.choosing]
        return chosen

    def grid(self, label: str) -> list[Factors]:
        """Return the configurations of one method that are tried in any case, the first of its lattice."""
        return self.lattice[label][: self.tune]

    @cached_property
    def lattice(self) -> dict[str, list[Factors]]:
        """All configurations that may ever be tried, by method."""
        size = LATTICE if self.climb else self.tune
        return {label: grid(method, size, self.strengths) for label, method in self.methods.items()}

    def about(self) -> dict[str, Any]:
        """Return the setting as plain text and numbers, so that another can be told from it."""
        return {
            "problem": self.problem.name,
            "model": repr(self.problem.model),
            "methods": {label: repr(method) for label, method in self.methods.items()},
            "grid": {label: self.grid(label) for label in self.methods},
            "seeds": list(self.seeds),
            **{
                name: getattr(self, name)
                for name in ("rounds", "tune", "validation", "select", "strengths")
            },
            **({} if self.choosing is None else {"choosing": self.choosing}),
            **({"climb": True} if self.climb else {}),
        }


def labelled(methods: Any) -> dict[str, Any]:
    """Return methods by label: those given, or the shortest that tell the methods of a list apart."""
    if isinstance(methods, Mapping):
        table = {str(label): method for label, method in methods.items()}
    elif isinstance(methods, Iterable) and not isinstance(methods, str):
        table = _named(list(methods))
    else:
        raise InputError(
            "compare-list-mapping",
            f"compare needs a list or a mapping of methods, got {methods!r}.",
        )
    if not table:
        raise InputError("compare-least-method", "compare needs at least one method.")
    for label, method in table.items():
        if not isinstance(method, Algorithm):
            raise InputError(
                "compare-methods-such",
                f"compare needs methods such as fair(ChiSquare(rho=0.1)), got {method!r}.",
            )
        if method.knobs and not (
            all(hasattr(method, name) for name in method.knobs) and is_dataclass(method)
        ):
            raise InputError(
                "method-knobs-make",
                f"The method {label!r} has knobs: make it a dataclass with these fields and automatic().",
            )
    return table


def _named(methods: Sequence[Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for method in methods:
        label = _label(method, [m for m in methods if type(m) is type(method)])
        number = 1 + sum(other == label or other.startswith(f"{label} #") for other in table)
        table[label if number == 1 else f"{label} #{number}"] = method
    return table


def _label(method: Any, kin: Sequence[Any]) -> str:
    """Return the class, and in brackets what differs from other methods of the same class."""
    name = type(method).__name__
    if len(kin) == 1:
        return name
    if not is_dataclass(method) or isinstance(method, type):
        return _shortened(repr(method))
    differing = [f.name for f in fields(method) if len({repr(getattr(m, f.name)) for m in kin}) > 1]
    values = [
        f"{field}={value!r}" if isinstance(value := getattr(method, field), PLAIN) else repr(value)
        for field in differing
    ]
    return _shortened(f"{name}({', '.join(values)})") if values else name


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _checked_seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, str | bytes) or not isinstance(seeds, Iterable):
        raise InputError(
            "compare-list-seeds", f"compare needs a list of seeds such as range(5), got {seeds!r}."
        )
    times = Counter(seeds)
    for seed, number in times.items():
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise InputError(
                "compare-whole-numbers", f"compare needs whole numbers >= 0 as seeds, got {seed!r}."
            )
        if number > 1:
            raise InputError(
                "compare-seeds-differ",
                f"compare needs seeds that differ, got {seed} {number} times.",
            )
    if not times:
        raise InputError("compare-least-seed", "compare needs at least one seed.")
    return tuple(map(int, times))


def zoo(
    objective: Objective, local_steps: int = 10, batch_size: int | None = None
) -> dict[str, Algorithm]:
    """Return the methods by name; quasi-Newton minimax stands for those whose servers see every client's gradient.

    Those that minimise an objective of their own keep it, as published: the average for FedAvg and its relatives,
    SCAFFOLD and ProxSkip, the worst client for AFL and DRFA, q = 1 for q-FFL, the worst half for Δ-FL. AFL makes
    one local step, as published, and under its second name as many as the others (the Scaff-PD paper's choice).
    GDA, extragradient, APD and quasi-Newton minimax make none, and subspace saddle as many as it needs: all five
    use all samples.

    Args:
        objective: of the methods that take any.
        local_steps: local steps per round of those that have them (of ProxSkip, the expected number).
        batch_size: samples per local gradient; `None` is all.
    """
    listed: dict[str, Algorithm] = {}
    for kind in ALGORITHMS.values():
        listed |= kind.usual(objective, local_steps, batch_size) if kind.published else {}
    return listed


def choose_methods(methods: dict[str, Algorithm], names: Iterable[str]) -> dict[str, Algorithm]:
    """Return those with the given names, in the order of `methods`; case, hyphens and blanks do not matter."""
    known = {_plain(type(method).__name__): label for label, method in methods.items()}
    known |= {_plain(label): label for label in methods}
    wanted = set()
    for name in names:
        if _plain(name) not in known:
            raise unknown("method", name, methods)
        wanted.add(known[_plain(name)])
    return {label: method for label, method in methods.items() if label in wanted}


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().replace("δ", "delta") if c.isalnum())
