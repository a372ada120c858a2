"""[algorithm] and [objective] of a federation: data of a closed grammar, and no code.

A name is one of the package's, or one that every file of this kind gives to its owner's own class.
A setting is a number in a range, a word or a list of numbers. What is common to several methods has
one range here; further rules are the methods' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Protocol, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

import scaffpd.fields as key
from scaffpd.algorithms import ALGORITHMS, Algorithm, Fair
from scaffpd.errors import InputError, unknown
from scaffpd.fields import Json, Needs, SettingsTable, plain_name
from scaffpd.objectives import OBJECTIVES, Objective
from scaffpd.settings.methods import RULES, own_class

PACKAGE: Mapping[str, Mapping[str, type]] = {"method": ALGORITHMS, "objective": OBJECTIVES}
BASES: Mapping[str, type] = {"method": Algorithm, "objective": Objective}
MOST = 1000  # numbers of a list: one for every silo
LARGEST = 1e12  # of a number without a range of its own
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,62}")


def _plain(given: object) -> object:
    """Accept a number, a word, true or false, or a list of numbers."""
    if isinstance(given, list):
        fits = len(given) <= MOST and all(_number(one) for one in given)
    elif isinstance(given, str):
        fits = WORD.fullmatch(given) is not None
    else:
        fits = isinstance(given, bool) or _number(given)
    if fits:
        return given
    raise PydanticCustomError("no_setting", "no setting")


def _number(given: object) -> bool:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return -LARGEST <= given <= LARGEST


Setting = Annotated[
    object,
    BeforeValidator(_plain),
    Needs(f"a number of at most {LARGEST:g}, a word, or a list of such numbers"),
]
Times = Annotated[int, Field(ge=1, le=10**6), Needs("a whole number from 1 to 1000000")]
Rate = Annotated[float, Field(ge=1e-12, le=1e6), Needs("a number from 1e-12 to 1e6")]
Power = Annotated[float, Field(ge=0, le=1000), Needs("a number from 0 to 1000")]
Part = Annotated[float, Field(ge=1e-12, le=1), Needs("a number above 0, up to 1")]
Portion = Annotated[float, Field(ge=0, le=1), Needs("a number from 0 to 1")]
Level = Annotated[float, Field(ge=-LARGEST, le=LARGEST), Needs("a number of at most 1e12")]
Word = Annotated[str, StringConstraints(max_length=20), Needs("a word")]


class StepTable(SettingsTable):
    """[algorithm.steps]: a step rule of the package."""

    kind: Annotated[str, key.one_of(RULES)]
    tau: Rate | None = None
    sigma: Rate | None = None
    theta: Portion | None = None
    local_rate: Rate | None = None
    extrapolation: Portion | None = None
    noise: Annotated[float, Field(ge=0, le=1e6), Needs("a number from 0 to 1e6")] | None = None
    accuracy: key.Strength | None = None


class ExtensibleTable(SettingsTable):
    """A table that may have settings of other names, which the class that takes them checks."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Setting] = Field(init=False)

    @model_validator(mode="after")
    def _names_are_plain(self, info: ValidationInfo[Path]) -> Self:
        for name in self.model_extra or {}:
            if not plain_name(name):
                raise InputError(
                    "setting-name", f"{info.context.name!r} has a setting whose name is none."
                )
        return self

    @property
    def given(self) -> Json:
        """What was given, kind included."""
        return self.model_dump(exclude_unset=True)


class MethodTable(ExtensibleTable):
    """[algorithm] of a federation."""

    kind: key.Name = Fair.__name__
    steps: StepTable | None = None
    local_steps: Times | None = None
    batch_size: Times | None = None
    clients_per_round: Times | None = None
    memory: Times | None = None
    local_rate: Rate | None = None
    server_rate: Rate | None = None
    dual_rate: Rate | None = None
    adaptivity: Rate | None = None
    momentum: Portion | None = None
    second_momentum: Portion | None = None
    mu: Annotated[float, Field(ge=0, le=1e6), Needs("a number from 0 to 1e6")] | None = None
    q: Power | None = None
    tail: Part | None = None
    full_gradients: key.Switch | None = None
    weights: Word | None = None
    optimizer: Word | None = None


class ObjectiveTable(ExtensibleTable):
    """[objective] of a federation."""

    kind: key.Name
    rho: key.Strength | None = None
    cap: Part | None = None
    alpha: Part | None = None
    delta: key.Strength | None = None
    q: Power | None = None
    b: Level | Annotated[list[Level], Field(min_length=1, max_length=MOST)] | None = None
    prior: Annotated[list[key.Strength], Field(min_length=1, max_length=MOST)] | None = None


class Lists(Protocol):
    """A file of this machine that lists its owner's own classes."""

    @property
    def methods(self) -> dict[str, str]: ...

    @property
    def objectives(self) -> dict[str, str]: ...


def entries(lists: Lists) -> dict[str, dict[str, str]]:
    """Return the lists by what they hold."""
    return {"method": lists.methods, "objective": lists.objectives}


def found_classes(names: Mapping[str, str], lists: Lists, folder: Path) -> dict[type, type]:
    """Import the classes of these names, which a file in a folder of this machine lists; return
    them by their bases.
    """
    found: dict[type, type] = {}
    for what, name in names.items():
        own = entries(lists)[what]
        if name not in own:
            raise unknown(what, name, [*PACKAGE[what], *own])
        found[BASES[what]] = own_class(BASES[what], own[name], folder)
    return found
