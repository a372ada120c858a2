"""Read a settings file into tables; whatever is wrong with it becomes one sentence with the nearest right word."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
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

from scaffpd.errors import InputError, shortened, unknown

LARGEST = 2**20  # bytes: nobody writes more than that by hand


class Table(BaseModel):
    """A table of a settings file. Unknown keys, and values of another type, are refused.

    The `description` of a field says what its key needs, as in "'c.toml' needs a whole number >= 1 for rounds". The
    validation context is the path of the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


T = TypeVar("T", bound=Table)


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
    return info.context.parent / Path(given.strip()).expanduser() if isinstance(given, str) and given.strip() else given


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), Field(description="a text in quotes")]
Name = Annotated[  # of a silo: it goes into paths, commands and certificates
    str,
    StringConstraints(strip_whitespace=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"),
    Field(description="a name of up to 63 letters, digits, - and _ (the first a letter or digit)"),
]
Entry = Annotated[
    str,
    StringConstraints(strip_whitespace=True, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"),
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
Names = Annotated[
    tuple[Name, ...],
    Field(min_length=1, description='the names of all silos (letters, digits, - and _), such as ["north", "south"],'),
    _listed,
    AfterValidator(_distinct),
]
Switch = Annotated[bool, Field(description="true or false")]
Whole = Annotated[int, Field(ge=0, description="a whole number >= 0")]
Count = Annotated[int, Field(ge=1, description="a whole number >= 1")]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a number >= 0")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above 0")]
Between = Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1")]
HeldOut = Annotated[float, Field(ge=0, lt=1, description="a share from 0 to below 1")]
Numbers = Annotated[str, one_of(("float32", "float64"))]


def read_toml(path: Path, others: Mapping[str, str]) -> dict[str, Any]:
    """Read a settings file; a key of `others` tells that it is another kind of file, and which one."""
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"The file {str(path)!r} is too large to be a settings file.")
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"Cannot read {str(path)!r}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"The file {str(path)!r} is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The file {path.name!r} is not TOML: {str(error).rstrip('.')}.") from None
    except RecursionError:
        raise InputError(f"The file {path.name!r} is nested too deeply to be a settings file.") from None
    for key, what in others.items():
        if key in values:
            raise InputError(f"The file {path.name!r} looks like {what}.")
    return values


def validated(kind: type[T], values: Mapping[str, Any], file: Path) -> T:
    """Return the tables of a settings file, or refuse the first mistake; unknown keys come first."""
    try:
        return kind.model_validate(values, context=file)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
        raise _refusal(kind, first, file.name) from None


def _refusal(kind: type[Table], error: ErrorDetails, file: str) -> InputError:
    """Turn one of pydantic's errors into a sentence with the file, the key, what it needs and what it has."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    known, needs = _described(kind, path)
    label, given, about = ".".join(path), error["input"], error.get("ctx", {})
    if isinstance(about.get("error"), InputError):
        return InputError(str(about["error"]))
    match error["type"]:
        case "extra_forbidden":
            table = f"[{'.'.join(path[:-1])}] of " if path[1:] else ""
            return unknown(f"key in {table}{file!r},", path[-1], known)
        case "unknown_name":
            return unknown(f"{label} in {file!r},", given, about["names"])
        case "named_twice":
            return InputError(f"{file!r} names {about['name']!r} twice in {label}.")
        case "model_type" | "dict_type":
            return InputError(f"{file!r} needs a table [{label}], got {label} = {given!r}.")
        case "missing":
            return InputError(f"{file!r} needs {needs} for {label}, but it is missing.")
    return InputError(f"{file!r} needs {needs} for {label}, got {shortened(given)}.")


def _described(kind: type[Table], path: list[str]) -> tuple[list[str], str]:
    """Return the keys of the table that the last key stands in, and what that key needs."""
    table: type[Table] | None = kind
    known, needs = list(kind.model_fields), "a text in quotes"
    for key in path:
        if table is None:
            break
        known, field = list(table.model_fields), table.model_fields.get(key)
        if field is None:
            break
        inner = list(_inside(field.annotation))
        described = [part.description for part in (*inner, field) if isinstance(part, FieldInfo) and part.description]
        needs = described[-1] if described else needs
        table = next((part for part in inner if isinstance(part, type) and issubclass(part, Table)), None)
    return known, needs


def _inside(annotation: Any) -> Iterator[Any]:
    """Yield a type and everything inside it: `X | None`, `dict[str, X]`, `Annotated[X, ...]`."""
    yield annotation
    for part in get_args(annotation):
        yield from _inside(part)
