"""Agree on columns: one schema out of many descriptions, one scale out of many sums, each checked before it is used.

A description comes from a silo, a schema from the coordinator. Both are plain JSON, and both sides may be mistaken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from math import prod
from typing import Annotated, Any, Literal, NotRequired, get_args

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic wants its own before Python 3.12

from scaffpd.data.silos import unless_constant
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, UNKNOWN, Matrix
from scaffpd.errors import InputError

VERSION = 1
CLASSIFICATION = "classification"
REGRESSION = "regression"
PREPARED = "prepared"
TASKS = (CLASSIFICATION, REGRESSION)  # that a user can ask for
MOST_COLUMNS = 100_000
MOST_CATEGORIES = 10_000
MOST_LABELS = 100_000
MOST_FEATURES = 2**31
LONGEST = 500  # characters of a name
LARGEST = 2**53  # whole numbers up to here survive JSON
HUGE = 1e150  # of bounds of columns: their squares are numbers
REST = "*"  # the columns that no range names

Json = dict[str, Any]
Table: Any = TypedDict  # of keys that are known at run time


def _need(fits: Callable[[Any], bool], words: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not fits(value):
            raise PydanticCustomError("rule", words)
        return value

    return AfterValidator(check)


_twice = "something is named twice"
_different = _need(lambda values: len(set(values)) == len(values), _twice)
_names_differ = _need(
    lambda columns: len({column["name"] for column in columns}) == len(columns), _twice
)
_rises = _need(lambda span: span[0] < span[1], "it does not go from less to more")
_fits = _need(lambda shape: prod(shape) <= MOST_FEATURES, "there are too many features")
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Label = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Labels = Annotated[
    list[Label] | list[Name], Field(min_length=1, max_length=MOST_LABELS), _different
]
Categories = Annotated[list[Name], Field(max_length=MOST_CATEGORIES), _different]
Shape = Annotated[list[Count], Field(min_length=1, max_length=8), _fits]
Bound = Annotated[float, Field(gt=-HUGE, lt=HUGE)]
Span = Annotated[list[Bound], Field(min_length=2, max_length=2), _rises]
Expansion = Literal["splines", "interactions", "rff"]
EXPANSIONS: tuple[str, ...] = get_args(Expansion)


def checked_description(silo: str, given: Any) -> Json:
    """Return a silo's description with all its parts, or refuse it by the silo's name."""
    return _checked(f"Silo {silo!r} sent a description", given, of_silo=True)


def checked_schema(given: Any) -> Json:
    """Return the coordinator's schema with all its parts, or refuse it."""
    return _checked("The coordinator sent an agreement", given, of_silo=False)


def width(schema: Json) -> int:
    """Count the numbers that a row has once it is encoded."""
    return len(features(schema)) if schema["shape"] is None else prod(schema["shape"])


def features(schema: Json) -> tuple[str, ...]:
    """Name the encoded columns: "age", "cp=1", …, and "cp (other)" for what is not named."""
    if schema["shape"] is not None:
        return tuple(f"x{j}" for j in range(prod(schema["shape"])))
    names: list[str] = []
    for column in schema["columns"]:
        if column["kind"] == CATEGORY:
            names += [f"{column['name']}={category}" for category in column["categories"]]
            names += [f"{column['name']} (other)"] if column["other"] else []
        else:
            names.append(column["name"])
    return tuple(names)


