r"""Secure sums among deployed silos: before training for sums over columns, in training for every vector.

c_i and d_i stay at their silos: the coordinator has no earlier answer that could stand in for an absent silo. A silo
that does not answer is lost at once: the run waits for it, or, where all agree to that, repeats the round among the
remaining silos. A sum that somebody has left before its masked vector came can never be opened.

Columns may be of very different sizes, and a sum has one clip. So every sum over columns is made twice: to a multiple
of 2⁻ᶠ, and then what is left beyond that, with a clip that is as much smaller; and once more, until every column has
its digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from scaffpd.deploy import messages
from scaffpd.deploy.agreement import Facts, Refusal
from scaffpd.deploy.byzantine import Shapes, too_large, troubles
from scaffpd.deploy.membership import Lost, Membership
from scaffpd.deploy.messages import Array, Message, plain
from scaffpd.deploy.remote import RemoteChannel, itself
from scaffpd.deploy.session import SiloRequest
from scaffpd.errors import ExposedError, InputError
from scaffpd.federation.questions import Losses, Question, Reply, Scores, Vectors
from scaffpd.masking.terms import LARGEST, SMALLEST
from scaffpd.secure import SecureSums
from scaffpd.secure.parties import MaskedReply, SumRequest
from scaffpd.tabular.agree import width

Checks = Callable[[Mapping[str, Message]], Mapping[str, str]]
Ask = Callable[[SiloRequest, Sequence[str], Checks], dict[str, Message]]
WITNESSES = 2
USELESS = "its part of a secure sum cannot be used"


class SiloParties:
    """Silos that mask what they send.

    Args:
        ask: puts a question to silos, and returns the answers that are there and pass the checks.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def _read(self, request: SiloRequest, names: Sequence[str], read: Callable[[str, Message], Any]) -> dict[str, Any]:
        """Put a question, and return what `read` makes of every answer; one that it refuses is no answer.

        What silos say about each other is believed where two say it, and ends the sum.
        """
        parts: dict[str, Any] = {}

        def check(answers: Mapping[str, Message]) -> dict[str, str]:
            troubles = {}
            for name, reply in answers.items():
                try:
                    parts[name] = None if "accused" in reply.values else read(name, reply)
                except InputError as error:
                    troubles[name] = str(error)
            return troubles

        replies = self._ask(request, names, check)
        said = {name: reply.values["accused"] for name, reply in replies.items() if "accused" in reply.values}
        claims = {name: plain(accused) for name, accused in said.items()}
        why = {accused: plain(replies[name].values.get("why")) for name, accused in claims.items()}
        sure = {accused: why[accused] for accused, n in Counter(claims.values()).items() if n >= WITNESSES}
        if sure:
            self.accused(sure)
        for name, accused in claims.items():
            raise InputError(f"Silo {name!r} does not add up with {accused!r}: {why[accused]}")
        return {name: parts[name] for name in replies}

    def accused(self, claims: Mapping[str, str]) -> None:
        """End a sum with silos whose cards several others cannot use."""
        name, sentence = next(iter(claims.items()))
        raise InputError(f"Silo {name!r} cannot be added up with: {sentence}")

    def meet(self, names: Sequence[str]) -> None:
        """Give everybody's cards to everybody; there is no sum where somebody does not take them."""
        cards = self._read(SiloRequest(messages.CARD), names, lambda _, reply: reply.values.get("card"))
        for name, card in cards.items():
            if not isinstance(card, dict) or card.get("name") != name:
                raise InputError(f"Silo {name!r} shows no card of its own.")
        self._read(SiloRequest(messages.MEET, {"cards": list(cards.values())}), names, lambda _, reply: reply)

    def mask(self, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Ask for everybody's masked vector, or its size. Everybody is told the same, all weights included."""
        about: SiloRequest = wanted.held
        terms, numbers = wanted.weights.terms, wanted.numbers
        values = {
            **about.values, "about": about.kind, "names": list(terms.names), "colluding": terms.colluding,
            "weights": wanted.weights.values.tolist(), "numbers": None if numbers is None else numbers.values(),
        }  # fmt: skip
        request = SiloRequest(messages.MASKED, values, about.vectors, {}, about.arrays)
        replies = self._read(request, terms.names, lambda _, reply: _masked(reply, length))
        for name, reply in replies.items():
            if isinstance(reply, InputError):
                raise type(reply)(f"Silo {name!r} declines: {reply}")
        return replies


def _masked(reply: Message, length: int) -> MaskedReply | InputError:
    """Read a silo's masked vector; or why it declines."""
    if "declined" in reply.values:
        return (ExposedError if reply.values.get("exposed") is True else InputError)(plain(reply.values["declined"]))
    exponent, vector = reply.values.get("exponent"), reply.arrays.get("masked")
    if type(exponent) is not int or not SMALLEST <= exponent <= LARGEST:
        raise InputError(USELESS)
    if vector is not None and (vector.dtype != np.int64 or vector.shape != (length,)):
        raise InputError(USELESS)
    return MaskedReply(exponent, None if vector is None else vector.view(np.uint64))


Totals = dict[str, Mapping[str, Array]]
TOGETHER = "all silos"
ATTEMPTS, EXACT = 5, 1e-15


def secure_totals(
    ask: Callable[[SiloRequest], dict[str, Message]], members: Sequence[str], secure: Mapping[str, Any]
) -> Callable[[SiloRequest], Totals]:
    """Return a function that puts a question for totals, and returns those of all silos together."""

    def checked(request: SiloRequest, names: Sequence[str], check: Checks) -> dict[str, Message]:
        replies = ask(request)
        for name, why in check(replies).items():
            raise Refusal(name, f"{why.rstrip('.')}.")
        return replies

    parties = SiloParties(checked)
    parties.meet(members)
    sums = SecureSums(parties, secure.get("colluding"), lambda exchanges, up, down: None)

    def added(kind: str, about: SiloRequest, length: int) -> Any:
        return sums.sum(kind, about, dict.fromkeys(members, 1.0), length)

    def totals(question: SiloRequest) -> Totals:
        what, columns = "squares" if "mean" in question.arrays else "sum", width(question.values["schema"])
        about = SiloRequest("totals", {**question.values, "parts": ["n", what]}, arrays=question.arrays)
        both = added(what, about, 2 * columns)
        for again in range(1, ATTEMPTS):
            assert sums.last is not None
            smallest = np.abs(both[both != 0]).min(initial=np.inf)
            if again > 1 and sums.last.error <= EXACT * smallest:
                break
            rest = replace(about, values={**about.values, "beyond": sums.last.bits})
            both += added(f"{what}, {again}", rest, 2 * columns)
        return {TOGETHER: {"n": np.rint(both[:columns]), what: both[columns:]}}

    return totals


class MaskedRemote(SiloParties, RemoteChannel):
    """The silos of a federation, which mask what they send: both a `Channel` and the `Parties` of its sums."""

    keeps = False

    def __init__(self, membership: Membership, facts: Facts) -> None:
        SiloParties.__init__(self, self.put)
        RemoteChannel.__init__(self, membership, facts)
        self.meet(self.names)

    def put(self, question: SiloRequest, names: Sequence[str], check: Checks) -> dict[str, Message]:
        """A question that everybody has to answer."""
        replies = self.membership.ask(question, list(names), check)
        lacking = [name for name in names if name not in replies]
        if lacking:
            raise Lost(lacking)
        return replies

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """The numbers that every silo shows, and handles on vectors, which it makes when their sum is asked for."""
        if isinstance(question, Scores):
            return self.scores(question)
        request, shapes = self.request(question, chosen), question.shapes(len(self.like))
        hidden = {
            part: self._handle(request, part, shapes.pop(part), chosen) for part in question.vectors & shapes.keys()
        }
        if question.scalars:
            shapes["scalars"] = (len(question.scalars),)
        table = self._numbers(request, shapes, chosen) if shapes else {}
        if isinstance(question, Losses):  # an absurd size gives a silo away here as well; there is no more to look at
            got = {i: {"scalars": row.numpy()} for i, row in zip(chosen, table["scalars"], strict=True)}
            self.accuse(self.judge.losses(question.x, question.batch_size, got))
        numbers = {part: partial(itself, table[part]) for part in shapes}
        numbers |= {name: partial(itself, table["scalars"][:, j]) for j, name in enumerate(question.scalars)}
        return Reply(numbers, hidden)

    def _numbers(self, request: SiloRequest, shapes: Shapes, chosen: Sequence[int]) -> dict[str, Tensor]:
        """Parts of everybody's answer, stacked."""
        names = [self.names[i] for i in chosen]
        replies = self.put(request, names, lambda answers: troubles(answers, shapes, shapes, self.like))
        return {part: torch.from_numpy(np.stack([replies[name].arrays[part] for name in names])) for part in shapes}

    def _handle(self, request: SiloRequest, part: str, shape: tuple[int, ...], chosen: Sequence[int]) -> SiloVectors:
        """A part of the answer that stays there; silos tell its length."""
        about = replace(request, values={**request.values, "parts": [part]})
        size = replace(about, kind=messages.SIZES, values={**about.values, "about": about.kind})

        def norms() -> Tensor:
            return self._numbers(size, {"scalars": (1,)}, chosen)["scalars"][:, 0]

        return SiloVectors(_stays, _stays, norms, shape, about=about)

    def accused(self, claims: Mapping[str, str]) -> None:
        """A silo whose keys several others cannot use is quarantined."""
        known = {name: f"{why.rstrip('.')} (masks)" for name, why in claims.items() if name in self.names}
        self.accuse({self.names.index(name): why for name, why in known.items()})
        super().accused(claims)

    def mask(self, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Everybody's masked vector; whose size is absurd beside the others' would leave their sum no digits."""
        replies = super().mask(replace(wanted, held=wanted.held.about), length)
        weights = dict(zip(wanted.weights.terms.names, wanted.weights.values, strict=True))
        sizes = {
            self.names.index(name): float(np.ldexp(1.0, reply.exponent)) / abs(weights[name])
            for name, reply in replies.items()
            if weights[name] and reply.exponent > SMALLEST
        }
        self.accuse(too_large("masked vector has size", sizes, sizes, self.membership.policy.outlier**2))
        return replies


@dataclass(frozen=True, eq=False)
class SiloVectors(Vectors):
    """Vectors that stay at their silos; `about` is the question that each would answer."""

    about: SiloRequest = field(kw_only=True)


def _stays(*_: Any) -> NoReturn:
    raise InputError("Vectors of deployed secure sums stay at their silos.")
