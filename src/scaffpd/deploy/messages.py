"""Messages between a coordinator and its silos, their encoding, and the transport.

A message has a kind, JSON values and plain arrays; nothing in it can execute. Its format is safetensors (a length, a
JSON table of names, types and offsets, then the raw numbers), which is validated as a whole before any number is read.
Kind and values are one more array, of UTF-8 bytes.

A vector that a site has is not sent again. It is named by the session and a digest of its contents, and both sides
cache the last `REMEMBERED` vectors in use. The coordinator only guesses what a site has; a restarted site answers which
vectors it lacks, and gets them.

An engine provides a `Transport`, which carries bytes to sites and back. Everything else is the same for every engine.

An algorithm declares the questions it asks, and a silo answers no others: one that has agreed to federated averaging
sends no gradient. `Scores` (a loss, an accuracy, a count) are part of every run.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

import scaffpd
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Key, LocalPlan, ProximalPlan, Vector
from scaffpd.federation.questions import GradientsAt, Question, Reply
from scaffpd.federation.weighed import Weighing
from scaffpd.objectives import from_values, to_values

ASKING = ("describe", "totals", "setup")  # questions that carry the run's request
SPENT = "spent"  # (ε, δ) so far
# a silo's public keys for the other silos; the cards of all silos
CARD = "card"
MEET = "meet"
SCALE = "scale"  # unit of a sum with shared noise: at least every silo's weight per row
# a test sum over vectors of so many ones
DRILL = "drill"
DRILLED = 8
MASKED = (
    "masked"  # the vector that answers another question (`about`), scaled and masked, or its size
)
SIZES = "sizes"  # the squared norm of such a vector
SECRET = frozenset({CARD, MEET, MASKED, SIZES})
# an unmasked vector and the silo's own weight, which never leave
BARE = "bare"
WEIGHT = "weight"


PROTOCOL = 2  # silos and coordinators need the same protocol; their versions may differ
VERSION = scaffpd.__version__
HEADER = "header"
LONGEST_HEADER = 256 * 2**20  # lists of categories are the longest part
LONGEST_LIST = 2**16  # bytes of the table of arrays
# A JSON value takes some eighty bytes of memory: a message takes at most four times its own size, or 40 MB.
ELEMENTS = 500_000
BYTES_EACH = 20
NUMBERS = ("float32", "float64", "int64")

Array = NDArray[Any]


@dataclass(frozen=True)
class Message:
    """One question or one answer: its kind, its JSON values, and its vectors and matrices."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
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
        raise WireError("message-bytes", f"A message is bytes, not {type(data).__name__}.")
    if len(data) > most:
        raise WireError(
            "message-bytes-longer",
            f"A message of {len(data)} bytes is longer than the {most} that are allowed.",
        )
    if LONGEST_LIST < int.from_bytes(bytes(data[:8]), "little") <= len(data):
        raise WireError("message-too-many", "The message has too many arrays.")
    try:
        arrays = load(bytes(data))
        header = arrays.pop(HEADER)
        if header.dtype != np.uint8 or header.ndim != 1 or header.nbytes > LONGEST_HEADER:
            raise WireError("message-readable-header", "The message has no readable header.")
        text = header.tobytes()
        if sum(map(text.count, (b",", b"[", b"{"))) > max(ELEMENTS, len(data) // BYTES_EACH):
            raise WireError("message-too-many", "The message has too many values.")
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
        raise WireError(
            "these-bytes-message", "These bytes are not a message of scaffpd."
        ) from None
    if protocol != PROTOCOL:
        theirs = plain(
            about.get("version", "0.1" if protocol == 1 else "of an unknown version"), 30
        )
        raise WireError(
            "other-side-scaffpd",
            f"The other side has scaffpd {theirs} (protocol {plain(protocol, 20)}), this one {VERSION} (protocol "
            f"{PROTOCOL}): versions with different protocols do not work together; upgrade the earlier one.",
        )
    if not isinstance(kind, str) or not isinstance(values, dict):
        raise WireError("message-readable-header", "The message has no readable header.")
    for name, array in arrays.items():
        if str(array.dtype) not in NUMBERS:
            raise WireError(
                "array-holds-numbers",
                f"The array {name!r} holds {array.dtype}, not numbers of a known format.",
            )
    return Message(kind, values, arrays)


def plain(text: Any, most: int = 500) -> str:
    """Make a received text fit for logs, tables and terminals: printable and at most `most` characters."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


def digest(array: Array) -> str:
    """Return a digest of a vector's contents, the same on both sides."""
    about = f"{array.dtype}{array.shape}".encode()
    return hashlib.blake2b(
        np.ascontiguousarray(array).data, digest_size=16, key=about[:64]
    ).hexdigest()


_HASHED: deque[tuple[ref[Tensor], int, str]] = deque(
    maxlen=64
)  # at the versions that PyTorch counts up


def vector_digest(vector: Tensor) -> str:
    """Hash a vector once, until PyTorch changes it in place; by NumPy, `.data` or DLPack it must not be changed."""
    version = None if vector.is_inference() else vector._version  # inference tensors have none
    for held, since, name in tuple(_HASHED):
        if held() is vector and since == version:
            return name
    name = digest(vector.detach().numpy(force=True))
    if version is not None:
        _HASHED.append((ref(vector), version, name))
    return name


GARBAGE = "garbage"
REFUSED = "refused"
REMEMBERED = 6  # x, c and D of this round and of the last one


def asked_digest(message: Message, vectors: Mapping[str, Array]) -> bytes:
    """Return a digest of a whole question, vectors by their contents; it is equal for silos asked the same.

    It leaves out the question's number, the names of vectors, and arrays that deliver a vector.
    """
    named = message.values.get("vectors", {})
    values = {
        name: value for name, value in message.values.items() if name not in ("question", "vectors")
    }
    carried = {*named.values()} if isinstance(named, dict) else set()
    arrays = {name: digest(array) for name, array in message.arrays.items() if name not in carried}
    parts = message.kind, values, arrays, {role: digest(array) for role, array in vectors.items()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


class MissingVectors(Exception):
    """A question uses vectors, `names`, that this site lacks."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = tuple(names)


class VectorCache:
    """Cache of the vectors used last; the coordinator has one per site, of names only."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Array | None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def use(self, name: str, array: Array | None = None) -> Array | None:
        """Return the vector of that name (or store it) and mark it as used."""
        held = self._held.pop(name, None)
        self._held[name] = array if held is None else held
        while len(self._held) > REMEMBERED:
            self._held.popitem(last=False)
        return self._held[name]

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Store the vectors that came with a question."""
        for name, array in arrays.items():
            self._held.pop(name, None)
            self.use(name, np.array(array))

    def find(self, names: Iterable[str]) -> dict[str, Array]:
        """Return the vectors of these names, or raise `MissingVectors`."""
        wanted = list(names)
        lacking = [name for name in wanted if name not in self._held]
        if lacking:
            raise MissingVectors(lacking)
        return {name: array for name in wanted if (array := self.use(name)) is not None}

    def last(self, most: int) -> dict[str, Array]:
        """Return the vectors used last, the oldest first."""
        return {
            name: array for name, array in list(self._held.items())[-most:] if array is not None
        }


@dataclass(frozen=True)
class Failure:
    """A missing or unusable answer from a site."""

    reason: str  # what happened, in words
    # "absent", "refused" by the silo, or "garbage" (a reply that could not be used)
    what: str = "absent"
    failed: bool = False  # whether the silo reports that the question failed there
    waits: bool = False  # whether a person there has to consent first

    def __post_init__(self) -> None:
        if self.what not in ("absent", GARBAGE, REFUSED):
            raise InputError(
                "failure-absent",
                f"A failure is 'absent', {GARBAGE!r} or {REFUSED!r}, not {self.what!r}.",
            )


@dataclass(frozen=True)
class Facts:
    """The members' reports with the agreement."""

    constants: Constants  # of their losses
    start: Array = field(repr=False)  # x⁰
    probes: Vector  # f_i at one arbitrary point, which identifies the data
    tested: NDArray[np.int64]  # how many rows each has held out
    squares: Vector | None = (
        None  # bounds on the mean ‖a‖² of their rows; `None` where the agreement gives none
    )


class Unanswered(Exception):
    """A silo did not answer while the agreement was made."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Silo {name!r} did not answer: {plain(reason).rstrip('.')}.")
        self.name = name


class Unusable(Unanswered):
    """A silo's answer could not be used while the agreement was made."""


class Transport(Protocol):
    """Sites that can be asked.

    An engine that authenticates sites by their silos' names has an attribute `named = True`: a silo cannot then claim
    another name.
    """

    def sites(self) -> tuple[str, ...]:
        """Return the connected sites by the engine's own names, sorted."""

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send every site its own question and wait for all replies, `timeout` seconds at most.

        A site that fails or does not answer in time yields a `Failure` and never delays the others' replies. A late
        reply is discarded, never taken for the answer to a later question.
        """


reader_of = cache(TypeAdapter)


def read_values(kinds: Mapping[str, Any], values: Any, sentence: str) -> dict[str, Any]:
    """Read values of these types strictly; refuse anything else with the sentence and the value's name."""
    read = {}
    for name, kind in kinds.items():
        try:
            read[name] = reader_of(kind).validate_python(values.get(name), strict=True)
        except (ValidationError, AttributeError):
            raise InputError("read-values", f"{sentence.rstrip('.')} ({name}).") from None
    return read


def names_of(values: Mapping[str, Any], key: str) -> list[str]:
    """Read a list of names."""
    names: list[str] = read_values(
        {key: list[str]}, values, "The question does not name what it is about."
    )[key]
    return names


def number(values: Mapping[str, Any], name: str) -> float:
    """Read a finite number."""
    return float(
        read_values({name: FiniteFloat}, values, f"The question needs a number {name}.")[name]
    )


BATCH: dict[str, Any] = {"batch_size": PositiveInt | None, "key": list[NonNegativeInt]}
PLAN: dict[str, Any] = {
    "steps": PositiveInt,
    "rate": FiniteFloat | None,
    "scale": FiniteFloat,
    "prox": FiniteFloat,
}
PLAN |= BATCH | {"snapshot": PositiveInt | None}
LEVELS = 8  # thresholds in one question
WEIGHING: dict[str, Any] = {
    "objective": dict[str, Any],
    "levels": list[FiniteFloat],
    "delta": FiniteFloat,
    "centre": NonNegativeInt,
    "mass": FiniteFloat,
    "name": NonNegativeInt,
}
types_of = cache(get_type_hints)  # the types of a question's fields
DIRECTIONS = 256  # most columns of a matrix: d of them would reveal the whole Hessian


def question_parts(question: Any) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Array]]:
    """Split a question into JSON values, vectors by their roles, and matrices."""
    values: dict[str, Any] = {}
    vectors: dict[str, Tensor] = {}
    arrays: dict[str, Array] = {}
    for item in fields(question):
        part = getattr(question, item.name)
        if isinstance(part, GradientsAt):
            vectors[item.name] = part.x
            values |= {"batch_size": part.batch_size, "key": [int(k) for k in part.key]}
        elif isinstance(part, LocalPlan):
            values[item.name] = asdict(part) | {"key": [int(k) for k in part.key]}
            values[item.name].pop("each")  # sent by silo name, see `own_steps`
        elif isinstance(part, Weighing):
            values[item.name] = {
                **vars(part),
                "objective": to_values(part.objective),
                "levels": list(part.levels),
            }
        elif isinstance(part, ProximalPlan):
            more, held, _ = question_parts(part)
            values = values | more
            vectors = vectors | held
        elif isinstance(part, Tensor) and part.ndim == 1:
            vectors[item.name] = part
        elif isinstance(part, Tensor):
            arrays[item.name] = part.numpy()
        elif part is not None:
            values[item.name] = [int(k) for k in part] if isinstance(part, tuple) else part
    return values, vectors, arrays


