"""Messages that one hostile silo changes in a secure run, and what becomes of the run.

`fuzzed` returns how a run ended in which a silo's n-th answer, and possibly all later ones, were changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from deploy_cases import Faulty, events, federation, is_right
from secure_silos import SCAFF_PD, SECURE

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import Message, decode, encode

WHO = "va"
LARGEST = 2**31


def _array(change):
    def lie(answer, random):
        message = decode(answer, LARGEST)
        arrays = {name: change(array, random) for name, array in message.arrays.items()}
        return encode(Message(message.kind, message.values, arrays))

    return lie


def _value(change):
    def lie(answer, random):
        message = decode(answer, LARGEST)
        return encode(
            Message(
                message.kind, {**message.values, **change(message.values, random)}, message.arrays
            )
        )

    return lie


def _cut(answer, random):
    return answer[: int(random.integers(0, len(answer)))]


def _flip(answer, random):
    """One bit, anywhere."""
    data = bytearray(answer)
    data[int(random.integers(0, len(data)))] ^= 1 << int(random.integers(0, 8))
    return bytes(data)


def _noise(array, random):
    if array.dtype.kind == "i":
        return random.integers(-(2**63), 2**63, array.shape)
    return random.standard_normal(array.shape).astype(array.dtype)


CHANGES = {
    "nothing": lambda answer, random: b"",
    "cut short": _cut,
    "one bit": _flip,
    "another shape": _array(lambda array, random: np.append(array, array[:1])),
    "another format": _array(
        np.errstate(over="ignore")(lambda array, random: array.astype(np.float16))
    ),
    "NaN": _array(lambda array, random: array if array.dtype.kind == "i" else array * np.nan),
    "noise": _array(_noise),
    "false masks": _array(
        lambda array, random: array * 3 + 1 if array.dtype.kind == "i" else array
    ),
    "no arrays": lambda answer, random: encode(Message("answer", decode(answer, LARGEST).values)),
    "a refusal": _value(lambda values, random: {"declined": "I do not want to."}),
    "an accusation": _value(
        lambda values, random: {"accused": "cleveland", "why": "It is not who it says."}
    ),
    "another size": _value(lambda values, random: {"exponent": int(random.integers(-90, 90))}),
    "another question": _value(lambda values, random: {"question": "0" * 16}),
    "another name": _value(lambda values, random: {"silo": "hungarian"}),
    "failed": lambda answer, random: encode(Message("failed", decode(answer, LARGEST).values)),
}


class Ended(NamedTuple):
    """How a run ended: its status and sentence, whether it went on without the silo, and by which event it did."""

    status: str
    sentence: str
    members: tuple[str, ...]
    event: str


class Changing(Faulty):
    """A silo's answers from the n-th on, or that one alone, are changed."""

    def __init__(self, places, change, moment, always):
        super().__init__(places)
        self.change = change
        self.moment = moment
        self.always = always
        self.answers = 0
        self.random = np.random.default_rng(moment)

    def ask(self, questions, timeout):
        replies = super().ask(questions, timeout)
        if WHO in replies and isinstance(replies[WHO], bytes):
            self.answers += 1
            if self.answers == self.moment or (self.always and self.answers > self.moment):
                replies[WHO] = self.change(replies[WHO], self.random)
        return replies


def fuzzed(folder: Path, change: str, moment: int, always: bool = False) -> Ended:
    """Run four hospitals with masks that go on without a silo that leaves, as all of them agree."""
    secure = SECURE.replace("[faults]", '[faults]\nmissing = "drop"')
    path, places = federation(folder, 4, replacing=SCAFF_PD, more=secure)
    for place in places.values():
        place.write_text(place.read_text() + "\n[secure]\nchanging = true\n")
    outcome = coordinate(path, Changing(places, CHANGES[change], moment, always))
    if outcome.status == "converged":
        is_right(path, places, outcome)
    seen = [event["what"] for event in events(path) if event["client"] == WHO]
    return Ended(outcome.status, outcome.sentence, tuple(outcome.members), seen[0] if seen else "")


def cases(number: int = 203):
    """So many runs: a change of one of the first forty answers, once or for good."""
    random = np.random.default_rng(0)
    return [
        (list(CHANGES)[k % len(CHANGES)], int(random.integers(1, 41)), bool(random.integers(0, 2)))
        for k in range(number)
    ]