def _checked(owner: str, given: Any, of_silo: bool) -> Json:
    """Return all parts of a description or a schema; keys that its task does not have are left out."""
    if not isinstance(given, dict):
        raise InputError("used-table", f"{owner} that cannot be used: it is no table.")
    if given.get("version") != VERSION:
        raise InputError(
            "another-version-use",
            f"{owner} of another version than {VERSION}: use the same version of scaffpd everywhere.",
        )
    task = given.get("task")
    shaped = given.get("shape") is not None
    declared = given.get("declared") is True
    try:
        read = _reader(
            task == CLASSIFICATION, task == PREPARED, shaped, of_silo, declared and not of_silo
        )
        parts = read.validate_python(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        words = "".join(filter(str.isprintable, first["msg"]))[:200]
        raise InputError(
            "used-checked", f"{owner} that cannot be used: {place}: {words}."
        ) from None
    return {"labels": [], "shape": None, "columns": [], "dimension": None, **parts}


@cache
def _reader(
    labelled: bool, prepared: bool, shaped: bool, of_silo: bool, declared: bool
) -> TypeAdapter[Json]:
    """Return a reader of the keys that a description or a schema of some kind has."""
    span = {"range": Span} if declared else {}
    keys: Json = {"version": int, "task": Literal[CLASSIFICATION, REGRESSION, PREPARED]}
    keys |= (
        {"train": Count, "test": Whole}
        if of_silo
        else {"standardise": bool, "expand": NotRequired[Expansion]}
    )
    keys |= {"declared": bool} if declared else {}
    keys |= {"labels": Labels} if labelled else {}
    if prepared:
        keys |= {"dimension": Count}
    elif shaped:
        keys |= {"shape": Shape, **span}
    else:
        column = {"name": Name, "any": bool} if of_silo else {"name": Name}
        number = column | {"kind": Literal[NUMBER, UNKNOWN] if of_silo else Literal[NUMBER], **span}
        category = column | {"kind": Literal[CATEGORY], "categories": Categories, "other": bool}
        either: Any = Table("Number", number) | Table("Category", category)
        columns = list[Annotated[either, Field(discriminator="kind")]]
        keys |= {
            "columns": Annotated[
                columns, Field(min_length=1, max_length=MOST_COLUMNS), _names_differ
            ]
        }
    return TypeAdapter(Table("Table", keys))


def declared_scale(schema: Json) -> tuple[Matrix, Matrix] | None:
    """Return centres and scales that no row has a part in, where ranges are declared; else `None`.

    The middle of the range and a quarter of it, which is about the deviation of numbers that fill a range; categories
    stay zeros and ones.
    """
    if not schema.get("declared"):
        return None
    columns = [schema] * width(schema) if schema["shape"] is not None else schema["columns"]
    both = np.array([scale for column in columns for scale in _scales(column)])
    return both[:, 0], both[:, 1]


def _scales(column: Json) -> list[tuple[float, float]]:
    if column.get("kind") == CATEGORY:
        return [(0.0, 1.0)] * (len(column["categories"]) + column["other"])
    low, high = column["range"]
    return [((low + high) / 2, (high - low) / 4)]


def mean_of(totals: Mapping[str, Any], schema: Json | None = None) -> Matrix:
    """Return the mean of every encoded column, from the silos' n and Σx; zero where nobody has a value."""
    n, sums = _added(totals, "sum", None if schema is None else width(schema))
    return np.divide(sums, n, out=np.zeros_like(sums), where=n > 0)


def deviation_of(totals: Mapping[str, Any], mean: Matrix) -> Matrix:
    """Return the standard deviation of every encoded column, from n and Σ(x − mean)²; one where it is constant."""
    n, squares = _added(totals, "squares", len(mean))
    deviation = np.sqrt(np.divide(squares, n, out=np.zeros_like(squares), where=n > 0))
    return unless_constant(mean, deviation, n)


def _added(totals: Mapping[str, Any], what: str, length: int | None) -> tuple[Matrix, Matrix]:
    """Add sums over silos in the order of their names, so that whoever answers first changes nothing."""
    if not totals:
        raise InputError("sums-least-silo", "Sums of at least one silo are needed.")
    counts = []
    sums = []
    for silo in sorted(totals):
        n, values = (_numbers(silo, totals[silo], key, length) for key in ("n", what))
        length = len(n)
        if len(values) != length or (n < 0).any() or (n != np.round(n)).any() or (n > 2**53).any():
            raise _unusable(silo, "its counts are no counts")
        if (values[n == 0] != 0).any() or (what == "squares" and (values < 0).any()):
            raise _unusable(silo, f"{what!r} and 'n' do not fit each other")
        counts.append(n)
        sums.append(values)
    with np.errstate(over="ignore"):
        total = np.sum(sums, axis=0)
    if not np.isfinite(total).all():
        raise InputError(
            "silos-numbers-too",
            f"The silos' numbers are too large to be added (encoded column {int(total.argmax())}).",
        )
    return np.sum(counts, axis=0), total


def _numbers(silo: str, given: Any, key: str, length: int | None) -> Matrix:
    values = given.get(key) if isinstance(given, Mapping) else None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "fiu":
        raise _unusable(silo, f"{key!r} is no list of numbers")
    if length is not None and len(values) != length:
        raise _unusable(silo, f"{key!r} has {len(values)} numbers, and {length} are expected")
    if not np.isfinite(values).all():
        raise _unusable(silo, f"{key!r} has a number that is not finite")
    return values.astype(np.float64)


def _unusable(silo: str, why: str) -> InputError:
    return InputError("silo-sent-sums", f"Silo {silo!r} sent sums that cannot be used: {why}.")


def agree(
    descriptions: Mapping[str, Any],
    standardise: bool = True,
    ranges: Mapping[str, Any] | None = None,
) -> Json:
    """Return the schema that all silos can follow, or refuse it by the silo and the column that cannot.

    Args:
        descriptions: what `Dataset.describe` returned at every silo; the first one fixes the order of columns.
        standardise: whether encoded columns are scaled to mean zero and deviation one.
        ranges: the least and the largest number of every column of numbers, by name, "*" for all others; columns are
            then scaled by these and by nothing that rows have a part in. Empty or `None` where nothing is declared.
    """
    if not descriptions:
        raise InputError("agreement-least-silo", "An agreement needs at least one silo.")
    silos = {name: checked_description(name, given) for name, given in descriptions.items()}
    task = _same_task(silos)
    schema: Json = {
        "version": VERSION,
        "task": task,
        "standardise": bool(standardise),
        "labels": [],
        "shape": None,
        "columns": [],
        "dimension": None,
    }
    if task == PREPARED:
        return schema | {"dimension": _same_dimension(silos)}
    if task == CLASSIFICATION:
        schema["labels"] = _labels(silos)
    schema["shape"] = _same_shape(silos)
    if schema["shape"] is None:
        schema["columns"] = _columns(silos)
    if not 0 < width(schema) <= MOST_FEATURES:
        raise InputError(
            "silos-columns-make",
            f"The silos' columns make {width(schema)} features; from 1 to {MOST_FEATURES} can be used.",
        )
    return _declared(schema, ranges) if ranges else schema


def _declared(schema: Json, ranges: Mapping[str, Any]) -> Json:
    """Give every column of numbers its range."""
    numbers = [column["name"] for column in schema["columns"] if column["kind"] == NUMBER]
    for name in ranges:
        if name != REST and name not in numbers:
            known = ", ".join(numbers)
            raise InputError(
                "range-column-numbers",
                f"There is a range of {name!r}, which is no column of numbers here ({known}).",
            )
    rest = ranges.get(REST)
    lacking = [name for name in numbers if name not in ranges]
    if rest is None and (lacking or schema["shape"] is not None):
        which = f"the column {lacking[0]!r}" if lacking else "the features"
        raise InputError(
            "range-declared-declare",
            f'No range is declared of {which}: declare one, or one of all others, "*" = [least, largest].',
        )
    columns = [
        {**column, "range": list(ranges.get(column["name"], rest))}
        if column["kind"] == NUMBER
        else column
        for column in schema["columns"]
    ]
    more = {} if schema["shape"] is None or rest is None else {"range": list(rest)}
    return checked_schema({**schema, **more, "columns": columns, "declared": True})


def _same_task(silos: dict[str, Json]) -> str:
    (first, other), task = (
        _odd(silos, "task"),
        {name: about["task"] for name, about in silos.items()},
    )
    if other is not None and PREPARED in (task[first], task[other]):
        ready, rows = (first, other) if task[first] == PREPARED else (other, first)
        raise InputError(
            "entry-silo-returns",
            f"The entry of silo {ready!r} returns a Cohort, that of {rows!r} does not: all silos or none must do so.",
        )
    if other is not None:
        raise InputError(
            "silo-target-set",
            f"Silo {other!r} has a target for {task[other]}, {first!r} one for {task[first]}: set data.task.",
        )
    return str(task[first])


def _odd(silos: dict[str, Json], key: str) -> tuple[str, str | None]:
    """Return the first silo, and one whose entry differs from the first one's."""
    first = next(iter(silos))
    return first, next(
        (name for name, about in silos.items() if about[key] != silos[first][key]), None
    )


def _same_dimension(silos: dict[str, Json]) -> int:
    (first, other), d = (
        _odd(silos, "dimension"),
        {name: about["dimension"] for name, about in silos.items()},
    )
    if other is not None:
        raise InputError(
            "silo-model-parameters",
            f"Silo {other!r} has a model of {d[other]} parameters, {first!r} one of {d[first]}.",
        )
    return int(d[first])


def _same_shape(silos: dict[str, Json]) -> list[int] | None:
    (first, other), shape = (
        _odd(silos, "shape"),
        {name: about["shape"] for name, about in silos.items()},
    )
    if other is not None and None in (shape[first], shape[other]):
        named, unnamed = (other, first) if shape[other] is None else (first, other)
        raise InputError(
            "silo-features-without",
            f"Silo {unnamed!r} has features without names, while {named!r} has named columns.",
        )
    if other is not None:
        sizes = ["×".join(map(str, shape[name])) for name in (other, first)]
        raise InputError(
            "silo-features",
            f"Silo {other!r} has {sizes[0]} features, but {first!r} has {sizes[1]}.",
        )
    return None if shape[first] is None else list(shape[first])


def _labels(silos: dict[str, Json]) -> list[int | str]:
    texts = {name: about for name, about in silos.items() if isinstance(about["labels"][0], str)}
    if texts and len(texts) < len(silos):
        worded = next(iter(texts))
        counted = next(name for name in silos if name not in texts)
        raise InputError(
            "silo-texts-labels",
            f"Silo {worded!r} has texts as labels, {counted!r} has numbers: write all targets alike.",
        )
    union = {label for about in silos.values() for label in about["labels"]}
    if len(union) == 1:
        raise InputError(
            "rows-clients-label",
            f"All rows of all clients have the label {union.pop()!r}: is it the right target?",
        )
    if not 2 <= len(union) <= MOST_LABELS:
        raise InputError(
            "silos-different-labels",
            f"The silos have {len(union)} different labels; from 2 to {MOST_LABELS} can be told apart.",
        )
    return sorted(union)


def _columns(silos: dict[str, Json]) -> list[Json]:
    first = next(iter(silos))
    columns = {
        silo: {column["name"]: column for column in about["columns"]}
        for silo, about in silos.items()
    }
    for silo, own in columns.items():
        for name in columns[first]:
            if name not in own:
                raise _lacking(silo, name, first, set(own) - set(columns[first]))
        for name in own:
            if name not in columns[first]:
                raise _lacking(first, name, silo, set())
    return [
        _merged(name, {silo: own[name] for silo, own in columns.items()}) for name in columns[first]
    ]


def _lacking(silo: str, name: str, other: str, spare: set[str]) -> InputError:
    lowered = {extra.lower(): extra for extra in sorted(spare)}
    near = get_close_matches(name.lower(), list(lowered), n=1)
    hint = f": is it the column {lowered[near[0]]!r} there?" if near else "."
    return InputError(
        "silo-column", f"Silo {silo!r} has no column {name!r}, which {other!r} has{hint}"
    )


def _merged(name: str, columns: dict[str, Json]) -> Json:
    """Merge one column of all silos: a silo without a single value goes along with the others."""
    kinds = {silo: column["kind"] for silo, column in columns.items() if column["kind"] != UNKNOWN}
    if len(set(kinds.values())) == 2:
        number = next(silo for silo, kind in kinds.items() if kind == NUMBER)
        category = next(silo for silo, kind in kinds.items() if kind == CATEGORY)
        raise InputError(
            "column-holds-numbers",
            f"Column {name!r} holds numbers at silo {number!r} and categories at {category!r}: list it in "
            f"data.categories at {number!r}, or correct it at {category!r}.",
        )
    if CATEGORY not in kinds.values():
        return {"name": name, "kind": NUMBER}
    listed = [column for column in columns.values() if column["kind"] == CATEGORY]
    union = {category for column in listed for category in column["categories"]}
    if len(union) > MOST_CATEGORIES:
        raise InputError(
            "column-categories-over",
            f"Column {name!r} has {len(union)} categories over all silos; {MOST_CATEGORIES} are allowed.",
        )
    return {
        "name": name,
        "kind": CATEGORY,
        "categories": sorted(union, key=_order),
        "other": any(column["other"] for column in listed),
    }


def _order(category: str) -> tuple[bool, int, str]:
    """Order whole numbers by size, then texts."""
    whole = category.removeprefix("-").isdecimal() and len(category) < 16
    return not whole, int(category) if whole else 0, category
