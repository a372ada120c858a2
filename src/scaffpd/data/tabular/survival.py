"""Times to an event as tables have them: events as numbers, texts or bool, entries, dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from scaffpd.data.tabular.columns import CATEGORY, DATE, NUMBER, DataColumn, Matrix, numbers_of
from scaffpd.errors import InputError

TIMES = {"time", "days", "weeks", "months", "years", "futime", "followup", "survival", "duration"}
EVENTS = {"event", "status", "died", "dead", "death", "deceased", "censored", "relapse", "fustat"}
SEEN = {"1", "true", "t", "yes", "y", "dead", "died", "deceased", "death", "event", "observed"}
NOT_SEEN = {"0", "false", "f", "no", "n", "alive", "living", "censored", "survived"}


def recognised(columns: Sequence[DataColumn], target: str) -> list[str]:
    """Say so where the target and another column look like a time and an event, by name and values.

    Predicting who has died, or how long, as if everybody had been followed alike, is wrong.
    """
    times = [c for c in columns if c.kind == NUMBER and _called(c, TIMES) and (c.values >= 0).all()]
    marks = [c for c in columns if _called(c, EVENTS) and _binary(c)]
    for time, event in product(times, marks):
        if target in (time.name, event.name):
            return [
                f"{time.name!r} and {event.name!r} look like times to an event: use "
                f"--time {time.name} --event {event.name} in place of --target {target}."
            ]
    return []


def _called(column: DataColumn, names: set[str]) -> bool:
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", column.name).lower())
    return bool(names & {*words, "".join(words)})


def _binary(column: DataColumn) -> bool:
    if column.missing.any():
        return False
    try:
        return len(np.unique(events(column, []))) == 2
    except InputError:
        return False


def survived(
    time: DataColumn, event: DataColumn, entry: DataColumn | None, remarks: list[str]
) -> tuple[DataColumn, tuple[Matrix, ...]]:
    """Return times as numbers, and events (0 or 1) with entries, if there are any.

    Two dates are the time between them, in days. Numbers are one clock: a row is at risk from its
    entry on (left truncation).
    """
    for column in filter(None, (time, entry)):
        numbers_of(column)
    seen = events(event, remarks)
    kinds = time.kind, entry.kind if entry is not None else NUMBER
    if kinds == (NUMBER, NUMBER):
        return time, (seen,) if entry is None else (seen, _begun(time, entry))
    if kinds != (DATE, DATE) or entry is None:
        raise InputError(
            "dates-and-numbers",
            f"Column {time.name!r} has {time.kind}s: dates need --entry, a column with the date "
            "from which on time is counted, and numbers need numbers.",
        )
    days = numbers_of(time) - numbers_of(entry)
    if (days <= 0).any():
        row = int((days <= 0).argmax())
        raise InputError(
            "time-not-positive",
            f"{entry.name!r} is not before {time.name!r} in row {row + 1} of those that have both.",
        )
    remarks.append(f"Times are days from {entry.name!r} to {time.name!r}.")
    return replace(time, kind=NUMBER, values=days), (seen,)


def events(column: DataColumn, remarks: list[str]) -> Matrix:
    if column.kind == CATEGORY:
        words = [re.findall(r"[a-z0-9]+", text.lower()) for text in column.categories]
        known = [_meaning(own) for own in words]
        if None in known:
            odd = column.categories[known.index(None)]
            raise InputError(
                "event-unclear",
                f"Column {column.name!r} has {odd!r}: write 1 or died where the event was seen, "
                "and 0 or alive where it was not.",
            )
        return np.array(known, dtype=np.float64)[column.values]
    values = np.asarray(column.values, dtype=np.float64)
    different = set(np.unique(values).tolist())
    if different == {1.0, 2.0}:
        remarks.append(f"Events {column.name!r} are 1 and 2: 2 is read as an event.")
        return values - 1
    if not different <= {0.0, 1.0}:
        raise InputError(
            "event-not-binary",
            f"Column {column.name!r} has {max(different):g}: events are 0 or 1, or 1 and 2.",
        )
    return values


def _meaning(words: list[str]) -> int | None:
    """Return what texts such as "1:DECEASED" mean; `None` where that is not clear."""
    found = {1 if word in SEEN else 0 for word in words if word in SEEN | NOT_SEEN}
    return found.pop() if len(found) == 1 else None


def _begun(time: DataColumn, entry: DataColumn) -> Matrix:
    begin = numbers_of(entry)
    wrong = (begin < 0) | (begin >= time.values)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(
            "entry-after-time",
            f"Column {entry.name!r} has the entry {begin[row]:g} for the time "
            f"{time.values[row]:g}, in row {row + 1} of those that have both: entries are from "
            "zero on, and before the time.",
        )
    return begin
