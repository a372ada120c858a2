r"""Secure aggregation: a server learns Σ_i w_i v_i and no single v_i.

After Bonawitz et al. (2017) and Bell et al. (2020), without recovery from dropouts: no shares of
keys, hence no second mask, no second exchange, and no round in which clients compare lists.

terms     the clients of a sum, which of them share masks, and the number format
keys      identities of clients, shared secrets of two of them, and key streams

This file has a client's part in a sum: one answer, hidden under streams that cancel in the sum.

    y_i = q_i + Σ_{j>i} stream(k_ij, h) − Σ_{j<i} stream(k_ij, h)   (mod 2⁶⁴)

over its neighbours j, with k_ij the secret of the two (`keys`) and h a digest of the whole
question: the run, the vector, the weights, the number format and the clients. So

    Σ_i y_i = Σ_i q_i

if all were asked the same and have answered. A server that sends two clients different questions,
or leaves a client out, gets only noise: clients reveal nothing else. A client that does not answer
leaves the sum closed for good; it has to be started again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from scaffpd.errors import InputError, not_installed

if find_spec("cryptography") is None:
    raise not_installed("cryptography", "privacy")

from scaffpd.secure.keys import Card, Identity, add_stream, derive_key, sign
from scaffpd.secure.terms import FixedPoint, Forgotten, Ring, Terms

__all__ = ["Card", "FixedPoint", "Identity", "Incomplete", "Party", "Terms"]

MOST_CARDS = 4096  # clients in a sum


@dataclass(eq=False, repr=False)
class Party:
    """One client of secure sums."""

    identity: Identity  # its keys
    # fingerprints of all others' keys, by name; with any of them, every other card is refused
    pins: Mapping[str, str] = field(default_factory=dict)
    least: int = 1  # the smallest number of colluding clients that this client accepts
    seed: bytes = b""  # the secret by which this client rounds; its key by default
    _cards: dict[str, Card] = field(default_factory=dict, init=False)
    _agreed: dict[str, bytes] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        """The client's name."""
        return self.identity.name

    @property
    def known(self) -> Collection[str]:
        """Names of the other clients that this client has met."""
        return self._cards.keys()

    def meet(self, cards: Sequence[Card]) -> None:
        """Accept the others' cards; a name has one long-term key while this client lives."""
        if len({*self._cards, *(card.name for card in cards)}) > MOST_CARDS:
            raise InputError("too-many-clients", f"Secure sums take {MOST_CARDS} clients at most.")
        for card in cards:
            if card.name == self.name:
                if card.key != self.identity.card.key:
                    raise InputError(
                        "name-taken",
                        f"Another client shows a card in the name of {self.name!r}.",
                    )
                if card.once != self.identity.card.once:
                    raise Forgotten(
                        "client-restarted", "This client was restarted after it showed that card."
                    )
                continue
            self._check(card)
            if self._cards.get(card.name) != card:
                self._agreed.pop(card.name, None)
            self._cards[card.name] = card

    def _check(self, card: Card) -> None:
        """Refuse a card that does not match its name."""
        if self._cards.get(card.name, card).key != card.key:
            raise InputError("key-changed", f"{card.name!r} shows another key than before.")
        if self.pins and card.name not in self.pins:
            raise InputError(
                "key-not-pinned",
                f"{self.name!r} has pins, and none for {card.name!r}: pin every other key.",
            )
        if self.pins.get(card.name, card.fingerprint) != card.fingerprint:
            raise InputError(
                "key-not-as-pinned",
                f"The key of {card.name!r} is not the one that is pinned here.",
            )

    def mask(
        self, terms: Terms, asked: bytes, numbers: FixedPoint, vector: Any, nearest: bool = False
    ) -> Ring:
        """Return y_i for the vector; `asked` stands for everything that this client was asked.

        A vector out of range is refused first. `nearest` rounds to the nearest number, and never at
        random.
        """
        if self.name not in terms.names or numbers.clients < len(terms.names):
            raise InputError(
                "not-in-this-sum",
                "This sum is not for this client, or its numbers are for fewer clients.",
            )
        if terms.colluding < self.least:
            raise InputError(
                "too-few-may-collude",
                f"This client takes part in sums that tolerate {self.least} colluding clients, not "
                f"{terms.colluding}.",
            )
        own = np.ravel(vector)
        salt = terms.digest + repr(numbers).encode() + asked
        drawn = None
        if not nearest:  # the same question has the same answer
            secret = self.seed or self.identity.secret()
            stream = np.zeros(len(own), dtype=np.uint64)
            add_stream(stream, derive_key(secret, salt, "rounding"), 1)
            drawn = stream * 2.0**-64
        total = numbers.encode(own, drawn)
        for other in terms.neighbours(self.name):
            add_stream(
                total, derive_key(self._shared(other), salt, "stream"), sign(self.name, other)
            )
        return total

    def _shared(self, other: str) -> bytes:
        """Return k_ij."""
        if other not in self._cards:
            raise Forgotten("client-not-met", f"This client has not met {other!r}.")
        if other not in self._agreed:
            try:
                self._agreed[other] = self.identity.agreed(self._cards[other])
            except ValueError:  # of small order: the secret would be public
                raise InputError("key-unusable", f"The key of {other!r} cannot be used.") from None
        return self._agreed[other]


class Incomplete(InputError):
    """A client has left a sum, which stays closed for good."""
