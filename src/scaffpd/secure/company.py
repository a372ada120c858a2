r"""In which sums a client's vector has been: what one sum hides, two of the same vectors may show.

Σ over all and Σ over all but one give that one's vector. Sums of the same vectors with m different weights are m
equations for those of N − t clients that do not collude. So a client lets the same vector into sums of the same company
only, and into fewer different ones than N − t; the same sum again is no news.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.masking import Terms

REMEMBERED = 256  # vectors


class Company:
    """The memory of one client.

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
        company, sums = self._known.pop(name, (names, []))
        if company != names and not self.changing:
            raise InputError(
                "This client's vector has been in a sum with others: in another company it would show somebody's own."
            )
        sums = sums if company == names else []
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
        return [[name, company, sums] for name, (company, sums) in self._known.items()]

    def restore(self, kept: list[Any]) -> None:
        """Go on from what `kept` returned."""
        self._known = OrderedDict((name, (company, sums)) for name, company, sums in kept)
