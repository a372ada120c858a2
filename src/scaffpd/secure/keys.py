r"""Keys of silos: who signs, and masks that two silos share.

A silo has one secret of 32 bytes in a file, and from it an Ed25519 key that signs and an X25519 key
that agrees on masks. Both public keys are its card, whose fingerprint operators compare once, by
telephone. Every process has one more X25519 key, which never touches a disk. The mask of silos i
and j at a step is a stream of AES in counter mode with the key

    HKDF(X25519(fresh_i, fresh_j) ‖ X25519(own_i, own_j);  transcript, step, kind, length),

which i adds and j subtracts: it takes a card's secret to impersonate a silo, a secret stolen later
opens no earlier sum, and two silos that have seen different things share nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from scaffpd.errors import InputError
from scaffpd.files import load_or_create
from scaffpd.secure.ring import BYTES, Ring, add, negative

SIGNATURE = 64  # bytes
KEY = 32


def derived(secret: bytes, about: bytes, salt: bytes = b"") -> bytes:
    """Return a key of 32 bytes for one use."""
    return HKDF(SHA256(), KEY, salt, b"scaffpd " + about).derive(secret)


@dataclass(frozen=True)
class Card:
    """Public keys of a silo."""

    signs: bytes
    masks: bytes

    @classmethod
    def of(cls, digits: object) -> Card:
        """Read the hexadecimal digits that a silo's agreement shows."""
        try:
            both = bytes.fromhex(str(digits))
            Ed25519PublicKey.from_public_bytes(both[:KEY])
            X25519PublicKey.from_public_bytes(both[KEY:])
        except ValueError:
            raise InputError(
                "key-unreadable",
                f"{str(digits)[:20]!r} is not a silo's key: `scaffpd silo check` prints it.",
            ) from None
        return cls(both[:KEY], both[KEY:])

    @cached_property
    def digits(self) -> str:
        return (self.signs + self.masks).hex()

    @property
    def fingerprint(self) -> str:
        """Short name of both keys, for people to compare."""
        return hashlib.sha256(self.signs + self.masks).hexdigest()

    def signed(self, signature: bytes, message: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.signs).verify(signature, message)
        except InvalidSignature:
            return False
        return True


class Identity:
    """Private keys of a silo, by default new."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._signs = Ed25519PrivateKey.generate()
        self._masks = X25519PrivateKey.generate()
        if secret is not None:
            self._signs = Ed25519PrivateKey.from_private_bytes(derived(secret, b"signs"))
            self._masks = X25519PrivateKey.from_private_bytes(derived(secret, b"masks"))
        public = self._signs.public_key().public_bytes_raw()
        self.card = Card(public, self._masks.public_key().public_bytes_raw())

    @classmethod
    def stored(cls, path: Path) -> Identity:
        """Load the secret of a file that only its owner can read; create it if missing."""
        return cls(load_or_create(path))

    def sign(self, message: bytes) -> bytes:
        return self._signs.sign(message)

    def shared(self, card: Card) -> bytes:
        return self._masks.exchange(X25519PublicKey.from_public_bytes(card.masks))


class Masks:
    """Masks of one silo in one epoch."""

    def __init__(self, name: str, identity: Identity) -> None:
        self.name = name
        self._identity = identity
        self._fresh = X25519PrivateKey.generate()
        self.fresh = self._fresh.public_key().public_bytes_raw()
        self._secrets: dict[str, bytes] = {}

    def meet(self, cards: Mapping[str, Card], fresh: Mapping[str, bytes]) -> None:
        """Agree with every other silo on a secret, from the keys of its card and of its process."""
        for name in cards.keys() - {self.name}:
            try:
                new = self._fresh.exchange(X25519PublicKey.from_public_bytes(fresh[name]))
                always = self._identity.shared(cards[name])
            except ValueError:
                raise InputError(
                    "key-unreadable", f"Silo {name!r} has posted no usable key."
                ) from None
            self._secrets[name] = new + always

    def add(self, numbers: Ring, transcript: bytes, about: bytes) -> Ring:
        """Return the numbers with all masks of a step, of which everybody's cancel in the sum."""
        for name, secret in self._secrets.items():
            key = derived(secret, about, transcript)
            stream = Cipher(algorithms.AES(key), modes.CTR(bytes(BYTES))).encryptor()
            drawn = np.frombuffer(stream.update(bytes(numbers.nbytes)), np.uint64)
            mask = drawn.reshape(numbers.shape)
            numbers = add(numbers, mask if self.name < name else negative(mask))
        return numbers
