"""One exchange with silos: send questions, and only the vectors that a site lacks; check who answers what."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from scaffpd.config.model_file import Setup
from scaffpd.deploy import messages
from scaffpd.deploy.messages import GARBAGE, REFUSED, Array, Failure, Message, Transport, VectorCache, decode, plain
from scaffpd.federation import Traffic
from scaffpd.federation.questions import QUESTIONS, Question

Replies = dict[str, Message | Failure]  # answers, or why there is none
LACKS = Failure("it lacks what it was just sent")  # a silo that was started anew
LARGEST_REPLY = 64 * 2**20  # bytes before training: descriptions of columns and categories


@dataclass(frozen=True)
class SiloRequest:
    """A question to several silos at once."""

    kind: str  # see `Question` and `messages`
    values: Mapping[str, Any] = field(default_factory=dict)  # the same for everybody
    vectors: Mapping[str, Tensor] = field(default_factory=dict)  # by their role; sent to those who lack them
    # further vectors, of one silo each, always sent
    own: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)  # matrices, always sent

    @classmethod
    def of(cls, question: Question, own: Mapping[str, Mapping[str, Tensor]] | None = None) -> SiloRequest:
        """A question of the waist, in these parts."""
        values, vectors, arrays = messages.question_parts(question)
        return cls(question.kind, values, vectors, own or {}, arrays)


NamedVectors = dict[str, tuple[str, Array]]  # by their roles: a name and the numbers


@dataclass(eq=False, repr=False)
class Session:
    """Silos by their names, over a transport that knows sites."""

    transport: Transport
    wire: Traffic = field(default_factory=Traffic)  # every byte of every message so far, evaluation and set-up included
    largest: int = LARGEST_REPLY  # the most bytes of a reply
    sites: dict[str, str] = field(default_factory=dict)
    asks: Mapping[str, Any] = field(default_factory=dict)  # what the run is, for silos to consent to
    barred: set[str] = field(default_factory=set)  # silos whose answers are ignored from now on
    setup: Setup | None = None  # the agreement
    # what every silo said about its losses when it took the agreement, and how many rows it has
    constants: dict[str, Array] = field(default_factory=dict)
    # Σ ‖a‖² over the standardised rows of every silo, or of all silos, as sums over columns have it
    spread: dict[str, float] = field(default_factory=dict)
    _sent: dict[str, VectorCache] = field(default_factory=dict)
    _prefix: str = field(default_factory=partial(secrets.token_hex, 8))

    def greet(self, timeout: float, present: Sequence[str] = ()) -> Replies:
        """Ask every connected site that is none of `present` who it is, and remember who is where."""
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
        """Ask these silos; send those that lack something the agreement, and ask them again, once."""
        sites = {name: self.sites[name] for name in names}
        replies = self._ask(request, sites, timeout)
        lacking = {name: sites[name] for name, reply in replies.items() if reply is LACKS}
        if lacking and self.setup is not None:
            for name in lacking:
                self._sent.pop(name, None)
            setup = SiloRequest("setup", {"setup": self.setup.values()})
            again = {n: self._same(n, reply) for n, reply in self._ask(setup, lacking, timeout).items()}
            able = {name: sites[name] for name in lacking if isinstance(again[name], Message)}
            replies |= again | self._ask(request, able, timeout)
        return replies

    def _same(self, name: str, reply: Message | Failure) -> Message | Failure:
        """Fail a silo that takes the agreement once more and says something else about its losses than before."""
        if isinstance(reply, Failure) or name not in self.constants:
            return reply
        rows = reply.values.get("samples")
        now = np.append(reply.arrays.get("constants", np.zeros(0)), rows if isinstance(rows, int) else np.nan)
        same = np.array_equal(now, self.constants[name])
        return reply if same else Failure("its data are not those that the run began with", GARBAGE)

    def _ask(self, request: SiloRequest, sites: Mapping[str, str], timeout: float, anyone: bool = False) -> Replies:
        """Encode, carry, decode, and check that the answer is to this question and from this silo."""
        if not sites:
            return {}
        number, encoded, out = secrets.token_hex(8), dict[tuple[str, ...], bytes](), {}
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
        return {n: self._checked(n, carried.get(s, Failure("no answer")), number, anyone) for n, s in sites.items()}

    def _named(self, vectors: Mapping[str, Tensor]) -> NamedVectors:
        """Name vectors by their contents; those of another coordinator, or of an earlier one, are never the same."""
        arrays = {role: vector.detach().numpy() for role, vector in vectors.items()}
        return {role: (f"{self._prefix}-{messages.digest(array)}", array) for role, array in arrays.items()}

    def _lacking(self, name: str, roles: NamedVectors) -> dict[str, Array]:
        """Return the vectors that this silo lacks, by their names."""
        cache, lacking = self._sent.setdefault(name, VectorCache()), {}
        for label, array in roles.values():
            if label not in cache:
                lacking[label] = array
            cache.use(label)
        return lacking

    def _message(self, request: SiloRequest, roles: NamedVectors, lacking: Mapping[str, Array], number: str) -> Message:
        values = {**request.values, "question": number}
        if self.asks and request.kind in messages.ASKING:
            values["asks"] = self.asks
        if self.setup is not None and (roles or request.kind in ("start", messages.SPENT, *QUESTIONS)):
            values |= {"setup": self.setup.digest, "vectors": {role: label for role, (label, _) in roles.items()}}
        return Message(request.kind, values, {**lacking, **request.arrays})

    def _checked(self, name: str, reply: bytes | Failure, number: str, anyone: bool) -> Message | Failure:
        if isinstance(reply, Failure):
            self._sent.pop(name, None)
            return reply
        self.wire.add(up=len(reply))
        try:
            message = decode(reply, self.largest)
        except messages.WireError as error:
            return Failure(f"an unreadable answer: {error}", GARBAGE)
        unread = message.kind == "refused" and message.values.get("question") is None  # not even its number
        if message.values.get("question") != number and not unread:
            return Failure("an answer to another question", GARBAGE)
        if not anyone and message.values.get("silo") != name:
            return Failure(f"an answer in the name of {plain(message.values.get('silo'))!r}", GARBAGE)
        if message.kind not in ("answer", "missing", "refused", "failed"):
            return Failure("an answer of an unknown kind", GARBAGE)
        if message.kind == "failed" or unread:
            what = "cannot read the question" if unread else "failed"
            words = f"the silo {what}: {plain(message.values.get('sentence'), 200)}"
            return Failure(words, GARBAGE) if unread else Failure(words, failed=True)
        if message.kind == "refused":
            return Failure(plain(message.values.get("sentence")), REFUSED, waits=message.values.get("waits") is True)
        return LACKS if message.kind == "missing" else message
