r"""A secret in shares, of which any τ give it back and τ − 1 say nothing about it (A. Shamir, 1979).

The shares of s are the values of a random polynomial of degree τ − 1 over the integers modulo p = 2²⁵⁵ − 19 with the
value s at 0; Lagrange's formula at 0 gives s back. Arithmetic on whole numbers, no cipher: `cryptography` has none of
it. All randomness is the operating system's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**255 - 19
BYTES = 32


def fresh() -> int:
    """A random secret."""
    return secrets.randbelow(PRIME)


def split(secret: int, threshold: int, places: Sequence[int]) -> list[int]:
    """The shares for holders at these places (positive and different from each other)."""
    rest = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = []
    for place in places:
        value = 0
        for coefficient in reversed(rest):
            value = (value + coefficient) * place % PRIME
        shares.append((value + secret) % PRIME)
    return shares


def join(shares: Mapping[int, int]) -> int:
    """The secret, from exactly as many shares (by their places) as its threshold."""
    total = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        total = (total + share * above * pow(below, -1, PRIME)) % PRIME
    return total
