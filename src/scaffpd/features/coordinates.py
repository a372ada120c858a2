"""Which coordinates of a gradient are kept, and whether two ways of computing them agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AGREE = 1e-3  # largest difference, relative to the largest entry of a parameter's gradient
FAINT = 1e-6  # relative to the largest entry of all: below, rounding is all there is


@dataclass(frozen=True)
class Span:
    """Coordinates of one parameter: which of its numbers, and where they lie in a row of the result.

    Attributes:
        name: of the parameter; "" is w, the random head.
        numbers: positions in the flattened parameter, on the device.
        where: columns of the result.
    """

    name: str
    numbers: Tensor
    where: slice


def choose(random: np.random.Generator, total: int, wanted: int) -> NDArray[np.int64]:
    """So many different numbers below `total`, ascending; all, where there are no more."""
    if wanted >= total:
        return np.arange(total)
    return np.sort(random.choice(total, wanted, replace=False))


def spans(chosen: NDArray[np.int64], sizes: dict[str, int], device: torch.device) -> list[Span]:
    """The chosen ones parameter by parameter, of those that have any."""
    starts = np.concatenate([[0], np.cumsum(list(sizes.values()))])
    cuts = np.searchsorted(chosen, starts).tolist()
    return [
        Span(name, torch.from_numpy(chosen[a:b] - start).to(device), slice(a, b))
        for name, start, a, b in zip(sizes, starts[:-1], cuts[:-1], cuts[1:], strict=True)
        if b > a
    ]


def agree(found: Tensor, reference: Tensor, parts: list[Span]) -> bool:
    """Whether the derivatives with respect to parameters are the same but for rounding."""
    found, reference = found.cpu(), reference.cpu()
    floor = FAINT * float(reference.abs().max())
    for part in parts:
        there = reference[:, part.where]
        gap = float((found[:, part.where] - there).abs().max())
        if part.name and not gap <= AGREE * float(there.abs().max()) + floor:
            return False
    return True
