r"""`Session` exchanges messages with silos and sends only what a site lacks; `Membership` is the rule for absent ones.

While silo i does not answer, a lower bound from its last answer (L_i, c_i) at y_i replaces its loss,

    f̃_i(x) = L_i + ⟨c_i, x − y_i⟩ + (μ_i/2)‖x − y_i‖² ≤ f_i(x),    ∇f̃_i(x) = c_i + μ_i (x − y_i),

in the dual step and in c. (With L_i and c_i frozen, losses would not change as their gradients predict, and a step rule
that compares the two could accept no step.) Local steps on f̃_i give d_i = (1 − (1 − η_i μ_i)^J)/μ_i · c, which is J η_i
c, a plain gradient step, for small μ_i. Methods without a correction c leave the silo out of their average, as if it
had not been drawn. Meanwhile nothing is certified, as the loss is unknown.

An absent silo is probed after 1, 2, 4, 8 … rounds (later with every further absence). When it is back, or is dropped
after more than `max_age` rounds, a new segment starts from the current x, and its certificate covers the silos
present. If the policy says so, the run pauses instead until all are back. Below the quorum it always pauses.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from scaffpd.deploy import messages
from scaffpd.deploy.messages import (
    GARBAGE,
    REFUSED,
    Array,
    Failure,
    Message,
    Transport,
    VectorCache,
    plain,
)
from scaffpd.errors import InputError
from scaffpd.federation import Traffic
from scaffpd.federation.questions import QUESTIONS, Question
from scaffpd.run.settings.federation import PAUSE, STRIKES, FaultPolicy
from scaffpd.run.settings.model_file import Setup

Replies = dict[str, Message | Failure]  # answers, or why there is none
LACKS = Failure("it lacks what it was just sent")  # a restarted silo
QUARANTINED = "quarantined"
TOGETHER = "all silos"  # the name under which masked sums are kept
LARGEST_REPLY = 64 * 2**20  # bytes before training: descriptions of columns and categories


@dataclass(frozen=True)
class SiloRequest:
    """A question to several silos at once."""

    kind: str  # see `Question` and `messages`
    values: Mapping[str, Any] = field(default_factory=dict)  # the same for all silos
    vectors: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # by their role; sent to silos that lack them
    # further vectors, of one silo each, always sent
    own: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)  # matrices, always sent

    @classmethod
    def of(
        cls, question: Question, own: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> SiloRequest:
        """Write a question of the `Federation` interface as a request."""
        values, vectors, arrays = messages.question_parts(question)
        return cls(question.kind, values, vectors, own or {}, arrays)


NamedVectors = dict[str, tuple[str, Array]]  # by their roles: a name and the numbers


@dataclass(eq=False, repr=False)
class Session:
    """Silos by name, over a transport that addresses sites."""

    transport: Transport
    wire: Traffic = field(
        default_factory=Traffic
    )  # bytes of all messages so far, including evaluation and set-up
    largest: int = LARGEST_REPLY  # the most bytes of a reply
    sites: dict[str, str] = field(default_factory=dict)
    asks: Mapping[str, Any] = field(
        default_factory=dict
    )  # the run's request, for silos to consent to
    barred: set[str] = field(default_factory=set)  # silos whose answers are ignored
    setup: Setup | None = None  # the agreement
    # every silo's report about its losses with the agreement, and its number of rows
    constants: dict[str, Array] = field(default_factory=dict)
    # Σ ‖a‖² over the standardised rows of every silo, or of all silos, from sums over columns
    spread: dict[str, float] = field(default_factory=dict)
    _sent: dict[str, VectorCache] = field(default_factory=dict)
    _prefix: str = field(default_factory=partial(secrets.token_hex, 8))

    def greet(self, timeout: float, present: Sequence[str] = ()) -> Replies:
        """Ask every connected site outside `present` for its silo's name, and store the names."""
        known = {self.sites[name] for name in (*present, *self.barred) if name in self.sites}
        sites = {site: site for site in self.transport.sites() if site not in known}
        found: Replies = {}
        for site, reply in self._ask(SiloRequest("hello"), sites, timeout, anyone=True).items():
            name = site
            if isinstance(reply, Message):
                name = plain(reply.values.get("silo"), 200)
                if name in found or name in present:
                    reply = Failure(f"a second site calls itself {name!r}")
                elif getattr(self.transport, "named", False) and name != site:
                    reply = Failure(f"the site {site!r} calls itself {name!r}")
                else:
                    self.sites[name] = site
            if name not in self.barred:
                found.setdefault(name, reply)
        return found

    def exchange(self, request: SiloRequest, names: Sequence[str], timeout: float) -> Replies:
        """Ask these silos; if one lacks something, send it the agreement and ask once more."""
        sites = {name: self.sites[name] for name in names}
        replies = self._ask(request, sites, timeout)
        lacking = {name: sites[name] for name, reply in replies.items() if reply is LACKS}
        if lacking and self.setup is not None:
            for name in lacking:
                self._sent.pop(name, None)
            setup = SiloRequest("setup", {"setup": self.setup.values()})
            again = {
                n: self._same(n, reply) for n, reply in self._ask(setup, lacking, timeout).items()
            }
            able = {name: sites[name] for name in lacking if isinstance(again[name], Message)}
            replies |= again | self._ask(request, able, timeout)
        return replies

    def _same(self, name: str, reply: Message | Failure) -> Message | Failure:
        """Fail a silo whose report about its losses differs when it accepts the agreement again."""
        if isinstance(reply, Failure) or name not in self.constants:
            return reply
        rows = reply.values.get("samples")
        now = np.append(
            reply.arrays.get("constants", np.zeros(0)), rows if isinstance(rows, int) else np.nan
        )
        same = np.array_equal(now, self.constants[name])
        return reply if same else Failure("its data are not those that the run began with", GARBAGE)

    def _ask(
        self, request: SiloRequest, sites: Mapping[str, str], timeout: float, anyone: bool = False
    ) -> Replies:
        """Encode, send, decode, and check that the answer is for this question and from this silo."""
        if not sites:
            return {}
        number = secrets.token_hex(8)
        encoded = dict[tuple[str, ...], bytes]()
        out = {}
        shared = self._named(request.vectors)
        for name, site in sites.items():
            own = self._named(request.own.get(name, {}))
            roles = shared | own
            lacking = self._lacking(name, roles)
            key = (name,) if own else ("", *lacking)
            if key not in encoded:
                encoded[key] = messages.encode(self._message(request, roles, lacking, number))
            out[site] = encoded[key]
        self.wire.add(exchanges=1, down=sum(map(len, out.values())))
        carried = self.transport.ask(out, timeout)
        return {
            n: self._checked(n, carried.get(s, Failure("no answer")), number, anyone)
            for n, s in sites.items()
        }

    def _named(self, vectors: Mapping[str, Tensor]) -> NamedVectors:
        """Name vectors by their contents and by this session, so that names of two sessions never collide."""
        names = {
            role: f"{self._prefix}-{messages.vector_digest(vector)}"
            for role, vector in vectors.items()
        }
        return {role: (names[role], vector.detach().numpy()) for role, vector in vectors.items()}

    def _lacking(self, name: str, roles: NamedVectors) -> dict[str, Array]:
        """Return the vectors that this silo lacks, by their names."""
        cache = self._sent.setdefault(name, VectorCache())
        lacking = {}
        for label, array in roles.values():
            if label not in cache:
                lacking[label] = array
            cache.use(label)
        return lacking

    def _message(
        self, request: SiloRequest, roles: NamedVectors, lacking: Mapping[str, Array], number: str
    ) -> Message:
        values = {**request.values, "question": number}
        if self.asks and request.kind in messages.ASKING:
            values["asks"] = self.asks
        if self.setup is not None and (
            roles or request.kind in ("start", messages.SPENT, *QUESTIONS)
        ):
            values |= {
                "setup": self.setup.digest,
                "vectors": {role: label for role, (label, _) in roles.items()},
            }
        return Message(request.kind, values, {**lacking, **request.arrays})

    def _checked(
        self, name: str, reply: bytes | Failure, number: str, anyone: bool
    ) -> Message | Failure:
        if isinstance(reply, Failure):
            self._sent.pop(name, None)
            return reply
        self.wire.add(up=len(reply))
        try:
            message = messages.decode(reply, self.largest)
        except messages.WireError as error:
            return Failure(f"an unreadable answer: {error}", GARBAGE)
        unread = (
            message.kind == "refused" and message.values.get("question") is None
        )  # not even the number
        if message.values.get("question") != number and not unread:
            return Failure("an answer to another question", GARBAGE)
        if not anyone and message.values.get("silo") != name:
            return Failure(
                f"an answer in the name of {plain(message.values.get('silo'))!r}", GARBAGE
            )
        if message.kind not in ("answer", "missing", "refused", "failed"):
            return Failure("an answer of an unknown kind", GARBAGE)
        if message.kind == "failed" or unread:
            what = "cannot read the question" if unread else "failed"
            words = f"the silo {what}: {plain(message.values.get('sentence'), 200)}"
            return Failure(words, GARBAGE) if unread else Failure(words, failed=True)
        if message.kind == "refused":
            return Failure(
                plain(message.values.get("sentence")),
                REFUSED,
                waits=message.values.get("waits") is True,
            )
        return LACKS if message.kind == "missing" else message


