"""`TableSettings`: a table and what its columns are, for Python, settings files and options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

import scaffpd.fields as key
from scaffpd.errors import InputError
from scaffpd.fields import Needs, SettingsTable

if TYPE_CHECKING:
    from scaffpd.tasks.base import Task

DECIMALS = (".", ",")
CURVES = ("auto", "on", "off")


def _rows_or_share(given: object, info: ValidationInfo[Path | None]) -> object:
    return key._beside(given, info) if isinstance(given, str) else given


def _share(given: float | Path) -> float | Path:
    if isinstance(given, float) and not 0 <= given < 1:
        raise PydanticCustomError("share", "no share")
    return given


HeldOut = Annotated[
    float | Path,
    BeforeValidator(_rows_or_share),
    AfterValidator(_share),
    Needs("a share from 0 to below 1, or a table"),
]


def _known_task(given: str) -> str:
    from scaffpd.tasks import choices  # PyTorch takes seconds, so not for --help

    checked: str = key.one_of(choices()).func(given)  # type: ignore[call-arg]
    return checked


def _number(given: object) -> object:
    try:
        return float(given) if isinstance(given, str) else given
    except ValueError:
        return given


Ends = Annotated[
    tuple[Annotated[float, BeforeValidator(_number)], ...],
    key._listed,
    Needs("a list of numbers such as 365,730"),
]


class ColumnSettings(SettingsTable):
    """What the columns of a table are."""

    target: key.Column
    """Column to be predicted: labels or numbers."""
    columns: key.Texts = ()
    """Columns to learn from, with commas; left out, all others."""
    categories: key.Texts = ()
    """Columns of numbers that are names of categories."""
    task: Annotated[str, AfterValidator(_known_task)] | None = None
    """classification, ordinal, regression or counts; left out, it goes by the target."""
    order: key.Texts = ()
    """Texts of an ordinal target from the least to the most: mild,fair,poor."""
    decimal: Annotated[str, key.one_of(DECIMALS)] | None = None
    """Decimal mark of CSV, . or , ; left out, it is detected."""
    missing: key.Codes = ()
    """Values that mean missing, with commas: -999,unknown."""


class TableSettings(ColumnSettings):
    """[data]: a table whose rows belong to clients."""

    # one table, a folder of them, or several with the same columns
    file: key.FileNames
    sheet: key.Text | None = None
    """Sheet of a workbook; left out, the first."""
    drop: key.Texts = ()
    """Columns not to learn from, with commas."""
    client: key.Column
    """Column with every row's client; file: each file is a client."""
    word: key.Text = "client"
    """What a client is called: school, say."""
    test: HeldOut = 0.2
    """Share of rows held out, or a table of them."""
    split_by: key.Column | None = None
    """Hold out the latest rows by this column, or whole groups of it."""
    groups: key.Texts = ()
    """Columns to score by, beside clients: sex,race."""
    weight: key.Column | None = None
    """Column of survey weights: what a row counts for among its client's."""
    offset: key.Column | None = None
    """Column with the logarithm of the exposure of counts."""
    time: key.Column | None = None
    """Column with the time to an event, or the date; in the place of the target."""
    event: key.Column | None = None
    """Column that says whether the event was seen: 0 and 1, died and alive."""
    entry: key.Column | None = None
    """Column with the time, or the date, from which on a row is at risk."""
    periods: Ends = ()
    """Ends of periods, such as 365,730: a hazard in each, not Cox's model."""
    curves: Annotated[str, key.one_of(CURVES)] = "auto"
    """Numbers have curves, not lines alone: auto, on or off."""
    pairs: key.Whole = 8
    """With curves, at most so many pairs of columns that act together, where it pays."""
    # [least, largest] of numeric columns by name, "*" for all others; columns are then scaled by
    # these alone
    ranges: dict[str, key.Range] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _time_is_the_target(cls, given: object) -> object:
        if not isinstance(given, dict) or not {"time", "event", "entry", "periods"} & given.keys():
            return given
        if not {"time", "event"} <= given.keys():
            raise InputError(
                "time-and-event", "Times to an event need both columns: --time and --event."
            )
        if given.get("target", given["time"]) != given["time"] or given.get("task"):
            raise InputError(
                "time-and-target", "--time takes the place of --target: leave that and --task out."
            )
        return {**given, "target": given["time"]}

    @property
    def wanted(self) -> Task | None:
        """The task that is asked for; `None` where it goes by the target."""
        from scaffpd.tasks import named, timed

        if self.time is not None:
            return timed()
        return None if self.task is None else named(self.task)

    @property
    def name(self) -> str:
        return self.file[0].name.split(".")[0] or "run"
