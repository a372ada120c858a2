"""Check what silos and coordinator tell each other about columns before it is used: both sides may be mistaken.

A description comes from a silo, a schema from the coordinator. Both are plain JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
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
    """Return a silo's description with all its parts, or refuse it by the silo's name."""
    return _checked(f"Silo {silo!r} sent a description", given, (NUMBER, CATEGORY, UNKNOWN), of_silo=True)


def checked_schema(given: Any) -> Json:
    """Return the coordinator's schema with all its parts, or refuse it."""
    return _checked("The coordinator sent an agreement", given, (NUMBER, CATEGORY), of_silo=False)


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


def _checked(owner: str, given: Any, kinds: tuple[str, ...], of_silo: bool) -> Json:
    read = _Checks(owner)
    table = read.table(given, "it")
    if table.get("version") != VERSION:
        raise InputError(
            f"{owner} of another version than {VERSION}: the same version of scaffpd is needed everywhere."
        )
    task = read.one_of(table, "task", (CLASSIFICATION, REGRESSION, PREPARED))
    out: Json = {"version": VERSION, "task": task, "labels": [], "shape": None, "columns": [], "dimension": None}
    if of_silo:
        out |= {"train": read.whole(table.get("train"), "train", 1), "test": read.whole(table.get("test"), "test", 0)}
    else:
        out["standardise"] = read.boolean(table, "standardise")
    if task == PREPARED:
        return out | {"dimension": read.whole(table.get("dimension"), "dimension", 1)}
    if task == CLASSIFICATION:
        labels = read.items(table, "labels", MOST_LABELS, 1)
        numbers = all(isinstance(label, int) and not isinstance(label, bool) for label in labels)
        out["labels"] = read.different(labels, "labels") if numbers else read.texts(table, "labels", MOST_LABELS)
        read.need(not numbers or all(abs(label) <= LARGEST for label in labels), "a label is too large")
    if table.get("shape") is not None:
        out["shape"] = [read.whole(size, "shape", 1) for size in read.items(table, "shape", 8, 1)]
        read.need(prod(out["shape"]) <= MOST_FEATURES, "it has too many features")
        return out
    for item in (read.table(item, "a column") for item in read.items(table, "columns", MOST_COLUMNS, 1)):
        column = {"name": read.text(item.get("name"), "name"), "kind": read.one_of(item, "kind", kinds)}
        if of_silo:
            column["any"] = read.boolean(item, "any")
        if column["kind"] == CATEGORY:
            column["categories"] = read.texts(item, "categories", MOST_CATEGORIES)
            column["other"] = read.boolean(item, "other")
        out["columns"].append(column)
    read.different([column["name"] for column in out["columns"]], "columns")
    return out


class _Checks:
    """Take untrusted JSON apart; every refusal starts with whose it is."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def need(self, fits: bool, why: str) -> None:
        if not fits:
            raise InputError(f"{self.owner} that cannot be used: {why}.")

    def table(self, given: Any, what: str) -> Any:
        self.need(isinstance(given, Mapping) and all(isinstance(key, str) for key in given), f"{what} is no table")
        return given

    def items(self, table: Any, key: str, most: int, least: int = 0) -> list[Any]:
        value = table.get(key)
        fits = isinstance(value, list) and least <= len(value) <= most
        self.need(fits, f"{key!r} is no list of {least} to {most} entries")
        return list(value)

    def different(self, values: list[Any], key: str) -> list[Any]:
        self.need(len(set(values)) == len(values), f"{key!r} names something twice")
        return values

    def one_of(self, table: Any, key: str, known: tuple[str, ...]) -> Any:
        self.need(isinstance(table.get(key), str) and table[key] in known, f"{key!r} is none of {', '.join(known)}")
        return table[key]

    def text(self, value: Any, key: str) -> Any:
        fits = isinstance(value, str) and 1 <= len(value) <= LONGEST
        self.need(fits, f"{key!r} is no text of 1 to {LONGEST} characters")
        self.need(not any("\ud800" <= letter <= "\udfff" for letter in value), f"{key!r} is no valid text")
        return value

    def texts(self, table: Any, key: str, most: int) -> list[Any]:
        return self.different([self.text(item, key) for item in self.items(table, key, most)], key)

    def whole(self, value: Any, key: str, least: int) -> Any:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
        self.need(fits, f"{key!r} is no whole number >= {least}")
        return value

    def boolean(self, table: Any, key: str) -> Any:
        self.need(isinstance(table.get(key), bool), f"{key!r} is neither true nor false")
        return table[key]
