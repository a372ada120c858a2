"""Messages between silos and their board, and the transport that carries them.

A message has a kind, JSON values and plain arrays; nothing in it can execute. Its format is
safetensors (a length, a JSON table of names, types and offsets, then the raw numbers), which is
validated as a whole before any number is read. Kind and values are one more array, of UTF-8 bytes.

An engine provides a `Transport`, which carries bytes to sites and back. Everything else is the same
for every engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

import scaffpd
from scaffpd.deploy.refusals import refusal
from scaffpd.errors import InputError
from scaffpd.fields import Json

PROTOCOL = 4  # all members need the same
VERSION = scaffpd.__version__
HEADER = "header"
EPOCH = "epoch"  # the kind of the posts that a run begins with
LONGEST_HEADER = 16 * 2**20
LONGEST_LIST = 2**20  # bytes of the table of arrays
LARGEST_MESSAGE = 512 * 2**20
# A JSON value takes some eighty bytes of memory: a message takes at most four times its size, or
# 40 MB.
ELEMENTS = 500_000
BYTES_EACH = 20
NUMBERS = ("float32", "float64", "int64", "uint8")

Array = NDArray[Any]
JsonMapping = Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One question or one answer: its kind, its JSON values, and its vectors and matrices."""

    kind: str
    values: JsonMapping = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


class WireError(InputError):
    """Bytes that are not a valid message."""


def encode(message: Message) -> bytes:
    about = {
        "protocol": PROTOCOL,
        "version": VERSION,
        "kind": message.kind,
        "values": dict(message.values),
    }
    header = np.frombuffer(json.dumps(about, allow_nan=False).encode(), dtype=np.uint8)
    # safetensors copies memory as it is, so it has to be contiguous
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    return bytes(save({HEADER: header, **arrays}))


def decode(data: bytes, most: int = LARGEST_MESSAGE, header: int = LONGEST_HEADER) -> Message:
    """Decode a message; raise `WireError` if it is malformed, longer than `most` bytes, or has
    values of more than `header` bytes.
    """
    malformed = WireError("not-a-message", "These bytes are not a message of scaffpd.")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise malformed
    if len(data) > most:
        raise refusal("message-too-long", WireError)
    if LONGEST_LIST < int.from_bytes(bytes(data[:8]), "little") <= len(data):
        raise refusal("too-many-arrays", WireError)
    try:
        arrays = load(bytes(data))
        letters = arrays.pop(HEADER)
        text = letters.tobytes()
        marks = sum(map(text.count, (b",", b"[", b"{")))
        if len(text) > header or marks > max(ELEMENTS, len(data) // BYTES_EACH):
            raise refusal("too-many-values", WireError)
        about = json.loads(
            text, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite
        )
        protocol = about["protocol"]
        kind = about["kind"]
        values = about["values"]
    except WireError:
        raise
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        raise malformed from None
    if protocol != PROTOCOL:
        theirs = plain(about.get("version", "of an unknown version"), 30)
        raise WireError(
            "other-protocol",
            f"The other side has scaffpd {theirs} (protocol {plain(protocol, 20)}), this one "
            f"{VERSION} (protocol {PROTOCOL}): versions with different protocols do not work "
            "together; upgrade the older one.",
        )
    numbers = all(str(array.dtype) in NUMBERS for array in arrays.values())
    if not (numbers and letters.dtype == np.uint8 and letters.ndim == 1):
        raise malformed
    if not isinstance(kind, str) or not isinstance(values, dict):
        raise malformed
    return Message(kind, values, arrays)


def _once(pairs: list[tuple[str, object]]) -> Json:
    """Make an object of JSON; refuse a member that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError
    return number


def plain(text: object, most: int = 500) -> str:
    """Make a received text fit for logs and terminals: printable, at most `most` characters."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


ABSENT = "absent"
REFUSED = "refused"


@dataclass(frozen=True)
class Failure:
    """A missing or unusable answer from a site."""

    reason: str  # what happened, in words
    what: str = ABSENT  # `ABSENT`, or `REFUSED` by the silo
    waits: bool = False  # whether a person there has to agree first


class Transport(Protocol):
    """Sites that can be asked, by their silos' names: the page that an engine has to fill."""

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send every site its own question and wait for all replies, `timeout` seconds at most.

        A site that fails or does not answer in time yields a `Failure` and never delays the others'
        replies. A late reply is discarded, never taken for the answer to a later question.
        """


class Answering(Protocol):
    """A silo, as a transport sees it."""

    def answer(self, question: bytes) -> bytes:
        """Return the reply to a question; never raise."""


class InProcess:
    """A `Transport` to silos in this process."""

    def __init__(self, silos: Mapping[str, Answering]) -> None:
        self.silos = dict(silos)

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        gone = Failure("there is no such site")
        return {
            s: self.silos[s].answer(asked) if s in self.silos else gone
            for s, asked in questions.items()
        }
