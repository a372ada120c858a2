"""Check a schema that was written elsewhere; `scaffpd.data.tabular.agree` says what one is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Annotated, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import PydanticCustomError

from scaffpd.data.curves import MOST
from scaffpd.data.tabular.agree import LARGEST, LONGEST, MOST_CATEGORIES, Schema
from scaffpd.errors import InputError

MOST_COLUMNS = 100_000
MOST_LABELS = 100_000
MOST_FEATURES = 2**31
HUGE = 1e150  # of bounds of columns: their squares are numbers

T = TypeVar("T")


def _need(fits: Callable[[T], bool], words: str) -> AfterValidator:
    def check(value: T) -> T:
        if not fits(value):
            raise PydanticCustomError("rule", words)
        return value

    return AfterValidator(check)


def _different(values: list[int] | list[str]) -> bool:
    return len(set(values)) == len(values)


def _names_differ(columns: list[CheckedNumbers | CheckedCategories]) -> bool:
    return len({column.name for column in columns}) == len(columns)


def _rises(values: list[float]) -> bool:
    return all(less < more for less, more in pairwise(values))


def _fits(shape: list[int]) -> bool:
    return prod(shape) <= MOST_FEATURES


TWICE = "something is named twice"
Count = Annotated[int, Field(ge=1, le=LARGEST)]
WholeLabel = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Labels = Annotated[
    list[WholeLabel] | list[Name], Field(max_length=MOST_LABELS), _need(_different, TWICE)
]
Shape = Annotated[
    list[Count],
    Field(min_length=1, max_length=8),
    _need(_fits, "there are too many features"),
]
Bound = Annotated[float, Field(gt=-HUGE, lt=HUGE)]
RISING = _need(_rises, "it does not go from less to more")
Span = Annotated[list[Bound], Field(min_length=2, max_length=2), RISING]
Steps = Annotated[list[Bound], Field(min_length=1, max_length=MOST), RISING]


class CheckedNumbers(BaseModel):
    """A `NumberColumn`; what may be left out has a default that is never used."""

    name: Name
    kind: Literal["number"]
    range: Span = []
    steps: Steps = []


class CheckedCategories(BaseModel):
    """A `CategoryColumn`."""

    name: Name
    kind: Literal["category"]
    categories: Annotated[list[Name], Field(max_length=MOST_CATEGORIES), _need(_different, TWICE)]
    other: bool


CheckedColumn = Annotated[CheckedNumbers | CheckedCategories, Field(discriminator="kind")]


class CheckedPair(BaseModel):
    """A `ColumnPair`."""

    left: CheckedColumn
    right: CheckedColumn


class CheckedSchema(BaseModel):
    """A `Schema`."""

    task: Literal["classification", "regression"]
    labels: Labels
    columns: Annotated[
        list[CheckedColumn], Field(max_length=MOST_COLUMNS), _need(_names_differ, TWICE)
    ]
    shape: Shape | None
    declared: bool = False
    range: Span = []
    pairs: list[CheckedPair] = []


def checked_schema(given: object) -> Schema:
    try:
        found = CheckedSchema.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        words = "".join(filter(str.isprintable, first["msg"]))[:200]
        raise InputError(
            "agreement-unusable", f"The agreement cannot be used: {place}: {words}."
        ) from None
    return cast("Schema", found.model_dump(exclude_unset=True))
