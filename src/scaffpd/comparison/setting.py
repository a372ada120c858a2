"""`Setting`: everything that decides the numbers of a comparison, checked before any work."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scaffpd.comparison.grid import Factors, check_tunable, grid
from scaffpd.comparison.problem import Problem
from scaffpd.errors import InputError, count, real, unknown

SELECTIONS = ("worst_20", "worst", "mean")
LATTICE = 1000  # configurations within reach of a climb
LONGEST = 48  # characters of a label made from a repr
PLAIN = (int, float, str, type(None))


@dataclass(frozen=True)
class Setting:
    """What is compared on what, and how.

    Attributes:
        methods: the methods by their labels.
        problem: data and model.
        seeds: one partition, one training seed and one choice of rates each.
        rounds: of every run.
        tune: configurations that every method may try.
        validation: the share of every client's training rows that a choice of rates is scored on.
        select: the measure over clients that is chosen by: "worst_20", "worst" or "mean".
        strengths: whether the budget may also go to how fair a method is: ρ, q, θ, μ.
        choosing: how many seeds choose rates for all; `None` lets each choose its own.
        climb: whether the best of the grid is followed beyond its edge.
    """

    methods: dict[str, Any]
    problem: Problem
    seeds: tuple[int, ...]
    rounds: int
    tune: int
    validation: float
    select: str
    strengths: bool = False
    choosing: int | None = None
    climb: bool = False

    @property
    def choosers(self) -> tuple[int, ...]:
        """The seeds that rates are chosen by."""
        return self.seeds[: self.choosing]

    def grid(self, label: str) -> list[Factors]:
        """The configurations of one method that are tried in any case, the first of its lattice."""
        return self.lattice[label][: self.tune]

    @cached_property
    def lattice(self) -> dict[str, list[Factors]]:
        """All configurations that may ever be tried, by method."""
        size = LATTICE if self.climb else self.tune
        return {label: grid(method, size, self.strengths) for label, method in self.methods.items()}

    def about(self) -> dict[str, Any]:
        """The same as plain text and numbers, so that another setting can be told from this one."""
        return {
            "problem": self.problem.name,
            "model": repr(self.problem.model),
            "methods": {label: repr(method) for label, method in self.methods.items()},
            "grid": {label: self.grid(label) for label in self.methods},
            "seeds": list(self.seeds),
            "rounds": self.rounds,
            "tune": self.tune,
            "validation": self.validation,
            "select": self.select,
            "strengths": self.strengths,
            **({} if self.choosing is None else {"choosing": self.choosing}),
            **({"climb": True} if self.climb else {}),
        }


def make_setting(
    methods: Any, problem: Any, seeds: Any, rounds: Any, tune: Any, validation: Any, select: Any, strengths: Any,
    choosing: Any = None, climb: Any = False,
) -> Setting:  # fmt: skip
    """Check what a user handed to `compare`."""
    if not isinstance(problem, Problem):
        raise InputError(f"compare needs a problem such as Problem(data, model, name), got {type(problem).__name__}.")
    fraction = real("compare", "validation", validation)
    if not 0 < fraction < 1:
        raise InputError(f"compare needs 0 < validation < 1, got {validation!r}.")
    if select not in SELECTIONS:
        raise unknown("selection", select, SELECTIONS)
    return Setting(
        methods=labelled(methods),
        problem=problem,
        seeds=_checked_seeds(seeds),
        rounds=count("compare", "rounds", rounds),
        tune=count("compare", "tune", tune),
        validation=fraction,
        select=select,
        strengths=bool(strengths),
        choosing=None if choosing is None else count("compare", "choosing", choosing),
        climb=bool(climb),
    )


def labelled(methods: Any) -> dict[str, Any]:
    """Methods by label: those given, or the shortest that tell the methods of a list apart."""
    if isinstance(methods, Mapping):
        table = {str(label): method for label, method in methods.items()}
    elif isinstance(methods, Iterable) and not isinstance(methods, str):
        table = _named(list(methods))
    else:
        raise InputError(f"compare needs a list or a mapping of methods, got {methods!r}.")
    if not table:
        raise InputError("compare needs at least one method.")
    for label, method in table.items():
        if isinstance(method, type) or not all(hasattr(method, k) for k in ("init", "round", "resume", "uncertified")):
            raise InputError(f"compare needs methods such as fair(ChiSquare(rho=0.1)), got {method!r}.")
        check_tunable(label, method)
    return table


def _named(methods: Sequence[Any]) -> dict[str, Any]:
    labels = [_label(method, [m for m in methods if type(m) is type(method)]) for method in methods]
    table: dict[str, Any] = {}
    for label, method in zip(labels, methods, strict=True):
        number = 1 + sum(other == label or other.startswith(f"{label} #") for other in table)
        table[label if number == 1 else f"{label} #{number}"] = method
    return table


def _label(method: Any, kin: Sequence[Any]) -> str:
    """The class, and in brackets what differs from other methods of the same class."""
    name = type(method).__name__
    if len(kin) == 1:
        return name
    if not dataclasses.is_dataclass(method) or isinstance(method, type):
        return _shortened(repr(method))
    differing = [f.name for f in dataclasses.fields(method) if len({repr(getattr(m, f.name)) for m in kin}) > 1]
    values = [
        f"{field}={value!r}" if isinstance(value := getattr(method, field), PLAIN) else repr(value)
        for field in differing
    ]
    return _shortened(f"{name}({', '.join(values)})") if values else name


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _checked_seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, str | bytes) or not isinstance(seeds, Iterable):
        raise InputError(f"compare needs a list of seeds such as range(5), got {seeds!r}.")
    numbers = list(seeds)
    for seed in numbers:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise InputError(f"compare needs whole numbers >= 0 as seeds, got {seed!r}.")
    if not numbers:
        raise InputError("compare needs at least one seed.")
    for seed, times in Counter(numbers).items():
        if times > 1:
            raise InputError(f"compare needs seeds that differ, got {seed} {times} times.")
    return tuple(int(seed) for seed in numbers)
