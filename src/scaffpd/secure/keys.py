r"""Identities of clients, shared secrets of two of them, and the key streams derived from these.

The others know a client by a long-term X25519 key on a card, which the server passes on. A client
that trusts the server to pass cards on unchanged needs no more; otherwise it pins the others' keys
by their fingerprints, compared by telephone.

A card also has a key for the lifetime of the process (`once`). The secret of two clients combines
both agreements,

    k_ij = HKDF(X25519(a_i, A_j) ‖ X25519(e_i, E_j)),

so that impersonating a client takes its long-term key, and a long-term key that is stolen later
opens no sum of an earlier process. Keys are derived by HKDF-SHA256, streams are those of ChaCha20,
both of `cryptography`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from scaffpd.errors import InputError
from scaffpd.files import load_or_create
from scaffpd.secure.terms import Ring


@dataclass(frozen=True)
class Card:
    """Public card of a client."""

    name: str  # the client
    key: bytes  # its public key, 32 bytes
    once: bytes  # the public key of its process, 32 bytes

    @property
    def fingerprint(self) -> str:
        """Short name of the key, for people to compare and to write down as a pin."""
        return hashlib.sha256(self.key).hexdigest()

    def values(self) -> dict[str, str]:
        """Return the card as JSON values."""
        return {"name": self.name, "key": self.key.hex(), "once": self.once.hex()}

    @classmethod
    def of(cls, values: Any) -> Card:
        """Read the JSON values of a card, and check them."""
        try:
            key = bytes.fromhex(values["key"])
            once = bytes.fromhex(values["once"])
            if len(key) != 32 or len(once) != 32:
                raise ValueError
            return cls(str(values["name"]), key, once)
        except (KeyError, TypeError, ValueError):
            raise InputError("card-unreadable", "A card of a client cannot be read.") from None


class Identity:
    """Private keys of a client: a long-term one, by default new, and one for its process."""

    def __init__(self, name: str, key: X25519PrivateKey | None = None) -> None:
        self.name = name
        self._key = key or X25519PrivateKey.generate()
        self._once = X25519PrivateKey.generate()
        self.card = Card(
            name,
            self._key.public_key().public_bytes_raw(),
            self._once.public_key().public_bytes_raw(),
        )

    @classmethod
    def stored(cls, name: str, path: Path) -> Identity:
        """Load the key of a file that only its owner can read; create it if missing."""
        return cls(name, X25519PrivateKey.from_private_bytes(load_or_create(path)))

    def secret(self) -> bytes:
        """Return the private key of this process, which never leaves it."""
        return self._once.private_bytes_raw()

    def agreed(self, other: Card) -> bytes:
        """Return k_ij, which only the two know."""
        pairs = (self._key, other.key), (self._once, other.once)
        both = b"".join(
            own.exchange(X25519PublicKey.from_public_bytes(theirs)) for own, theirs in pairs
        )
        shown = sorted((self.card.key + self.card.once, other.key + other.once))
        return derive_key(both, b"".join(shown), "pair")


BLOCK = 2**14  # numbers at a time, to stay in the cache
_ZEROS = bytes(8 * BLOCK)


def derive_key(secret: bytes, salt: bytes, purpose: str) -> bytes:
    """Derive a key of 32 bytes for one purpose only."""
    return HKDF(SHA256(), 32, salt, f"scaffpd {purpose}".encode()).derive(secret)


def add_stream(total: Ring, key: bytes, sign: int) -> None:
    """Add a key's stream of uniform numbers modulo 2⁶⁴ to `total`, or subtract it.

    A key is for one stream, which starts at zero. Numbers are little-endian on every machine.
    """
    stream: Any = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    held = bytearray(8 * BLOCK)
    numbers = np.frombuffer(held, dtype="<u8")
    change = np.add if sign > 0 else np.subtract
    for first in range(0, len(total), BLOCK):
        part = total[first : first + BLOCK]
        stream.update_into(memoryview(_ZEROS)[: 8 * len(part)], held)
        change(part, numbers[: len(part)], out=part)


def sign(name: str, other: str) -> int:
    """Return +1 for the neighbour that adds the stream of two, -1 for the one that subtracts it."""
    return 1 if name < other else -1
