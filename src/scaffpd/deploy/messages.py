"""Messages between a coordinator and its silos: bytes, vectors by name, plans, the agreement, and their transport.

A message has a kind, JSON values and plain arrays; nothing in it can execute. Its format is that of safetensors (a
length, a JSON table of names, types and places, then the raw numbers), which a reader checks as a whole before it looks
at a single number. Kind and values travel as one more array, of UTF-8 bytes.

A vector that a site has is not sent again. Its name is the session's with a digest of its contents, and both sides
remember the last `REMEMBERED` vectors that a question used. The coordinator only guesses what a site still has; a site
that was restarted answers which vectors it lacks, and gets them.

An engine brings a `Transport`, which carries bytes to sites and back. Everything else is the same for every engine.

An algorithm says which questions it asks, and a silo answers no others: one that has agreed to federated averaging will
not hand out a gradient. `Scores` (a loss, an accuracy, a count) are part of every run.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

import scaffpd
from scaffpd.config.model_file import read_values
from scaffpd.errors import InputError
from scaffpd.federation import Key, LocalPlan, ProximalPlan
from scaffpd.federation.questions import GradientsAt, Question, Reply
from scaffpd.federation.weighed import Weighing
from scaffpd.objectives import from_values, to_values

ASKING = ("describe", "totals", "setup")  # questions with which a coordinator says what its run asks for
SPENT = "spent"  # (ε, δ) so far
CARD, MEET = "card", "meet"  # who a silo is, to the other silos; everybody's cards
SCALE = "scale"  # of a sum to which silos add shares of noise: at least everybody's weight per row
DRILL, DRILLED = "drill", 8  # about no vector, but so many ones: to see who adds up
MASKED = "masked"  # the vector that another question is `about`, scaled and masked, or how large it is
SIZES = "sizes"  # the squared length of such a vector
SECRET = frozenset({CARD, MEET, MASKED, SIZES})
BARE, WEIGHT = "bare", "weight"  # a vector and the silo's own weight of it, which never leave


PROTOCOL = 2  # silos and coordinators that differ in this refuse each other; others may differ in their versions
VERSION = scaffpd.__version__
HEADER = "header"
LONGEST_HEADER = 256 * 2**20  # lists of categories are the longest thing in there
LONGEST_LIST = 2**16  # bytes in which a message names its arrays
# A value of JSON takes some eighty bytes of memory: a message takes at most four times its own size, or 40 MB.
ELEMENTS, BYTES_EACH = 500_000, 20
NUMBERS = ("float32", "float64", "int64")

Array = NDArray[Any]


@dataclass(frozen=True)
class Message:
    """One question or one answer: its kind, its JSON values, and its vectors and matrices."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


class WireError(InputError):
    """Bytes that are no message."""


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    about = {"protocol": PROTOCOL, "version": VERSION, "kind": message.kind, "values": dict(message.values)}
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
    if LONGEST_LIST < int.from_bytes(bytes(data[:8]), "little") <= len(data):
        raise WireError("The message has too many arrays.")
    try:
        arrays = load(bytes(data))
        header = arrays.pop(HEADER)
        if header.dtype != np.uint8 or header.ndim != 1 or header.nbytes > LONGEST_HEADER:
            raise WireError("The message has no readable header.")
        text = header.tobytes()
        if sum(map(text.count, (b",", b"[", b"{"))) > max(ELEMENTS, len(data) // BYTES_EACH):
            raise WireError("The message has too many values.")
        about = json.loads(text)
        protocol, kind, values = about["protocol"], about["kind"], about["values"]
    except WireError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError, AttributeError):
        raise WireError("These bytes are not a message of scaffpd.") from None
    if protocol != PROTOCOL:
        theirs = plain(about.get("version", "0.1" if protocol == 1 else "of an unknown version"), 30)
        raise WireError(
            f"The other side has scaffpd {theirs} (protocol {plain(protocol, 20)}), this one {VERSION} (protocol "
            f"{PROTOCOL}): versions with different protocols do not work together; upgrade the earlier one."
        )
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


GARBAGE, REFUSED = "garbage", "refused"
REMEMBERED = 6  # x, c and D of this round and of the last one


