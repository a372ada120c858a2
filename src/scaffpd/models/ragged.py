r"""Clients of unequal size without a loop over clients.

The samples of all clients lie in one stack; `owner` says whose a row is. Sums over a client's own rows are segment
sums. Where every client has an iterate of its own (local steps), clients are padded to a common length and handled as
one batched product. Padding costs arithmetic and one more block costs the fixed price of a dozen small operations, so
the clients, in order of size, are cut where

    Σ_blocks ( overhead + clients · longest · width )

is least: many small clients make one block whatever their sizes, large ones are hardly padded at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Padded elements that cost as much as one more block (measured); on a GPU launches are dear and arithmetic is cheap.
OVERHEAD = {"cpu": 30_000, "cuda": 10_000_000}


@dataclass(frozen=True)
class Block:
    """Some clients with the same padded number of rows.

    Attributes:
        clients: (n,) which clients.
        rows: (n, m) row numbers in the stack; padding repeats a client's first row.
        weight: (n, m) weight of each row in its client's mean; 0 for padding.
        first: the first of n·m rows in a row, where nothing is padded; `None` elsewhere.
    """

    clients: Tensor
    rows: Tensor
    weight: Tensor
    first: int | None = None

    def of(self, stack: Tensor) -> Tensor:
        """The block's part of a stack (M, ...) as (n, m, ...): a view where nothing is padded, else a copy."""
        if self.first is None:
            return stack[self.rows]
        return stack[self.first : self.first + self.rows.numel()].view(*self.rows.shape, *stack.shape[1:])


class Ragged:
    """The layout of N clients' rows in one stack."""

    def __init__(self, sizes: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = list(sizes)
        self.sizes = torch.tensor(sizes, device=device)
        self.starts = torch.cumsum(self.sizes, 0) - self.sizes
        self.owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), self.sizes)
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.sizes)

    def rows_of(self, clients: list[int]) -> Tensor:
        """The row numbers of some clients, one client after the other."""
        ends = (self.starts + self.sizes).tolist()
        starts = self.starts.tolist()
        return torch.cat([torch.arange(starts[i], ends[i], device=self.sizes.device) for i in clients])

    def segment_sum(self, rows: Tensor) -> Tensor:
        """Σ over each client's rows: (M, ...) → (N, ...)."""
        return torch.segment_reduce(rows, "sum", lengths=self.sizes, unsafe=True)

    def segment_max(self, rows: Tensor) -> Tensor:
        """The largest of each client's rows."""
        return torch.segment_reduce(rows, "max", lengths=self.sizes, unsafe=True)

    def segment_min(self, rows: Tensor) -> Tensor:
        """The smallest of each client's rows."""
        return torch.segment_reduce(rows, "min", lengths=self.sizes, unsafe=True)

    def blocks(self, share: Tensor, width: int) -> list[Block]:
        """All rows, weighted by their (M,) `share`, in the cheapest padded blocks for rows of `width` numbers."""
        order = torch.argsort(self.sizes, descending=True, stable=True)
        ordered = self.sizes[order].cpu().numpy()
        overhead = OVERHEAD.get(self.sizes.device.type, OVERHEAD["cuda"]) / width
        cuts = cheapest_cuts(ordered, overhead)
        return [
            self._padded(order[first:last], ordered[first:last], share)
            for first, last in zip([0, *cuts[:-1]], cuts, strict=True)
        ]

    def _padded(self, clients: Tensor, sizes: NDArray[np.int64], share: Tensor) -> Block:
        position = torch.arange(int(sizes[0]), device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        rows = self.starts[clients, None] + torch.where(inside, position, 0)
        consecutive = bool((clients[1:] == clients[:-1] + 1).all()) and sizes[0] == sizes[-1]
        return Block(clients, rows, torch.where(inside, share[rows], 0), int(rows[0, 0]) if consecutive else None)

    def minibatch(self, uniform: NDArray[np.float64]) -> Block:
        """Rows drawn with replacement, one per column of the (N, b) `uniform` numbers in [0, 1).

        A client with no more than b rows gives them all.
        """
        device, (_, size) = self.sizes.device, uniform.shape
        sizes, position = self.sizes[:, None], torch.arange(size, device=device)
        inside = position < sizes
        drawn = torch.minimum((torch.from_numpy(uniform).to(device) * sizes).long(), sizes - 1)
        small = sizes <= size
        rows = self.starts[:, None] + torch.where(small, torch.where(inside, position, 0), drawn)
        weight = torch.where(inside, 1 / torch.clamp(sizes, max=size).to(self.dtype), 0)
        return Block(torch.arange(len(self), device=device), rows, weight)


def cheapest_cuts(sizes: NDArray[np.int64], overhead: float) -> list[int]:
    """Where to end each block of descending `sizes` so that Σ_blocks (overhead + clients · longest) is least.

    Dynamic programming over the places where sizes, rounded up to six binary digits, change; there are few of them.
    """
    fraction, exponent = np.frexp(sizes)
    rounded = np.ldexp(np.ceil(64 * fraction), exponent)
    edges = np.concatenate([[0], 1 + np.flatnonzero(np.diff(rounded)), [len(sizes)]])
    longest = sizes[edges[:-1]]
    cost, cut = np.zeros(len(edges)), np.zeros(len(edges), dtype=np.int64)
    for end in range(1, len(edges)):
        options = cost[:end] + overhead + longest[:end] * (edges[end] - edges[:end])
        cut[end] = options.argmin()
        cost[end] = options[cut[end]]
    ends, end = [], len(edges) - 1
    while end > 0:
        ends.append(int(edges[end]))
        end = int(cut[end])
    return ends[::-1]
