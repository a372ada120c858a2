"""Objects that settings name: a class by its `kind`, and the user's own class or function by `module:name`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from scaffpd import objectives, steps
from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.errors import InputError, unknown
from scaffpd.objectives import Objective


def kind_of(algorithm: Algorithm) -> str:
    """Return the name of an algorithm in settings: that of its class, with its module where it is not one of ours."""
    kind = type(algorithm)
    return kind.__name__ if ALGORITHMS.get(kind.__name__) is kind else f"{kind.__module__}:{kind.__qualname__}"


def algorithm_kind(kind: Any, folder: Path, what: str = "algorithm", keep: bool = True) -> type[Algorithm] | Algorithm:
    """Return a class of ours by its name; a class, or an object of it, of the user's by `module:name`.

    `keep` leaves the user's module importable, so that other processes can be sent what it makes. Without it, several
    folders may have modules of one name.
    """
    if not isinstance(kind, str) or ":" not in kind:
        if kind not in ALGORITHMS:
            raise unknown(what, kind, ALGORITHMS)
        return ALGORITHMS[kind]
    if keep:
        sys.path += [place for place in (str(folder), str(Path.cwd())) if place not in sys.path]
        importlib.invalidate_caches()
    with nullcontext() if keep else _searching(folder, kind):
        found = _named(folder, kind)
    if isinstance(found, Algorithm) or (isinstance(found, type) and issubclass(found, Algorithm)):
        return found
    raise InputError(f"{kind!r} is no algorithm: it has to be a class of scaffpd.algorithms.Algorithm, got {found!r}.")


def algorithm_of(given: Mapping[str, Any], objective: Mapping[str, Any] | None, file: Path) -> Any:
    """Make the algorithm that [algorithm] and [objective] describe, with its step rule."""
    values = dict(given)
    kind = values.pop("kind", "Fair")
    chosen = algorithm_kind(kind, file.parent, f"algorithm.kind in {file.name!r},")
    if isinstance(chosen, Algorithm):
        if values or objective is not None:
            raise InputError(f"{kind} is complete: leave [objective] and other keys of [algorithm] out.")
        return chosen
    if isinstance(values.get("steps"), dict):
        values["steps"] = _made("algorithm.steps", values["steps"], steps, file)
    if objective is not None:
        if "objective" not in inspect.signature(chosen).parameters:
            raise InputError(f"{kind} has an objective of its own: leave [objective] out of {file.name!r}.")
        values["objective"] = objective_of(objective, file)
    elif chosen.needs_objective():
        raise InputError(f'{kind} needs an [objective] in {file.name!r}, such as kind = "ChiSquare" and rho = 0.1.')
    return called(chosen, "algorithm", values, file)


def objective_of(given: Mapping[str, Any], file: Path) -> Objective:
    """Make the objective that [objective] describes."""
    made: Objective = _made("objective", given, objectives, file)
    return made


def _made(table: str, given: Mapping[str, Any], module: ModuleType, file: Path) -> Any:
    values = dict(given)
    kind = values.pop("kind", None)
    known = [name for name in module.__all__ if isinstance(getattr(module, name), type)]
    if kind not in known:
        raise unknown(f"{table}.kind in {file.name!r},", kind, known)
    return called(getattr(module, kind), table, values, file)


def called(made: Any, table: str, values: Mapping[str, Any], file: Path) -> Any:
    """Make an object of the keys of a table; what it refuses is said with the table's name."""
    takes = [name for name in inspect.signature(made).parameters if name != "kind"]
    for name in values:
        if name not in takes:
            raise unknown(f"key in [{table}] of {file.name!r},", name, takes)
    try:
        return made(**values)
    except InputError as error:
        raise InputError(f"[{table}] of {file.name!r}: {error}") from None
    except TypeError as error:
        raise InputError(f"[{table}] of {file.name!r} is not complete: {str(error).split(') ')[-1]}.") from None


def load(folder: Path, entry: str) -> Any:
    """Call the user's own function, looked up in `folder` first; its failure is said in one sentence with its line."""
    with _searching(folder, entry):
        function = _named(folder, entry)
        if not callable(function):
            module, _, name = entry.partition(":")
            raise InputError(f"The module {module!r} has no function {name!r}, which the entry {entry!r} names.")
        try:
            return function()
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"The entry {entry!r} failed with {_cause(error)}.") from error


def _named(folder: Path, entry: str) -> Any:
    module_name, _, name = entry.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InputError(
                f"There is no module {error.name!r} for the entry {entry!r}, neither in {str(folder)!r} nor installed."
            ) from None
        raise InputError(f"The entry {entry!r} needs the module {error.name!r}, which is not installed.") from error
    except Exception as error:
        raise InputError(f"The module of the entry {entry!r} failed with {_cause(error)}.") from error


@contextmanager
def _searching(folder: Path, entry: str) -> Iterator[None]:
    """Search the folder first; modules from there are forgotten afterwards, as other silos have their own."""
    top, path = entry.partition(":")[0].partition(".")[0], str(folder)
    own = _holds(folder, top)
    taken = {name: m for name, m in sys.modules.items() if own and (name == top or name.startswith(f"{top}."))}
    for name in taken:
        del sys.modules[name]
    before = set(sys.modules)
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(path)
        for name in [name for name in sys.modules if name not in before and _holds(folder, name.partition(".")[0])]:
            del sys.modules[name]
        sys.modules.update(taken)


def _holds(folder: Path, module: str) -> bool:
    return (folder / module).is_dir() or (folder / f"{module}.py").is_file()


def _cause(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = "" if last is None else f" ({Path(last.filename).name}, line {last.lineno})"
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
