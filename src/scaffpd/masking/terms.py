r"""The terms of an exchange: who takes part, who is whose neighbour, and the number format of the sum.

Clients stand on a ring, in an order that the exchange's own name shuffles, and every client has the k nearest as its
neighbours (a Harary graph; all others where k ≥ N − 1). With t colluding clients and at most D that leave,

    k ≥ t + D + 1,    τ = k − D

are enough, whoever they are: such a graph stays connected when any t + D of its clients are taken out, so that the
masks of the others hide everything but their sum; τ > t shares are more than the colluding have of any secret; and
k − D neighbours are still there to give them. D ≤ t makes τ > k/2, so that no two halves of the neighbours can give
away both secrets of a client, of which only one may be known. That is against a server that names different survivors
to different clients, or against t clients that show it what they hold; against both at once it would take
k ≥ t + 2D + 1, so that 2τ > k + t.

Numbers are whole numbers modulo 2⁶⁴: q = round(2ᶠ v) for |v| ≤ C, and Σ_i q_i / 2ᶠ for the sum. Of N clients,
|Σ q_i| ≤ N (2ᶠ C + ½) < 2⁶³ by the choice of f, so that no sum can wrap around; a larger |v| is refused before it is
encoded. The sum is off by at most N 2⁻ᶠ⁻¹ in every entry.
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
MOST = 10  # of those who collude, or leave, unless more is asked for: 22 neighbours


class Accused(InputError):
    """What another client has shown is not its own, or cannot be used; `name` is whose it is."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(sentence)
        self.name = name


class Forgotten(InputError):
    """A client has lost what it knew of an exchange, or of the others: it was started anew."""


