r"""Minibatches that depend on nobody else: a client draws the same rows alone and in company, here and on a GPU.

Every client has a stream of its own, seeded by the round's key and the client's *name*. So a silo that answers for
itself draws what a simulation of all silos draws for it. The streams are SplitMix64 (Steele, Lea, Flood, 2014, "Fast
splittable pseudorandom number generators"), whose n-th number

    u_n = mix(seed + n γ) / 2^64,    γ = 0x9E3779B97F4A7C15,

needs no state, so that all clients draw in one array operation, wherever their data is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(number: int) -> int:
    """The 64 bits of a number as PyTorch has them."""
    return number - 2**64 if number >= 2**63 else number


GAMMA = _signed(0x9E3779B97F4A7C15)
ROUNDS = (30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))


class Draws:
    """Uniform numbers for each of the named clients, from one key.

    Args:
        key: what they are drawn for.
        names: the clients, or their `streams`, which lie where numbers are to be drawn.
    """

    def __init__(self, key: tuple[int, ...], names: Sequence[str] | Tensor) -> None:
        common = _signed(_hash(repr(tuple(int(k) for k in key))))
        self.seeds = (names if isinstance(names, Tensor) else streams(names)) ^ common
        self.drawn = 0

    @classmethod
    def of(cls, seeds: Tensor) -> Draws:
        """The draws of some clients, from their `seeds` and from the first number on."""
        own = cls.__new__(cls)
        own.seeds, own.drawn = seeds, 0
        return own

    def uniform(self, size: int) -> Tensor:
        """The next `size` numbers in [0, 1) of every client, (N, size), in float64."""
        n = torch.arange(self.drawn + 1, self.drawn + size + 1, device=self.seeds.device)
        self.drawn += size
        z = self.seeds[:, None] + n * GAMMA
        for shift, factor in ROUNDS:
            z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
        return _shifted(z.bitwise_xor_(_shifted(z, 31)), 11).double().mul_(2.0**-53)


def streams(names: Sequence[str], device: torch.device | str = "cpu") -> Tensor:
    """What tells the clients' numbers apart."""
    return torch.tensor([_signed(_hash(name)) for name in names], dtype=torch.int64, device=device)


def _shifted(z: Tensor, by: int) -> Tensor:
    """The bits of z moved down, with zeros from above."""
    return (z >> by).bitwise_and_(2 ** (64 - by) - 1)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
