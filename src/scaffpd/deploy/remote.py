r"""`Remote`: silos behind a transport as a `Federation`, used by algorithms like a cohort.

A `Session` asks silos by name and checks every reply before it is used. A run needs the answers of
all silos that it asks. One that does not answer, cannot be read or refuses ends the question with a
`SiloTrouble`. Going on without it from the same point would show its vector as the difference of
two sums; so the coordinator waits for it, or pauses the run.

An answer is checked for its format and for numbers beyond any use. That is all that is certain:
silos that lie about their data are not detected (docs/threat-model.md).

A round of Scaff-PD is two exchanges: x down and (L_i, c_i) up; c down and d_i up. Scalars such as
⟨c_i, v⟩ are computed here from the c_i.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.deploy import messages
from scaffpd.deploy.messages import (
    GARBAGE,
    REFUSED,
    Array,
    Failure,
    JsonMapping,
    Message,
    Transport,
    plain,
    question_parts,
)
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Federation, Traffic, Vector
from scaffpd.federation.questions import (
    QUESTIONS,
    Curvature,
    GradientsAt,
    LocalSteps,
    Project,
    ProximalSteps,
    Question,
    Reply,
    Scores,
    Vectors,
)
from scaffpd.run.settings.model_file import Setup

Replies = dict[str, Message | Failure]  # answers, or why there is none
Checks = Callable[[Mapping[str, Message]], Mapping[str, str]]  # what is wrong with which answers
LACKS = Failure("it was restarted and lacks what it was just sent")
CHANGED = "changed"  # what is wrong with a silo whose data are not those that the run began with
LARGEST_REPLY = 64 * 2**20  # bytes before training: descriptions of columns and categories


class SiloTrouble(Exception):
    """A silo without which the run cannot go on: absent, unreadable, refusing, or changed."""

    def __init__(self, name: str, failure: Failure) -> None:
        says = {REFUSED: "refuses for now" if failure.waits else "refuses", CHANGED: "has changed"}
        reason = plain(failure.reason).rstrip(".")
        super().__init__(f"Silo {name!r} {says.get(failure.what, 'did not answer')}: {reason}.")
        self.name = name
        self.failure = failure


@dataclass(frozen=True)
class SiloRequest:
    """A question to several silos at once."""

    kind: str  # see `Question` and `messages`
    values: JsonMapping = field(default_factory=dict)  # the same for all silos
    arrays: Mapping[str, Array] = field(default_factory=dict)  # vectors by their role, matrices
    own: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)  # arrays of one silo each

    @classmethod
    def of(
        cls, question: Question, own: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> SiloRequest:
        """Write a question of the `Federation` interface as a request."""
        values, arrays = question_parts(question)
        each = {
            name: {role: vector.detach().numpy() for role, vector in vectors.items()}
            for name, vectors in (own or {}).items()
        }
        return cls(question.kind, values, arrays, each)


@dataclass(eq=False, repr=False)
class Session:
    """Silos by name, over a transport that addresses sites."""

    transport: Transport
    timeout: float = 60.0  # seconds that a silo has for an answer
    wire: Traffic = field(default_factory=Traffic)  # bytes of all messages so far
    largest: int = LARGEST_REPLY  # the most bytes of a reply
    sites: dict[str, str] = field(default_factory=dict)
    asks: JsonMapping = field(default_factory=dict)  # the run's request, to consent to
    setup: Setup | None = None  # the agreement
    constants: dict[str, Array] = field(default_factory=dict)  # every silo's report about its rows

    def greet(self, timeout: float) -> Replies:
        """Ask every connected site for its silo's name, and store the names."""
        sites = {site: site for site in self.transport.sites()}
        found: Replies = {}
        for site, reply in self._ask(SiloRequest("hello"), sites, timeout, anyone=True).items():
            name = site
            if isinstance(reply, Message):
                name = plain(reply.values.get("silo"), 200)
                if name in found:
                    reply = Failure(f"a second site calls itself {name!r}", GARBAGE)
                elif self.transport.named and name != site:
                    reply = Failure(f"the site {site!r} calls itself {name!r}", GARBAGE)
                else:
                    self.sites[name] = site
            found.setdefault(name, reply)
        return found

    def ask(
        self, request: SiloRequest, names: Sequence[str], check: Checks = lambda _: {}
    ) -> dict[str, Message]:
        """Return the answers of these silos; raise `SiloTrouble` if one fails, or fails the check.

        A silo that was restarted is sent the agreement and asked once more.
        """
        sites = {name: self.sites.get(name, name) for name in names}
        replies = self._ask(request, sites, self.timeout)
        lacking = {name: sites[name] for name, reply in replies.items() if reply is LACKS}
        if lacking and self.setup is not None:
            setup = SiloRequest("setup", {"setup": self.setup.values()})
            for name, reply in self._ask(setup, lacking, self.timeout).items():
                self._same(name, reply)
            replies |= self._ask(request, lacking, self.timeout)
        answers = {}
        for name, reply in replies.items():
            if isinstance(reply, Failure):
                trouble = SiloTrouble(name, reply)
                if reply.what == REFUSED and not reply.waits:  # it would refuse again
                    raise InputError("silo-refuses", str(trouble))
                raise trouble
            answers[name] = reply
        for name, why in check(answers).items():
            raise SiloTrouble(name, Failure(why, GARBAGE))
        return answers

    def _same(self, name: str, reply: Message | Failure) -> None:
        """Refuse a silo whose report about its rows differs when it accepts the agreement again."""
        if isinstance(reply, Failure):
            raise SiloTrouble(name, reply)
        rows = reply.values.get("samples")
        reported = reply.arrays.get("constants", np.zeros(0))
        now = np.append(reported, rows if isinstance(rows, int) else np.nan)
        if name in self.constants and not np.array_equal(now, self.constants[name]):
            raise SiloTrouble(name, Failure("its data are not those of this run", CHANGED))

    def _ask(
        self, request: SiloRequest, sites: Mapping[str, str], timeout: float, anyone: bool = False
    ) -> Replies:
        """Encode, send, decode, and check that an answer is to this question, from this silo."""
        if not sites:
            return {}
        number = secrets.token_hex(8)
        shared = messages.encode(self._message(request, {}, number))
        out = dict.fromkeys(sites.values(), shared)
        for name in request.own.keys() & sites.keys():
            message = self._message(request, request.own[name], number)
            out[sites[name]] = messages.encode(message)
        self.wire.add(exchanges=1, down=sum(map(len, out.values())))
        carried = self.transport.ask(out, timeout)
        return {
            name: self._checked(name, carried.get(site, Failure("no answer")), number, anyone)
            for name, site in sites.items()
        }

    def _message(self, request: SiloRequest, own: Mapping[str, Array], number: str) -> Message:
        values = {**request.values, "question": number}
        if self.asks and request.kind in messages.ASKING:
            values["asks"] = self.asks
        trains = request.kind in ("start", messages.SPENT, messages.MASKED, messages.SIZES)
        if self.setup is not None and (trains or request.kind in QUESTIONS):
            values["setup"] = self.setup.digest
        return Message(request.kind, values, {**request.arrays, **own})

    def _checked(
        self, name: str, reply: bytes | Failure, number: str, anyone: bool
    ) -> Message | Failure:
        if isinstance(reply, Failure):
            return reply
        self.wire.add(up=len(reply))
        try:
            message = messages.decode(reply, self.largest)
        except messages.WireError as error:
            return Failure(f"an unreadable answer: {error}", GARBAGE)
        sentence = plain(message.values.get("sentence"), 200)
        if message.kind == "refused" and message.values.get("question") is None:
            return Failure(f"the silo cannot read the question: {sentence}", GARBAGE)
        if message.values.get("question") != number:
            return Failure("an answer to another question", GARBAGE)
        if not anyone and message.values.get("silo") != name:
            return Failure("an answer in another silo's name", GARBAGE)
        if message.kind == "failed":
            return Failure(f"the silo failed: {sentence}", GARBAGE)
        if message.kind == "refused":
            waits = message.values.get("waits") is True
            return Failure(plain(message.values.get("sentence")), REFUSED, waits)
        if message.kind == "missing":
            return LACKS
        if message.kind != "answer":
            return Failure("an answer of an unknown kind", GARBAGE)
        return message


