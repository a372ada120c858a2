"""The names that columns of run folders may have: those that docs/report.md lists, put together by its rules."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import fields
from pathlib import Path

from scaffpd.run import OLD_NAMES
from scaffpd.training.history import SPREAD
from scaffpd.training.metrics import Spread

PAGE = Path(__file__).parents[1] / "docs" / "report.md"
COSTS = {"rounds", "exchanges", "bytes_up", "bytes_down", "seconds"}
OF_CLIENTS = "|".join(f.name for f in fields(Spread))
BUILT = [  # names that are put together
    rf"(train|validation|test)_(loss|accuracy|rmse)(_({OF_CLIENTS}))?(_mean|_sd|_se)?",
    rf"({'|'.join(COSTS)})_(mean|sd)",
    r"((accuracy|rmse)_)?gain_over_(alone|average)(_low|_high)?",
    r"(base_rate|calibration_gap)(_low|_high)?",
    r"(?s:(loss|weight)\[.+\])",
    "|".join(SPREAD),
]


def documented() -> set[str]:
    """The whole names in the first column of the page's table."""
    table = (
        PAGE.read_text(encoding="utf-8")
        .partition("### The names of columns")[2]
        .partition("\n## ")[0]
    )
    firsts = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    names = set(re.findall(r"`(\w+)`", firsts))
    return {name for name in names if not any(re.fullmatch(rule, name) for rule in BUILT)}


def own_names(folder: Path, table: str) -> set[str]:
    """The names that belong to one run: its models, and the rates of its methods."""
    if table == "coefficients":
        models = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["models"]
        return {one["name"] for one in models} | {"personal", "personal_low", "personal_high"}
    if table == "runs":
        grids = json.loads((folder / "about.json").read_text(encoding="utf-8"))["setting"]["grid"]
        rates = {name for grid in grids.values() for point in grid for name in point}
        return rates | {f"factor_{name}" for name in rates}
    return set()


def written(folder: Path) -> dict[tuple[str, str], bool]:
    """Every (table, column) of a folder, and whether the page knows that name."""
    known = documented()
    found = {}
    for file in sorted(folder.glob("*.csv")):
        own = own_names(folder, file.stem)
        with file.open(newline="", encoding="utf-8") as text:
            for name in next(csv.reader(text)):
                old = f"{file.stem}/{name}" in OLD_NAMES or name in OLD_NAMES
                right = name in known | own or any(re.fullmatch(rule, name) for rule in BUILT)
                found[file.stem, name] = right and (not old or name in own)
    return found


def keys(value: object) -> set[str]:
    """Every key in a JSON value, however deep."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    return set(value).union(*map(keys, value.values())) if isinstance(value, dict) else set()


def old_keys(folder: Path) -> set[str]:
    """The keys of a folder's JSON files that are names of earlier versions."""
    files = [
        file for name in ("summary", "joining", "outcome") for file in folder.glob(f"{name}.json")
    ]
    values = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file in folder.glob("*.jsonl"):
        values += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return keys(values) & {*OLD_NAMES, "megabytes_up", "megabytes_down"}


def check(folder: Path) -> set[str]:
    """Assert that a folder has no column of another name, and return its columns."""
    found = written(folder)
    assert found
    assert [place for place, known in found.items() if not known] == []
    assert old_keys(folder) == set()
    return {name for _, name in found}
