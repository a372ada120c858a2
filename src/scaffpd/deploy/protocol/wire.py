r"""Questions and answers as bytes: a kind, JSON values and plain arrays. Nothing in them can execute.

The format is that of safetensors (a length, a JSON table of names, types and places, then the raw numbers), which a
reader checks as a whole before it looks at a single number. Kind and values travel as one more array, of UTF-8 bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from scaffpd.errors import InputError

PROTOCOL = 1  # silos and coordinators that differ in this refuse each other
HEADER = "header"
LONGEST_HEADER = 256 * 2**20  # lists of categories are the longest thing in there
NUMBERS = ("float32", "float64", "int64")

Array = NDArray[Any]


@dataclass(frozen=True)
class Message:
    """One question or one answer.

    Attributes:
        kind: what it is.
        values: names, numbers and lists of them, as JSON has them.
        arrays: vectors and matrices.
    """

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @property
    def numbers(self) -> int:
        """Bytes of numbers that it carries."""
        return sum(array.nbytes for array in self.arrays.values())


class WireError(InputError):
    """Bytes that are no message."""


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    about = {"protocol": PROTOCOL, "kind": message.kind, "values": dict(message.values)}
    header = np.frombuffer(json.dumps(about, allow_nan=False).encode(), dtype=np.uint8)
    # safetensors copies memory as it lies there, so it has to lie there in order
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    return bytes(save({HEADER: header, **arrays}))


def decode(data: bytes, most: int) -> Message:
    """The message that `data` is; a `WireError` for anything else, and for what is longer than `most` bytes."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise WireError(f"A message is bytes, not {type(data).__name__}.")
    if len(data) > most:
        raise WireError(f"A message of {len(data)} bytes is longer than the {most} that are allowed.")
    try:
        arrays = load(bytes(data))
        header = arrays.pop(HEADER)
        if header.dtype != np.uint8 or header.ndim != 1 or header.nbytes > LONGEST_HEADER:
            raise WireError("The message has no readable header.")
        about = json.loads(header.tobytes())
        protocol, kind, values = about["protocol"], about["kind"], about["values"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError, AttributeError):
        raise WireError("These bytes are not a message of scaffpd.") from None
    if protocol != PROTOCOL:
        raise WireError(f"The other side speaks protocol {protocol!r}, this one {PROTOCOL}: use the same version.")
    if not isinstance(kind, str) or not isinstance(values, dict):
        raise WireError("The message has no readable header.")
    for name, array in arrays.items():
        if str(array.dtype) not in NUMBERS:
            raise WireError(f"The array {name!r} holds {array.dtype}, not numbers of a known format.")
    return Message(kind, values, arrays)


def plain(text: Any, most: int = 500) -> str:
    """A text that somebody else has sent, fit for logs, tables and terminals: printable, and not too long."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


def digest(array: Array) -> str:
    """A name for the contents of a vector, the same on both sides."""
    about = f"{array.dtype}{array.shape}".encode()
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16, key=about[:64]).hexdigest()
