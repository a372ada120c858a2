"""Everything that is derived from the two secrets of a client in an exchange; client and server derive it alike."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from scaffpd.masking import shamir
from scaffpd.masking.streams import seed
from scaffpd.masking.terms import Terms


def private_key(secret: int, terms: Terms) -> X25519PrivateKey:
    """a_i."""
    return X25519PrivateKey.from_private_bytes(seed(as_bytes(secret), terms.digest, "key"))


def mask_seed(secret: int, terms: Terms) -> bytes:
    """The seed of b_i's stream."""
    return seed(as_bytes(secret), terms.digest, "mask")


def pair_seed(own: X25519PrivateKey, key: bytes, terms: Terms, name: str, other: str) -> bytes:
    """s_ij, from one's private and the other's public key."""
    first, second = sorted((name, other))
    return seed(own.exchange(X25519PublicKey.from_public_bytes(key)), terms.digest, f"pair {first}\0{second}")


def sign(name: str, other: str) -> int:
    """Which of two neighbours adds their stream, and which takes it away."""
    return 1 if name < other else -1


def mark(secret: int) -> bytes:
    """A fingerprint of b_i: whoever puts it together from shares knows that it is right."""
    return hashlib.sha256(b"scaffpd mark\0" + as_bytes(secret)).digest()


def as_bytes(*secrets: int) -> bytes:
    """Whole numbers below the prime, 32 bytes each."""
    return b"".join(secret.to_bytes(shamir.BYTES, "big") for secret in secrets)
