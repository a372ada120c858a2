"""Agree on columns: one schema out of many descriptions, one scale out of many sums.

A description comes from a silo, a schema from the coordinator. Both are plain JSON, both sides may
be mistaken, and each is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import prod
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic wants its own before Python 3.12

from scaffpd.data.silos import unless_constant
from scaffpd.data.tabular.columns import CATEGORY, NUMBER, UNKNOWN, Matrix
from scaffpd.data.tabular.settings import CLASSIFICATION
from scaffpd.errors import InputError

VERSION = 1
PREPARED = "prepared"  # the task of silos whose entry returns a `Cohort`
MOST_COLUMNS = 100_000
MOST_CATEGORIES = 10_000
MOST_LABELS = 100_000
MOST_FEATURES = 2**31
LONGEST = 500  # characters of a name
LARGEST = 2**53  # whole numbers up to here survive JSON
HUGE = 1e150  # of bounds of columns: their squares are numbers
REST = "*"  # the columns that no range names

Json = dict[str, Any]
Totals = Mapping[str, Mapping[str, NDArray[Any]]]  # of every silo: n, and sums over its rows


def _need(fits: Callable[[Any], bool], words: str) -> AfterValidator:
    def check(value: object) -> object:
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


class _Numbers(TypedDict):
    name: Name
    kind: Literal["number", "unknown"]
    any: NotRequired[bool]  # whether the silo has a value
    range: NotRequired[Span]  # declared in the schema


class _Categories(TypedDict):
    name: Name
    kind: Literal["category"]
    any: NotRequired[bool]
    categories: Categories
    other: bool  # whether there are categories that are not named


Columns = Annotated[
    list[Annotated[_Numbers | _Categories, Field(discriminator="kind")]],
    Field(min_length=1, max_length=MOST_COLUMNS),
    _names_differ,
]


class _Table(TypedDict):
    version: int
    task: Literal["classification", "regression", "prepared"]
    labels: NotRequired[Labels]
    columns: NotRequired[Columns]
    shape: NotRequired[Shape | None]
    dimension: NotRequired[Count | None]


class _Description(_Table):
    train: Count
    test: Whole


class _Schema(_Table):
    standardise: bool
    declared: NotRequired[bool]
    range: NotRequired[Span]


DESCRIPTION = TypeAdapter(_Description)
SCHEMA = TypeAdapter(_Schema)


def checked_description(silo: str, given: object) -> Json:
    """Return a silo's description with all its parts, or refuse it by the silo's name."""
    return _checked(f"Silo {silo!r} sent a description", given, DESCRIPTION)


def checked_schema(given: object) -> Json:
    """Return the coordinator's schema with all its parts, or refuse it."""
    return _checked("The coordinator sent an agreement", given, SCHEMA)