def own_steps(values: Mapping[str, Any], silo: str) -> Mapping[str, Any]:
    """Return a question's values for one silo, with its own number of local steps in the plan."""
    plan = values.get("plan")
    if not isinstance(plan, dict) or "each" not in plan:
        return values
    rest = {name: value for name, value in plan.items() if name != "each"}
    if not isinstance(plan["each"], dict) or silo not in plan["each"]:
        raise InputError(
            "plan-local-steps",
            "The plan of local steps does not say how many this silo is to make.",
        )
    return {**values, "plan": {**rest, "steps": plan["each"][silo]}}


class WrittenQuestion(NamedTuple):
    """A question as written in a message: values, vectors by their roles, and matrices."""

    values: Mapping[str, Any]
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
        if hint is Weighing:
            return self.weighing()
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
            raise InputError(
                "question-name-vectors", f"The question does not name its vectors ({name})."
            )
        return self.vectors[name]

    def _matrix(self, name: str) -> Tensor:
        """Return a matrix with few columns, each as long as the vectors."""
        V = self.arrays.get(name)
        like = next(iter(self.vectors.values()), None)
        if V is None or like is None:
            raise InputError("question-matrix", f"The question has no matrix {name}.")
        if V.ndim != 2 or V.shape[0] != len(like) or not 1 <= V.shape[1] <= DIRECTIONS:
            raise InputError(
                "directions-fit-model", f"The directions {name} do not fit this model."
            )
        return torch.from_numpy(np.array(V)).to(like)

    def batch(self) -> tuple[int | None, Key]:
        """Return the size and the key of a minibatch."""
        batch = read_values(
            BATCH, {"key": [0], **self.values}, "The question's batch size or key cannot be used."
        )
        return batch["batch_size"], tuple(batch["key"])

    def weighing(self) -> Weighing:
        """Return the rule by which silos find their own weights."""
        sentence = "The question does not say how weights are found."
        read = read_values(WEIGHING, self.values.get("weighing"), sentence)
        if len(read["levels"]) > LEVELS or read["delta"] < 0 or not read["mass"] > 0:
            raise InputError("weighing", sentence)
        objective = from_values(read.pop("objective"))
        return Weighing(objective, tuple(map(float, read.pop("levels"))), **read)

    def plan(self) -> LocalPlan:
        """Return the plan of local steps."""
        sentence = "The plan of local steps is not complete, or cannot be carried out."
        plan = read_values(PLAN, self.values.get("plan"), sentence)
        if (plan["snapshot"] or 1) > plan["steps"]:
            raise InputError("plan", sentence)
        return LocalPlan(**{**plan, "key": tuple(plan["key"])})


def reply_arrays(question: Question, reply: Reply, like: Tensor) -> dict[str, Array]:
    """Write one client's answer: vectors in the model's number format, everything else in float64.

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


class InProcess:
    """A `Transport` to silos in this process."""

    def __init__(self, silos: Mapping[str, Any]) -> None:
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
