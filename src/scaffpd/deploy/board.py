"""The board: it keeps what silos post at every step, and shows it to all. It chooses nothing.

The coordinator's `Board` knows names, steps and bytes. It asks the first silo for its next post,
shows that to all, collects the posts of all, and so on; what they mean it need not know. A silo's
`Mailbox` connects the program that runs there, in a thread, with the engine's calls.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from scaffpd.deploy.messages import (
    REFUSED,
    Failure,
    JsonMapping,
    Message,
    Transport,
    WireError,
    decode,
    encode,
    plain,
)
from scaffpd.deploy.refusals import TABLE_BUSY
from scaffpd.deploy.transcript import FIRST
from scaffpd.errors import InputError
from scaffpd.federation import Traffic

BEGIN = "begin"  # the agreement, and the epoch's name
NEWS = "news"  # posts of steps
POST = "post"  # a silo's own next post
WAIT = "wait"  # it needs others' posts
BUSY = "busy"  # it computes
DONE = "done"
LEAVE = "leave"  # the epoch has ended: the rows are free for other runs
LOST = "lost"  # it was restarted, and knows nothing of this epoch
LEAVE_SECONDS = 5.0
STEP = re.compile("[0-9]{1,9}")  # in names of arrays
Posts = Mapping[str, bytes]


class Abandoned(Exception):
    """The epoch has ended: another one has begun, or the silo stops."""


class Mailbox:
    """A silo's side of the board, and a `Link`; it waits `patience` seconds for others' posts."""

    def __init__(self, patience: float | None = None) -> None:
        self._changed = threading.Condition()
        self._log: list[Posts] = []
        self._own: tuple[int, str, bytes | None] | None = None
        self._closed = False
        self._patience = patience
        self.failure: BaseException | None = None
        self.ended = False

    def exchange(self, step: int, senders: str, own: bytes | None) -> Posts:
        """Post at a step, once, and wait for the others."""
        with self._changed:
            self._own = step, senders, own
            self._changed.notify_all()
            there = self._changed.wait_for(
                lambda: self._closed or len(self._log) > step, self._patience
            )
            if self._closed:
                raise Abandoned
            if not there:
                raise InputError("post-missing", f"Nobody has shown the posts of step {step}.")
            return self._log[step]

    def start(self, program: Callable[[], object]) -> threading.Thread:

        def run() -> None:
            try:
                program()
            except BaseException as error:
                self.failure = error
            with self._changed:
                self.ended = True
                self._changed.notify_all()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def close(self, seconds: float = 0.0) -> None:
        """End the program at its next exchange, and wait so many seconds for that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.ended, seconds)

    def show(self, start: int, news: Sequence[Posts]) -> None:
        """Take the posts of steps from `start` on; what is known already stays as it is."""
        with self._changed:
            for step, posts in enumerate(news, start):
                if step == len(self._log) and not (self._closed or self.ended):
                    self._log.append(posts)
            self._changed.notify_all()

    def next(self, seconds: float) -> Message:
        """Return the program's next post; a repeated question gets the same bytes."""

        def ready() -> bool:
            return self.ended or (self._own is not None and self._own[0] >= len(self._log))

        with self._changed:
            if not self._changed.wait_for(ready, seconds):
                return Message(BUSY)
            if self.ended:
                return Message(DONE)
            assert self._own is not None
            step, senders, own = self._own
            if own is None:
                return Message(WAIT)
            post = np.frombuffer(own, np.uint8)
            return Message(POST, {"step": step, "senders": senders}, {POST: post})


def written(start: int, log: Sequence[Posts], epoch: str) -> bytes:
    """Write the news of steps from `start` on."""
    arrays = {
        f"{step}:{name}": np.frombuffer(post, np.uint8)
        for step, posts in enumerate(log[start:], start)
        for name, post in posts.items()
    }
    return encode(Message(NEWS, {"epoch": epoch, "start": start, "end": len(log)}, arrays))


def read_news(message: Message) -> tuple[int, list[Posts]]:
    start = message.values.get("start")
    end = message.values.get("end")
    malformed = WireError("not-a-message", "The news of the board cannot be read.")
    most = len(message.arrays)  # every step has a post
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= start + most:
        raise malformed
    news: list[dict[str, bytes]] = [{} for _ in range(end - start)]
    for name, array in message.arrays.items():
        step, _, silo = name.partition(":")
        if not STEP.fullmatch(step) or not start <= int(step) < end:
            raise malformed
        news[int(step) - start][silo] = array.tobytes()
    return start, list[Posts](news)


class SiloTrouble(Exception):
    """A silo without which the run cannot go on: absent, refusing, or restarted."""

    def __init__(self, name: str, failure: Failure) -> None:
        says = "did not answer"
        if failure.what == REFUSED:
            says = "refuses for now" if failure.waits else "refuses"
        super().__init__(f"Silo {name!r} {says}: {plain(failure.reason).rstrip('.')}.")
        self.name = name
        self.failure = failure


