"""Messages between a coordinator and its silos, questions in them, and the transport.

A message has a kind, JSON values and plain arrays; nothing in it can execute. Its format is
safetensors (a length, a JSON table of names, types and offsets, then the raw numbers), which is
validated as a whole before any number is read. Kind and values are one more array, of UTF-8 bytes.

Questions are written and read back strictly: every value has a declared type. An algorithm declares
the questions it asks, and a silo answers no others: one that has agreed to federated averaging
sends no gradient. `Scores` (a loss, an accuracy, a count) are part of every run.

An engine provides a `Transport`, which carries bytes to sites and back. Everything else is the same
for every engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

import scaffpd
from scaffpd.errors import InputError
from scaffpd.federation import Key, LocalPlan, ProximalPlan
from scaffpd.federation.questions import GradientsAt, Question, Reply

ASKING = ("describe", "totals", "setup")  # questions that carry the run's request
SPENT = "spent"  # (ε, δ) so far
# a silo's public keys for the other silos; the cards of all silos
CARD = "card"
MEET = "meet"
SCALE = "scale"  # unit of a sum with shared noise: at least every silo's weight per row
# the vector that answers another question (`about`), scaled and masked, or its size
MASKED = "masked"
SIZES = "sizes"  # the squared norm of such a vector
SECRET = frozenset({CARD, MEET, MASKED, SIZES})
PROTOCOL = 3  # silos and coordinators need the same protocol; their versions may differ
VERSION = scaffpd.__version__
HEADER = "header"
LONGEST_HEADER = 256 * 2**20  # lists of categories are the longest part
LONGEST_LIST = 2**16  # bytes of the table of arrays
# A JSON value takes some eighty bytes of memory: a message takes at most four times its size, or
# 40 MB.
ELEMENTS = 500_000
BYTES_EACH = 20
NUMBERS = ("float32", "float64", "int64")

Array = NDArray[Any]
Json = dict[str, Any]  # an object of JSON: values of a message or of a file
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
    """Encode a message."""
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


def decode(data: bytes, most: int) -> Message:
    """Decode a message; raise `WireError` if it is malformed or longer than `most` bytes."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise WireError("message-not-bytes", f"A message is bytes, not {type(data).__name__}.")
    if len(data) > most:
        raise WireError(
            "message-too-long",
            f"A message of {len(data)} bytes is longer than the {most} that are allowed.",
        )
    if LONGEST_LIST < int.from_bytes(bytes(data[:8]), "little") <= len(data):
        raise WireError("too-many-arrays", "The message has too many arrays.")
    try:
        arrays = load(bytes(data))
        header = arrays.pop(HEADER)
        if header.dtype != np.uint8 or header.ndim != 1 or header.nbytes > LONGEST_HEADER:
            raise WireError("message-without-header", "The message has no readable header.")
        text = header.tobytes()
        if sum(map(text.count, (b",", b"[", b"{"))) > max(ELEMENTS, len(data) // BYTES_EACH):
            raise WireError("too-many-values", "The message has too many values.")
        about = json.loads(text)
        protocol = about["protocol"]
        kind = about["kind"]
        values = about["values"]
    except WireError:
        raise
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        OverflowError,
        AttributeError,
    ):
        raise WireError("not-a-message", "These bytes are not a message of scaffpd.") from None
    if protocol != PROTOCOL:
        theirs = plain(about.get("version", "of an unknown version"), 30)
        raise WireError(
            "other-protocol",
            f"The other side has scaffpd {theirs} (protocol {plain(protocol, 20)}), this one "
            f"{VERSION} (protocol {PROTOCOL}): versions with different protocols do not work "
            "together; upgrade the earlier one.",
        )
    if not isinstance(kind, str) or not isinstance(values, dict):
        raise WireError("message-without-header", "The message has no readable header.")
    for name, array in arrays.items():
        if str(array.dtype) not in NUMBERS:
            raise WireError(
                "array-of-other-type",
                f"The array {name!r} holds {array.dtype}, not numbers of a known format.",
            )
    return Message(kind, values, arrays)


