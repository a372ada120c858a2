"""What silos and coordinator tell each other about columns, checked before it is used: both sides may be mistaken.

A description comes from a silo, a schema from the coordinator. Both are plain JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaffpd.errors import InputError
from scaffpd.tabular.columns import CATEGORY, NUMBER, UNKNOWN

VERSION = 1
CLASSIFICATION, REGRESSION, PREPARED = "classification", "regression", "prepared"
TASKS = (CLASSIFICATION, REGRESSION)  # that a user can ask for
MOST_COLUMNS, MOST_CATEGORIES, MOST_LABELS, MOST_FEATURES = 100_000, 10_000, 100_000, 2**31
LONGEST = 500  # characters of a name
LARGEST = 2**53  # whole numbers up to here survive JSON

Json = dict[str, Any]


def checked_description(silo: str, given: Any) -> Json:
    """A silo's description with all its parts, or a sentence that names the silo."""
    return _checked(f"Silo {silo!r} sent a description", given, (NUMBER, CATEGORY, UNKNOWN), of_silo=True)


def checked_schema(given: Any) -> Json:
    """The coordinator's schema with all its parts, or a sentence."""
    return _checked("The coordinator sent an agreement", given, (NUMBER, CATEGORY), of_silo=False)


def width(schema: Json) -> int:
    """How many numbers a row has once it is encoded."""
    return len(features(schema)) if schema["shape"] is None else _product(schema["shape"])


def features(schema: Json) -> tuple[str, ...]:
    """Names of the encoded columns: "age", "cp=1", …, and "cp (other)" for what is not named."""
    if schema["shape"] is not None:
        return tuple(f"x{j}" for j in range(_product(schema["shape"])))
    names: list[str] = []
    for column in schema["columns"]:
        if column["kind"] == CATEGORY:
            names += [f"{column['name']}={category}" for category in column["categories"]]
            names += [f"{column['name']} (other)"] if column["other"] else []
        else:
            names.append(column["name"])
    return tuple(names)


def _checked(owner: str, given: Any, kinds: tuple[str, ...], of_silo: bool) -> Json:
    read = _Reader(owner)
    table = read.table(given, "it")
    if table.get("version") != VERSION:
        raise InputError(
            f"{owner} of another version than {VERSION}: the same version of scaffpd is needed everywhere."
        )
    task = read.one_of(table, "task", (CLASSIFICATION, REGRESSION, PREPARED))
    out: Json = {"version": VERSION, "task": task, "labels": [], "shape": None, "columns": [], "dimension": None}
    if of_silo:
        out |= {"train": read.whole(table, "train", 1), "test": read.whole(table, "test", 0)}
    else:
        out["standardise"] = read.boolean(table, "standardise")
    if task == PREPARED:
        return out | {"dimension": read.whole(table, "dimension", 1)}
    if task == CLASSIFICATION:
        out["labels"] = read.labels(table)
    if table.get("shape") is not None:
        return out | {"shape": read.shape(table)}
    return out | {"columns": read.columns(table, kinds, of_silo)}


class _Reader:
    """Takes untrusted JSON apart; every refusal starts with whose it is."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def refusal(self, what: str) -> InputError:
        return InputError(f"{self.owner} that cannot be used: {what}.")

    def table(self, given: Any, what: str) -> Mapping[str, Any]:
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise self.refusal(f"{what} is no table")
        return given

    def items(self, table: Mapping[str, Any], key: str, most: int, least: int = 0) -> list[Any]:
        value = table.get(key)
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise self.refusal(f"{key!r} is no list of {least} to {most} entries")
        return value

    def one_of(self, table: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
        value = table.get(key)
        if not isinstance(value, str) or value not in known:
            raise self.refusal(f"{key!r} is none of {', '.join(known)}")
        return value

    def text(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= LONGEST:
            raise self.refusal(f"{key!r} is no text of 1 to {LONGEST} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.refusal(f"{key!r} is no valid text") from None
        return value

    def texts(self, table: Mapping[str, Any], key: str, most: int) -> list[str]:
        found = [self.text(item, key) for item in self.items(table, key, most)]
        if len(set(found)) < len(found):
            raise self.refusal(f"{key!r} names something twice")
        return found

    def whole(self, table: Mapping[str, Any], key: str, least: int) -> int:
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise self.refusal(f"{key!r} is no whole number >= {least}")
        return value

    def boolean(self, table: Mapping[str, Any], key: str) -> bool:
        value = table.get(key)
        if not isinstance(value, bool):
            raise self.refusal(f"{key!r} is neither true nor false")
        return value

    def labels(self, table: Mapping[str, Any]) -> list[int | str]:
        found = self.items(table, "labels", MOST_LABELS, 1)
        numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in found)
        if numbers and any(abs(item) > LARGEST for item in found):
            raise self.refusal("a label is too large")
        if not numbers:
            return list(self.texts(table, "labels", MOST_LABELS))
        if len(set(found)) < len(found):
            raise self.refusal("'labels' names something twice")
        return list(found)

    def shape(self, table: Mapping[str, Any]) -> list[int]:
        found = self.items(table, "shape", 8, 1)
        sizes = [self.whole({"shape": item}, "shape", 1) for item in found]
        if _product(sizes) > MOST_FEATURES:
            raise self.refusal("it has too many features")
        return sizes

    def columns(self, table: Mapping[str, Any], kinds: tuple[str, ...], of_silo: bool) -> list[Json]:
        found = [self.table(item, "a column") for item in self.items(table, "columns", MOST_COLUMNS, 1)]
        columns = [self._column(item, kinds, of_silo) for item in found]
        if len({column["name"] for column in columns}) < len(columns):
            raise self.refusal("two columns have the same name")
        return columns

    def _column(self, item: Mapping[str, Any], kinds: tuple[str, ...], of_silo: bool) -> Json:
        column: Json = {"name": self.text(item.get("name"), "name"), "kind": self.one_of(item, "kind", kinds)}
        if of_silo:
            column["any"] = self.boolean(item, "any")
        if column["kind"] == CATEGORY:
            column["categories"] = self.texts(item, "categories", MOST_CATEGORIES)
            column["other"] = self.boolean(item, "other")
        return column


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
