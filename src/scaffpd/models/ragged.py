r"""Clients of unequal size without a loop over clients.

The samples of all clients lie in one stack; `owner` says whose a row is. Sums over a client's own rows are segment sums.
Where every client has an iterate of its own (local steps), clients of similar size are padded to a common length and handled
as one batched product; a block never holds more than `WASTE` times the rows that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WASTE = 1.5


@dataclass(frozen=True)
class Block:
    """Some clients with the same padded number of rows.

    Attributes:
        clients: (n,) which clients.
        rows: (n, m) row numbers in the stack; padding repeats a client's first row.
        weight: (n, m) weight of each row in its client's mean; 0 for padding.
    """

    clients: Tensor
    rows: Tensor
    weight: Tensor


class Ragged:
    """The layout of N clients' rows in one stack."""

    def __init__(self, sizes: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.sizes = torch.tensor(sizes, device=device)
        self.starts = torch.cumsum(self.sizes, 0) - self.sizes
        self.owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), self.sizes)
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.sizes)

    def segment_sum(self, rows: Tensor) -> Tensor:
        """Σ over each client's rows: (M, ...) → (N, ...)."""
        return torch.segment_reduce(rows, "sum", lengths=self.sizes, unsafe=True)

    def blocks(self, share: Tensor) -> list[Block]:
        """All rows, weighted by their (M,) `share`, in as few padded blocks as `WASTE` allows."""
        order = torch.argsort(self.sizes, descending=True, stable=True)
        ordered = self.sizes[order].tolist()
        blocks, first = [], 0
        while first < len(ordered):
            last = first
            while last < len(ordered) and ordered[last] * WASTE >= ordered[first]:
                last += 1
            blocks.append(self._padded(order[first:last], ordered[first], share))
            first = last
        return blocks

    def _padded(self, clients: Tensor, length: int, share: Tensor) -> Block:
        position = torch.arange(length, device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        rows = self.starts[clients, None] + torch.where(inside, position, 0)
        return Block(clients, rows, torch.where(inside, share[rows], 0))

    def minibatch(self, size: int, generator: np.random.Generator) -> Block:
        """`size` rows of every client drawn with replacement; a client with no more than `size` rows gives them all."""
        device = self.sizes.device
        uniform = torch.from_numpy(generator.random((len(self), size))).to(device)
        sizes = self.sizes[:, None]
        position = torch.arange(size, device=device).expand(len(self), size)
        small = sizes <= size
        drawn = torch.minimum((uniform * sizes).long(), sizes - 1)
        rows = self.starts[:, None] + torch.where(small, torch.where(position < sizes, position, 0), drawn)
        share = torch.where(small, (position < sizes).to(self.dtype) / sizes, torch.full_like(uniform, 1 / size, dtype=self.dtype))
        return Block(torch.arange(len(self), device=device), rows, share)
