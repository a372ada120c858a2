"""Draws of minibatches: a stream of uniform numbers per client.

A client's minibatches do not depend on the others: its stream is seeded by the round's key and the
client's *name*. A real silo draws the same minibatches as a simulation of all silos does for it, on
any device. The streams are SplitMix64 (Steele, Lea, Flood, 2014, "Fast splittable pseudorandom
number generators"), whose n-th number

    u_n = mix(seed + n γ) / 2^64,    γ = 0x9E3779B97F4A7C15,

needs no state, so that all clients draw in one array operation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


GAMMA = _signed(0x9E3779B97F4A7C15)
ROUNDS = (30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))


class Draws:
    """Uniform numbers for each of the named clients, from one key.

    Args:
        key: purpose of the draws.
        names: the clients, or their `streams` on the device where numbers are drawn.
    """

    def __init__(self, key: tuple[int, ...], names: Sequence[str] | Tensor) -> None:
        common = _signed(_hash(repr(tuple(int(k) for k in key))))
        self.seeds = (names if isinstance(names, Tensor) else streams(names)) ^ common
        self.drawn = 0

    @classmethod
    def of(cls, seeds: Tensor) -> Draws:
        """Return the draws of some clients, from their `seeds` and from the first number on."""
        own = cls.__new__(cls)
        own.seeds = seeds
        own.drawn = 0
        return own

    def uniform(self, size: int) -> Tensor:
        """Return the next `size` numbers in [0, 1) of every client, (N, size), in float64."""
        n = torch.arange(self.drawn + 1, self.drawn + size + 1, device=self.seeds.device)
        self.drawn += size
        return _mixed(self.seeds[:, None] + n * GAMMA)


def uniform_at(seed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first numbers in [0, 1) of one seed, in float64."""
    n = torch.arange(1, math.prod(shape) + 1, device=seed.device).view(*shape)
    return _mixed(seed + n * GAMMA)


def _mixed(z: Tensor) -> Tensor:
    """Scramble the bits of z, in place, and return numbers in [0, 1)."""
    for shift, factor in ROUNDS:
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return _shifted(z.bitwise_xor_(_shifted(z, 31)), 11).double().mul_(2.0**-53)


def streams(names: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([_signed(_hash(name)) for name in names], dtype=torch.int64, device=device)


def _shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by).bitwise_and_(2 ** (64 - by) - 1)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
