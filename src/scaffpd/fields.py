"""Kinds of settings: what a value must be, in words, so that a wrong one gets one sentence.

A table of settings is a pydantic model. It is the argument of a Python function, a table of a TOML
file and a group of command-line options at once, so each setting is declared in one place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

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
from pydantic_core import ErrorDetails, PydanticCustomError

from scaffpd.errors import InputError, shortened, unknown


class SettingsTable(BaseModel):
    """A table of settings; it refuses unknown keys and values of the wrong type.

    The docstring below a field is the help of its command-line option; a field with a comment
    instead is for files and Python only. The validation context is the path of the file, from whose
    folder relative paths start; without one they start from the working folder.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class Needs(NamedTuple):
    """What a key needs, as in "'c.toml' needs a whole number >= 1 for rounds"."""

    words: str


T = TypeVar("T", bound=SettingsTable)
LARGEST = 2**20  # bytes of a settings file: far above any that is written by hand
Json = dict[str, Any]  # a table whose keys belong to a class that the user may have written


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


def _beside(given: object, info: ValidationInfo[Path | None]) -> object:
    """Resolve a file name from the folder of the settings file."""
    if not isinstance(given, str | Path) or not str(given).strip() or "\0" in str(given):
        return given
    path = Path(str(given).strip()).expanduser()
    return path if info.context is None else info.context.parent / path


def _several(given: object) -> object:
    return tuple(given) if isinstance(given, list | tuple) else (given,)


NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"  # of a silo, for use in paths, commands and certificates
MOST = 2**62  # largest whole number, within the range of all libraries used
_listed = BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)

Text = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1), Needs("a text in quotes")
]
Column = Annotated[Text, Needs("the name of a column")]
Name = Annotated[
    str,
    StringConstraints(strip_whitespace=True, pattern=NAME),
    Needs("a name of up to 63 letters, digits, - and _ (the first a letter or digit)"),
]
Entry = Annotated[
    str,
    StringConstraints(
        strip_whitespace=True, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
    ),
    Needs("module:function"),
]
FileName = Annotated[Path, BeforeValidator(_beside), Needs("the name of a file")]
FileNames = Annotated[
    tuple[FileName, ...],
    Field(min_length=1),
    BeforeValidator(_several),
    Needs("the name of a file, or a list of such names"),
]
Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1),
    _listed,
    AfterValidator(_distinct),
    Needs('a list such as ["a", "b"]'),
]
Codes = Annotated[tuple[str | int | float, ...], _listed, Needs('a list such as [-999, "unknown"]')]
Names = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=NAME)], ...],
    Field(min_length=1, max_length=1000),
    _listed,
    AfterValidator(_distinct),
    Needs('the names of at most 1000 silos (letters, digits, - and _), as in ["north", "south"],'),
]
Switch = Annotated[bool, Needs("true or false")]
Whole = Annotated[int, Field(ge=0, le=MOST), Needs("a whole number >= 0")]
Count = Annotated[int, Field(ge=1, le=MOST), Needs("a whole number >= 1")]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), Needs("a number >= 0")]
Positive = Annotated[float, Field(ge=1e-12, allow_inf_nan=False), Needs("a number above 0")]
Strength = Annotated[float, Field(ge=1e-12, le=1e12), Needs("a number from 1e-12 to 1e12")]
Epsilon = Annotated[float, Field(ge=1e-6, le=1e6), Needs("a number from 1e-6 to 1e6")]
Delta = Annotated[float, Field(ge=1e-30, le=1e-3), Needs("a number from 1e-30 to 0.001")]
Bound = Annotated[float, Field(ge=-1e150, le=1e150)]  # whose square is a number
Range = Annotated[list[Bound], Field(min_length=2, max_length=2), Needs("[least, largest]")]
Share = Annotated[float, Field(ge=0, lt=1), Needs("a share from 0 to below 1")]


def plain_name(name: object) -> bool:
    """Return whether a name is one that a program's settings have: short, of plain letters."""
    return isinstance(name, str) and name.isascii() and name.isidentifier() and len(name) < 64


