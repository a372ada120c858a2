"""`[data]` of a run: a table, a data set known by name, or a function of the user's own."""

from __future__ import annotations

from typing import Any

from scaffpd.errors import InputError, unknown
from scaffpd.settings.section import Section
from scaffpd.tabular.schema import TASKS

DATA = (
    *("file", "client", "target", "columns", "categories", "task", "test", "seed", "standardise"),
    *("source", "clients", "alpha", "entry"),
)
BY_FILE = ("client", "target", "columns", "categories", "task", "standardise")
HELD_OUT = 0.2


def read_data(top: Section) -> dict[str, Any]:
    """Where the data is, and how it is read; keys that do not go together are refused."""
    section = top.section("data", (*DATA, "beside"))
    chosen = [key for key in ("file", "source", "entry") if key in section]
    if len(chosen) != 1:
        raise InputError(f"{top.file.name!r} needs exactly one of file, source and entry in [data].")
    text = section.text(chosen[0])
    found: dict[str, Any] = {chosen[0]: text}
    for key in BY_FILE:
        if key in section and chosen[0] != "file":
            raise InputError(f"{top.file.name!r} has data.{key}, which goes with data.file, but not with {chosen[0]}.")
    if chosen[0] == "file":
        found |= _columns(section)
    if chosen[0] != "source" and ("clients" in section or "alpha" in section):
        raise InputError(f"{top.file.name!r} has data.clients or data.alpha, which go with data.source.")
    if chosen[0] == "source":
        found |= {"clients": section.whole("clients", None, 2)} if "clients" in section else {}
        needs = "a number above 0"
        found |= {"alpha": section.number("alpha", None, needs, 1e-9, float("inf"))} if "alpha" in section else {}
    if chosen[0] == "entry" and ("test" in section or "seed" in section):
        raise InputError(f"{top.file.name!r} has data.test or data.seed, but an entry returns held-out rows itself.")
    if chosen[0] != "entry":
        found["test"] = section.number("test", HELD_OUT, "a share from 0 to below 1", 0, 1)
        found["seed"] = section.whole("seed", 0)
    if "beside" in section:
        found["beside"] = section.text("beside")
    return found


def _columns(section: Section) -> dict[str, Any]:
    found: dict[str, Any] = {key: section.text(key, needs="the name of a column") for key in ("client", "target")}
    for key in ("columns", "categories"):
        given = section.texts(key)
        found |= {key: list(given)} if given else {}
    task = section.maybe("task")
    if task is not None and task not in TASKS:
        raise unknown(f"data.task in {section.file.name!r},", task, TASKS)
    found |= {"task": task} if task else {}
    return found | {"standardise": section.boolean("standardise", True)}
