"""Objects that a settings file describes: `kind` names a class of ours, the other keys are its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from scaffpd import algorithms, objectives, steps
from scaffpd.errors import InputError, unknown
from scaffpd.objectives import Objective
from scaffpd.settings.section import Section

KINDS = tuple(name for name in algorithms.__all__ if isinstance(getattr(algorithms, name), type))


def algorithm_of(top: Section) -> Any:
    """The algorithm that [algorithm] and [objective] describe, with its step rule."""
    given = dict(top.section("algorithm", top.values.get("algorithm", {}) or ()).values)
    kind = given.pop("kind", "Fair")
    if kind not in KINDS:
        raise unknown(f"algorithm.kind in {top.file.name!r},", kind, KINDS)
    chosen = getattr(algorithms, kind)
    takes = inspect.signature(chosen).parameters
    if isinstance(given.get("steps"), dict):
        given["steps"] = _made(top, "algorithm.steps", given["steps"], steps)
    if "objective" in top.values:
        if "objective" not in takes:
            raise InputError(f"{kind} has an objective of its own: leave [objective] out of {top.file.name!r}.")
        given["objective"] = objective_of(top)
    elif "objective" in takes and takes["objective"].default is inspect.Parameter.empty:
        raise InputError(f'{kind} needs an [objective] in {top.file.name!r}, such as kind = "ChiSquare" and rho = 0.1.')
    return _called(top, "algorithm", chosen, given)


def objective_of(top: Section) -> Objective:
    """The objective that [objective] describes."""
    made: Objective = _made(top, "objective", top.section("objective", top.values["objective"]).values, objectives)
    return made


def _made(top: Section, table: str, given: Mapping[str, Any], module: ModuleType) -> Any:
    """An object of one of a module's public classes."""
    values = dict(given)
    kind = values.pop("kind", None)
    known = [name for name in module.__all__ if isinstance(getattr(module, name), type)]
    if kind not in known:
        raise unknown(f"{table}.kind in {top.file.name!r},", kind, known)
    return _called(top, table, getattr(module, kind), values)


def _called(top: Section, table: str, made: Any, values: Mapping[str, Any]) -> Any:
    takes = [name for name in inspect.signature(made).parameters if name != "kind"]
    for name in values:
        if name not in takes:
            raise unknown(f"key in [{table}] of {top.file.name!r},", name, takes)
    try:
        return made(**values)
    except InputError as error:
        raise InputError(f"[{table}] of {top.file.name!r}: {error}") from None
    except TypeError as error:
        raise InputError(f"[{table}] of {top.file.name!r} is not complete: {str(error).split(') ')[-1]}.") from None
