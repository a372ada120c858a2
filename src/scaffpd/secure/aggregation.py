r"""`SecureAggregation`: a federation whose server learns sums of vectors, and no single one.

A round of Scaff-PD needs Σ λ_i c_i and Σ λ_i d_i; λ_i goes to client i, which scales its own
vector. The server sees losses L_i, weights λ_i and a few scalars. docs/secure-aggregation.md
describes the threat model, and what it does not hide.

`parties` has clients with their own keys, and the checks of each before it answers. This file has
one secure sum Σ_i w_i v_i, which is one exchange. The clip 2ᵉ follows the vectors: with its y_i a
client sends the e that would have been enough, and the next sum of the same kind leaves `HEADROOM`
binary digits above the largest. A client with a larger vector reports that instead of sending it;
then the sum stays closed, and is started again. The same happens if all vectors have shrunk so much
that more than `WASTE` digits would be lost. Of 64 binary digits log₂ N and those are lost, and
weights have `PRECISE` digits: with N ≤ 32 clients a sum's error is below 10⁻¹² of its largest term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, real
from scaffpd.federation import Federation, Vector
from scaffpd.federation.plans import ClientSelection
from scaffpd.federation.questions import Question, Reply, Vectors
from scaffpd.secure.masking import FixedPoint, Incomplete, Terms
from scaffpd.secure.parties import (
    PRECISE,
    LocalParties,
    MaskedReply,
    SumRequest,
    Weighting,
    weightings,
)
from scaffpd.secure.terms import LARGEST, SMALLEST

HEADROOM = 3
WASTE = 10
ATTEMPTS = 4
RECENT = 16  # weights that are used again
SMALL = 16  # bytes: a size, a number format


class Parties(Protocol):
    """Clients that mask: `LocalParties`, or deployed silos."""

    def mask(self, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Return the masked vectors of all clients, or their sizes."""


Record = Callable[[str, str, Any], None]  # called with every masked vector: kind, client, numbers


@dataclass(eq=False)
class SecureSums:
    """Secure sums of a run."""

    parties: Parties
    colluding: int | None  # t; `None` for a third of the clients
    count: Callable[[int, int, int], None]  # called with exchanges, bytes up and bytes down
    record: Record | None = None
    last: FixedPoint | None = field(default=None, init=False)  # the format of the last sum
    _exponents: dict[tuple[str, int], int] = field(default_factory=dict, init=False)
    _weightings: list[Weighting] = field(default_factory=list, init=False)  # the last ones

    def sum(
        self, kind: str, held: Any, weights: dict[str, float], length: int
    ) -> NDArray[np.float64]:
        """Return Σ w_i v_i over the clients with a weight.

        `kind` names the vectors, for their number format; clients are asked for the first one.
        """
        key = (kind, len(weights))
        n = len(weights)
        weighting = self._recent(
            Terms.usual(tuple(weights), self.colluding), np.array([*weights.values()])
        )
        for _ in range(ATTEMPTS):
            exponent = self._exponents.get(key)
            numbers = None if exponent is None else FixedPoint.finest(n, exponent)
            request = SumRequest(held, weighting, numbers)
            replies = self.parties.mask(request, length)
            sent = sum(reply.vector is not None for reply in replies.values())
            self.count(1, 8 * length * sent + SMALL * n, (8 * n + SMALL) * n)
            if set(replies) != set(weights):
                raise Incomplete(
                    "sum-incomplete",
                    f"{n - len(replies)} clients have left a secure sum: it stays closed.",
                )
            largest = max(reply.exponent for reply in replies.values())
            if exponent is None or largest > SMALLEST:  # vectors that are zero have no size
                self._exponents[key] = min(largest + HEADROOM, LARGEST)
            if numbers is not None and _fits(numbers, largest, replies):
                self.last = numbers
                return self._opened(kind, numbers, replies)
        raise InputError(
            "sum-without-clip",
            f"The vectors of a secure sum grow from one question to the next: {kind!r} has no "
            "clip.",
        )

    def _recent(self, terms: Terms, weights: Vector) -> Weighting:
        """Return the weights, or those of a recent sum that differ by a last digit.

        Clients refuse weights that are nearly the same.
        """
        found = Weighting(terms, weights)
        for known in self._weightings:
            if known.terms == terms:
                size = np.maximum(np.abs(known.values), np.abs(found.values))
                if np.all(
                    np.abs(known.values - found.values)
                    <= np.ldexp(1.0, np.frexp(size)[1] - PRECISE)
                ):
                    return known
        self._weightings = [*self._weightings[1 - RECENT :], found]
        return found

    def _opened(
        self, kind: str, numbers: FixedPoint, replies: dict[str, MaskedReply]
    ) -> NDArray[np.float64]:
        """Add up the replies; refuse a sum that exceeds all of its terms: masks were false."""
        total: Any = np.zeros(1, dtype=np.uint64)
        for name, reply in replies.items():
            if self.record is not None:
                self.record(kind, name, reply.vector)
            total = total + reply.vector
        found = numbers.decode(total)
        most = (
            sum(float(np.ldexp(1.0, reply.exponent)) for reply in replies.values()) + numbers.error
        )
        if not np.all(np.abs(found) <= most):
            raise InputError(
                "sum-spoilt",
                "A secure sum is larger than all of its terms: one of the clients has masked "
                "another question, or sent no masked vector. Which one cannot be found without "
                "all the vectors.",
            )
        return found


