r"""Identities of clients, shared secrets of two of them, and the key streams derived from these.

The others know a client by a long-term X25519 key on a card, which the server passes on. A client that trusts the
server to pass cards on unchanged needs no more; otherwise it pins the others' keys by their
fingerprints, compared by telephone, or has cards signed with certificates of an authority that the server does not own.

A card also has a key for the lifetime of the process (`once`). The secret of two clients combines both agreements,

    k_ij = HKDF(X25519(a_i, A_j) ‖ X25519(e_i, E_j)),

so that impersonating a client takes its long-term key, and a long-term key that is stolen later opens no
sum of an earlier process. Keys are derived by HKDF-SHA256, streams are those of ChaCha20, both of `cryptography`.
"""

from __future__ import annotations

import datetime
import hashlib
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
from scaffpd.files import load_or_create
from scaffpd.secure.terms import Ring


@dataclass(frozen=True)
class Card:
    """Public card of a client."""

    name: str  # the client
    key: bytes  # its public key, 32 bytes
    once: bytes  # the public key of its process, 32 bytes
    certificate: bytes = b""  # of the deployment, PEM; empty if there is none
    signature: bytes = b""  # of name and keys, with the certificate's own key

    @property
    def fingerprint(self) -> str:
        """Short name of the key, for people to compare and to write down as a pin."""
        return hashlib.sha256(self.key).hexdigest()

    @property
    def signed(self) -> bytes:
        """Bytes that the signature covers."""
        return b"scaffpd card\0" + self.name.encode() + b"\0" + self.key + self.once

    def values(self) -> dict[str, str]:
        """Return the card as JSON values."""
        return {
            "name": self.name,
            "key": self.key.hex(),
            "once": self.once.hex(),
            "certificate": self.certificate.decode(),
            "signature": self.signature.hex(),
        }

    @classmethod
    def of(cls, values: Any) -> Card:
        """Read the JSON values of a card, and check them."""
        try:
            keys = bytes.fromhex(values["key"]), bytes.fromhex(values["once"])
            signed = str(values["certificate"]).encode(), bytes.fromhex(values["signature"])
            card = cls(str(values["name"]), *keys, *signed)
        except (KeyError, TypeError, ValueError):
            raise InputError("card-client-read", "A card of a client cannot be read.") from None
        if len(card.key) != 32 or len(card.once) != 32:
            raise InputError("card-client-read", "A card of a client cannot be read.")
        return card


@dataclass(frozen=True)
class Authority:
    """Root certificate of the deployment, which vouches for the sites and their names."""

    root: x509.Certificate

    @classmethod
    def read(cls, path: Path) -> Authority:
        """Read a PEM file."""
        try:
            return cls(x509.load_pem_x509_certificate(path.read_bytes()))
        except (OSError, ValueError):
            raise InputError(
                "authority-certificate-read",
                f"The authority's certificate {str(path)!r} cannot be read.",
            ) from None

    def check(self, card: Card) -> None:
        """Check that the card belongs to the site that the authority knows by this name."""
        try:
            certificate = x509.load_pem_x509_certificate(card.certificate)
            certificate.verify_directly_issued_by(self.root)
            _verify(certificate.public_key(), card.signature, card.signed)
        except (ValueError, TypeError, InvalidSignature):
            raise InputError(
                "card-signed-site",
                f"The card of {card.name!r} is not signed by a site that this authority knows.",
            ) from None
        now = datetime.datetime.now(datetime.UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise InputError(
                "certificate-valid-today", f"The certificate of {card.name!r} is not valid today."
            )
        names = [a.value for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if names != [card.name]:
            raise InputError(
                "card-signed-name",
                f"The card of {card.name!r} is signed in the name of {', '.join(map(str, names))!r}.",
            )


class Identity:
    """Private keys of a client: a long-term one, and one for its process (`once`); new ones by default.

    With a certificate of the deployment and its private key, both PEM, the card is signed.
    """

    def __init__(
        self,
        name: str,
        key: X25519PrivateKey | None = None,
        certificate: tuple[bytes, bytes] | None = None,
        once: bytes | None = None,
    ) -> None:
        self.name = name
        self._certificate = certificate
        self._key = key or X25519PrivateKey.generate()
        self._once = (
            X25519PrivateKey.generate()
            if once is None
            else X25519PrivateKey.from_private_bytes(once)
        )
        card = Card(
            name,
            self._key.public_key().public_bytes_raw(),
            self._once.public_key().public_bytes_raw(),
        )
        if certificate is not None:
            shown, private = certificate
            card = Card(name, card.key, card.once, shown, _sign(_private(private), card.signed))
        self.card = card

    @classmethod
    def kept(
        cls, name: str, path: Path, certificate: tuple[bytes, bytes] | None = None
    ) -> Identity:
        """Load the key of a file that only its owner can read; create it if missing."""
        return cls(name, X25519PrivateKey.from_private_bytes(load_or_create(path)), certificate)

    def secret(self) -> str:
        """Return the private key of this process, for another process that takes its place."""
        return self._once.private_bytes_raw().hex()

    def resumed(self, secret: str) -> Identity:
        """Return the same client in the place of the process with that private key."""
        return Identity(self.name, self._key, self._certificate, bytes.fromhex(secret))

    def agreed(self, other: Card) -> bytes:
        """Return k_ij, which only the two know."""
        pairs = (self._key, other.key), (self._once, other.once)
        both = b"".join(
            own.exchange(X25519PublicKey.from_public_bytes(theirs)) for own, theirs in pairs
        )
        shown = sorted((self.card.key + self.card.once, other.key + other.once))
        return derive_key(both, b"".join(shown), "pair")


def _private(pem: bytes) -> Any:
    try:
        return serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(
            "certificate-private-key",
            "The certificate's private key cannot be read: PEM without a password is needed.",
        ) from None


def _sign(key: Any, message: bytes) -> bytes:
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(
            message, padding.PSS(padding.MGF1(SHA256()), padding.PSS.MAX_LENGTH), SHA256()
        )
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(message, ec.ECDSA(SHA256()))
    raise InputError(
        "card-signed-rsa",
        f"A card can be signed with an RSA or EC key, not with {type(key).__name__}.",
    )


def _verify(key: Any, signature: bytes, message: bytes) -> None:
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= 2048:
        key.verify(
            signature, message, padding.PSS(padding.MGF1(SHA256()), padding.PSS.AUTO), SHA256()
        )
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(SHA256()))
    else:
        raise InvalidSignature


BLOCK = 2**14  # numbers at a time, to stay in the cache
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


def sign(name: str, other: str) -> int:
    """Return +1 for the neighbour that adds the stream of two, -1 for the one that subtracts it."""
    return 1 if name < other else -1
