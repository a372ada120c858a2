"""Objects that settings name: a class of ours by its `kind`, a class or function of the user's by `module:name`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from scaffpd import objectives, steps
from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.config.errors import Section
from scaffpd.errors import InputError, unknown
from scaffpd.objectives import Objective


def find(folder: Path, entry: str) -> Any:
    """A class or object of the user's, `module:name`, from this folder, the working directory or what is installed.

    The module stays importable, so that other processes can be sent what it makes.
    """
    for place in (str(folder), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)
    importlib.invalidate_caches()
    return _named(folder, entry)


def load(folder: Path, entry: str) -> Any:
    """What the function returns; whatever goes wrong in it is said in one sentence with its line."""
    with _looking_in(folder, entry.partition(":")[0]):
        function = _named(folder, entry)
        if not callable(function):
            raise _lacking("function", entry)
        try:
            return function()
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"The entry {entry!r} failed with {_words(error)}.") from error


def glimpse(folder: Path, entry: str) -> Any:
    """The same as `find`, without a trace: for processes in which several folders have modules of one name."""
    with _looking_in(folder, entry.partition(":")[0]):
        return _named(folder, entry)


def _lacking(what: str, entry: str) -> InputError:
    module, _, name = entry.partition(":")
    return InputError(f"The module {module!r} has no {what} {name!r}, which the entry {entry!r} names.")


def _named(folder: Path, entry: str) -> Any:
    module_name, _, name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InputError(
                f"There is no module {error.name!r} for the entry {entry!r}, neither in {str(folder)!r} nor installed."
            ) from None
        raise InputError(f"The entry {entry!r} needs the module {error.name!r}, which is not installed.") from error
    except Exception as error:
        raise InputError(f"The module of the entry {entry!r} failed with {_words(error)}.") from error
    return getattr(module, name, None)


@contextmanager
def _looking_in(folder: Path, module: str) -> Iterator[None]:
    """The folder on the search path for a while; modules from there are forgotten, as other silos have their own."""
    top, path = module.partition(".")[0], str(folder)
    own = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
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
        for name in [name for name in sys.modules if name not in before and _from(folder, name)]:
            del sys.modules[name]
        sys.modules.update(taken)


def _from(folder: Path, module: str) -> bool:
    top = folder / module.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").is_file()


def _words(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = "" if last is None else f" ({Path(last.filename).name}, line {last.lineno})"
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def kind_of(algorithm: Algorithm) -> str:
    """The name of an algorithm in settings: that of its class, with its module where it is not one of ours."""
    kind = type(algorithm)
    return kind.__name__ if ALGORITHMS.get(kind.__name__) is kind else f"{kind.__module__}:{kind.__qualname__}"


def algorithm_kind(
    kind: Any, folder: Path, what: str = "algorithm", look: Callable[[Path, str], Any] = find
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
