r"""Identities of clients, Shamir shares of their secrets, and the seeds and key streams derived from them.

A client is known to the others by a long-term X25519 key, shown on a card, which the server carries around. A client
that trusts the server to pass on what it was given needs no more; one that does not can pin the others' keys by their
fingerprints, told by telephone, or have cards signed with the certificates by which the deployment knows its sites, and
check them against the deployment's own authority.

The shares of a secret s are the values of a random polynomial of degree τ − 1 over the integers modulo p = 2²⁵⁵ − 19
with the value s at 0 (A. Shamir, 1979): any τ of them give s back by Lagrange's formula at 0, and τ − 1 say nothing
about it. Seeds and streams are HKDF-SHA256 and ChaCha20 of `cryptography`; randomness is the operating system's.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from scaffpd.errors import InputError
from scaffpd.masking.terms import Ring, Terms
from scaffpd.system import load_or_create


@dataclass(frozen=True)
class Card:
    """What a client shows of itself.

    Attributes:
        name: the client.
        key: its public key, 32 bytes.
        certificate: of the deployment, PEM; empty where there is none.
        signature: of name and key, with the certificate's own key.
    """

    name: str
    key: bytes
    certificate: bytes = b""
    signature: bytes = b""

    @property
    def fingerprint(self) -> str:
        """A short name for the key, to be compared by people and written down as a pin."""
        return hashlib.sha256(self.key).hexdigest()

    @property
    def signed(self) -> bytes:
        """What the signature is about."""
        return b"scaffpd card\0" + self.name.encode() + b"\0" + self.key

    def values(self) -> dict[str, str]:
        """As JSON has it."""
        return {
            "name": self.name, "key": self.key.hex(), "certificate": self.certificate.decode(),
            "signature": self.signature.hex(),
        }  # fmt: skip

    @classmethod
    def of(cls, values: Any) -> Card:
        """What `values` made, checked."""
        try:
            parts = (str(values["name"]), bytes.fromhex(values["key"]), str(values["certificate"]).encode())
            card = cls(*parts, bytes.fromhex(values["signature"]))
        except (KeyError, TypeError, ValueError):
            raise InputError("A card of a client cannot be read.") from None
        if len(card.key) != 32:
            raise InputError("A card of a client cannot be read.")
        return card


@dataclass(frozen=True)
class Authority:
    """The deployment's root certificate: whom it has let in, and under which name."""

    root: x509.Certificate

    @classmethod
    def read(cls, path: Path) -> Authority:
        """A PEM file."""
        try:
            return cls(x509.load_pem_x509_certificate(path.read_bytes()))
        except (OSError, ValueError):
            raise InputError(f"The authority's certificate {str(path)!r} cannot be read.") from None

    def check(self, card: Card) -> None:
        """Whether the card is of the site that the authority knows by this name."""
        try:
            certificate = x509.load_pem_x509_certificate(card.certificate)
            certificate.verify_directly_issued_by(self.root)
            _verify(certificate.public_key(), card.signature, card.signed)
        except (ValueError, TypeError, InvalidSignature):
            raise InputError(f"The card of {card.name!r} is not signed by a site that this authority knows.") from None
        now = datetime.datetime.now(datetime.UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise InputError(f"The certificate of {card.name!r} is not valid today.")
        names = [a.value for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if names != [card.name]:
            raise InputError(f"The card of {card.name!r} is signed in the name of {', '.join(map(str, names))!r}.")


class Identity:
    """A client's own long-term key.

    Args:
        name: the client.
        key: its private key; a new one by default.
        certificate: of the deployment, with its private key (both PEM), to sign the card with.
    """

    def __init__(
        self, name: str, key: X25519PrivateKey | None = None, certificate: tuple[bytes, bytes] | None = None
    ) -> None:
        self.name, self._key = name, key or X25519PrivateKey.generate()
        card = Card(name, self._key.public_key().public_bytes_raw())
        if certificate is not None:
            shown, private = certificate
            card = Card(name, card.key, shown, _sign(_private(private), card.signed))
        self.card = card

    @classmethod
    def kept(cls, name: str, path: Path, certificate: tuple[bytes, bytes] | None = None) -> Identity:
        """The key of a file that only its owner can read, made where there is none."""
        return cls(name, X25519PrivateKey.from_private_bytes(load_or_create(path)), certificate)

    def agreed(self, other: Card) -> bytes:
        """The secret that only the two know."""
        return self._key.exchange(X25519PublicKey.from_public_bytes(other.key))


def _private(pem: bytes) -> Any:
    try:
        return serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError("The certificate's private key cannot be read: PEM without a password is needed.") from None


def _sign(key: Any, message: bytes) -> bytes:
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(message, padding.PSS(padding.MGF1(SHA256()), padding.PSS.MAX_LENGTH), SHA256())
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(message, ec.ECDSA(SHA256()))
    raise InputError(f"A card can be signed with an RSA or EC key, not with {type(key).__name__}.")


def _verify(key: Any, signature: bytes, message: bytes) -> None:
    if isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, message, padding.PSS(padding.MGF1(SHA256()), padding.PSS.AUTO), SHA256())
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(SHA256()))
    else:
        raise InvalidSignature


