"""Read a settings file into tables; a mistake gets one sentence with the nearest valid name.

Settings name a class by its `kind`, and the user's own class or function by `module:name`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

import scaffpd.algorithms.steps as steps
from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.errors import InputError, shortened, unknown
from scaffpd.objectives import OBJECTIVES, Excess, Objective

LARGEST = 2**20  # bytes: far above any file written by hand


class SettingsTable(BaseModel):
    """A table of a settings file; it refuses unknown keys and values of the wrong type.

    The `description` of a field says what its key needs, as in "'c.toml' needs a whole number >= 1 for rounds". The
    validation context is the path of the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


T = TypeVar("T", bound=SettingsTable)


def one_of(names: Collection[str]) -> AfterValidator:
    """Return a validator that accepts these names only, and suggests the nearest one."""

    def check(given: str) -> str:
        if given not in names:
            raise PydanticCustomError("unknown_name", "unknown name", {"names": list(names)})
        return given

    return AfterValidator(check)


def _distinct(given: tuple[str, ...]) -> tuple[str, ...]:
    for name in given:
        if given.count(name) > 1:
            raise PydanticCustomError("named_twice", "named twice", {"name": name})
    return given


def _beside(given: Any, info: ValidationInfo[Path]) -> Any:
    """Resolve a file name from the folder of the settings file."""
    named = isinstance(given, str) and given.strip() and "\0" not in given
    return info.context.parent / Path(given.strip()).expanduser() if named else given


Text = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1),
    Field(description="a text in quotes"),
]
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"  # of a silo, for use in paths, commands and certificates
Name = Annotated[
    str,
    StringConstraints(strip_whitespace=True, pattern=NAME),
    Field(description="a name of up to 63 letters, digits, - and _ (the first a letter or digit)"),
]
Entry = Annotated[
    str,
    StringConstraints(
        strip_whitespace=True, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
    ),
    Field(description="module:function"),
]
FileName = Annotated[Path, BeforeValidator(_beside), Field(description="the name of a file")]
_listed = BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)
Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1, description='a list such as ["a", "b"]'),
    _listed,
    AfterValidator(_distinct),
]
Codes = Annotated[
    tuple[str | int | float, ...], _listed, Field(description='a list such as [-999, "unknown"]')
]
Names = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=NAME)], ...],
    Field(
        min_length=1,
        description='the names of all silos (letters, digits, - and _), such as ["north", "south"],',
    ),
    _listed,
    AfterValidator(_distinct),
]
MOST = 2**62  # largest whole number, within the range of all libraries used
Switch = Annotated[bool, Field(description="true or false")]
Whole = Annotated[int, Field(ge=0, le=MOST, description="a whole number >= 0")]
Count = Annotated[int, Field(ge=1, le=MOST, description="a whole number >= 1")]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a number >= 0")]
Positive = Annotated[float, Field(ge=1e-12, allow_inf_nan=False, description="a number above 0")]
Between = Annotated[float, Field(ge=1e-300, lt=1, description="a number between 0 and 1")]
Range = Annotated[list[float], Field(min_length=2, max_length=2, description="[least, largest]")]
HeldOut = Annotated[float, Field(ge=0, lt=1, description="a share from 0 to below 1")]
Numbers = Annotated[str, one_of(("float32", "float64"))]


def read_toml(path: Path, others: Mapping[str, str]) -> dict[str, Any]:
    """Read a settings file; refuse one with a key of `others`, which marks another kind of file."""
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(
                "file-too-large", f"The file {str(path)!r} is too large to be a settings file."
            )
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(
            "read-read-toml", f"Cannot read {str(path)!r}: {error.strerror}."
        ) from None
    except UnicodeDecodeError:
        raise InputError("file-utf-text", f"The file {str(path)!r} is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "file-toml", f"The file {path.name!r} is not TOML: {str(error).rstrip('.')}."
        ) from None
    except RecursionError:
        raise InputError(
            "file-nested-too", f"The file {path.name!r} is nested too deeply to be a settings file."
        ) from None
    for key, what in others.items():
        if key in values:
            raise InputError("file-looks-like", f"The file {path.name!r} looks like {what}.")
    return values


def validated(kind: type[T], values: Mapping[str, Any], file: Path) -> T:
    """Return the tables of a settings file, or refuse the first mistake, unknown keys before others."""
    try:
        return kind.model_validate(values, context=file)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
        raise _refusal(kind, first, file.name) from None


