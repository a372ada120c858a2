"""One hostile silo in a secure run: whatever it sends, the run ends in a sentence, or rightly."""

from __future__ import annotations

import numpy as np
import pytest

from cases.silos import Faulty, is_right, secured
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import Message, decode, encode

WHO = "va"
LARGEST = 2**31
pytestmark = pytest.mark.usefixtures("fake_clock")


def _array(change):
    def lie(answer, random):
        message = decode(answer, LARGEST)
        arrays = {name: change(array, random) for name, array in message.arrays.items()}
        return encode(Message(message.kind, message.values, arrays))

    return lie


def _value(change):
    def lie(answer, random):
        message = decode(answer, LARGEST)
        values = {**message.values, **change(random)}
        return encode(Message(message.kind, values, message.arrays))

    return lie


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
    "cut short": lambda answer, random: answer[: int(random.integers(0, len(answer)))],
    "one bit": _flip,
    "another shape": _array(lambda array, random: np.append(array, array[:1])),
    "another format": _array(
        np.errstate(over="ignore")(lambda array, random: array.astype(np.float16))
    ),
    "NaN": _array(lambda array, random: array if array.dtype.kind == "i" else array * np.nan),
    "noise in vectors": _array(
        lambda array, random: _noise(array, random) if array.dtype.kind == "i" else array
    ),
    "no arrays": lambda answer, random: encode(Message("answer", decode(answer, LARGEST).values)),
    "a refusal": _value(lambda random: {"declined": "I do not want to."}),
    "another size": _value(lambda random: {"exponent": int(random.integers(-90, 90))}),
    "another question": _value(lambda random: {"question": "0" * 16}),
    "another name": _value(lambda random: {"silo": "hungarian"}),
    "failed": lambda answer, random: encode(Message("failed", decode(answer, LARGEST).values)),
}


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


def cases(number):
    """A change of one of the first forty answers, once or for good."""
    random = np.random.default_rng(0)
    names = list(CHANGES)
    return [
        (names[k % len(names)], int(random.integers(1, 41)), bool(random.integers(0, 2)))
        for k in range(number)
    ]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("change", "moment", "always"), cases(104))
def test_a_run_ends_in_a_sentence_or_rightly(tmp_path, change, moment, always):
    """One bit of an open loss, or of a mask, may pass the checks of the format: then sums fail."""
    path, places = secured(tmp_path, 3)
    outcome = coordinate(path, Changing(places, CHANGES[change], moment, always))
    if outcome.status == "converged":
        is_right(path, places, outcome)
    else:
        assert outcome.status in ("failed", "paused", "stalled", "precision"), outcome
        assert outcome.sentence.endswith(".")
