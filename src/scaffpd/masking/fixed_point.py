r"""Numbers as whole numbers modulo 2⁶⁴: q = round(2ᶠ v) for |v| ≤ C, and Σ_i q_i / 2ᶠ for the sum.

Of N clients, |Σ q_i| ≤ N (2ᶠ C + ½) < 2⁶³ by the choice of f, so that no sum can wrap around; a larger |v| is refused
before it is encoded. The sum is off by at most N 2⁻ᶠ⁻¹ in every entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError

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
