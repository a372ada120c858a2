"""What can happen to a silo: the events that are written down, and those that end a segment of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Event:
    """Something that happened to a silo."""

    round: int
    silo: str
    what: str
    sentence: str


class Paused(Exception):
    """Too few silos are there to go on; the last finished round is what counts."""


class Change(Exception):
    """Other silos than before are to be asked from here on."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class Lost(Change):
    """Silos are gone for which no earlier answer can stand in, or for longer than the policy allows."""


class Returned(Change):
    """Silos are back."""


class Quarantined(Change):
    """Silos have given answers that cannot be true; nothing that they say is used any more."""


def accuse(verdicts: Mapping[str, str], number: int, record: Callable[[Event], None]) -> None:
    """Write down who has given itself away in that round, by which test and which numbers; and end the segment."""
    for name, why in verdicts.items():
        record(Event(number, name, QUARANTINED, f"Silo {name!r} is quarantined: {why}."))
    if verdicts:
        raise Quarantined(list(verdicts))