@dataclass(frozen=True)
class SiloEvent:
    """An event of a silo: it left, came back, was dropped or quarantined."""

    round: int
    client: str
    what: str
    sentence: str


class Paused(Exception):
    """Too few silos are left; the run pauses after its last finished round."""


class MembershipChange(Exception):
    """The members of the run change; `names` are the silos that cause it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class Lost(MembershipChange):
    """Silos are absent for longer than the policy allows, or without an answer to replace them by."""


class Returned(MembershipChange):
    """Silos are back."""


class Quarantined(MembershipChange):
    """Silos have given impossible answers and are not asked again."""

    @classmethod
    def accuse(
        cls,
        names: Sequence[str],
        verdicts: Mapping[int, str],
        number: int,
        record: Callable[[SiloEvent], None],
    ) -> None:
        """Record the accused silos with the failed test and its numbers, and end the segment."""
        for i, why in verdicts.items():
            record(
                SiloEvent(
                    number, names[i], QUARANTINED, f"Silo {names[i]!r} is quarantined: {why}."
                )
            )
        if verdicts:
            raise cls([names[i] for i in verdicts])


@dataclass(eq=False)
class Membership:
    """The members of a segment, and for how many rounds the absent ones have not answered."""

    session: Session  # with all silos
    members: Sequence[str]  # silos whose losses make up the objective
    policy: FaultPolicy  # what to do about the absent
    record: Callable[[SiloEvent], None]  # takes every event
    dropped: Sequence[str] = ()  # former members that may come back
    absences: Counter[str] = field(default_factory=Counter)  # how often each silo was absent so far
    strikes: Counter[str] = field(
        default_factory=Counter
    )  # how many of its answers were unusable or refusals
    absent: set[str] = field(default_factory=set)
    round: int = 0
    ending: bool = False  # whether only the final tables still depend on answers
    _welcomed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.age = dict.fromkeys([*self.members, *self.dropped], 0)

    @property
    def present(self) -> list[str]:
        """Members that answered their last question."""
        return [name for name in self.members if name not in self.absent]

    def ask(
        self,
        question: SiloRequest,
        names: Sequence[str],
        check: Callable[[Mapping[str, Message]], Mapping[str, str]] = lambda _: {},
    ) -> dict[str, Message]:
        """Ask the present silos among `names`; mark those without an answer that passes `check` as absent."""
        asked = [name for name in names if name not in self.absent]
        replies = self.session.exchange(question, asked, self.policy.timeout) if asked else {}
        self._refused(replies)
        answers = {name: reply for name, reply in replies.items() if isinstance(reply, Message)}
        troubles = check(answers)
        for name, reply in replies.items():
            if isinstance(reply, Failure):
                self.leave(name, reply.what, reply.reason, reply.failed)
            elif name in troubles:
                self.leave(name, GARBAGE, troubles[name])
        self._check_quorum()
        return {name: answer for name, answer in answers.items() if name not in troubles}

    def _refused(self, replies: Replies) -> None:
        """Raise an error if all silos refuse: the question is the coordinator's mistake."""
        refusals = [
            reply
            for reply in replies.values()
            if isinstance(reply, Failure) and reply.what == REFUSED
        ]
        if len(refusals) == len(replies) >= min(2, len(self.members)):
            raise InputError(
                "silo-refuses", f"Silo {next(iter(replies))!r} refuses: {refusals[0].reason}"
            )

    def leave(self, name: str, what: str, reason: str, failed: bool = False) -> None:
        """Mark a silo as absent, record why, and count a strike unless it was merely absent."""
        self.absent.add(name)
        self.absences[name] += 1
        self.strikes[name] += failed or what != "absent"
        words = plain(reason).rstrip(".")
        self.record(
            SiloEvent(self.round, name, what, f"Silo {name!r} does not take part: {words}.")
        )

    def _check_quorum(self) -> None:
        if len(self.present) < self.policy.quorum and not self.ending:
            left = ", ".join(self.present) or "nobody"
            raise Paused(f"Fewer than {self.policy.quorum} silos answer (there: {left}).")

    def finish_round(self, number: int) -> None:
        """Count a round of absence; probe absent silos, and drop those absent for too long."""
        self.round = number
        away = {*self.absent, *self.dropped}
        self.age = {name: age + 1 if name in away else 0 for name, age in self.age.items()}
        if any(self._due(name) for name in away) and (back := self.welcome()):
            raise Returned(back)
        old = [name for name in self.members if self.age[name] > self.policy.max_age]
        if old and self.policy.missing == PAUSE:
            raise Paused(f"Silo {old[0]!r} has given no answer for {self.age[old[0]]} rounds.")
        if old:
            raise Lost(old)

    def _due(self, name: str) -> bool:
        """Return whether to probe an absent silo (exponential back-off)."""
        age = self.age[name]
        return (
            age & (age - 1) == 0
            and age >= 2 ** (self.absences[name] - 1)
            and self.strikes[name] < self._patience
        )

    @property
    def _patience(self) -> int:
        """Number of unusable answers that rule a silo out: one if sums are masked, as every return costs sums."""
        setup = self.session.setup
        masked = setup is not None and bool(setup.secure)
        return 1 if masked and self.policy.missing != PAUSE else STRIKES

    def welcome(self) -> list[str]:
        """Return the absent and dropped silos that are back, except those with too many unusable answers."""
        replies = self.session.greet(self.policy.probe, self.present)
        away = {
            name for name in {*self.absent, *self.dropped} if self.strikes[name] < self._patience
        }
        back = [
            name for name, reply in replies.items() if name in away and isinstance(reply, Message)
        ]
        for name in back:
            if name in self._welcomed:
                continue
            self._welcomed |= {name} & set(self.dropped)
            self.absent.discard(name)
            self.record(SiloEvent(self.round, name, "back", f"Silo {name!r} is back."))
        return back
