r"""Clients that mask their vectors, and what each of them checks before it answers.

A client scales its vector by its own weight, encodes it and masks it; what leaves it is a `MaskedReply`. Everything
else that leaves is a scalar.

What one sum hides, two of the same vectors may show: Σ over all and Σ over all but one give that one's vector. Sums of
the same vectors with m different weights are m equations for those of N − t clients that do not collude. So a client
lets the same vector into sums over the same clients only, and into fewer different ones than N − t; the same sum again
reveals nothing new.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.federation.questions import Question, Reply
from scaffpd.masking import Aggregator, FixedPoint, Identity, Opened, Party, Terms
from scaffpd.masking.terms import LARGEST, SMALLEST, Ring, exponent_of

REMEMBERED = 256  # vectors


class DisclosureGuard:
    """Remembers in which sums a client's vectors have been, and refuses those that would show one.

    Args:
        changing: whether the same vector may be in sums of other clients; those who leave show theirs by it.
        counted: whether the number of different sums is limited.
    """

    def __init__(self, changing: bool = False, counted: bool = True) -> None:
        self.changing, self.counted = changing, counted
        self._known: OrderedDict[str, tuple[str, list[list[float]]]] = OrderedDict()

    def check(self, vector: NDArray[np.float64], weight: float, total: float, terms: Terms) -> None:
        """Let the vector into a sum, or refuse; a vector that adds nothing is in no sum."""
        if weight == 0 or not np.any(vector):
            return
        name, names = hashlib.blake2b(np.ascontiguousarray(vector).data).hexdigest(), "\0".join(sorted(terms.names))
        before, sums = self._known.pop(name, (names, []))
        if before != names and not self.changing:
            raise InputError(
                "This client's vector has been in a sum already: one over different clients would show somebody's own."
            )
        sums = sums if before == names else []
        if [weight, total] not in sums:
            sums = [*sums, [weight, total]]
        if self.counted and len(sums) >= max(2, len(terms.names) - terms.colluding):
            raise InputError(
                f"This client's vector has been in {len(sums) - 1} sums with other weights: one more could show it."
            )
        self._known[name] = names, sums
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def kept(self) -> list[Any]:
        """As JSON has it."""
        return [[name, names, sums] for name, (names, sums) in self._known.items()]

    def restore(self, kept: list[Any]) -> None:
        """Go on from what `kept` returned."""
        self._known = OrderedDict((name, (names, sums)) for name, names, sums in kept)


@dataclass(frozen=True)
class MaskedReply:
    """What a client answers to a question for its masked vector.

    Attributes:
        exponent: e, with |w_i v_i| ≤ 2ᵉ.
        vector: y_i; `None` where the clip of the question is smaller than that, or where it has none.
    """

    exponent: int
    vector: Ring | None


@dataclass(frozen=True)
class SumRequest:
    """A sum that is asked for.

    Attributes:
        held: which vector of every client; the channel knows what it means.
        weights: w_i, by the clients' names; each is told its own.
        numbers: the format; `None` asks for the sizes of vectors alone.
    """

    held: Any
    weights: Mapping[str, float]
    numbers: FixedPoint | None

    @property
    def total(self) -> float:
        """Σ |w_i|."""
        return float(sum(abs(w) for w in self.weights.values()))


class Parties(Protocol):
    """Clients that mask what they send, here or elsewhere."""

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Everybody opens an exchange."""

    def mask(self, aggregator: Aggregator | None, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Everybody's masked vector, of those who answer; or its size, where no exchange is open."""

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares that open a sum, and, with the same message, the opening of the exchange that follows."""


class TooLarge(InputError):
    """A sum would nearly be a client's own vector."""


class Contribution(NamedTuple):
    """A client's part in a sum.

    Attributes:
        weight: w_i.
        total: Σ |w_i| over all clients.
        share: the largest share of a sum that this client agrees to.
    """

    weight: float
    total: float
    share: float

    def check(self, name: str) -> None:
        """Refuse a sum that would nearly be this client's own vector."""
        if abs(self.weight) > self.share * self.total:
            raise TooLarge(
                f"Client {name!r} would make up {abs(self.weight) / self.total:.0%} of a sum, more than the "
                f"{self.share:.0%} that it agrees to: the sum would show its vector. Use an objective that caps "
                "weights (CVaR, or a cap), or allow a larger share."
            )


class GuardedParty(NamedTuple):
    """A client in secure sums.

    Attributes:
        party: its keys and secrets.
        guard: the sums that its vectors have been in.
    """

    party: Party
    guard: DisclosureGuard

    def answer(
        self,
        part: Contribution,
        terms: Terms | None,
        around: Mapping[str, Opened],
        numbers: FixedPoint | None,
        vector: Any,
    ) -> MaskedReply:
        """Its masked vector; without a number format, or where the vector does not fit it, the vector's size alone."""
        part.check(self.party.name)
        own = np.asarray(vector, dtype=np.float64).ravel()
        scaled = part.weight * own
        exponent = _exponent(own, part.weight)
        if numbers is None or terms is None or exponent > numbers.exponent:
            return MaskedReply(exponent, None)
        self.guard.check(own, part.weight, part.total, terms)
        return MaskedReply(exponent, self.party.mask(terms.exchange, around, numbers, scaled))


def _exponent(vector: NDArray[np.float64], weight: float) -> int:
    """A bound 2ᵉ on |w v| from that of v alone: other weights show nothing more of v."""
    if weight == 0 or not np.any(vector):
        return SMALLEST
    if not math.isfinite(weight):
        raise InputError("A vector with a NaN or infinite weight cannot be added securely.")
    return int(np.clip(exponent_of(vector) + math.ceil(math.log2(abs(weight))), SMALLEST, LARGEST))


def quantised(losses: Any, quantum: float) -> Any:
    """The nearest multiples of the quantum."""
    return losses if quantum == 0 else np.rint(losses / quantum) * quantum


def coarse(question: Question, reply: Reply, quantum: float) -> Reply:
    """Round losses, and changes of losses, to the quantum, in float64; the bound on their errors allows for it."""
    if quantum == 0 or not question.loss:
        return reply
    exact, numbers = reply.numbers, dict(reply.numbers)
    numbers[question.loss] = lambda: torch.round(exact[question.loss]().double() / quantum) * quantum
    if "loss_error" in numbers:
        numbers["loss_error"] = lambda: exact["loss_error"]().double() + quantum / 2
    return Reply(numbers, reply.vectors)


class LocalParties:
    """Clients in this process, each with an identity of its own, none with another's secrets.

    Args:
        names: the clients.
        share: the largest share of a sum that a client agrees to.
        counted: whether a client limits the number of different sums that a vector of its is in.
    """

    def __init__(self, names: Sequence[str], share: float, counted: bool) -> None:
        self.share = share
        self.members = {name: GuardedParty(Party(Identity(name)), DisclosureGuard(counted=counted)) for name in names}
        cards = [member.party.identity.card for member in self.members.values()]
        for member in self.members.values():
            member.party.meet(cards)

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Everybody opens an exchange."""
        return {name: self.members[name].party.share(terms) for name in terms.names}

    def mask(self, aggregator: Aggregator | None, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Everybody's masked vector, or its size."""
        terms, answers = None if aggregator is None else aggregator.terms, {}
        for (name, weight), vector in zip(wanted.weights.items(), wanted.held.each(), strict=True):
            around = {} if aggregator is None else aggregator.around(name)
            part, row = Contribution(weight, wanted.total, self.share), vector.detach().cpu().numpy()
            answers[name] = self.members[name].answer(part, terms, around, wanted.numbers, row)
        return answers

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares, and the next exchange's opening."""
        shares = {name: self.members[name].party.reveal(terms.exchange, survivors) for name in survivors}
        return shares, self.open(following)
