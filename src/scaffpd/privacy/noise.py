r"""Noise that only its client can draw: whole numbers with exactly the law of a discrete Gaussian.

    P(N_ℤ(0, σ²) = y) ∝ exp(−y²/(2σ²)),   y ∈ ℤ

(Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", 2020). Every operation
on the way to a number is one on bits and whole numbers, so that a computer draws this law and no
approximation of it: a floating-point Gaussian has gaps, which move with what it is added to and
show that (Mironov, "On significance of the least significant bits for differential privacy", 2012).

The sampler is a rejection sampler, for many numbers at once. With 2ᵏ the least power of two for
which 4ᵏ ≥ 2 ln 2 · σ²,

    U uniform on {0, …, 2ᵏ − 1},   V = v with probability 2⁻ᵛ⁻¹,   a sign,   y = ±(U + 2ᵏ V)
    accept with probability a = 2ⱽ exp(−y²/(2σ²)),   refuse −0

y is proposed with probability 2⁻ᵏ⁻ⱽ⁻² and accepted with a: the product is 2⁻ᵏ⁻² exp(−y²/(2σ²)).
a ≤ 1 since y²/(2σ²) ≥ 4ᵏV²/(2σ²) ≥ V ln 2. To accept with probability a is to compare a uniform
real number u with a: its first 64 bits and a in floating point decide, unless they are closer than
the rounding errors. Then whole numbers decide, with more bits of u and as many digits of a as it
takes. V below 64 leaves out |y| ≥ 64·2ᵏ, which has a probability below 10⁻¹⁰⁰⁰.

The bits are a pseudo-random function of a secret and of the question, so that the same question has
the same noise:

    K_i = HKDF-SHA256(secret; name, model and data of client i)
    K   = HMAC-SHA256(K_i; kind of question, all bytes of x, corrections and plan)
    bits: the key stream of ChaCha20 under HMAC(K; "noise")

So asking again gains nothing, a resumed run has the same digits, and another question gets fresh
noise. The secret comes from the operating system. Without it nobody can tell the bits from random
ones; the keys of a plan, which the server knows, are not enough. The data enters K_i so that two
versions of it never share their noise.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import needed

KEY = 32  # bytes of a key
MARK = 16  # bytes that identify a question
WORD = 64  # bits that a source of randomness gives at a time
LARGEST_SIGMA = 2**50
ROUNDING = 2.0**-38  # of u and a in floating point, with room: both are off by less than 2⁻⁴⁰
AT_ONCE = 2**14  # proposals that stay in a core's cache

Words = NDArray[np.uint64]
Source = Callable[[int], Words]  # n → the next n words of independent, fair bits


def secret_bytes(secret: bytes | int | None) -> bytes:
    """Return the secret itself, that of an experiment's seed, or one from the operating system."""
    if secret is None:
        return os.urandom(KEY)
    return secret if isinstance(secret, bytes) else hashlib.sha256(b"seed %d" % secret).digest()


def client_key(secret: bytes, *about: str | bytes) -> bytes:
    """Derive K_i, a key for one client, model and data set."""
    hashes = needed("cryptography.hazmat.primitives.hashes", "cryptography", "privacy")
    hkdf = needed("cryptography.hazmat.primitives.kdf.hkdf", "cryptography", "privacy")
    key: bytes = hkdf.HKDF(hashes.SHA256(), KEY, salt=None, info=digest(*about)).derive(secret)
    return key