def _refusal(kind: type[SettingsTable], error: ErrorDetails, file: str) -> InputError:
    """Turn a pydantic error into a sentence with the file, the key, the wanted and the given value."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    known, needs = _described(kind, path)
    label = ".".join(path)
    given = error["input"]
    about = error.get("ctx", {})
    if isinstance(about.get("error"), InputError):
        return InputError("error-refusal", str(about["error"]))
    match error["type"]:
        case "extra_forbidden":
            table = f"[{'.'.join(path[:-1])}] of " if path[1:] else ""
            return unknown(f"key in {table}{file!r},", path[-1], known)
        case "unknown_name":
            return unknown(f"{label} in {file!r},", given, about["names"])
        case "named_twice":
            return InputError("names-twice", f"{file!r} names {about['name']!r} twice in {label}.")
        case "model_type" | "dict_type":
            return InputError(
                "table-refusal", f"{file!r} needs a table [{label}], got {label} = {given!r}."
            )
        case "missing":
            return InputError(
                "missing-refusal", f"{file!r} needs {needs} for {label}, but it is missing."
            )
    return InputError("refusal", f"{file!r} needs {needs} for {label}, got {shortened(given)}.")


def _described(kind: type[SettingsTable], path: list[str]) -> tuple[list[str], str]:
    """Return the keys of the last key's table, and what that key needs."""
    table: type[SettingsTable] | None = kind
    known = list(kind.model_fields)
    needs = "a text in quotes"
    for key in path:
        if table is None:
            break
        known = list(table.model_fields)
        field = table.model_fields.get(key)
        if field is None:
            break
        inner = list(_inside(field.annotation))
        described = [
            part.description
            for part in (*inner, field)
            if isinstance(part, FieldInfo) and part.description
        ]
        needs = described[-1] if described else needs
        table = next(
            (part for part in inner if isinstance(part, type) and issubclass(part, SettingsTable)),
            None,
        )
    return known, needs


def _inside(annotation: Any) -> Iterator[Any]:
    """Yield a type and everything inside it: `X | None`, `dict[str, X]`, `Annotated[X, ...]`."""
    yield annotation
    for part in get_args(annotation):
        yield from _inside(part)


def kind_of(algorithm: Algorithm) -> str:
    """Return the name of an algorithm in settings: its class, with the module if it is the user's own."""
    kind = type(algorithm)
    return (
        kind.__name__
        if ALGORITHMS.get(kind.__name__) is kind
        else f"{kind.__module__}:{kind.__qualname__}"
    )


def algorithm_kind(
    kind: Any, folder: Path, what: str = "algorithm", keep: bool = True
) -> type[Algorithm] | Algorithm:
    """Return one of our classes by its name, or the user's own class or object by `module:name`.

    `keep` leaves the user's module importable, so that its objects can be sent to other processes. Without it, several
    folders may have modules of the same name.
    """
    found: type[Algorithm] | Algorithm = _kind(kind, folder, what, ALGORITHMS, Algorithm, keep)
    return found


def objective_kind(kind: Any, folder: Path, what: str = "objective") -> type[Objective]:
    """Return one of our classes by its name, or the user's own class by `module:name`."""
    found: type[Objective] = _kind(kind, folder, what, OBJECTIVES, Objective, True)
    return found


def _kind(
    kind: Any, folder: Path, what: str, known: Mapping[str, Any], base: type, keep: bool
) -> Any:
    if not isinstance(kind, str) or ":" not in kind:
        if not isinstance(kind, str) or kind not in known:
            raise unknown(what, kind, known)
        return known[kind]
    if keep:
        sys.path += [place for place in (str(folder), str(Path.cwd())) if place not in sys.path]
        importlib.invalidate_caches()
    with nullcontext() if keep else _searching(folder, kind):
        found = _named(folder, kind)
        if found is None:
            module, _, name = kind.partition(":")
            raise unknown(
                f"name in {module!r},",
                name,
                [own for own in vars(sys.modules[module]) if own[0] != "_"],
            )
    if (isinstance(found, type) and issubclass(found, base)) or (
        base is Algorithm and isinstance(found, base)
    ):
        return found
    word = base.__name__.lower()
    needed = f"scaffpd.{base.__name__.lower()}s.{base.__name__}"
    raise InputError(
        "class-kind", f"{kind!r} is no {word}: it has to be a class of {needed}, got {found!r}."
    )


