"""Every name in the table of symbols exists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest

import scaffpd as sp
from snippets import ROOT

PAGE = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
HOMES = (
    *("federation", "objectives", "history", "training", "steps.base", "steps.auto"),
    *("algorithms.scaff_pd", "algorithms.base"),
)


def rows():
    table = PAGE.split("## Symbols")[1]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ][2:]


def owner(name):
    if hasattr(sp, name):
        return getattr(sp, name)
    return next(
        getattr(module, name)
        for home in HOMES
        if hasattr(module := importlib.import_module(f"scaffpd.{home}"), name)
    )


def has(thing, name):
    fields = (
        {item.name for item in dataclasses.fields(thing)}
        if dataclasses.is_dataclass(thing)
        else set()
    )
    taken = set(inspect.signature(thing).parameters) if callable(thing) else set()
    return hasattr(thing, name) or name in fields | taken | set(
        getattr(thing, "__annotations__", {})
    )


def names(cell):
    """`A.b`, `f(a)` and `len(A.b)` as pairs of an owner and what it has."""
    for code in re.findall(r"`([^`]+)`", cell):
        call = re.fullmatch(r"(\w+)\((.+)\)", code)
        inner = call.group(2) if call and call.group(1) == "len" else code
        yield (
            (call.group(1), call.group(2))
            if call and call.group(1) != "len"
            else tuple(inner.split("."))
        )


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_code_name_exists(row):
    found = list(names(row[2]))
    assert found
    for thing, part in found:
        if (thing, part) == ("Cohort", "dimension"):
            cohort = sp.Cohort(sp.data.synthetic(N=2, d=3, m=5), sp.Linear())
            assert cohort.dimension == 3
        else:
            assert has(owner(thing), part), f"{thing} has no {part}"


def test_a_name_that_does_not_exist_is_noticed():
    assert not has(owner("ScaffPD"), "locals_steps")
    assert len(rows()) > 30
