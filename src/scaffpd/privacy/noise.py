r"""Noise that only its client can draw, and that is the same whenever the same question is asked.

    K_i = HKDF-SHA256(secret; name, model and data of client i)
    K   = HMAC-SHA256(K_i; kind of question, all bytes of x, corrections, plan and key)
    u   = the key stream of ChaCha20 under HMAC(K; "noise" or "rows"),  64 bits a number
    g   = Φ⁻¹((⌊u/2¹¹⌋ + ½) 2⁻⁵³)

So asking again gains nothing, a resumed run has the same digits, and another question gets fresh noise. Without the
secret nobody can tell the numbers from random ones; the keys of a plan, which the server knows, are not enough. The
data enters K_i so that two versions of it never share their noise.

The numbers g are Gaussian to double precision, the usual approximation, and not a discrete mechanism: what the last
digits of a floating-point sum may give away (Mironov, "On significance of the least significant bits for differential
privacy", 2012) is not covered.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import not_installed

KEY, MARK = 32, 16  # bytes of a key, and of what tells questions apart


def secret_bytes(secret: bytes | int | None) -> bytes:
    """Return the secret itself, that of an experiment's seed, or one from the operating system."""
    if secret is None:
        return os.urandom(KEY)
    return secret if isinstance(secret, bytes) else hashlib.sha256(b"seed %d" % secret).digest()


def client_key(secret: bytes, *about: str | bytes) -> bytes:
    """Derive K_i, a key for one client, model and data set."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ModuleNotFoundError:
        raise not_installed("cryptography", "privacy") from None
    return HKDF(SHA256(), KEY, salt=None, info=digest(*about)).derive(secret)


def digest(*parts: Any) -> bytes:
    """Hash texts, numbers and vectors so that none can be mistaken for another."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            about, content = f"{part.dtype} {tuple(part.shape)}", np.ascontiguousarray(part.detach().cpu()).tobytes()
        else:
            about, content = type(part).__name__, part if isinstance(part, bytes) else repr(part).encode()
        whole.update(f"{about} {len(content)};".encode() + content)
    return whole.digest()


class PrivateQuestion:
    """A question to one client: what is drawn to answer it.

    Args:
        key: K_i of the client.
        content: the `digest` of everything that the answer depends on, besides the data.
    """

    def __init__(self, key: bytes, content: bytes) -> None:
        self._key = hmac.digest(key, content, "sha256")

    @cached_property
    def mark(self) -> bytes:
        """Identifies this question; with another secret the same question has another mark."""
        return hmac.digest(self._key, b"mark", "sha256")[:MARK]

    @cached_property
    def noise(self) -> KeyStream:
        """Gaussian numbers."""
        return KeyStream(hmac.digest(self._key, b"noise", "sha256"))

    @cached_property
    def rows(self) -> KeyStream:
        """Uniform numbers that decide which rows take part."""
        return KeyStream(hmac.digest(self._key, b"rows", "sha256"))


class KeyStream:
    """Pseudo-random numbers under a key, one after the other."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def uniform(self, size: int) -> NDArray[np.float64]:
        """Draw the next numbers, strictly between 0 and 1."""
        bits = np.frombuffer(self._cipher.update(bytes(8 * size)), dtype="<u8")
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def normal(self, size: int) -> NDArray[np.float64]:
        """Draw the next numbers as standard Gaussians."""
        from scipy.special import ndtri

        gaussian: NDArray[np.float64] = ndtri(self.uniform(size))
        return gaussian


def normals(questions: Sequence[PrivateQuestion], size: int) -> NDArray[np.float64]:
    """Draw the next Gaussians of every client, (N, size)."""
    return np.stack([question.noise.normal(size) for question in questions])


def drawn(questions: Sequence[PrivateQuestion], sizes: Sequence[int], rates: Sequence[float]) -> NDArray[np.bool_]:
    """Draw a Poisson sample of every client: row j of client i takes part with probability q_i, independently."""
    return np.concatenate([
        question.rows.uniform(size) < rate for question, size, rate in zip(questions, sizes, rates, strict=True)
    ])  # fmt: skip