def validated(
    kind: type[T],
    values: Mapping[str, object],
    file: Path,
    options: Mapping[str, str] | None = None,
) -> T:
    """Return a table of settings, or refuse the first mistake, unknown keys before others.

    Args:
        kind: the table.
        values: by key.
        file: the settings file, or what stands for one in sentences.
        options: keys that were given on the command line, such as "data.test", and their options.
    """
    try:
        return kind.model_validate(values, context=file)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
        raise _refusal(kind, first, file.name, options or {}) from None


def _refusal(
    kind: type[SettingsTable], error: ErrorDetails, file: str, options: Mapping[str, str]
) -> InputError:
    """Turn a pydantic error into a sentence with the file, the key, the wanted and given value."""
    about = error.get("ctx", {})
    raised = about.get("error")
    if isinstance(raised, InputError):  # by a validator of ours
        return raised
    texts = (part for part in error["loc"] if isinstance(part, str))
    names = [part for part in texts if "[" not in part and not part.startswith("constrained-")]
    known, needs = _described(kind, names)
    path = [name for name in names if not name[:1].isupper()]
    label = ".".join(path)
    option = options.get(label)
    given = error["input"]
    match error["type"]:
        case "extra_forbidden" if option:
            return InputError(
                "option-not-applicable", f"{option} does not go with {file!r}: leave it out."
            )
        case "extra_forbidden":
            table = f"[{'.'.join(path[:-1])}] of " if path[1:] else ""
            return unknown(f"key in {table}{file!r},", path[-1], known)
        case "unknown_name":
            return unknown(option or f"{label} in {file!r},", given, about["names"])
        case "named_twice":
            return InputError(
                "named-twice", f"{option or f'{label} of {file!r}'} names {about['name']!r} twice."
            )
        case "model_type" | "dict_type" | "union_tag_not_found":
            return InputError(
                "setting-not-a-table", f"{file!r} needs a table [{label}], got {label} = {given!r}."
            )
        case "missing":
            return InputError(
                "setting-missing", f"{file!r} needs {needs} for {label}, but it is missing."
            )
    wanted = f"{option} needs {needs}" if option else f"{file!r} needs {needs} for {label}"
    return InputError("setting-invalid", f"{wanted}, got {shortened(given)}.")


def _described(kind: type[SettingsTable], path: list[str]) -> tuple[list[str], str]:
    """Return the keys of the last key's table, and what that key needs.

    Of a union of tables, the path has the beginning of the chosen class's name, such as "Source".
    """
    tables = [kind]
    known = list(kind.model_fields)
    needs = "a text in quotes"
    for key in path:
        if key[:1].isupper():
            tables = [table for table in tables if table.__name__.startswith(key)]
            continue
        known = [name for table in tables for name in table.model_fields]
        field = next((t.model_fields[key] for t in tables if key in t.model_fields), None)
        if field is None:
            break
        inside = [*parts(field.annotation), *field.metadata]
        needs = next((part.words for part in reversed(inside) if isinstance(part, Needs)), needs)
        tables = tables_in(field.annotation)
    return known, needs


def parts(annotation: object) -> Iterator[object]:
    """Yield a type and all parts of it: `X | None`, `dict[str, X]`, `Annotated[X, ...]`."""
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def tables_in(annotation: object) -> list[type[SettingsTable]]:
    return [
        part
        for part in parts(annotation)
        if isinstance(part, type) and issubclass(part, SettingsTable)
    ]


def read_toml(path: Path, others: Mapping[str, str]) -> Json:
    """Read a settings file; refuse one with a key of `others`, which marks another kind of file."""
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(
                "settings-too-large", f"The file {str(path)!r} is too large to be a settings file."
            )
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(
            "settings-unreadable", f"Cannot read {str(path)!r}: {error.strerror}."
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            "settings-not-utf8", f"The file {str(path)!r} is not UTF-8 text."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "settings-not-toml", f"The file {path.name!r} is not TOML: {str(error).rstrip('.')}."
        ) from None
    except RecursionError:
        raise InputError(
            "settings-nested", f"The file {path.name!r} is nested too deeply to be a settings file."
        ) from None
    for key, what in others.items():
        if key in values:
            raise InputError("other-settings-file", f"The file {path.name!r} looks like {what}.")
    return values