def algorithm_of(given: Mapping[str, Any], objective: Mapping[str, Any] | None, file: Path) -> Any:
    """Make the algorithm of [algorithm] and [objective], with its step rule."""
    values = dict(given)
    kind = values.pop("kind", "Fair")
    chosen = algorithm_kind(kind, file.parent, f"algorithm.kind in {file.name!r},")
    if isinstance(chosen, Algorithm):
        if values or objective is not None:
            raise InputError(
                "complete-leave-objective",
                f"{kind} is complete: leave [objective] and other keys of [algorithm] out.",
            )
        return chosen
    if isinstance(values.get("steps"), dict):
        rule = dict(values["steps"])
        if (name := rule.pop("kind", None)) not in steps.__all__:
            raise unknown(f"algorithm.steps.kind in {file.name!r},", name, steps.__all__)
        values["steps"] = called(getattr(steps, name), "algorithm.steps", rule, file)
    if objective is not None:
        if "objective" not in inspect.signature(chosen).parameters:
            raise InputError(
                "objective-own-leave",
                f"{kind} has an objective of its own: leave [objective], or --objective, out.",
            )
        values["objective"] = objective_of(objective, file)
    elif chosen.needs_objective():
        raise InputError(
            "objective-such-kind",
            f'{kind} needs an [objective] in {file.name!r}, such as kind = "ChiSquare" and rho = 0.1.',
        )
    return called(chosen, "algorithm", values, file)


def objective_of(given: Mapping[str, Any], file: Path) -> Objective:
    """Make the objective of [objective]."""
    values = dict(given)
    offset = values.pop("offset", None)
    kind = objective_kind(
        values.pop("kind", None), file.parent, f"objective.kind in {file.name!r},"
    )
    made: Objective = called(kind, "objective", values, file)
    return (
        made
        if offset is None
        else called(Excess, "objective", {"objective": made, "offset": offset}, file)
    )


def with_usual(objective: dict[str, Any] | None, file: Path) -> dict[str, Any] | None:
    """Return [objective] with the default strength if it has none."""
    if objective is None:
        return None
    kind = objective_kind(objective.get("kind"), file.parent, f"objective.kind in {file.name!r},")
    return (
        objective
        if kind.usual is None
        else {**objective, kind.parameter: objective.get(kind.parameter, kind.usual)}
    )


def called(made: Any, table: str, values: Mapping[str, Any], file: Path) -> Any:
    """Make an object from the keys of a table; prefix its error messages with the table's name."""
    takes = [name for name in inspect.signature(made).parameters if name != "kind"]
    for name in values:
        if name not in takes:
            raise unknown(f"key in [{table}] of {file.name!r},", name, takes)
    try:
        return made(**values)
    except InputError as error:
        raise InputError("called", f"[{table}] of {file.name!r}: {error}") from None
    except TypeError as error:
        raise InputError(
            "complete-called",
            f"[{table}] of {file.name!r} is not complete: {str(error).split(') ')[-1]}.",
        ) from None


def load(folder: Path, entry: str) -> Any:
    """Call the user's own function, searched in `folder` first; report its failure in one sentence with the line."""
    with _searching(folder, entry):
        function = _named(folder, entry)
        if not callable(function):
            module, _, name = entry.partition(":")
            raise InputError(
                "module-function-entry",
                f"The module {module!r} has no function {name!r}, which the entry {entry!r} names.",
            )
        try:
            return function()
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                "entry-failed", f"The entry {entry!r} failed with {_cause(error)}."
            ) from error


def _named(folder: Path, entry: str) -> Any:
    module_name, _, name = entry.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and (
            module_name == error.name or module_name.startswith(f"{error.name}.")
        ):
            raise InputError(
                "module-entry-neither",
                f"There is no module {error.name!r} for the entry {entry!r}, neither in {str(folder)!r} nor installed.",
            ) from None
        raise InputError(
            "entry-module-installed",
            f"The entry {entry!r} needs the module {error.name!r}, which is not installed.",
        ) from error
    except Exception as error:
        raise InputError(
            "module-entry-failed", f"The module of the entry {entry!r} failed with {_cause(error)}."
        ) from error


@contextmanager
def _searching(folder: Path, entry: str) -> Iterator[None]:
    """Search a folder first, and forget its modules afterwards: other silos have their own."""
    top = entry.partition(":")[0].partition(".")[0]
    path = str(folder)
    own = _holds(folder, top)
    taken = {
        name: m
        for name, m in sys.modules.items()
        if own and (name == top or name.startswith(f"{top}."))
    }
    for name in taken:
        del sys.modules[name]
    before = set(sys.modules)
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(path)
        for name in [
            name
            for name in sys.modules
            if name not in before and _holds(folder, name.partition(".")[0])
        ]:
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
