r"""Both sides of an exchange. A client gives three answers:

share   draw a mask's seed b_i and a key a_i for this exchange alone, and give every neighbour a share of both, sealed
        for it; show the public key A_i and a fingerprint of b_i.
mask    y_i = q_i + stream(b_i) + Σ_{j>i} stream(s_ij) − Σ_{j<i} stream(s_ij)  (mod 2⁶⁴),  s_ij = X25519(a_i, A_j).
reveal  of every neighbour that has sent its y_j a share of b_j, of every other a share of a_j; once per exchange.

Nothing but y_i and shares ever leaves. The streams s_ij cancel in the sum of all; shares of b_j open the stream that
remains, and shares of a_j the streams of somebody who has left. Nobody gives both for one client: a vector that comes
late, after its other masks were opened, is still hidden by b_j.

The server carries sealed shares around, adds up what comes, and opens the sum,

    Σ_{i∈U} q_i = Σ_{i∈U} y_i − Σ_{i∈U} stream(b_i) ∓ Σ_{j∉U, i∈U} stream(s_ij)   (mod 2⁶⁴)

for the clients U whose y_i came. It compares every secret that it puts together from shares with the public key or the
mark that its owner has shown: a sum is right, or there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from scaffpd.errors import InputError
from scaffpd.masking import keys
from scaffpd.masking.keys import (
    Authority,
    Card,
    Identity,
    add_stream,
    as_bytes,
    derive_key,
    mark,
    mask_seed,
    pair_seed,
    private_key,
    sign,
)
from scaffpd.masking.terms import Accused, FixedPoint, Forgotten, Ring, Terms

KEY, SHOWN, SEALED = 32, 64, 80  # bytes: a key or a mark, both, two shares with their tag
NAMES = 64  # of exchanges that are known again; secrets are new with every opening in any case
REMEMBERED = 4  # exchanges whose secrets are kept: this one's, the next one's, and those of a repeated question


@dataclass(frozen=True)
class Opened:
    """How a client opens an exchange.

    Attributes:
        key: A_i.
        mark: a fingerprint of b_i.
        sealed: the shares for every neighbour, which only that one can read.
    """

    key: bytes
    mark: bytes
    sealed: Mapping[str, bytes] = field(repr=False)


@dataclass
class _Secrets:
    """What a client remembers of an exchange."""

    terms: Terms
    key: int
    mask: int
    held: dict[str, tuple[int, int]] = field(default_factory=dict)  # shares of (a_j, b_j)
    sent: bool = False
    survivors: tuple[str, ...] | None = None


class Party:
    """One client.

    Args:
        identity: its long-term key.
        pins: fingerprints of all others' keys, by their names; with any of them, every other card is refused.
        authority: checks the signatures on cards; `None` where cards are not signed.
        least: the smallest number of colluding clients that this client wants to be safe from.
    """

    def __init__(
        self,
        identity: Identity,
        pins: Mapping[str, str] | None = None,
        authority: Authority | None = None,
        least: int = 1,
    ) -> None:
        self.identity, self.name = identity, identity.name
        self._pins, self._authority, self._least = dict(pins or {}), authority, least
        self._cards: dict[str, Card] = {}
        self._agreed: dict[str, bytes] = {}
        self._open: dict[str, _Secrets] = {}
        self._used: list[str] = []

    def meet(self, cards: Sequence[Card]) -> None:
        """Take the others' cards; a name keeps its key for as long as this client lives."""
        for card in cards:
            if card.name == self.name:
                if card.key != self.identity.card.key:
                    raise InputError(f"Somebody else shows a card in the name of {self.name!r}.")
                continue
            known = self._cards.get(card.name, card)
            if known.key != card.key:
                raise Accused(card.name, f"{card.name!r} shows another key than before.")
            if self._pins and card.name not in self._pins:
                raise Accused(card.name, f"{self.name!r} has pins, and none for {card.name!r}: pin every other key.")
            if self._pins.get(card.name, card.fingerprint) != card.fingerprint:
                raise Accused(card.name, f"The key of {card.name!r} is not the one that is pinned here.")
            if self._authority is not None:
                try:
                    self._authority.check(card)
                except InputError as why:
                    raise Accused(card.name, str(why)) from None
            self._cards[card.name] = card

    def share(self, terms: Terms) -> Opened:
        """Open an exchange; the same one cannot be opened twice."""
        if self.name not in terms.names or terms.exchange in self._used:
            raise InputError("This exchange is not for this client, or has been opened before.")
        if terms.colluding < self._least:
            raise InputError(
                f"This client takes part in sums that bear {self._least} colluding clients, not {terms.colluding}."
            )
        mine = _Secrets(terms, keys.fresh_secret(), keys.fresh_secret())
        opened = Opened(private_key(mine.key, terms).public_key().public_bytes_raw(), mark(mine.mask), {})
        places = [terms.names.index(other) + 1 for other in terms.neighbours(self.name)]
        parts = (keys.split_secret(secret, terms.threshold, places) for secret in (mine.key, mine.mask))
        sealed = {}
        for other, a, b in zip(terms.neighbours(self.name), *parts, strict=True):
            sealed[other] = self._box(terms, self.name, other, opened).encrypt(bytes(12), as_bytes(a, b), None)
        self._used = [*self._used[1 - NAMES :], terms.exchange]
        self._open[terms.exchange] = mine
        while len(self._open) > REMEMBERED:
            self._open.pop(next(iter(self._open)))
        return Opened(opened.key, opened.mark, sealed)

    def mask(self, exchange: str, others: Mapping[str, Opened], numbers: FixedPoint, vector: Any) -> Ring:
        """y_i for the vector; `others` are the neighbours' openings, each with what is sealed for this client.

        A vector out of range is refused before anything happens. Nothing is masked twice in one exchange.
        """
        mine = self._secrets(exchange)
        terms, neighbours = mine.terms, mine.terms.neighbours(self.name)
        if mine.sent or set(others) != set(neighbours) or numbers.clients < len(terms.names):
            raise InputError("This exchange is over, or not complete, or its numbers are for fewer clients.")
        total = numbers.encode(np.ravel(vector))
        held = {other: self._unsealed(terms, other, others[other]) for other in neighbours}
        add_stream(total, mask_seed(mine.mask, terms), +1)
        own = private_key(mine.key, terms)
        for other in neighbours:
            try:
                shared = pair_seed(own, others[other].key, terms, self.name, other)
            except ValueError:  # of small order: everybody would know the secret
                raise Accused(other, f"The key of {other!r} cannot be used.") from None
            add_stream(total, shared, sign(self.name, other))
        mine.held, mine.sent = held, True
        return total

    def reveal(self, exchange: str, survivors: Sequence[str]) -> dict[str, int]:
        """A share of b_j of every surviving neighbour, of a_j of every other."""
        mine = self._secrets(exchange)
        there, terms = tuple(survivors), mine.terms
        if not mine.sent or self.name not in there or not set(there) <= set(terms.names):
            raise InputError("This client's vector is not in that sum.")
        if len(set(there)) < len(terms.names) - terms.leaving:
            raise InputError(f"Only {len(set(there))} of {len(terms.names)} clients are in that sum: it stays closed.")
        if mine.survivors not in (None, there):
            raise InputError("This sum has been opened for other clients before.")
        mine.survivors = there
        return {other: shares[other in there] for other, shares in mine.held.items()}

    def _secrets(self, exchange: str) -> _Secrets:
        if exchange not in self._open:
            raise Forgotten("This client has not opened that exchange.")
        return self._open[exchange]

    def _unsealed(self, terms: Terms, other: str, opened: Opened) -> tuple[int, int]:
        box = self._box(terms, other, self.name, opened)
        try:
            both = box.decrypt(bytes(12), opened.sealed[self.name], None)
        except (InvalidTag, KeyError):
            sentence = f"The shares of {other!r} are not from {other!r}, or not for this exchange."
            raise Accused(other, sentence) from None
        return int.from_bytes(both[: keys.SHARE_BYTES], "big"), int.from_bytes(both[keys.SHARE_BYTES :], "big")

    def _box(self, terms: Terms, sender: str, receiver: str, opened: Opened) -> ChaCha20Poly1305:
        """A cipher for one message: its key is of this exchange, these two clients, this direction, and this opening.

        What the sender shows is new with every opening: also a client that was restarted, and has forgotten which
        names of exchanges are used, never seals two messages with one key.
        """
        other = receiver if sender == self.name else sender
        if other not in self._cards:
            raise Forgotten(f"This client has not met {other!r}.")
        if other not in self._agreed:
            try:
                self._agreed[other] = self.identity.agreed(self._cards[other])
            except ValueError:
                raise Accused(other, f"The key of {other!r} cannot be used.") from None
        salt = terms.digest + opened.key + opened.mark
        return ChaCha20Poly1305(derive_key(self._agreed[other], salt, f"shares {sender}\0{receiver}"))

    def kept(self) -> dict[str, Any]:
        """What another process of this client needs to go on: it holds secrets, and must not leave the site."""
        about = [
            {
                "terms": s.terms.values(), "key": hex(s.key), "mask": hex(s.mask), "sent": s.sent,
                "survivors": None if s.survivors is None else list(s.survivors),
                "held": {name: [hex(a), hex(b)] for name, (a, b) in s.held.items()},
            }
            for s in self._open.values()
        ]  # fmt: skip
        return {"open": about, "used": self._used, "cards": [card.values() for card in self._cards.values()]}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `kept` returned."""
        self._used = list(kept["used"])
        self._cards = {card.name: card for card in map(Card.of, kept["cards"])}
        for about in kept["open"]:
            held = {name: (int(a, 16), int(b, 16)) for name, (a, b) in about["held"].items()}
            survivors = None if about["survivors"] is None else tuple(about["survivors"])
            terms, key, mask = Terms.of(about["terms"]), int(about["key"], 16), int(about["mask"], 16)
            self._open[terms.exchange] = _Secrets(terms, key, mask, held, about["sent"], survivors)


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
            if right(name, secret := keys.join_shares(dict(chosen))):
                return secret
        raise Incomplete(f"The shares of {name!r} do not fit together: the sum stays closed.")