def _checked(owner: str, given: object, reader: TypeAdapter[Any]) -> Json:
    """Return all parts of a description or a schema; keys that its task does not have go."""
    if not isinstance(given, dict):
        raise InputError("unusable-agreement", f"{owner} that cannot be used: it is no table.")
    if given.get("version") != VERSION:
        raise InputError(
            "other-version",
            f"{owner} of another version than {VERSION}: use the same version of scaffpd "
            "everywhere.",
        )
    labelled = given.get("task") == CLASSIFICATION
    if given.get("task") == PREPARED:
        features = "dimension"
    else:
        features = "columns" if given.get("shape") is None else "shape"
    needed = {features} | ({"labels"} if labelled else set())
    foreign = {"labels", "columns", "shape", "dimension"} - needed
    if features != "shape" or not given.get("declared"):
        foreign.add("range")
    own = {name: value for name, value in given.items() if name not in foreign}
    try:
        read: Json = reader.validate_python(own, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        words = "".join(filter(str.isprintable, first["msg"]))[:200]
        raise InputError(
            "unusable-agreement", f"{owner} that cannot be used: {place}: {words}."
        ) from None
    lacking = sorted(needed - read.keys())
    if reader is SCHEMA and any(c["kind"] == UNKNOWN for c in read.get("columns", [])):
        lacking.append("kind of a column")
    if read.get("declared") and reader is SCHEMA:
        spans = [read] if features == "shape" else read["columns"] if features in read else []
        numbers = [part for part in spans if part.get("kind") != CATEGORY]
        lacking += [] if all("range" in part for part in numbers) else ["range"]
    if lacking:
        raise InputError("unusable-agreement", f"{owner} that cannot be used: no {lacking[0]}.")
    return {"labels": [], "shape": None, "columns": [], "dimension": None, **read}


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


def declared_scale(schema: Json) -> tuple[Matrix, Matrix] | None:
    """Return centres and scales that no row has a part in, where ranges are declared.

    The middle of the range and a quarter of it, which is about the deviation of numbers that fill a
    range; categories stay zeros and ones.
    """
    if not schema.get("declared"):
        return None
    scales: list[tuple[float, float]] = []
    for column in [schema] * width(schema) if schema["shape"] is not None else schema["columns"]:
        if column.get("kind") == CATEGORY:
            scales += [(0.0, 1.0)] * (len(column["categories"]) + column["other"])
        else:
            low, high = column["range"]
            scales.append(((low + high) / 2, (high - low) / 4))
    both = np.array(scales)
    return both[:, 0], both[:, 1]


def mean_of(totals: Totals, schema: Json | None = None) -> Matrix:
    """Return the mean of every encoded column, from n and Σx; zero where nobody has a value."""
    n, sums = _added(totals, "sum", None if schema is None else width(schema))
    return np.divide(sums, n, out=np.zeros_like(sums), where=n > 0)


def deviation_of(totals: Totals, mean: Matrix) -> Matrix:
    """Return the deviation of every column, from n and Σ(x − mean)²; one where it is constant."""
    n, squares = _added(totals, "squares", len(mean))
    deviation = np.sqrt(np.divide(squares, n, out=np.zeros_like(squares), where=n > 0))
    return unless_constant(mean, deviation, n)


def _added(totals: Totals, what: str, length: int | None) -> tuple[Matrix, Matrix]:
    """Add sums over silos in the order of their names: who answers first changes nothing."""
    if not totals:
        raise InputError("no-silos", "Sums of at least one silo are needed.")
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
            "numbers-too-large",
            f"The silos' numbers are too large to be added (encoded column {int(total.argmax())}).",
        )
    return np.sum(counts, axis=0), total


def _numbers(silo: str, given: object, key: str, length: int | None) -> Matrix:
    values = given.get(key) if isinstance(given, Mapping) else None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "fiu":
        raise _unusable(silo, f"{key!r} is no list of numbers")
    if length is not None and len(values) != length:
        raise _unusable(silo, f"{key!r} has {len(values)} numbers, and {length} are expected")
    if not np.isfinite(values).all():
        raise _unusable(silo, f"{key!r} has a number that is not finite")
    return values.astype(np.float64)


def _unusable(silo: str, why: str) -> InputError:
    return InputError("unusable-sums", f"Silo {silo!r} sent sums that cannot be used: {why}.")


def agree(
    descriptions: Mapping[str, object],
    standardise: bool = True,
    ranges: Mapping[str, list[float]] | None = None,
) -> Json:
    """Return the schema that all silos can follow, or name the silo and the column that cannot.

    Args:
        descriptions: what `ClientRows.describe` returned at every silo; the first one fixes the
            order of columns.
        standardise: whether encoded columns are scaled to mean zero and deviation one.
        ranges: the least and the largest number of every column of numbers, by name, "*" for all
            others; columns are then scaled by these and by nothing that rows have a part in. Empty
            or `None` where nothing is declared.
    """
    if not descriptions:
        raise InputError("no-silos", "An agreement needs at least one silo.")
    silos = {name: checked_description(name, given) for name, given in descriptions.items()}
    task = _same(silos, "task", "a target for {}", "Set data.task.")
    schema: Json = {
        "version": VERSION,
        "task": task,
        "standardise": bool(standardise),
        "labels": _labels(silos) if task == CLASSIFICATION else [],
        "shape": None,
        "columns": [],
        "dimension": None,
    }
    if task == PREPARED:
        return schema | {"dimension": _same(silos, "dimension", "a model of {} parameters")}
    schema["shape"] = _same(silos, "shape", "features of shape {} (none: named columns)")
    if schema["shape"] is None:
        schema["columns"] = _columns(silos)
    if not 0 < width(schema) <= MOST_FEATURES:
        raise InputError(
            "too-many-features",
            f"The silos' columns make {width(schema)} features; from 1 to {MOST_FEATURES} can be "
            "used.",
        )
    return _declared(schema, ranges) if ranges else schema