def digest(*parts: object) -> bytes:
    """Hash texts, numbers and vectors so that none can be mistaken for another."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            about = f"{part.dtype} {tuple(part.shape)}"
            content = np.ascontiguousarray(part.detach().cpu()).tobytes()
        else:
            about = type(part).__name__
            content = part if isinstance(part, bytes) else repr(part).encode()
        whole.update(f"{about} {len(content)};".encode() + content)
    return whole.digest()


class PrivateQuestion:
    """A question to one client: what is drawn to answer it.

    `key` is K_i of the client, `content` the `digest` of everything that the answer depends on,
    besides the data.
    """

    def __init__(self, key: bytes, content: bytes) -> None:
        self._key = hmac.digest(key, content, "sha256")

    @cached_property
    def mark(self) -> bytes:
        """Identifies this question; with another secret the same question has another mark."""
        return hmac.digest(self._key, b"mark", "sha256")[:MARK]

    @cached_property
    def noise(self) -> Source:
        return key_stream(hmac.digest(self._key, b"noise", "sha256"))


def key_stream(key: bytes) -> Source:
    """Return a source of pseudo-random words under a key, one after the other."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda size: np.frombuffer(cipher.update(bytes(8 * size)), dtype="<u8")


def discrete_gaussians(words: Source, sigma: int, size: int) -> NDArray[np.int64]:
    """Draw independent numbers of N_ℤ(0, σ²) from these bits; σ is from 1 to 2⁵⁰."""
    if not 1 <= sigma <= LARGEST_SIGMA:
        raise ValueError(
            f"A discrete Gaussian needs a whole sigma from 1 to {LARGEST_SIGMA}, got {sigma}."
        )
    k = bits_of(sigma)
    # about √(π/8) σ/2ᵏ of the proposals are accepted
    found = []
    missing = size
    rate = 0.6 * sigma / 2**k
    while missing > 0:
        accepted = _proposed(words, sigma, k, min(AT_ONCE, int(missing / rate) + 16))[:missing]
        found.append(accepted)
        missing -= len(accepted)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def bits_of(sigma: int) -> int:
    """Return k, the least for which 4ᵏ ≥ 2 ln 2 · σ²; 2 ln 2 < 1.3863."""
    k = max(0, sigma.bit_length() - 1)
    while 4**k * 10_000 < 13_863 * sigma**2:
        k += 1
    return k


def _proposed(words: Source, sigma: int, k: int, n: int) -> NDArray[np.int64]:
    first, second, u = words(3 * n).reshape(3, n)
    lowest = second & (~second + np.uint64(1))
    V = np.frexp(lowest.astype(np.float64))[1].astype(np.int64) - 1  # −1 where all 64 bits are zero
    size = (first & np.uint64(2**k - 1)).astype(np.int64) + (V << k)
    negative = first >> np.uint64(WORD - 1) == 1
    with np.errstate(under="ignore"):
        a = np.ldexp(np.exp(-0.5 * np.square(size / float(sigma))), V.astype(np.int32))
    above = a - u.astype(np.float64) * 2.0**-WORD
    accept = above > 0
    for i in np.flatnonzero(np.abs(above) < ROUNDING):
        accept[i] = below(words, int(u[i]), int(V[i]), int(size[i]) ** 2, 2 * sigma**2)
    accept &= (V >= 0) & ~(negative & (size == 0))
    return np.where(negative, -size, size)[accept]


def below(words: Source, u: int, V: int, p: int, q: int) -> bool:
    """Return whether a uniform number whose first 64 bits are u lies below 2ⱽ exp(−p/q)."""
    bits = WORD
    while True:
        low, high = exp_bounds(p, q, bits + max(V, 0))
        if u + 1 <= low:
            return True
        if u >= high:
            return False
        u = u << WORD | int(words(1)[0])
        bits = bits + WORD


def exp_bounds(p: int, q: int, bits: int) -> tuple[int, int]:
    """Return whole numbers around 2^bits · exp(−p/q), for p ≥ 0 and q > 0.

    exp(−r) for r = p/(2ʰ q) ≤ 1 by its series, squared h times; every rounding error is between the
    bounds.
    """
    P = bits + 96
    h = (p // q).bit_length()
    r = (p << P) // (q << h)
    one = 1 << P
    term = one
    total = one
    terms = 0
    while term:
        terms += 1
        term = (term * r >> P) // terms
        total += term if terms % 2 == 0 else -term
    low = max(0, total - 8 * terms - 8)
    high = total + 8 * terms + 8
    for _ in range(h):
        low = low * low >> P
        high = -(-high * high >> P)
    return low >> 96, -(-high >> 96)
