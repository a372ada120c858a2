r"""What the server does in an exchange: carry sealed shares around, add up what comes, and open the sum.

    Σ_{i∈U} q_i = Σ_{i∈U} y_i − Σ_{i∈U} stream(b_i) ∓ Σ_{j∉U, i∈U} stream(s_ij)   (mod 2⁶⁴)

for the clients U whose y_i came. Every secret that it puts together from shares is held against the public key or the
mark that its owner has shown: a sum is right, or there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, islice

import numpy as np

from scaffpd.errors import InputError
from scaffpd.masking import shamir
from scaffpd.masking.fixed_point import Ring
from scaffpd.masking.keys import mark, mask_seed, pair_seed, private_key, sign
from scaffpd.masking.party import Opened
from scaffpd.masking.streams import add_stream
from scaffpd.masking.terms import Terms

TRIED = 500  # choices of neighbours


class Incomplete(InputError):
    """Too few clients are left to open a sum: it stays closed for good."""


class Aggregator:
    """The server's side of one exchange.

    Args:
        terms: who takes part.
        opened: how every one of them has opened it.
        length: of the vectors.
    """

    def __init__(self, terms: Terms, opened: Mapping[str, Opened], length: int) -> None:
        if set(opened) != set(terms.names):
            raise Incomplete("Not every client has opened the exchange.")
        self.terms, self._opened = terms, dict(opened)
        self._total: Ring = np.zeros(length, dtype=np.uint64)
        self._came: set[str] = set()

    def around(self, name: str) -> dict[str, Opened]:
        """What a client needs of its neighbours, each with the shares that are sealed for it."""
        found = {other: self._opened[other] for other in self.terms.neighbours(name)}
        return {o: Opened(seen.key, seen.mark, {name: seen.sealed[name]}) for o, seen in found.items()}

    def take(self, name: str, masked: Ring) -> None:
        """Add a client's y_i."""
        if name in self._came or name not in self.terms.names or masked.shape != self._total.shape:
            raise InputError(f"The masked vector of {name!r} does not belong to this exchange.")
        self._came.add(name)
        np.add(self._total, masked, out=self._total)

    @property
    def survivors(self) -> tuple[str, ...]:
        """U, whose vectors came."""
        return tuple(name for name in self.terms.names if name in self._came)

    def open(self, revealed: Mapping[str, Mapping[str, int]]) -> Ring:
        """Σ_{i∈U} q_i, from the shares of those who gave them."""
        total, U = self._total.copy(), self.survivors
        for name in U:
            b = self._secret(name, revealed, self._marked)
            add_stream(total, mask_seed(b, self.terms), -1)
        for name in self.terms.names:
            if name not in self._came:
                self._without(name, self._secret(name, revealed, self._keyed), total)
        return total

    def _without(self, name: str, secret: int, total: Ring) -> None:
        """Take away the streams that neighbours have in common with somebody who has left."""
        key = private_key(secret, self.terms)
        for other in self.terms.neighbours(name):
            if other in self._came:
                add_stream(total, pair_seed(key, self._opened[other].key, self.terms, name, other), -sign(other, name))

    def _marked(self, name: str, secret: int) -> bool:
        return mark(secret) == self._opened[name].mark

    def _keyed(self, name: str, secret: int) -> bool:
        return private_key(secret, self.terms).public_key().public_bytes_raw() == self._opened[name].key

    def _secret(self, name: str, revealed: Mapping[str, Mapping[str, int]], right: Callable[[str, int], bool]) -> int:
        """What τ neighbours have said, put together; other neighbours' shares where somebody's do not fit."""
        names, terms = self.terms.names, self.terms
        said = {names.index(o) + 1: revealed[o][name] for o in terms.neighbours(name) if name in revealed.get(o, {})}
        if len(said) < terms.threshold:
            raise Incomplete(
                f"Only {len(said)} neighbours of {name!r} are left, {terms.threshold} are needed: the sum stays closed."
            )
        for chosen in islice(combinations(said.items(), terms.threshold), TRIED):
            if right(name, secret := shamir.join(dict(chosen))):
                return secret
        raise Incomplete(f"The shares of {name!r} do not fit together: the sum stays closed.")