def _fits(numbers: FixedPoint, largest: int, replies: dict[str, MaskedReply]) -> bool:
    """Return whether all vectors arrived, and are not far below the clip."""
    fine = largest == SMALLEST or numbers.exponent - largest <= WASTE
    return fine and all(reply.vector is not None for reply in replies.values())


@dataclass(eq=False)
class MaskedSums:
    """Sums of masked vectors; a `Summer`."""

    sums: SecureSums  # the protocol
    allows_projections: bool  # of gradients, along directions that the server chooses
    allows_reweighting: bool  # whether the same vectors may be summed with two weightings
    hides_vectors: bool = field(default=True, init=False)

    def shown(self, question: Question, reply: Reply) -> Reply:
        """Return the reply: numbers leave their clients as they are."""
        return reply

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """Return Σ_i w_i v_i, masked."""
        if vectors.addends is not None:
            return self._shared(part, vectors, asked, weights)
        own = {asked.names[i]: float(weights[i]) for i in asked.chosen}
        shape = vectors.shape or asked.like.shape
        length = int(np.prod(shape))
        total = self.sums.sum(part, vectors, own, length)
        return torch.from_numpy(total.reshape(shape)).to(asked.like)

    def _shared(
        self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector
    ) -> Tensor:
        """Add up vectors that clients have weighted and noised themselves.

        One more entry, the same for all clients and as large as possible, hides a vector's size.
        """
        assert vectors.addends is not None
        shared = vectors.addends(torch.from_numpy(np.array(weights[asked.index])))
        if isinstance(shared.parts, Vectors):  # deployed clients, which do all of this themselves
            own = {asked.names[i]: float(weights[i]) for i in asked.chosen}
            total = self.sums.sum(part, shared.parts, own, len(asked.like) + 1)
            return shared.total(torch.from_numpy(total[:-1]))
        rows = torch.nn.functional.pad(shared.parts.double(), (0, 1), value=shared.most)
        ones = dict.fromkeys((asked.names[i] for i in asked.chosen), 1.0)
        total = self.sums.sum(part, replace(vectors, each=lambda: rows), ones, rows.shape[1])
        return shared.total(torch.from_numpy(total[:-1]))

    def error(self, length: int, weights: Vector) -> float:
        """Return √d times the largest error of an entry of the last sum, per unit of weight.

        The rounding of the weights is included.
        """
        last = self.sums.last
        worst = (
            0.0
            if last is None
            else last.error + np.ldexp(last.clients, last.exponent - PRECISE + 1)
        )
        return float(length**0.5 * worst / (np.abs(weights).sum() or 1.0))


class SecureAggregation(Federation):
    """Federation of clients that mask every vector.

    Args:
        federation: a `Cohort`, whose clients then have their own keys, in this process; or a
            deployed federation, whose silos have theirs (`Remote` over a `MaskedRemote`).
        colluding: t, how many clients may reveal all that they know to the server without harm to
            others; by default a third of the clients (10 at most).
        share: the largest share of a sum, by Σ|w_i|, that a single client's vector may have; beyond
            it the client refuses, for the sum would nearly be its vector.
        projections: whether clients may reveal their gradients along directions that the server
            chooses: the subspace saddle method needs that.
        record: called with everything that the server receives of a vector, as (kind, client,
            array), for tests.
    """

    def __init__(
        self,
        federation: Federation,
        colluding: int | None = None,
        share: float = 0.9,
        projections: bool = False,
        record: Record | None = None,
    ) -> None:
        if not 0 < real("SecureAggregation", "share", share) <= 1:
            raise InputError(
                "share-out-of-range", f"SecureAggregation needs 0 < share <= 1, got {share!r}."
            )
        channel: Any = getattr(federation, "channel", None)
        masks = isinstance(federation, Federation) and (channel.here or hasattr(channel, "mask"))
        if not masks or federation.sums.hides_vectors:
            given = type(federation).__name__
            raise InputError(
                "federation-cannot-mask",
                "SecureAggregation takes a Cohort or a deployed federation that masks, got "
                f"{given}.",
            )
        # or a sentence that so many may not collude
        terms = Terms.usual(federation.names, colluding)
        parties = channel
        if channel.here:  # clients have no keys yet
            parties = LocalParties(federation.names, float(share), counted=not projections)
        sums = SecureSums(parties, colluding, self._counted, record)
        super().__init__(channel, MaskedSums(sums, projections, weightings(terms) > 1))
        self.inner = federation

    def _counted(self, exchanges: int, up: int, down: int) -> None:
        self.traffic.add(exchanges=exchanges, up=up, down=down)

    def __repr__(self) -> str:
        return f"Secure sums over {self.inner!r}"