# --- what is certain about an answer: its format, and numbers beyond any use

HUGE = np.float64(1e100)  # larger numbers are refused: products of two would overflow
DOUBLE = np.dtype(np.float64)
SCALARS = "scalars"  # always float64; the first is a loss or a size, and finite
Shapes = Mapping[str, tuple[int, ...]]


def troubles(
    answers: Mapping[str, Message], shapes: Shapes, formats: Mapping[str, np.dtype[Any]]
) -> dict[str, str]:
    """Return why some silos' answers cannot be used.

    Numbers that are not finite are a silo's fault if others have finite ones. If nobody has, the
    run is diverging, and the training loop reports that.
    """
    malformed = {}
    infinite = {}
    wanted = {name: (shape, formats.get(name, DOUBLE)) for name, shape in shapes.items()}
    for name, answer in answers.items():
        if {part: (own.shape, own.dtype) for part, own in answer.arrays.items()} != wanted:
            malformed[name] = "its answer has other parts, shapes or formats than were asked for"
            continue
        for part, array in answer.arrays.items():
            # rounding bounds, which follow a loss, may be infinite
            if not np.all(np.abs(array[:1] if part == SCALARS else array) <= HUGE):
                infinite[name] = f"its {part!r} has an entry that is NaN or beyond {HUGE:g}"
    everybody = len(infinite) > 1 and len(malformed) + len(infinite) == len(answers)
    return malformed if everybody else malformed | infinite


