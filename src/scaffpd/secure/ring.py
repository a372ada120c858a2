r"""Sums of vectors as whole numbers modulo 2¹²⁸: exact in any order, on any processor.

A number v is q = round(2ᶠ v), in two's complement of two 64-bit halves, the low one first. Sums of
N numbers within the format cannot wrap around. A vector with a larger entry, or with one that is
NaN, is clipped, and says so: a last entry counts such vectors, so that the sum is refused, and
nobody learns more than their number.

f is 72 by default: numbers up to 3.6e16/N with an error of 2e-22. Sums over columns may have any
scale: `wide` gives every number two places, its whole part and its fraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.federation import Vector

Ring = NDArray[np.uint64]  # (2, n): the low and the high halves
BYTES = 16  # of a number
FRACTION = 72  # f
FINE = 110  # f of fractions, which are below one
WHOLE = 0
HALF = 64


class ClippedSum(InputError):
    """A sum in which a term was too large or no number."""


@dataclass(frozen=True)
class Places:
    """The number format of a vector: f of every entry, and the number of terms of a sum."""

    fraction: NDArray[np.int64]
    terms: int

    @classmethod
    def usual(cls, length: int, terms: int, fraction: int = FRACTION) -> Places:
        """Return the format of vectors in training; f = 0 for whole numbers."""
        return cls(np.full(length, fraction), terms)

    @property
    def room(self) -> int:
        """Binary digits of a term before the point moves: N 2^room < 2¹²⁷."""
        return 126 - math.ceil(math.log2(self.terms))

    @property
    def error(self) -> float:
        """The largest error of an entry of a sum, N 2⁻ᶠ."""
        return math.ldexp(self.terms, -int(self.fraction.min(initial=FRACTION)))

    def relative(self, length: int, weights: Vector) -> float:
        """Return √d times that error, per unit of weight."""
        return float(length**0.5 * self.error / (np.abs(weights).sum() or 1.0))

    @property
    def bytes(self) -> int:
        """The length of a message, the count of clipped vectors included."""
        return BYTES * (len(self.fraction) + 1)

    def encode(self, vector: Vector | NDArray[np.int64]) -> Ring:
        """Return the vector's whole numbers, and last whether it was clipped."""
        if vector.dtype == np.int64:
            signs = np.where(vector < 0, ~np.uint64(0), np.uint64(0))
            whole = np.stack([vector.view(np.uint64), signs])
            return np.concatenate([whole, np.zeros((2, 1), np.uint64)], 1)
        most = np.ldexp(1.0, self.room - self.fraction)
        fits = np.abs(vector) <= most  # not NaN
        sizes = np.where(fits, np.abs(vector), 0.0)
        scaled = np.ldexp(sizes, self.fraction - HALF)
        high = np.floor(scaled)
        low = np.rint(np.ldexp(scaled - high, HALF))
        found = np.stack([low.astype(np.uint64), high.astype(np.uint64)])
        found = np.where(vector < 0, negative(found), found)
        flag = np.array([[not fits.all()], [False]], dtype=np.uint64)
        return np.concatenate([found, flag], 1)

    def decode(self, total: Ring) -> Vector:
        """Return the sum; refuse it if a term was clipped."""
        if total[:, -1].any():
            raise ClippedSum(
                "sum-clipped",
                "A number in a sum over silos was too large or not finite: the run stops.",
            )
        below = total[1].view(np.int64) < 0
        low, high = np.where(below, negative(total), total).astype(np.float64)
        sizes = np.ldexp(high[:-1], HALF - self.fraction) + np.ldexp(low[:-1], -self.fraction)
        total_values: Vector = np.where(below[:-1], -sizes, sizes)
        return total_values


def add(a: Ring, b: Ring) -> Ring:
    """Return a + b modulo 2¹²⁸."""
    low = a[0] + b[0]
    return np.stack([low, a[1] + b[1] + (low < a[0])])


def negative(a: Ring) -> Ring:
    """Return −a modulo 2¹²⁸."""
    low = ~a[0] + np.uint64(1)
    return np.stack([low, ~a[1] + (low == 0)])


def wide(values: Vector, terms: int) -> tuple[Places, Vector]:
    """Return numbers of any scale as whole parts and fractions, and their format."""
    whole = np.trunc(values)
    parts = np.concatenate([whole, np.where(np.isfinite(values), values - whole, 0.0)])
    return Places(np.repeat([WHOLE, FINE], len(values)), terms), parts


def narrow(total: Vector) -> Vector:
    whole, fraction = total.reshape(2, -1)
    return whole + fraction
