r"""One secure sum Σ_i w_i v_i: an exchange for the masked vectors, and one that opens their sum.

The clip 2ᵉ follows the vectors: with its y_i a client says which e would have been enough for it, and the next sum of
the same kind leaves `HEADROOM` binary digits above the largest. Whose vector is larger than that says so instead of
sending it; then the exchange is given up, unopened, and begun anew. So it is where all vectors have become so much
smaller that more than `WASTE` digits would be lost. Of 64 binary digits log₂ N and those are lost: with N ≤ 64 clients
a sum is off by less than 10⁻¹² of its largest term.

The exchange that follows is opened with the same messages that close the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.masking import Aggregator, FixedPoint, Incomplete, Opened, Terms
from scaffpd.masking.exchange import SEALED, SHOWN
from scaffpd.masking.keys import SHARE_BYTES, nonce
from scaffpd.masking.terms import LARGEST, SMALLEST
from scaffpd.secure.parties import MaskedReply, Parties, SumRequest

HEADROOM, WASTE = 3, 10
ATTEMPTS = 4
SMALL = 16  # bytes: a weight, a size


class SecureSums:
    """The secure sums of a run.

    Args:
        parties: the clients.
        colluding: t; `None` for a third of those who take part.
        leaving: D; likewise.
        count: is told exchanges, bytes up and bytes down.
        record: is handed every masked vector and every share that the server receives.
    """

    def __init__(
        self,
        parties: Parties,
        colluding: int | None,
        leaving: int | None,
        count: Callable[[int, int, int], None],
        record: Callable[[str, str, Any], None] | None = None,
    ) -> None:
        self.parties, self._limits, self._count = parties, (colluding, leaving), count
        self._record = record or (lambda kind, name, array: None)
        self._exponents: dict[tuple[str, int], int] = {}
        self._pending: tuple[Terms, dict[str, Opened]] | None = None
        self.last: FixedPoint | None = None  # the format of the last sum

    def sum(self, kind: str, held: Any, weights: dict[str, float], length: int) -> NDArray[np.float64]:
        """Σ w_i v_i over the clients that have a weight; `kind` names what is summed, for its number format."""
        names, key = tuple(weights), (kind, len(weights))
        for _ in range(ATTEMPTS):
            exponent = self._exponents.get(key)
            numbers = None if exponent is None else FixedPoint.finest(len(names), exponent)
            aggregator = None if numbers is None else self._opened(names, length)
            replies = self.parties.mask(aggregator, SumRequest(held, weights, numbers), length)
            self._count(
                1, length * 8 * (aggregator is not None) * len(replies) + SMALL * len(names), SMALL * len(names)
            )
            if set(replies) != set(names):
                raise Incomplete(f"{len(names) - len(replies)} clients have left a secure sum: it stays closed.")
            largest = max(reply.exponent for reply in replies.values())
            if exponent is None or largest > SMALLEST:  # nothing is known of vectors that are zero
                self._exponents[key] = min(largest + HEADROOM, LARGEST)
            if numbers is not None and aggregator is not None and _fits(numbers, largest, replies):
                self.last = numbers
                return numbers.decode(self._closed(kind, aggregator, replies))
        raise InputError(f"The vectors of a secure sum grow from one question to the next: {kind!r} has no clip.")

    def _opened(self, names: tuple[str, ...], length: int) -> Aggregator:
        """The exchange that is open for these clients, or a new one."""
        if self._pending is None or self._pending[0].names != names:
            terms = self._terms(names)
            self._pending = terms, self.parties.open(terms)
            self._count(1, self._opening(terms), 0)
        terms, opened = self._pending
        self._pending = None
        self._count(0, 0, self._opening(terms, down=True))
        return Aggregator(terms, opened, length)

    def _closed(self, kind: str, aggregator: Aggregator, replies: dict[str, MaskedReply]) -> Any:
        """Add up what came, and have it opened."""
        for name, reply in replies.items():
            if reply.vector is not None:
                self._record(kind, name, reply.vector)
                aggregator.take(name, reply.vector)
        terms, following = aggregator.terms, self._terms(aggregator.terms.names)
        shares, opened = self.parties.reveal(terms, aggregator.survivors, following)
        if set(opened) == set(following.names):
            self._pending = following, opened
        self._count(
            1, sum(map(len, shares.values())) * SHARE_BYTES + self._opening(following), SMALL * len(terms.names)
        )
        return aggregator.open(shares)

    def _terms(self, names: Sequence[str]) -> Terms:
        return Terms.usual(nonce(), names, *self._limits)

    def _opening(self, terms: Terms, down: bool = False) -> int:
        """Bytes by which an exchange is opened: a key, a mark and sealed shares; each goes down to every neighbour."""
        per_client = terms.degree * (SEALED + SHOWN) if down else terms.degree * SEALED + SHOWN
        return per_client * len(terms.names)


def _fits(numbers: FixedPoint, largest: int, replies: dict[str, MaskedReply]) -> bool:
    """Whether everybody's vector is there, and not far below the clip."""
    fine = largest == SMALLEST or numbers.exponent - largest <= WASTE
    return fine and all(reply.vector is not None for reply in replies.values())