@dataclass(frozen=True)
class Terms:
    """One exchange.

    Attributes:
        exchange: its name, used once.
        names: who takes part.
        colluding: t, how many clients may show the server all that they know.
        leaving: D, how many may stop answering at any time.
    """

    exchange: str
    names: tuple[str, ...]
    colluding: int
    leaving: int

    def __post_init__(self) -> None:
        n, t, d = len(self.names), self.colluding, self.leaving
        if len(set(self.names)) < n or n < FEWEST:
            raise InputError(f"Secure sums need at least {FEWEST} clients with different names, got {n}.")
        if t < 1 or not 0 <= d <= t:
            raise InputError(f"Secure sums need colluding >= 1 and 0 <= leaving <= colluding, got {t} and {d}.")
        if t + d + 2 > n:
            raise InputError(
                f"Secure sums over {n} clients do not bear {t} that collude and {d} that leave: their sum may be at "
                f"most {n - 2}."
            )

    @classmethod
    def usual(cls, exchange: str, names: Sequence[str], colluding: int | None, leaving: int | None) -> Terms:
        """A third of the clients may collude, or leave (10 at most), where nothing else is said."""
        n = len(names)
        for what, number in (("colluding", colluding), ("leaving", leaving)):
            if number is not None and type(number) is not int:
                raise InputError(f"Secure sums need a whole number {what}, got {number!r}.")
        t = min(max(1, n // 3), MOST) if colluding is None else colluding
        d = min(t, max(0, n - 2 - t), n // 3) if leaving is None else leaving
        return cls(exchange, tuple(names), t, d)

    @cached_property
    def _ring(self) -> list[str]:
        def place(name: str) -> bytes:
            return hashlib.sha256(f"{self.exchange}\0{name}".encode()).digest()

        return sorted(self.names, key=place)

    @cached_property
    def degree(self) -> int:
        """k, how many neighbours everybody has."""
        k = self.colluding + self.leaving + 1
        return min(k + k % 2, len(self.names) - 1)

    @property
    def threshold(self) -> int:
        """τ, how many shares open a secret."""
        return self.degree - self.leaving

    def neighbours(self, name: str) -> tuple[str, ...]:
        """With whom this client shares masks."""
        ring = self._ring
        here, n, half = ring.index(name), len(ring), self.degree // 2
        if self.degree == n - 1:
            return tuple(other for other in ring if other != name)
        return tuple(ring[(here + step) % n] for step in range(-half, half + 1) if step)

    @cached_property
    def digest(self) -> bytes:
        """A name for all of it: every key of the exchange depends on it."""
        return hashlib.sha256(json.dumps(self.values(), sort_keys=True).encode()).digest()

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "exchange": self.exchange, "names": list(self.names), "colluding": self.colluding, "leaving": self.leaving,
        }  # fmt: skip

    @classmethod
    def of(cls, values: Any) -> Terms:
        """What `values` made, checked."""
        try:
            exchange, names = values["exchange"], tuple(values["names"])
            numbers = values["colluding"], values["leaving"]
        except (KeyError, TypeError):
            raise InputError("The terms of a secure sum are not complete.") from None
        words = isinstance(exchange, str) and all(isinstance(name, str) for name in names)
        if not words or not all(isinstance(k, int) and not isinstance(k, bool) for k in numbers):
            raise InputError("The terms of a secure sum are not complete.")
        return cls(exchange, names, *numbers)


Ring = NDArray[np.uint64]
SMALLEST = -900  # exponent of the smallest clip: 2ᶠ stays a number
LARGEST = 900


class OutOfRange(InputError):
    """A vector has an entry beyond the clip; `exponent` would be enough for it."""

    def __init__(self, exponent: int) -> None:
        super().__init__(f"A vector has entries up to 2^{exponent}, more than the clip of this sum.")
        self.exponent = exponent


@dataclass(frozen=True)
class FixedPoint:
    """A number format.

    Attributes:
        clients: N, how many terms a sum has.
        exponent: of the clip, C = 2ᵉ.
        bits: f.
    """

    clients: int
    exponent: int
    bits: int

    def __post_init__(self) -> None:
        if self.clients < 1 or not SMALLEST <= self.exponent <= LARGEST or not -LARGEST <= self.bits <= 2 * LARGEST:
            raise InputError(f"Numbers up to 2^{self.exponent} of {self.clients} clients cannot be added securely.")
        if self.bits + self.exponent > self.room(self.clients):
            raise InputError(
                f"The sum of {self.clients} numbers up to 2^{self.exponent} with {self.bits} binary digits may not fit "
                f"into 64 bits: {self.room(self.clients) - self.exponent} digits do."
            )

    @staticmethod
    def room(clients: int) -> int:
        """The most binary digits of 2ᶠ C: N (2^room + ½) < 2⁶³."""
        return 62 - math.ceil(math.log2(clients))

    @classmethod
    def finest(cls, clients: int, exponent: int) -> FixedPoint:
        """As many digits as there is room for."""
        return cls(clients, exponent, cls.room(clients) - exponent)

    @property
    def error(self) -> float:
        """N 2⁻ᶠ⁻¹, the most that an entry of a sum can be off."""
        return math.ldexp(self.clients, -self.bits - 1)

    def encode(self, vector: NDArray[Any]) -> Ring:
        """q, or `OutOfRange`."""
        v: NDArray[np.float64] = np.asarray(vector, dtype=np.float64)
        if (needed := exponent_of(v)) > self.exponent:
            raise OutOfRange(needed)
        scaled = np.ldexp(v, self.bits)
        return np.rint(scaled, out=scaled).astype(np.int64).view(np.uint64)

    def decode(self, total: Ring) -> NDArray[np.float64]:
        """Σ v_i from Σ q_i modulo 2⁶⁴."""
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.bits)


def exponent_of(vector: NDArray[Any]) -> int:
    """The least e with |v| ≤ 2ᵉ in every entry; no less than the smallest that is of use."""
    largest = float(max(vector.max(initial=0.0), -vector.min(initial=0.0)))
    if not math.isfinite(largest):
        raise InputError("A vector with a NaN or infinite entry cannot be added securely.")
    if largest == 0:
        return SMALLEST
    fraction, exponent = math.frexp(largest)
    return max(exponent - (fraction == 0.5), SMALLEST)