@dataclass(eq=False)
class Board:
    """The coordinator's side: it carries posts, and shows them to an onlooker of its own."""

    transport: Transport
    names: Sequence[str]
    timeout: float  # seconds that a silo has to say that it is busy
    wire: Traffic = field(default_factory=Traffic)
    log: list[Posts] = field(default_factory=list, init=False)
    _seen: dict[str, int] = field(default_factory=dict, init=False)
    _in_turn: bool = field(default=False, init=False)
    _begun: list[str] = field(default_factory=list, init=False)  # or asked to
    _epoch: str = field(default="", init=False)
    _awaited: tuple[str, ...] = field(default=(), init=False)  # whose operator has not agreed yet

    def begin(self, agreement: JsonMapping, states: Sequence[Sequence[object]]) -> None:
        """Open an epoch at all silos; raise `SiloTrouble` unless all take part."""
        self._epoch = secrets.token_hex(16)
        self.log.clear()
        self._begun.clear()
        self._seen = dict.fromkeys(self.names, 0)
        values = {"agreement": agreement, "epoch": self._epoch, "states": states}
        begin = encode(Message(BEGIN, values))
        others = [name for name in self.names if name not in self._awaited]
        # Two runs over the same tables would each hold some of them and wait for the rest: once one
        # was busy, silos begin in the order of their names, which is the same for both runs.
        then = [[name] for name in sorted(others)] if self._in_turn else [others]
        for names in filter(None, (self._awaited, *then)):  # nobody begins while a person decides
            self._awaited = ()
            self._begun += names
            self.asked(dict.fromkeys(names, begin))
        self._in_turn = False

    def leave(self, but: str = "") -> None:
        """Let silos go that have begun, but for one that cannot: others may run over their rows."""
        names = [name for name in self._begun if name != but]
        left = encode(Message(LEAVE, {"epoch": self._epoch}))
        with suppress(Exception):  # the engine may have ended
            if names:
                self.transport.ask(dict.fromkeys(names, left), min(self.timeout, LEAVE_SECONDS))

    def run(self, onlooker: Mailbox) -> None:
        first = self.names[0]
        found = self._next([first])
        while found[first].kind != DONE:
            missing = [name for name in self.names if name not in found]
            if found[first].values["senders"] != FIRST:
                found |= self._next(missing)
            waits = [name for name, reply in found.items() if reply.kind != POST]
            alone = found[first].values["senders"] == FIRST
            if waits and not alone:
                why = Failure("it does not take the step that the others take", REFUSED)
                raise SiloTrouble(waits[0], why)
            names = [first] if alone else self.names
            self.log.append({name: found[name].arrays[POST].tobytes() for name in names})
            onlooker.show(len(self.log) - 1, self.log[-1:])
            if onlooker.failure is not None:
                raise onlooker.failure
            found = self._next(self.names if alone else [first])
        for name in self.names[1:]:
            if self._next([name])[name].kind != DONE:
                raise SiloTrouble(name, Failure("it has not ended with the others", REFUSED))

    def _next(self, names: Sequence[str]) -> dict[str, Message]:
        """Return the next posts of these silos, once they have heard all news."""
        found: dict[str, Message] = {}
        while left := [name for name in names if name not in found]:
            replies = self.asked(
                {name: written(self._seen[name], self.log, self._epoch) for name in left}
            )
            for name, reply in replies.items():
                self._seen[name] = len(self.log)
                if reply.kind == LOST:
                    raise SiloTrouble(name, Failure("it was restarted"))
                if reply.kind == POST and not self._usable(name, reply):
                    raise SiloTrouble(name, Failure("its post cannot be used"))
                if reply.kind != BUSY:
                    found[name] = reply
        return found

    def _usable(self, name: str, reply: Message) -> bool:
        post = reply.arrays.get(POST)
        return (
            reply.values.get("step") == len(self.log)
            and (reply.values.get("senders") != FIRST or name == self.names[0])
            and post is not None
            and post.dtype == np.uint8
        )

    def asked(self, questions: Mapping[str, bytes]) -> dict[str, Message]:
        """Ask silos; raise `SiloTrouble` for one that fails or refuses."""
        found = {}
        self.wire.add(exchanges=1, down=sum(map(len, questions.values())))
        replies = self.transport.ask(questions, self.timeout)
        for name in questions:
            reply = replies[name]
            if isinstance(reply, Failure):
                raise SiloTrouble(name, reply)
            self.wire.add(up=len(reply))
            try:
                found[name] = decode(reply)
            except WireError as error:
                raise SiloTrouble(name, Failure(f"an unreadable answer: {error}")) from None
            if found[name].kind == REFUSED:
                values = found[name].values
                waits = values.get("waits") is True
                busy = values.get("code") == TABLE_BUSY
                self._in_turn = self._in_turn or busy
                self._awaited = (name,) if waits and not busy else ()
                raise SiloTrouble(name, Failure(plain(values.get("sentence")), REFUSED, waits))
        return found
