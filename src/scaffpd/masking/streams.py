"""Seeds and key streams: HKDF-SHA256 and ChaCha20 of `cryptography`, nothing of our own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from scaffpd.masking.fixed_point import Ring

BLOCK = 2**14  # numbers at a time: what is added to them is still in the cache
_ZEROS = bytes(8 * BLOCK)


def seed(secret: bytes, salt: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose only."""
    return HKDF(SHA256(), 32, salt, f"scaffpd {purpose}".encode()).derive(secret)


def add_stream(total: Ring, key: bytes, sign: int) -> None:
    """Add a key's stream of uniform numbers modulo 2⁶⁴ to `total`, or take it away.

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
    """A name that nobody has used before."""
    return os.urandom(16).hex()
