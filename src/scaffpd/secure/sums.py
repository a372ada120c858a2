r"""One secure sum Σ_i w_i v_i: one exchange, for the masked vectors.

The clip 2ᵉ follows the vectors: with its y_i a client says which e would have been enough for it, and the next sum of
the same kind leaves `HEADROOM` binary digits above the largest. Whose vector is larger than that says so instead of
sending it; then the sum stays closed, and is begun anew. So it is where all vectors have become so much smaller that
more than `WASTE` digits would be lost. Of 64 binary digits log₂ N and those are lost: with N ≤ 64 clients a sum is off
by less than 10⁻¹² of its largest term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.masking import FixedPoint, Incomplete, Terms
from scaffpd.masking.terms import LARGEST, SMALLEST
from scaffpd.secure.parties import MaskedReply, Parties, SumRequest, Weighting

HEADROOM, WASTE = 3, 10
ATTEMPTS = 4
SMALL = 16  # bytes: a size, a number format


class SecureSums:
    """The secure sums of a run.

    Args:
        parties: the clients.
        colluding: t; `None` for a third of those who take part.
        count: is told exchanges, bytes up and bytes down.
        record: is handed every masked vector that the server receives.
    """

    def __init__(
        self,
        parties: Parties,
        colluding: int | None,
        count: Callable[[int, int, int], None],
        record: Callable[[str, str, Any], None] | None = None,
    ) -> None:
        self.parties, self._colluding, self._count = parties, colluding, count
        self._record = record or (lambda kind, name, array: None)
        self._exponents: dict[tuple[str, int], int] = {}
        self.last: FixedPoint | None = None  # the format of the last sum

    def sum(self, kind: str, held: Any, weights: dict[str, float], length: int) -> NDArray[np.float64]:
        """Σ w_i v_i over the clients that have a weight; `kind` names what is summed, for its number format."""
        key, n = (kind, len(weights)), len(weights)
        weighting = Weighting(Terms.usual(tuple(weights), self._colluding), np.array([*weights.values()]))
        for _ in range(ATTEMPTS):
            exponent = self._exponents.get(key)
            numbers = None if exponent is None else FixedPoint.finest(n, exponent)
            replies = self.parties.mask(SumRequest(held, weighting, numbers), length)
            sent = sum(reply.vector is not None for reply in replies.values())
            self._count(1, 8 * length * sent + SMALL * n, (8 * n + SMALL) * n)
            if set(replies) != set(weights):
                raise Incomplete(f"{n - len(replies)} clients have left a secure sum: it stays closed.")
            largest = max(reply.exponent for reply in replies.values())
            if exponent is None or largest > SMALLEST:  # nothing is known of vectors that are zero
                self._exponents[key] = min(largest + HEADROOM, LARGEST)
            if numbers is not None and _fits(numbers, largest, replies):
                self.last = numbers
                return self._opened(kind, numbers, replies)
        raise InputError(f"The vectors of a secure sum grow from one question to the next: {kind!r} has no clip.")

    def _opened(self, kind: str, numbers: FixedPoint, replies: dict[str, MaskedReply]) -> NDArray[np.float64]:
        """Add up what came; refuse a sum that is larger than all of its terms: somebody's masks were false."""
        total: Any = np.zeros(1, dtype=np.uint64)
        for name, reply in replies.items():
            self._record(kind, name, reply.vector)
            total = total + reply.vector
        found = numbers.decode(total)
        most = sum(float(np.ldexp(1.0, reply.exponent)) for reply in replies.values()) + numbers.error
        if not np.all(np.abs(found) <= most):
            raise InputError(
                "A secure sum is larger than all of its terms: one of the clients has masked another question, or has "
                "sent what is no masked vector."
            )
        return found


def _fits(numbers: FixedPoint, largest: int, replies: dict[str, MaskedReply]) -> bool:
    """Whether everybody's vector is there, and not far below the clip."""
    fine = largest == SMALLEST or numbers.exponent - largest <= WASTE
    return fine and all(reply.vector is not None for reply in replies.values())
