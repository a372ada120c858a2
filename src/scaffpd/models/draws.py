r"""Minibatches that depend on nobody else: a client draws the same rows alone and in company.

Every client has a stream of its own, seeded by the round's key and the client's *name*. So a silo that answers for
itself draws what a simulation of all silos draws for it. The streams are SplitMix64 (Steele, Lea, Flood, 2014, "Fast
splittable pseudorandom number generators"), whose n-th number

    u_n = mix(seed + n γ) / 2^64,    γ = 0x9E3779B97F4A7C15,

needs no state, so that all clients draw in one array operation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class Draws:
    """Uniform numbers for each of the named clients, from one key."""

    def __init__(self, key: tuple[int, ...], names: Sequence[str]) -> None:
        common = _hash(repr(tuple(int(k) for k in key)))
        self.seeds = np.array([_hash(name) ^ common for name in names], dtype=np.uint64)
        self.drawn = 0

    def uniform(self, size: int) -> NDArray[np.float64]:
        """The next `size` numbers in [0, 1) of every client, (N, size)."""
        n = np.arange(self.drawn + 1, self.drawn + size + 1, dtype=np.uint64)
        self.drawn += size
        z = self.seeds[:, None] + n * GAMMA
        for shift, factor in zip(SHIFTS, FACTORS, strict=False):
            z = (z ^ (z >> shift)) * factor
        bits = (z ^ (z >> SHIFTS[2])) >> np.uint64(11)
        uniform: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
        return uniform


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
