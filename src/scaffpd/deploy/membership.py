r"""Who takes part in a run, who is absent and since when: the rule by which a run survives the loss of a silo.

While silo i does not answer, a lower bound of its loss stands in for it, made of its last answer (L_i, c_i) at y_i:

    f̃_i(x) = L_i + ⟨c_i, x − y_i⟩ + (μ_i/2)‖x − y_i‖² ≤ f_i(x),    ∇f̃_i(x) = c_i + μ_i (x − y_i),

in the dual step and in c. (If L_i and c_i stayed as they are, losses would not change as their gradients say, and a
step rule that compares the two could accept no step.) Local steps on f̃_i give d_i = (1 − (1 − η_i μ_i)^J)/μ_i · c,
which is J η_i c, a plain gradient step, for small μ_i. Methods without a correction c leave the silo out of their
average, as if it had not been drawn. Nothing is certified meanwhile, for the loss itself is not known.

An absent silo is asked after 1, 2, 4, 8 … rounds whether it is back (later from one absence to the next). When it is,
or when it has been away for more than `max_age` rounds and is dropped, a new segment of the run starts from the x that
is reached, and its certificate is about those present. Or the run pauses until everybody is back, if that is the
policy. Below the quorum it always pauses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scaffpd.config.federation import PAUSE, FaultPolicy
from scaffpd.deploy.messages import GARBAGE, REFUSED, Failure, Message, plain
from scaffpd.deploy.session import Replies, Session, SiloRequest
from scaffpd.errors import InputError

QUARANTINED = "quarantined"


@dataclass(frozen=True)
class SiloEvent:
    """Something that happened to a silo."""

    round: int
    silo: str
    what: str
    sentence: str


class Paused(Exception):
    """Too few silos are there to go on; the last finished round is what counts."""


class MembershipChange(Exception):
    """Other silos than before are to be asked from here on."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class Lost(MembershipChange):
    """Silos are gone for which no earlier answer can stand in, or for longer than the policy allows."""


class Returned(MembershipChange):
    """Silos are back."""


class Quarantined(MembershipChange):
    """Silos have given answers that cannot be true; nothing that they say is used any more."""


def accuse(verdicts: Mapping[str, str], number: int, record: Callable[[SiloEvent], None]) -> None:
    """Write down who has given itself away in that round, by which test and which numbers; and end the segment."""
    for name, why in verdicts.items():
        record(SiloEvent(number, name, QUARANTINED, f"Silo {name!r} is quarantined: {why}."))
    if verdicts:
        raise Quarantined(list(verdicts))


STRIKES = 3  # answers that cannot be used, failures or refusals, after which a silo is not asked again


@dataclass(eq=False)
class Membership:
    """The members of a segment, which of them are absent, and for how many rounds they have not answered."""

    session: Session  # with all silos
    members: Sequence[str]  # whose losses make up the objective
    policy: FaultPolicy  # what to do about the absent
    record: Callable[[SiloEvent], None]  # takes every event
    dropped: Sequence[str] = ()  # silos that are no members, and would be if they were back
    absences: Counter[str] = field(default_factory=Counter)  # how often each silo went away so far
    strikes: Counter[str] = field(default_factory=Counter)  # how often its answer could not be used, or was a refusal
    absent: set[str] = field(default_factory=set)
    round: int = 0
    ending: bool = False  # whether nothing depends on the answers any more but the last tables
    _welcomed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.age = dict.fromkeys([*self.members, *self.dropped], 0)

    @property
    def present(self) -> list[str]:
        """Those who answered when they were last asked."""
        return [name for name in self.members if name not in self.absent]

    def ask(
        self,
        question: SiloRequest,
        names: Sequence[str],
        check: Callable[[Mapping[str, Message]], Mapping[str, str]] = lambda _: {},
    ) -> dict[str, Message]:
        """The answers of those among `names` who are present; who gives none, or one that fails `check`, is absent."""
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
        """A question that everybody refuses is the coordinator's mistake."""
        refusals = [reply for reply in replies.values() if isinstance(reply, Failure) and reply.what == REFUSED]
        if len(refusals) == len(replies) >= min(2, len(self.members)):
            raise InputError(f"Silo {next(iter(replies))!r} refuses: {refusals[0].reason}")

    def leave(self, name: str, what: str, reason: str, failed: bool = False) -> None:
        """Count a silo as absent, and write down why; one that fails at every question is not asked for ever."""
        self.absent.add(name)
        self.absences[name] += 1
        self.strikes[name] += failed or what != "absent"
        words = plain(reason).rstrip(".")
        self.record(SiloEvent(self.round, name, what, f"Silo {name!r} does not take part: {words}."))

    def _check_quorum(self) -> None:
        if len(self.present) < self.policy.quorum and not self.ending:
            left = ", ".join(self.present) or "nobody"
            raise Paused(f"Fewer than {self.policy.quorum} silos answer (there: {left}).")

    def finish_round(self, number: int) -> None:
        """A round is made: the absent grow older, are asked whether they are back, or have been away too long."""
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
        """Whether to ask if it is back: at ages that are powers of two, the first of them later every time."""
        age = self.age[name]
        return age & (age - 1) == 0 and age >= 2 ** (self.absences[name] - 1) and self.strikes[name] < self._patience

    @property
    def _patience(self) -> int:
        """How many useless answers end a silo's part: one where sums are masked, for coming back costs further sums."""
        setup = self.session.setup
        masked = setup is not None and bool(setup.secure)
        return 1 if masked and self.policy.missing != PAUSE else STRIKES

    def welcome(self) -> list[str]:
        """The absent and dropped who are back; those whose answers could not be used again and again are not."""
        replies = self.session.greet(self.policy.probe, self.present)
        away = {name for name in {*self.absent, *self.dropped} if self.strikes[name] < self._patience}
        back = [name for name, reply in replies.items() if name in away and isinstance(reply, Message)]
        for name in back:
            if name in self._welcomed:
                continue
            self._welcomed |= {name} & set(self.dropped)
            self.absent.discard(name)
            self.record(SiloEvent(self.round, name, "back", f"Silo {name!r} is back."))
        return back