def _same(silos: dict[str, Json], key: str, words: str, advice: str = "") -> Any:
    """Return what all silos have; refuse one that differs from the first."""
    first, *others = silos
    value = silos[first][key]
    for other in others:
        if silos[other][key] != value:
            has = words.format(str(silos[other][key]).lower())
            had = words.format(str(value).lower())
            raise InputError(
                f"different-{key}",
                f"Silo {other!r} has {has}, but {first!r} has {had}. {advice}".strip(),
            )
    return value


def _declared(schema: Json, ranges: Mapping[str, list[float]]) -> Json:
    """Give every column of numbers its range."""
    numbers = [column["name"] for column in schema["columns"] if column["kind"] == NUMBER]
    for name in ranges:
        if name != REST and name not in numbers:
            raise InputError(
                "range-without-column",
                f"There is a range of {name!r}, which is no column of numbers here "
                f"({', '.join(numbers)}).",
            )
    rest = ranges.get(REST)
    lacking = [name for name in numbers if name not in ranges]
    if rest is None and (lacking or schema["shape"] is not None):
        which = f"the column {lacking[0]!r}" if lacking else "the features"
        raise InputError(
            "range-missing",
            f"No range is declared of {which}: declare one, or one of all others, "
            '"*" = [least, largest].',
        )
    columns = [
        {**column, "range": ranges.get(column["name"], rest)}
        if column["kind"] == NUMBER
        else column
        for column in schema["columns"]
    ]
    more = {} if schema["shape"] is None else {"range": rest}
    return checked_schema({**schema, **more, "columns": columns, "declared": True})


def _labels(silos: dict[str, Json]) -> list[int | str]:
    texts = {name: about for name, about in silos.items() if isinstance(about["labels"][0], str)}
    if texts and len(texts) < len(silos):
        counted = next(name for name in silos if name not in texts)
        raise InputError(
            "labels-of-two-kinds",
            f"Silo {next(iter(texts))!r} has texts as labels, {counted!r} has numbers: write all "
            "targets alike.",
        )
    union = {label for about in silos.values() for label in about["labels"]}
    if len(union) == 1:
        raise InputError(
            "constant-target",
            f"All rows of all clients have the label {union.pop()!r}: is it the right target?",
        )
    if len(union) > MOST_LABELS:
        raise InputError(
            "too-many-labels",
            f"The silos have {len(union)} different labels, and {MOST_LABELS} are allowed.",
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
        "column-missing", f"Silo {silo!r} has no column {name!r}, which {other!r} has{hint}"
    )


def _merged(name: str, columns: dict[str, Json]) -> Json:
    """Merge one column of all silos: a silo without a single value goes along with the others."""
    kinds = {silo: column["kind"] for silo, column in columns.items() if column["kind"] != UNKNOWN}
    if len(set(kinds.values())) == 2:
        number = next(silo for silo, kind in kinds.items() if kind == NUMBER)
        category = next(silo for silo, kind in kinds.items() if kind == CATEGORY)
        raise InputError(
            "column-of-two-kinds",
            f"Column {name!r} holds numbers at silo {number!r} and categories at {category!r}: "
            f"list it in data.categories at {number!r}, or correct it at {category!r}.",
        )
    if CATEGORY not in kinds.values():
        return {"name": name, "kind": NUMBER}
    listed = [column for column in columns.values() if column["kind"] == CATEGORY]
    union = {category for column in listed for category in column["categories"]}
    if len(union) > MOST_CATEGORIES:
        raise InputError(
            "too-many-categories",
            f"Column {name!r} has {len(union)} categories over all silos; {MOST_CATEGORIES} are "
            "allowed.",
        )
    other = any(column["other"] for column in listed)
    ordered = sorted(union, key=_order)
    return {"name": name, "kind": CATEGORY, "categories": ordered, "other": other}


def _order(category: str) -> tuple[bool, int, str]:
    """Order whole numbers by size, then texts."""
    whole = category.removeprefix("-").isdecimal() and len(category) < 16
    return not whole, int(category) if whole else 0, category