PRIME = 2**255 - 19
SHARE_BYTES = 32


def fresh_secret() -> int:
    """Draw a random secret."""
    return secrets.randbelow(PRIME)


def split_secret(secret: int, threshold: int, places: Sequence[int]) -> list[int]:
    """Return the shares for holders at these places (positive and different from each other)."""
    rest = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = []
    for place in places:
        value = 0
        for coefficient in reversed(rest):
            value = (value + coefficient) * place % PRIME
        shares.append((value + secret) % PRIME)
    return shares


def join_shares(shares: Mapping[int, int]) -> int:
    """Return the secret, from exactly as many shares (by their places) as its threshold."""
    total = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        total = (total + share * above * pow(below, -1, PRIME)) % PRIME
    return total


BLOCK = 2**14  # numbers at a time: what is added to them is still in the cache
_ZEROS = bytes(8 * BLOCK)


def derive_key(secret: bytes, salt: bytes, purpose: str) -> bytes:
    """Derive a key of 32 bytes for one purpose only."""
    return HKDF(SHA256(), 32, salt, f"scaffpd {purpose}".encode()).derive(secret)


def add_stream(total: Ring, key: bytes, sign: int) -> None:
    """Add a key's stream of uniform numbers modulo 2⁶⁴ to `total`, or subtract it.

    A key is for one stream: it starts at zero. Streams are read as little-endian numbers on every machine.
    """
    stream: Any = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    held = bytearray(8 * BLOCK)
    numbers = np.frombuffer(held, dtype="<u8")
    change = np.add if sign > 0 else np.subtract
    for first in range(0, len(total), BLOCK):
        part = total[first : first + BLOCK]
        stream.update_into(memoryview(_ZEROS)[: 8 * len(part)], held)
        change(part, numbers[: len(part)], out=part)


def nonce() -> str:
    """Return a name that nobody has used before."""
    return os.urandom(16).hex()


def private_key(secret: int, terms: Terms) -> X25519PrivateKey:
    """a_i."""
    return X25519PrivateKey.from_private_bytes(derive_key(as_bytes(secret), terms.digest, "key"))


def mask_seed(secret: int, terms: Terms) -> bytes:
    """The seed of b_i's stream."""
    return derive_key(as_bytes(secret), terms.digest, "mask")


def pair_seed(own: X25519PrivateKey, key: bytes, terms: Terms, name: str, other: str) -> bytes:
    """s_ij, from one's private and the other's public key."""
    first, second = sorted((name, other))
    return derive_key(own.exchange(X25519PublicKey.from_public_bytes(key)), terms.digest, f"pair {first}\0{second}")


def sign(name: str, other: str) -> int:
    """Return +1 for the neighbour that adds the stream of two, -1 for the one that subtracts it."""
    return 1 if name < other else -1


def mark(secret: int) -> bytes:
    """A fingerprint of b_i: whoever puts it together from shares knows that it is right."""
    return hashlib.sha256(b"scaffpd mark\0" + as_bytes(secret)).digest()


def as_bytes(*secrets: int) -> bytes:
    """Whole numbers below the prime, 32 bytes each."""
    return b"".join(secret.to_bytes(SHARE_BYTES, "big") for secret in secrets)
