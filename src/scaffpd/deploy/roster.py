r"""Who is there, who is not, and since when: the rule by which a run survives the loss of a silo.

While silo i does not answer,
- its last (L_i, c_i) stay in the dual step and in c;
- its local update is that of a silo whose gradient stays what it was: u ← u − η_i (c_i − c_i + c), so d_i = J η_i c, a
  plain gradient step; methods without a correction c leave it out of their average, as if it had not been drawn;
- nothing is certified, for its loss at the new x is not known;
- it is asked after each of 1, 2, 4, 8 … rounds whether it is back.
After `max_age` rounds the policy decides: it is dropped, and the others start a new segment from the x that is reached,
whose certificate is about those present; or the run pauses until it is back. Below the quorum it pauses in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scaffpd.deploy.line import Line, Question, Replies, answered
from scaffpd.deploy.transport import Failure
from scaffpd.deploy.wire import Message
from scaffpd.errors import InputError, count, positive, unknown

DROP, PAUSE = "drop", "pause"
STRIKES = 3  # answers that cannot be used, or refusals, after which a silo is not asked again


@dataclass(frozen=True)
class Policy:
    """What a federation does about silos that do not answer.

    Args:
        quorum: the fewest silos with which a run goes on.
        timeout: seconds that a silo has for an answer.
        max_age: rounds for which an absent silo's last answers stand in for it.
        missing: what comes after that, "drop" or "pause".
        start_timeout: seconds to wait for all silos before a run starts (or goes on) without some of them.
        probe: seconds that an absent silo has to say that it is back.
    """

    quorum: int = 2
    timeout: float = 60.0
    max_age: int = 3
    missing: str = DROP
    start_timeout: float = 120.0
    probe: float = 10.0

    def __post_init__(self) -> None:
        count("faults", "quorum", self.quorum)
        for name in ("timeout", "start_timeout", "probe"):
            positive("faults", name, getattr(self, name))
        if isinstance(self.max_age, bool) or not isinstance(self.max_age, int) or self.max_age < 0:
            raise InputError(f"faults needs a whole number max_age >= 0, got {self.max_age!r}.")
        if self.missing not in (DROP, PAUSE):
            raise unknown("policy for missing silos", self.missing, (DROP, PAUSE))


@dataclass(frozen=True)
class Event:
    """Something that happened to a silo."""

    round: int
    silo: str
    what: str
    sentence: str


class Paused(Exception):
    """Too few silos are there to go on; the last finished round is what counts."""


class Lost(Exception):
    """Silos are gone for which no earlier answer can stand in, or for longer than the policy allows."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class Returned(Exception):
    """Silos that had been dropped are back: there is a new segment with them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class Roster:
    """The members of a run, which of them are absent, and for how many rounds they have not answered.

    Args:
        line: to all silos.
        members: whose losses make up the objective.
        policy: what to do about the absent.
        record: takes every event.
        dropped: silos that are no members, and would be if they were back.
    """

    def __init__(
        self,
        line: Line,
        members: Sequence[str],
        policy: Policy,
        record: Callable[[Event], None],
        dropped: Sequence[str] = (),
    ) -> None:
        self.line, self.members, self.policy, self.record = line, tuple(members), policy, record
        self.absent: set[str] = set()
        self.age = dict.fromkeys([*members, *dropped], 0)
        self.round = 0
        self._dropped, self._failed = tuple(dropped), set[str]()
        self._strikes: Counter[str] = Counter()

    @property
    def present(self) -> list[str]:
        """Those who answered when they were last asked."""
        return [name for name in self.members if name not in self.absent]

    def ask(
        self,
        question: Question,
        names: Sequence[str],
        check: Callable[[Mapping[str, Message]], Mapping[str, str]] = lambda _: {},
    ) -> dict[str, Message]:
        """The answers of those among `names` who are present; who gives none, or one that fails `check`, is absent."""
        asked = [name for name in names if name not in self.absent]
        replies = self.line.exchange(question, asked, self.policy.timeout) if asked else {}
        self._refused(replies)
        answers = {name: reply for name, reply in replies.items() if answered(reply)}
        troubles = check(answers)
        for name, reply in replies.items():
            if isinstance(reply, Failure):
                self._leave(name, "absent", reply.reason)
            elif name not in answers:
                self._leave(name, "refused", str(reply.values.get("sentence"))[:500])
            elif name in troubles:
                self._leave(name, "garbage", troubles[name])
        self._check_quorum()
        return {name: answer for name, answer in answers.items() if name not in troubles}

    def _refused(self, replies: Replies) -> None:
        """A question that everybody refuses is the coordinator's mistake."""
        refusals = [r for r in replies.values() if isinstance(r, Message) and r.kind == "refused"]
        if replies and len(refusals) == len(replies):
            name, sentence = next(iter(replies)), str(refusals[0].values.get("sentence"))[:500]
            raise InputError(f"Silo {name!r} refuses: {sentence}")

    def _leave(self, name: str, what: str, reason: str) -> None:
        self.absent.add(name)
        self._failed.add(name)
        self._strikes[name] += what != "absent"
        self.record(Event(self.round, name, what, f"Silo {name!r} does not take part: {reason.rstrip('.')}."))

    def _check_quorum(self) -> None:
        if len(self.present) < self.policy.quorum:
            left = ", ".join(self.present) or "nobody"
            raise Paused(f"Fewer than {self.policy.quorum} silos answer (there: {left}).")

    def finish_round(self, number: int) -> None:
        """A round is made: the absent grow older, are asked whether they are back, or have been away too long."""
        self.round = number
        for name in self.age:
            away = name in self.absent or name in self._failed or name in self._dropped
            self.age[name] = self.age[name] + 1 if away else 0
        self._failed.clear()
        if any(age & (age - 1) == 0 for age in self.age.values() if age):
            self.welcome()
        old = [name for name in self.members if self.age[name] > self.policy.max_age]
        if old and self.policy.missing == PAUSE:
            raise Paused(f"Silo {old[0]!r} has given no answer for {self.age[old[0]]} rounds.")
        if old:
            raise Lost(old)

    def welcome(self) -> list[str]:
        """The absent who are back; `Returned` where they are no members any more. Liars are not welcome."""
        replies = self.line.greet(self.policy.probe, self.present)
        back = [name for name, reply in replies.items() if answered(reply) and self._strikes[name] < STRIKES]
        for name in back:
            if name in self.absent:
                self.absent.discard(name)
                self.record(Event(self.round, name, "back", f"Silo {name!r} takes part again."))
        returned = [name for name in back if name in self._dropped]
        if returned:
            raise Returned(returned)
        return [name for name in back if name in self.members]