def plain(text: object, most: int = 500) -> str:
    """Make a received text fit for logs and terminals: printable, at most `most` characters."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


def digest(array: Array) -> str:
    """Return a digest of a vector's contents, the same on both sides."""
    about = f"{array.dtype}{array.shape}".encode()
    return hashlib.blake2b(
        np.ascontiguousarray(array).data, digest_size=16, key=about[:64]
    ).hexdigest()


# what is wrong with a silo's answer
ABSENT = "absent"
GARBAGE = "garbage"
REFUSED = "refused"


def asked_digest(message: Message) -> bytes:
    """Return a digest of a question but its number, equal for silos that are asked the same."""
    values = {name: value for name, value in message.values.items() if name != "question"}
    arrays = {name: digest(array) for name, array in message.arrays.items()}
    parts = message.kind, values, arrays
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


class MissingAgreement(Exception):
    """A question comes before the agreement, or before the keys, that it depends on."""


@dataclass(frozen=True)
class Failure:
    """A missing or unusable answer from a site."""

    reason: str  # what happened, in words
    what: str = ABSENT  # `ABSENT`, `REFUSED` by the silo, or `GARBAGE`: a reply that cannot be used
    waits: bool = False  # whether a person there has to consent first


class Transport(Protocol):
    """Sites that can be asked: the page that an engine has to fill.

    An engine that authenticates sites by their silos' names has `named = True`: a silo cannot then
    claim another name.
    """

    named: bool

    def sites(self) -> tuple[str, ...]:
        """Return the connected sites by the engine's own names, sorted."""

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

    named = False

    def __init__(self, silos: Mapping[str, Answering]) -> None:
        self.silos = dict(silos)

    def sites(self) -> tuple[str, ...]:
        """Return all silos."""
        return tuple(sorted(self.silos))

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Ask one after another; silos in this process always answer."""
        gone = Failure("there is no such site")
        return {
            s: self.silos[s].answer(asked) if s in self.silos else gone
            for s, asked in questions.items()
        }


# --- questions and answers in messages

reader_of = cache(TypeAdapter)


def read_values(kinds: JsonMapping, values: Any, sentence: str) -> Json:
    """Read values of these types strictly; refuse anything else, naming the value."""
    read = {}
    for name, kind in kinds.items():
        try:
            read[name] = reader_of(kind).validate_python(values.get(name), strict=True)
        except (ValidationError, AttributeError):
            raise InputError("value-unreadable", f"{sentence.rstrip('.')} ({name}).") from None
    return read


def names_of(values: JsonMapping, key: str) -> list[str]:
    """Read a list of names."""
    names: list[str] = read_values(
        {key: list[str]}, values, "The question does not name what it is about."
    )[key]
    return names


def number(values: JsonMapping, name: str) -> float:
    """Read a finite number."""
    return float(
        read_values({name: FiniteFloat}, values, f"The question needs a number {name}.")[name]
    )


BATCH: Json = {"batch_size": PositiveInt | None, "key": list[NonNegativeInt]}
PLAN: Json = {
    "steps": PositiveInt,
    "rate": FiniteFloat | None,
    "scale": FiniteFloat,
    "prox": FiniteFloat,
}
PLAN |= BATCH | {"snapshot": PositiveInt | None}
types_of = cache(get_type_hints)  # the types of a question's fields
DIRECTIONS = 256  # most columns of a matrix: d of them would reveal the whole Hessian


def question_parts(question: Question | ProximalPlan) -> tuple[Json, dict[str, Array]]:
    """Split a question into JSON values, and vectors and matrices by their roles."""
    values: Json = {}
    arrays: dict[str, Array] = {}
    for item in fields(question):
        part = getattr(question, item.name)
        if isinstance(part, GradientsAt):
            arrays[item.name] = part.x.detach().numpy()
            values |= {"batch_size": part.batch_size, "key": [int(k) for k in part.key]}
        elif isinstance(part, LocalPlan):
            values[item.name] = asdict(part) | {"key": [int(k) for k in part.key]}
        elif isinstance(part, ProximalPlan):
            more, vectors = question_parts(part)
            values |= more
            arrays |= vectors
        elif isinstance(part, Tensor):
            arrays[item.name] = part.detach().numpy()
        elif part is not None:
            values[item.name] = [int(k) for k in part] if isinstance(part, tuple) else part
    return values, arrays


class WrittenQuestion(NamedTuple):
    """A question as written in a message: values, vectors by their roles, and matrices."""

    values: JsonMapping
    vectors: Mapping[str, Tensor]
    arrays: Mapping[str, Array]

    def read(self, kind: Any, point: Callable[[str], GradientsAt]) -> Any:
        """Read what `question_parts` wrote; `point` returns earlier points by their roles."""
        if kind is GradientsAt:
            return point("x")
        hints = types_of(kind)
        return kind(
            **{item.name: self._field(item, hints[item.name], point) for item in fields(kind)}
        )

    def _field(self, item: Field[Any], hint: Any, point: Callable[[str], GradientsAt]) -> Any:
        name = item.name
        kinds = set(get_args(hint)) or {hint}
        if GradientsAt in kinds:
            return point(name) if name in self.vectors or NoneType not in kinds else None
        if hint is LocalPlan:
            return self.plan()
        if hint is ProximalPlan:
            return self.read(hint, point)
        if "matrix" in item.metadata:
            return self._matrix(name)
        if Tensor in kinds:
            return None if NoneType in kinds and name not in self.vectors else self.vector(name)
        if name in BATCH:
            return self.batch()[list(BATCH).index(name)]
        if hint in (float, int):
            return hint(number(self.values, name))
        if hint is bool and name not in self.values:
            return item.default
        return read_values({name: hint}, self.values, "The question is not complete.")[name]

    def vector(self, name: str) -> Tensor:
        """Return the vector of a role."""
        if name not in self.vectors:
            raise InputError("vector-missing", f"The question lacks the vector {name}.")
        return self.vectors[name]

    def _matrix(self, name: str) -> Tensor:
        """Return a matrix with few columns, each as long as the vectors."""
        V = self.arrays.get(name)
        like = next(iter(self.vectors.values()), None)
        if V is None or like is None:
            raise InputError("matrix-missing", f"The question lacks the matrix {name}.")
        if V.ndim != 2 or V.shape[0] != len(like) or not 1 <= V.shape[1] <= DIRECTIONS:
            raise InputError(
                "directions-of-other-model", f"The directions {name} do not fit this model."
            )
        return torch.from_numpy(np.array(V)).to(like)

    def batch(self) -> tuple[int | None, Key]:
        """Return the size and the key of a minibatch."""
        batch = read_values(
            BATCH, {"key": [0], **self.values}, "The question's batch size or key cannot be used."
        )
        return batch["batch_size"], tuple(batch["key"])

    def plan(self) -> LocalPlan:
        """Return the plan of local steps."""
        sentence = "The plan of local steps is not complete, or cannot be carried out."
        plan = read_values(PLAN, self.values.get("plan"), sentence)
        if (plan["snapshot"] or 1) > plan["steps"]:
            raise InputError("plan-unusable", sentence)
        return LocalPlan(**{**plan, "key": tuple(plan["key"])})


def reply_arrays(question: Question, reply: Reply, like: Tensor) -> dict[str, Array]:
    """Write one client's answer: vectors in the model's format, everything else in float64.

    Vectors with shared noise are left out, as they appear in sums only.
    """
    shapes = question.shapes(len(like))
    arrays = dict[str, Array]()
    shared = {part for part, vectors in reply.vectors.items() if vectors.addends is not None}
    for part in (*question.vectors, *shapes):  # slopes accompany curvatures
        if part in shapes.keys() - shared and part not in arrays:
            hidden = part in question.vectors
            found = (
                reply.vectors[part].sum(like.new_ones(1)) if hidden else reply.numbers[part]()[0]
            )
            arrays[part] = (
                found if found.shape == like.shape and hidden else found.double()
            ).numpy(force=True)
    if question.scalars:
        arrays["scalars"] = np.array([float(reply.numbers[name]()[0]) for name in question.scalars])
    return arrays
