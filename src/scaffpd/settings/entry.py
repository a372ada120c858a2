"""An entry: the operator's own function that returns the data, looked up beside `silo.toml` first."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError


def find(folder: Path, entry: str) -> Any:
    """A class or object of the user's, `module:name`, from this folder, the working directory or what is installed.

    The module stays importable, so that other processes can be sent what it makes.
    """
    for place in (str(folder), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)
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
