r"""The terms of a sum: its clients, which of them share masks, and the number format.

Clients form a ring, in an order shuffled by their names, and every client shares masks with the k
nearest (a Harary graph; with all others if k ≥ N − 1). With any t colluding clients, k ≥ t + 1 is
enough: the graph stays connected without them, so that the masks of the others hide everything but
the sum over all of them.

Numbers are whole numbers modulo 2⁶⁴: q = round(2ᶠ v) for |v| ≤ C, and Σ_i q_i / 2ᶠ for the sum. Of
N clients, |Σ q_i| ≤ N (2ᶠ C + ½) < 2⁶³ by the choice of f, so that no sum can wrap around; a
larger |v| is refused before it is encoded. The error of the sum is at most N 2⁻ᶠ in every entry.

The server chooses f. Rounded to the nearest, small terms would vanish from a coarse sum, and a
large one would be left alone; so a term of fewer than `FINE` digits is rounded up or down at
random, by a secret of the client, with mean 2ᶠ v.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError

FEWEST = 3  # with two clients, each knows the other's vector from the sum
MOST = 10  # colluding clients by default: 12 neighbours


class Forgotten(InputError):
    """A client was restarted and has lost the others' keys."""


@dataclass(frozen=True)
class Terms:
    """Clients of a sum."""

    names: tuple[str, ...]  # the clients
    colluding: int  # t, how many of them may reveal all that they know to the server

    def __post_init__(self) -> None:
        n = len(self.names)
        t = self.colluding
        if len(set(self.names)) < n or n < FEWEST:
            raise InputError(
                "too-few-clients",
                f"Secure sums need at least {FEWEST} clients with different names, got {n}.",
            )
        if not 1 <= t <= n - 2:
            raise InputError(
                "colluding-out-of-range",
                f"Secure sums over {n} clients need 1 <= colluding <= {n - 2}, got {t}.",
            )

    @classmethod
    def usual(cls, names: Sequence[str], colluding: int | None) -> Terms:
        """Return the terms; by default tolerate min(N/3, 10) colluding clients."""
        n = len(names)
        if colluding is not None and type(colluding) is not int:
            raise InputError(
                "colluding-not-whole",
                f"Secure sums need a whole number colluding, got {colluding!r}.",
            )
        return cls(tuple(names), min(max(1, n // 3), MOST) if colluding is None else colluding)

    @cached_property
    def _ring(self) -> list[str]:
        everyone = hashlib.sha256("\0".join(sorted(self.names)).encode()).digest()
        return sorted(
            self.names, key=lambda name: hashlib.sha256(everyone + name.encode()).digest()
        )

    @cached_property
    def degree(self) -> int:
        """k, the number of neighbours of each client."""
        k = self.colluding + 1
        return min(k + k % 2, len(self.names) - 1)

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Return the clients with which this client shares masks."""
        ring = self._ring
        here = ring.index(name)
        n = len(ring)
        half = self.degree // 2
        if self.degree == n - 1:
            return tuple(other for other in ring if other != name)
        return tuple(ring[(here + step) % n] for step in range(-half, half + 1) if step)

    @cached_property
    def digest(self) -> bytes:
        """Digest of the terms; every key of the sum depends on it."""
        return hashlib.sha256(json.dumps([*self.names, self.colluding]).encode()).digest()


Ring = NDArray[np.uint64]
SMALLEST = -900  # exponent of the smallest clip: 2ᶠ does not overflow
LARGEST = 900
FINE = 40  # binary digits of a term; with fewer it is rounded at random


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point number format."""

    clients: int  # N, the number of terms of a sum
    exponent: int  # of the clip, C = 2ᵉ
    bits: int  # f

    def __post_init__(self) -> None:
        if (
            self.clients < 1
            or not SMALLEST <= self.exponent <= LARGEST
            or not -LARGEST <= self.bits <= 2 * LARGEST
        ):
            raise InputError(
                "numbers-out-of-range",
                f"Numbers up to 2^{self.exponent} of {self.clients} clients cannot be added "
                "securely.",
            )
        if self.bits + self.exponent > self.room(self.clients):
            raise InputError(
                "sum-too-wide",
                f"The sum of {self.clients} numbers up to 2^{self.exponent} with {self.bits} "
                "binary digits may not fit into 64 bits: "
                f"{self.room(self.clients) - self.exponent} digits do.",
            )

    @staticmethod
    def room(clients: int) -> int:
        """Return the most binary digits of 2ᶠ C: N (2^room + ½) < 2⁶³."""
        return 62 - math.ceil(math.log2(clients))

    @classmethod
    def finest(cls, clients: int, exponent: int) -> FixedPoint:
        """Return the format with as many digits as fit."""
        return cls(clients, exponent, cls.room(clients) - exponent)

    @property
    def error(self) -> float:
        """N 2⁻ᶠ, the largest error of an entry of a sum."""
        return math.ldexp(self.clients, -self.bits)

    def values(self) -> dict[str, int]:
        """Return the format as JSON values."""
        return {"clients": self.clients, "exponent": self.exponent, "bits": self.bits}

    @classmethod
    def of(cls, values: Any) -> FixedPoint:
        """Read the JSON values of a format, and check them."""
        names = ("clients", "exponent", "bits")
        parts: list[Any] = [values.get(name) for name in names] if isinstance(values, dict) else []
        if not parts or not all(type(part) is int for part in parts):
            raise InputError(
                "format-unreadable", "The number format of a secure sum cannot be read."
            )
        return cls(*parts)

    def encode(self, vector: NDArray[Any], drawn: NDArray[Any] | None = None) -> Ring:
        """Return q, or refuse a vector beyond the clip.

        With u drawn from [0, 1), short terms become ⌊2ᶠ v + u⌋.
        """
        v: NDArray[np.float64] = np.asarray(vector, dtype=np.float64)
        needed = exponent_of(v)
        if needed > self.exponent:
            raise InputError(
                "vector-beyond-clip",
                f"A vector has entries up to 2^{needed}, more than the clip of this sum.",
            )
        scaled = np.ldexp(v, self.bits)
        if drawn is not None:
            np.floor(scaled + drawn, out=scaled, where=np.abs(scaled) < 2.0**FINE)
        return np.rint(scaled, out=scaled).astype(np.int64).view(np.uint64)

    def decode(self, total: Ring) -> NDArray[np.float64]:
        """Return Σ v_i from Σ q_i modulo 2⁶⁴."""
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.bits)


def exponent_of(vector: NDArray[Any]) -> int:
    """Return the least e with |v| ≤ 2ᵉ in every entry; at least `SMALLEST`."""
    largest = float(max(vector.max(initial=0.0), -vector.min(initial=0.0)))
    if not math.isfinite(largest):
        raise InputError(
            "vector-nan-infinite", "A vector with a NaN or infinite entry cannot be added securely."
        )
    if largest == 0:
        return SMALLEST
    fraction, exponent = math.frexp(largest)
    return max(exponent - (fraction == 0.5), SMALLEST)
