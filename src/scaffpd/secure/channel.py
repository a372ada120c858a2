r"""Channels to clients that mask their vectors, and what each client checks before it answers.

A client scales its vector by its own weight, encodes it and masks it; what leaves it is a `MaskedReply`. Everything
else that leaves is a scalar.

What one sum hides, two of the same vectors may show: Σ over all and Σ over all but one give that one's vector. Sums of
the same vectors with m different weights are m equations for those of N − t clients that do not collude. So a client
lets the same vector into sums over the same clients only, and into fewer different ones than N − t; the same sum again
reveals nothing new.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.cohort import Cohort
from scaffpd.cohort.answers import CohortGradients, CohortUpdates
from scaffpd.errors import InputError
from scaffpd.federation import Clients, ClientScores, LocalPlan, ProximalPlan, Vector
from scaffpd.masking import Aggregator, FixedPoint, Identity, Opened, Party, Terms
from scaffpd.masking.terms import Ring, exponent_of

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


Rounding = tuple[Vector, Vector]


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


class MaskedPoint(Protocol):
    """Clients at one x: their scalars, and handles of what they keep."""

    losses: Vector

    @property
    def rounding(self) -> Rounding:
        """Bounds on the errors of L_i and c_i."""

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client."""

    def norms(self) -> Vector:
        """‖c_i‖² per client."""

    def slopes(self, V: Tensor, metric: Tensor) -> tuple[NDArray[np.float64], Vector]:
        """Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""

    def held(self, what: str, V: Tensor | None = None, metric: Tensor | None = None) -> Any:
        """A handle of "c", of the "diagonal" of the Hessian, or of its "curvature" VᵀH_iV."""


class MaskedSteps(Protocol):
    """Local steps that clients have made, or make when they are asked for them."""

    def norms(self) -> Vector:
        """‖d_i‖² per client."""

    def held(self, what: str) -> Any:
        """A handle of "d", or of the "snapshot"."""


class SumChannel(Protocol):
    """Clients that mask what they send."""

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Everybody opens an exchange."""

    def mask(self, aggregator: Aggregator | None, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Everybody's masked vector, of those who answer; or its size, where no exchange is open."""

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares that open a sum, and, with the same message, the opening of the exchange that follows."""


class Channel(SumChannel, Protocol):
    """Clients that answer the questions of the waist, and keep their vectors."""

    def gradients(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> MaskedPoint:
        """Losses at x; every client keeps its c_i."""

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients
    ) -> MaskedSteps:
        """Local steps; every client keeps its d_i."""

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> MaskedSteps:
        """Local models; every client keeps its d_i."""

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> Vector:
        """L_i."""

    def evaluate(self, x: Any, split: str) -> ClientScores:
        """Scores per client."""


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
        exponent = exponent_of(scaled)
        if numbers is None or terms is None or exponent > numbers.exponent:
            return MaskedReply(exponent, None)
        self.guard.check(own, part.weight, part.total, terms)
        return MaskedReply(exponent, self.party.mask(terms.exchange, around, numbers, scaled))


def quantised(losses: Vector, quantum: float) -> Vector:
    """The nearest multiples of the quantum."""
    return losses if quantum == 0 else np.rint(losses / quantum) * quantum


Held = Callable[[], tuple[list[int], Tensor]]


class CohortChannel:
    """The clients of a cohort, in this process: each with an identity of its own, none with another's secrets.

    Args:
        cohort: whose clients.
        share: the largest share of a sum that a client agrees to.
        quantum: losses are rounded to multiples of it before they leave; 0 leaves them as they are.
        projections: whether clients show their gradients along directions anyway.
    """

    def __init__(self, cohort: Cohort, share: float, quantum: float, projections: bool = False) -> None:
        self.cohort, self.share, self.quantum = cohort, share, quantum
        counted = not projections
        self.members = {
            name: GuardedParty(Party(Identity(name)), DisclosureGuard(counted=counted)) for name in cohort.names
        }
        cards = [member.party.identity.card for member in self.members.values()]
        for member in self.members.values():
            member.party.meet(cards)

    def gradients(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> CohortPoint:
        """Losses at x."""
        return CohortPoint(self.cohort.gradients(x, batch_size, key, clients), self)

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients
    ) -> CohortSteps:
        """Local steps."""
        inner = at.inner if isinstance(at, CohortPoint) else at
        return CohortSteps(self.cohort.local_updates(x, inner, correction, plan, clients))

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> CohortSteps:
        """Local models."""
        return CohortSteps(self.cohort.proximal_steps(at.inner, correction, plan))

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> Vector:
        """L_i, rounded."""
        return quantised(self.cohort.losses(x, batch_size, key, clients), self.quantum)

    def evaluate(self, x: Any, split: str) -> ClientScores:
        """Scores per client, the losses rounded."""
        scores = self.cohort.evaluate(x, split)
        return replace(scores, loss=quantised(scores.loss, self.quantum))

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Everybody opens an exchange."""
        return {name: self.members[name].party.share(terms) for name in terms.names}

    def mask(self, aggregator: Aggregator | None, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Everybody's masked vector, or its size."""
        chosen, vectors = wanted.held()
        names = [self.cohort.names[i] for i in chosen]
        terms = None if aggregator is None else aggregator.terms
        answers = {}
        for name, vector in zip(names, vectors, strict=True):
            around = {} if aggregator is None else aggregator.around(name)
            part, row = Contribution(wanted.weights[name], wanted.total, self.share), vector.detach().cpu().numpy()
            answers[name] = self.members[name].answer(part, terms, around, wanted.numbers, row)
        return answers

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares, and the next exchange's opening."""
        shares = {name: self.members[name].party.reveal(terms.exchange, survivors) for name in survivors}
        return shares, self.open(following)


class CohortPoint:
    """A cohort's clients at one x."""

    def __init__(self, inner: CohortGradients, channel: CohortChannel) -> None:
        self.inner, self._channel = inner, channel
        self.losses = quantised(inner.losses, channel.quantum)

    @property
    def rounding(self) -> Rounding:
        """Bounds on the errors of L_i and c_i; a rounded loss is off by up to half of its quantum."""
        loss, gradient = self.inner.rounding
        return loss + self._channel.quantum / 2, gradient

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client, a change of the loss, and as coarse as losses are."""
        return quantised(self.inner.project(direction), self._channel.quantum)

    def norms(self) -> Vector:
        """‖c_i‖² per client."""
        return self.inner.norms()

    def slopes(self, V: Tensor, metric: Tensor) -> tuple[NDArray[np.float64], Vector]:
        """Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""
        seen = self.inner.restriction(V, np.zeros(self.inner.asked.n), metric)
        return seen.slopes, seen.sizes

    def held(self, what: str, V: Tensor | None = None, metric: Tensor | None = None) -> Held:
        """The c_i, the diagonals or the curvatures, when they are asked for."""
        if what == "curvature":
            return lambda: (self.inner.chosen, self._curvatures(V, metric))
        return lambda: (self.inner.chosen, self.inner.each() if what == "c" else self.inner.diagonals())

    def _curvatures(self, V: Any, metric: Any) -> Tensor:
        """VᵀH_iV, one client at a time."""
        one = np.eye(self.inner.asked.n)
        return torch.stack(
            [torch.from_numpy(self.inner.restriction(V, one[i], metric).curvature) for i in self.inner.chosen]
        )


class CohortSteps:
    """A cohort's local steps."""

    def __init__(self, inner: CohortUpdates) -> None:
        self.inner = inner

    def norms(self) -> Vector:
        """‖d_i‖² per client."""
        return self.inner.norms()

    def held(self, what: str) -> Held:
        """The d_i, or what they were at the snapshot."""
        return lambda: (self.inner.chosen, self.inner.each() if what == "d" else self.inner.snapshots())