def asked_digest(message: Message, vectors: Mapping[str, Array]) -> bytes:
    """A name for everything that a question says, vectors by their contents; silos that were asked the same have it.

    Left out are the question's number, the names of vectors, and arrays that bring a vector along.
    """
    named = message.values.get("vectors", {})
    values = {name: value for name, value in message.values.items() if name not in ("question", "vectors")}
    carried = {*named.values()} if isinstance(named, dict) else set()
    arrays = {name: digest(array) for name, array in message.arrays.items() if name not in carried}
    parts = message.kind, values, arrays, {role: digest(array) for role, array in vectors.items()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


class MissingVectors(Exception):
    """A question names vectors, `names`, that this site does not have."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = tuple(names)


class VectorCache:
    """The vectors that were used last; the coordinator has one for every site, without the vectors."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Array | None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def use(self, name: str, array: Array | None = None) -> Array | None:
        """Take the vector of that name (or put it there) and remember that it was used."""
        held = self._held.pop(name, None)
        self._held[name] = array if held is None else held
        while len(self._held) > REMEMBERED:
            self._held.popitem(last=False)
        return self._held[name]

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Take what came with a question."""
        for name, array in arrays.items():
            self._held.pop(name, None)
            self.use(name, np.array(array))

    def find(self, names: Iterable[str]) -> dict[str, Array]:
        """The vectors of these names, or `MissingVectors`."""
        wanted = list(names)
        lacking = [name for name in wanted if name not in self._held]
        if lacking:
            raise MissingVectors(lacking)
        return {name: array for name in wanted if (array := self.use(name)) is not None}

    def last(self, most: int) -> dict[str, Array]:
        """The vectors that were used last, the oldest first."""
        return {name: array for name, array in list(self._held.items())[-most:] if array is not None}


@dataclass(frozen=True)
class Failure:
    """No answer from a site."""

    reason: str  # what happened, in words
    # "absent", "refused" by the silo, or "garbage": there was a reply, and it could not be used
    what: str = "absent"
    failed: bool = False  # whether the silo says that it could not work the question out
    waits: bool = False  # whether a person there has to agree first

    def __post_init__(self) -> None:
        if self.what not in ("absent", GARBAGE, REFUSED):
            raise InputError(f"A failure is 'absent', {GARBAGE!r} or {REFUSED!r}, not {self.what!r}.")


class Transport(Protocol):
    """Sites that can be asked.

    An engine that authenticates sites by the names of their silos has an attribute `named = True`: then a silo cannot
    call itself anything else.
    """

    def sites(self) -> tuple[str, ...]:
        """The sites that are connected now, by the engine's own names for them, sorted."""

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send every site its own question and wait for all replies, `timeout` seconds at most.

        A site that fails or does not answer in time yields a `Failure`; it never keeps the others' replies back. A
        reply that comes later than that is thrown away, never taken for the answer to a later question.
        """


def names_of(values: Mapping[str, Any], key: str) -> list[str]:
    """Read a list of names."""
    names: list[str] = read_values({key: list[str]}, values, "The question does not name what it is about.")[key]
    return names


def number(values: Mapping[str, Any], name: str) -> float:
    """Read a finite number."""
    return float(read_values({name: FiniteFloat}, values, f"The question needs a number {name}.")[name])


BATCH: dict[str, Any] = {"batch_size": PositiveInt | None, "key": list[NonNegativeInt]}
PLAN: dict[str, Any] = {"steps": PositiveInt, "rate": FiniteFloat | None, "scale": FiniteFloat, "prox": FiniteFloat}
PLAN |= BATCH | {"snapshot": PositiveInt | None}
LEVELS = 8  # thresholds in one question
WEIGHING: dict[str, Any] = {
    "objective": dict[str, Any], "levels": list[FiniteFloat], "delta": FiniteFloat, "centre": NonNegativeInt,
    "mass": FiniteFloat, "name": NonNegativeInt,
}  # fmt: skip
types_of = cache(get_type_hints)  # the types of a question's fields
DIRECTIONS = 256  # most columns of a matrix: with d of them the whole Hessian would leave


def question_parts(question: Any) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Array]]:
    """Split a question, field by field, into JSON values, vectors by their roles, and matrices."""
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
            values[item.name].pop("each")  # it goes by the silos' names: `own_steps`
        elif isinstance(part, Weighing):
            values[item.name] = {**vars(part), "objective": to_values(part.objective), "levels": list(part.levels)}
        elif isinstance(part, ProximalPlan):
            more, held, _ = question_parts(part)
            values, vectors = values | more, vectors | held
        elif isinstance(part, Tensor) and part.ndim == 1:
            vectors[item.name] = part
        elif isinstance(part, Tensor):
            arrays[item.name] = part.numpy()
        elif part is not None:
            values[item.name] = [int(k) for k in part] if isinstance(part, tuple) else part
    return values, vectors, arrays


def own_steps(values: Mapping[str, Any], silo: str) -> Mapping[str, Any]:
    """Return a question's values as one silo has to read them: its own number of local steps is the plan's."""
    plan = values.get("plan")
    if not isinstance(plan, dict) or "each" not in plan:
        return values
    rest = {name: value for name, value in plan.items() if name != "each"}
    if not isinstance(plan["each"], dict) or silo not in plan["each"]:
        raise InputError("The plan of local steps does not say how many this silo is to make.")
    return {**values, "plan": {**rest, "steps": plan["each"][silo]}}


class WrittenQuestion(NamedTuple):
    """A question as a message has it: its values, its vectors by their roles, and matrices."""

    values: Mapping[str, Any]
    vectors: Mapping[str, Tensor]
    arrays: Mapping[str, Array]

    def read(self, kind: Any, point: Callable[[str], GradientsAt]) -> Any:
        """Read what `question_parts` wrote; `point` has the points that clients have answered at, by their roles."""
        if kind is GradientsAt:
            return point("x")
        hints = types_of(kind)
        return kind(**{item.name: self._field(item, hints[item.name], point) for item in fields(kind)})

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
        """A vector in its role."""
        if name not in self.vectors:
            raise InputError(f"The question does not name its vectors ({name}).")
        return self.vectors[name]

    def _matrix(self, name: str) -> Tensor:
        """A few columns as long as the vectors."""
        V, like = self.arrays.get(name), next(iter(self.vectors.values()), None)
        if V is None or like is None:
            raise InputError(f"The question has no matrix {name}.")
        if V.ndim != 2 or V.shape[0] != len(like) or not 1 <= V.shape[1] <= DIRECTIONS:
            raise InputError(f"The directions {name} do not fit this model.")
        return torch.from_numpy(np.array(V)).to(like)

    def batch(self) -> tuple[int | None, Key]:
        """The size and the key of a minibatch."""
        batch = read_values(BATCH, {"key": [0], **self.values}, "The question's batch size or key cannot be used.")
        return batch["batch_size"], tuple(batch["key"])

    def weighing(self) -> Weighing:
        """How silos find their own weights."""
        sentence = "The question does not say how weights are found."
        read = read_values(WEIGHING, self.values.get("weighing"), sentence)
        if len(read["levels"]) > LEVELS or read["delta"] < 0 or not read["mass"] > 0:
            raise InputError(sentence)
        objective = from_values(read.pop("objective"))
        return Weighing(objective, tuple(map(float, read.pop("levels"))), **read)

    def plan(self) -> LocalPlan:
        """The plan of local steps."""
        sentence = "The plan of local steps is not complete, or cannot be carried out."
        plan = read_values(PLAN, self.values.get("plan"), sentence)
        if (plan["snapshot"] or 1) > plan["steps"]:
            raise InputError(sentence)
        return LocalPlan(**{**plan, "key": tuple(plan["key"])})


def reply_arrays(question: Question, reply: Reply, like: Tensor) -> dict[str, Array]:
    """Write one client's answer: vectors in the model's format, everything else in float64.

    Vectors whose noise is shared are left out: they are in sums alone.
    """
    shapes, arrays = question.shapes(len(like)), dict[str, Array]()
    shared = {part for part, vectors in reply.vectors.items() if vectors.shares is not None}
    for part in (*question.vectors, *shapes):  # slopes come with curvatures
        if part in shapes.keys() - shared and part not in arrays:
            hidden = part in question.vectors
            found = reply.vectors[part].sum(like.new_ones(1)) if hidden else reply.numbers[part]()[0]
            arrays[part] = (found if found.shape == like.shape and hidden else found.double()).numpy(force=True)
    if question.scalars:
        arrays["scalars"] = np.array([float(reply.numbers[name]()[0]) for name in question.scalars])
    return arrays


class InProcess:
    """A `Transport` to silos that are objects here."""

    def __init__(self, silos: Mapping[str, Any]) -> None:
        self.silos = dict(silos)

    def sites(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(sorted(self.silos))

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """One after another; they always answer."""
        gone = Failure("there is no such site")
        return {s: self.silos[s].answer(asked) if s in self.silos else gone for s, asked in questions.items()}
