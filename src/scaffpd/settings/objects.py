"""Objects that a settings file describes: `kind` names a class of ours, the other keys are its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from scaffpd import objectives, steps
from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.errors import InputError, unknown
from scaffpd.objectives import Objective
from scaffpd.settings import entry
from scaffpd.settings.section import Section


def kind_of(algorithm: Algorithm) -> str:
    """The name of an algorithm in settings: that of its class, with its module where it is not one of ours."""
    kind = type(algorithm)
    return kind.__name__ if ALGORITHMS.get(kind.__name__) is kind else f"{kind.__module__}:{kind.__qualname__}"


def algorithm_kind(
    kind: Any, folder: Path, what: str = "algorithm", look: Callable[[Path, str], Any] = entry.find
) -> type[Algorithm] | Algorithm:
    """A class of ours by its name; a class, or an object of it, of the user's by `module:name`."""
    if not isinstance(kind, str) or ":" not in kind:
        if kind not in ALGORITHMS:
            raise unknown(what, kind, ALGORITHMS)
        return ALGORITHMS[kind]
    found = look(folder, kind)
    if isinstance(found, Algorithm) or (isinstance(found, type) and issubclass(found, Algorithm)):
        return found
    raise InputError(f"{kind!r} is no algorithm: it has to be a class of scaffpd.algorithms.Algorithm, got {found!r}.")


def algorithm_of(top: Section) -> Any:
    """The algorithm that [algorithm] and [objective] describe, with its step rule."""
    given = dict(top.section("algorithm", top.values.get("algorithm", {}) or ()).values)
    kind = given.pop("kind", "Fair")
    chosen = algorithm_kind(kind, top.file.parent, f"algorithm.kind in {top.file.name!r},")
    if isinstance(chosen, Algorithm):
        if given or "objective" in top.values:
            raise InputError(f"{kind} is complete: leave [objective] and other keys of [algorithm] out.")
        return chosen
    takes = inspect.signature(chosen).parameters
    if isinstance(given.get("steps"), dict):
        given["steps"] = _made(top, "algorithm.steps", given["steps"], steps)
    if "objective" in top.values:
        if "objective" not in takes:
            raise InputError(f"{kind} has an objective of its own: leave [objective] out of {top.file.name!r}.")
        given["objective"] = objective_of(top)
    elif chosen.needs_objective():
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