# --- silos as a federation


@dataclass(frozen=True)
class Facts:
    """The silos' reports with the agreement."""

    names: tuple[str, ...]
    constants: Constants  # of their losses
    start: Array = field(repr=False)  # x⁰
    probes: Vector  # f_i at one arbitrary point, which identifies the data
    tested: NDArray[np.int64]  # how many rows each has held out


class RemoteChannel:
    """A `Channel` to silos behind a transport."""

    work = float("inf")
    absent = 0  # the run waits for a silo that does not answer
    keeps = True
    here = False
    account = None

    def __init__(self, session: Session, facts: Facts) -> None:
        self.session = session
        self.facts = facts
        self.names = facts.names
        self.like = torch.from_numpy(np.array(facts.start))
        # c_i of the questions that are still in use
        self._answers: WeakKeyDictionary[GradientsAt, dict[tuple[int, ...], Tensor]] = (
            WeakKeyDictionary()
        )

    @property
    def fingerprint(self) -> str:
        """Digest of the agreement and of the silos' constants, which change with their data."""
        known = self.facts.constants
        setup = self.session.setup
        columns = (known.smoothness, known.strong_convexity, known.steepest, known.samples)
        words = [f"{value:.6e}" for part in (*columns, self.facts.probes) for value in part]
        about = (tuple(self.names), "" if setup is None else setup.digest, words)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def constants(self) -> Constants:
        """Return the constants that silos reported with the agreement."""
        return self.facts.constants

    def start(self) -> Tensor:
        """Return the default x⁰."""
        return self.like

    def own(self, x: Tensor) -> None:
        """Do nothing: a silo makes its personal model itself."""

    def using(self, *_: object) -> NoReturn:
        """Refuse: strengths are part of what silos have agreed to."""
        raise InputError(
            "strengths-agreed", "The strengths of a deployed run are those of its agreement."
        )

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """Make one exchange."""
        if isinstance(question, Project):
            slopes = self._gradients(question.at, chosen) @ question.direction
            return Reply({"slope": lambda: slopes})
        if isinstance(question, Scores):
            return self.scores(question)
        shapes = question.shapes(len(self.like))
        if question.scalars:
            shapes["scalars"] = (len(question.scalars),)
        dtype = self.like.numpy().dtype
        formats = {part: dtype for part in question.vectors if shapes.get(part) == self.like.shape}
        parts = self.exchange(self.request(question, chosen), shapes, chosen, formats)
        vectors = {}
        for part in question.vectors & parts.keys():
            stack = parts[part].to(self.like)
            vectors[part] = Vectors(
                partial(_mixed, stack), partial(itself, stack), double_weights=True
            )
        if isinstance(question, GradientsAt):
            self._answers.setdefault(question, {})[tuple(chosen)] = vectors["c"].each()
        if isinstance(question, Curvature):  # slopes are computed from the stored c_i
            c = self._gradients(question.at, chosen)
            slopes = c @ question.V
            size = (c.square() / question.metric).sum(1)
            return Reply({"slopes": lambda: slopes, "size": lambda: size}, vectors)
        return Reply(columns_of(question, parts), vectors)

    def exchange(
        self,
        request: SiloRequest,
        shapes: Shapes,
        chosen: Sequence[int],
        formats: Mapping[str, np.dtype[Any]] | None = None,
    ) -> dict[str, Tensor]:
        """Return the checked answers of the chosen silos, stacked part by part."""
        names = [self.names[i] for i in chosen]
        answers = self.session.ask(request, names, lambda got: troubles(got, shapes, formats or {}))
        return {
            part: torch.from_numpy(np.stack([answers[name].arrays[part] for name in names]))
            for part in shapes
        }

    def request(self, question: Question, chosen: Sequence[int]) -> SiloRequest:
        """Return the question as a message, with the values that only the coordinator knows.

        A vector that the coordinator stores for a silo is subtracted from that silo's correction.
        """
        own: dict[str, dict[str, Tensor]] = {}
        if isinstance(question, LocalSteps) and isinstance(question.at, Tensor):
            c = torch.zeros_like(question.x) if question.correction is None else question.correction
            own = {
                self.names[i]: {"correction": c - row}
                for i, row in zip(chosen, question.at, strict=True)
            }
            question = replace(question, at=None, correction=None)
        if isinstance(question, ProximalSteps):
            known = self.facts.constants
            L = known.smoothness if question.at.batch_size is None else known.steepest
            steepest = max(question.plan.steepest, float(L[list(chosen)].max()))
            question = replace(question, plan=replace(question.plan, steepest=steepest))
        return SiloRequest.of(question, own)

    def _gradients(self, at: GradientsAt, chosen: Sequence[int]) -> Tensor:
        """Return the stored c_i of these silos."""
        stored = self._answers.get(at, {})
        if tuple(chosen) not in stored:
            raise InputError(
                "gradients-not-asked",
                "This question is about gradients that these silos have not been asked for.",
            )
        return stored[tuple(chosen)]

    def scores(self, question: Scores) -> Reply:
        """Return loss, accuracy and count per silo; NaN for a silo without held-out rows."""
        everyone = range(len(self.names))
        chosen = [i for i in everyone if question.split == "train" or self.facts.tested[i]]
        if not chosen:
            raise InputError(
                "no-held-out-rows", "No silo has held rows out: there is nothing to test on."
            )
        table = torch.tensor([[np.nan, np.nan, 0.0]] * len(everyone), dtype=torch.float64)
        request = self.request(question, chosen)
        table[chosen] = self.exchange(request, {"scalars": (3,)}, chosen)["scalars"]
        return Reply(columns_of(question, {"scalars": table}))


def itself(stack: Tensor) -> Tensor:
    """Return numbers that are already here."""
    return stack


def columns_of(question: Question, parts: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Return the question's scalars by name."""
    return {
        name: partial(itself, parts["scalars"][:, j]) for j, name in enumerate(question.scalars)
    }


def _mixed(stack: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w_i v_i, added up in double precision."""
    mixed: Tensor = torch.tensordot(weights.double(), stack.double(), dims=1)
    return mixed.to(stack.dtype)


class Remote(Federation):
    """N silos behind a transport; for `SecureAggregation` over a `MaskedRemote` channel."""

    channel: RemoteChannel

    def __init__(
        self, session: Session, facts: Facts, channel: type[RemoteChannel] = RemoteChannel
    ) -> None:
        super().__init__(channel(session, facts))

    def __repr__(self) -> str:
        return f"Remote federation of {len(self.names)} silos, {self.dimension} parameters"
