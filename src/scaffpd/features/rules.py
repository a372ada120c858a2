"""What the rules of all layers share: how a rule is applied, and when one product of matrices beats picking."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor], Tensor]  # (δ, x) -> (B, coordinates)

MOVES = 8  # numbers that are read and written for each one that is picked, multiplied and summed
PACE = {"cpu": 16, "cuda": 40}  # multiplications in a product of matrices in the time of one such move
NEAR = {"cpu": 2**18, "cuda": 2**28}  # numbers: what fits into a processor's cache; 1 GiB on a GPU


@dataclass(frozen=True)
class Part:
    """How to compute some coordinates of one parameter.

    Attributes:
        rule: (δ, x) ↦ the derivatives (B, coordinates).
        work: numbers of storage that it needs for a while, per sample.
    """

    rule: Rule
    work: int

    def write(self, delta: Tensor, x: Tensor, rows: Tensor) -> None:
        """The derivatives into `rows`, so many samples at a time that what is needed for a while stays near."""
        step = max(1, NEAR.get(x.device.type, NEAR["cpu"]) // max(self.work, 1))
        for k in range(0, len(x), step):
            rows[k : k + step] = self.rule(delta[k : k + step], x[k : k + step])


def flat(x: Tensor) -> Tensor:
    """(B, C, *) to (B, C, P)."""
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_p a[b, s, p] b[b, s, p], at least in single precision."""
    return (a * b).sum(-1, dtype=wide(a.dtype))


def wide(kind: torch.dtype) -> torch.dtype:
    """The format in which sums are taken: at least single precision."""
    return torch.promote_types(kind, torch.float32)


def plane(x: Tensor) -> int:
    """Positions of one channel."""
    return math.prod(x.shape[2:])


def full_is_cheaper(wanted: int, size: int, moved: int, places: int, device: torch.device) -> bool:
    """Whether to compute all `size` weights of a layer, for which `moved` numbers a position are read and written."""
    full = (moved + size / PACE.get(device.type, PACE["cpu"])) * places + size
    return full < MOVES * wanted * places
