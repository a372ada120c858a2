"""One exchange with silos: send questions, and only the vectors that a site lacks; check who answers what."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from scaffpd.deploy.messages import (
    Array,
    Failure,
    Message,
    Setup,
    TensorNames,
    Transport,
    VectorCache,
    WireError,
    decode,
    encode,
    plain,
)
from scaffpd.deploy.questions import SPENT
from scaffpd.federation import Traffic

Replies = dict[str, Message | Failure]
LEAST_ROOM = 64 * 2**20  # descriptions of columns and categories are the largest replies before training


@dataclass(frozen=True)
class SiloRequest:
    """What is asked of several silos at once.

    Attributes:
        kind: see `needs`.
        values: the same for everybody.
        vectors: by their role; sent to those who lack them.
        own: further vectors, of one silo each, sent in any case.
        personal: values and arrays for one silo alone.
        arrays: matrices, sent in any case.
    """

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    personal: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Array]]] = field(default_factory=dict)


def answered(reply: Message | Failure) -> TypeGuard[Message]:
    """Whether it is an answer, and no refusal."""
    return isinstance(reply, Message) and reply.kind == "answer"


class Session:
    """Silos by their names, over a transport that knows sites.

    Attributes:
        wire: every byte of every message so far, evaluation and set-up included.
        barred: silos that are not listened to any more.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.wire = transport, Traffic()
        self.most = LEAST_ROOM  # bytes of a reply
        self.sites: dict[str, str] = {}
        self.barred: set[str] = set()
        self.setup: Setup | None = None
        self.taken: dict[str, Array] = {}  # what every silo said about its losses when it took the agreement
        self._shelves: dict[str, VectorCache] = {}
        self._name = TensorNames()

    def greet(self, timeout: float, present: Sequence[str] = ()) -> Replies:
        """Ask every connected site that is none of `present` who it is, and remember who is where."""
        taken = {self.sites[name] for name in (*present, *self.barred) if name in self.sites}
        sites = {site: site for site in self.transport.sites() if site not in taken}
        found: Replies = {}
        for site, reply in self._ask(dict.fromkeys(sites, SiloRequest("hello")), sites, timeout, anyone=True).items():
            name = site if isinstance(reply, Failure) else plain(reply.values.get("silo"), 200)
            if isinstance(reply, Message):
                reply = self._identified(site, name, reply, {*found, *present})
            if isinstance(reply, Message):
                self.sites[name] = site
            if name not in self.barred:
                found.setdefault(name, reply)
        return found

    def _identified(self, site: str, name: str, reply: Message, taken: set[str]) -> Message | Failure:
        """A site is who it says it is, unless somebody else is, or the engine's own certificates know better."""
        if name in taken:
            return Failure(f"a second site calls itself {name!r}")
        if getattr(self.transport, "named", False) and name != site:
            return Failure(f"the site {site!r} calls itself {name!r}")
        return reply

    def exchange(self, question: SiloRequest, names: Sequence[str], timeout: float) -> Replies:
        """Ask these silos; who lacks something is sent it and asked again, once."""
        sites = {name: self.sites[name] for name in names}
        replies = self._ask(dict.fromkeys(names, question), sites, timeout)
        lacking = [name for name, reply in replies.items() if isinstance(reply, Message) and reply.kind == "missing"]
        if lacking and self.setup is not None:
            for name in lacking:
                self._shelves.pop(name, None)
            setup = SiloRequest("setup", {"setup": self.setup.values()})
            again = self._ask(dict.fromkeys(lacking, setup), sites, timeout)
            again = {name: self._same(name, reply) for name, reply in again.items()}
            able = [name for name in lacking if answered(again[name])]
            replies |= again | self._ask(dict.fromkeys(able, question), sites, timeout)
        return replies

    def _same(self, name: str, reply: Message | Failure) -> Message | Failure:
        """A silo that takes the agreement once more must say the same about its losses as before."""
        if not answered(reply) or name not in self.taken:
            return reply
        same = np.array_equal(reply.arrays.get("constants", np.zeros(0)), self.taken[name])
        return reply if same else Failure("its data are not those that the run began with", garbage=True)

    def _ask(
        self, questions: Mapping[str, SiloRequest], sites: Mapping[str, str], timeout: float, anyone: bool = False
    ) -> Replies:
        """One turn: encode, carry, decode, and check that the answer is to this question and from this silo."""
        if not questions:
            return {}
        number, done, out = secrets.token_hex(8), {}, {}
        for name, question in questions.items():
            sent = self._parcel(name, question)
            key = (id(question), tuple(sent))
            if question.own.get(name) or name in question.personal or key not in done:
                done[key] = encode(self._message(name, question, sent, number))
            out[name] = done[key]
        self.wire.add(exchanges=1, down=sum(map(len, out.values())))
        carried = self.transport.ask({sites[name]: data for name, data in out.items()}, timeout)
        return {
            name: self._checked(name, carried.get(sites[name], Failure("no answer")), number, anyone)
            for name in questions
        }

    def _parcel(self, name: str, question: SiloRequest) -> dict[str, Array]:
        """The vectors that this silo lacks, by their names."""
        shelf = self._shelves.setdefault(name, VectorCache())
        sent = {}
        for tensor in (*question.vectors.values(), *question.own.get(name, {}).values()):
            label = self._name(tensor)
            if label not in shelf:
                sent[label] = tensor.detach().numpy()
            shelf.use(label)
        return sent

    def _message(self, name: str, question: SiloRequest, sent: Mapping[str, Array], number: str) -> Message:
        roles = {**question.vectors, **question.own.get(name, {})}
        more, arrays = question.personal.get(name, ({}, {}))
        values = {**question.values, **more, "question": number}
        if roles or question.kind in ("start", SPENT):
            assert self.setup is not None
            values |= {"setup": self.setup.digest, "vectors": {role: self._name(v) for role, v in roles.items()}}
        return Message(question.kind, values, {**sent, **question.arrays, **arrays})

    def _checked(self, name: str, reply: bytes | Failure, number: str, anyone: bool) -> Message | Failure:
        if isinstance(reply, Failure):
            self._shelves.pop(name, None)
            return reply
        self.wire.add(up=len(reply))
        try:
            message = decode(reply, self.most)
        except WireError as error:
            return Failure(f"an unreadable answer: {error}", garbage=True)
        if message.values.get("question") != number:
            return Failure("an answer to another question", garbage=True)
        if not anyone and message.values.get("silo") != name:
            return Failure(f"an answer in the name of {plain(message.values.get('silo'))!r}", garbage=True)
        if message.kind not in ("answer", "missing", "refused", "failed"):
            return Failure("an answer of an unknown kind", garbage=True)
        if message.kind == "failed":
            return Failure(f"the silo failed: {plain(message.values.get('sentence'), 200)}")
        return message
