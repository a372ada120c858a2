r"""Clients of unequal size without a loop over clients.

The samples of all clients lie in one stack; `owner` says whose a row is. Sums over a client's own rows are segment
sums. Where every client has an iterate of its own (local steps), clients are padded to a common length and handled as
one batched product. Padding costs arithmetic and one more block costs the fixed price of a dozen small operations, so
the clients, in order of size, are cut where

    Σ_blocks ( overhead + clients · longest · width )

is least: many small clients make one block whatever their sizes, large ones are hardly padded at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Padded elements that cost as much as one more block (measured); on a GPU launches are dear and arithmetic is cheap.
OVERHEAD = {"cpu": 30_000, "cuda": 10_000_000}
CACHE = 2**17  # numbers that a core's second-level cache holds: half a megabyte, or one in double precision


@dataclass(frozen=True)
class Block:
    """Some clients with the same padded number of rows.

    Attributes:
        clients: (n,) which clients.
        rows: (n, m) row numbers in the stack; padding repeats a client's first row.
        weight: (n, m) weight of each row in its client's mean; 0 for padding.
        first: the first of n·m rows in a row, where nothing is padded; `None` elsewhere.
        number: tells the blocks of a layout apart; `None` for a minibatch.
    """

    clients: Tensor
    rows: Tensor
    weight: Tensor
    first: int | None = None
    number: int | None = None

    def of(self, stack: Tensor) -> Tensor:
        """The block's part of a stack (M, ...) as (n, m, ...): a view where nothing is padded, else a copy."""
        if self.first is None:
            return stack[self.rows]
        return stack[self.first : self.first + self.rows.numel()].view(*self.rows.shape, *stack.shape[1:])

    def add(self, stack: Tensor, values: Tensor) -> None:
        """Add (n, ≥ m, ...) to the block's part of a stack; what belongs to padding must be zero."""
        values = values[:, : self.rows.shape[1]]
        if self.first is None:
            stack.index_add_(0, self.rows.flatten(), values.reshape(-1, *stack.shape[1:]))
        else:
            self.of(stack).add_(values)


class Ragged:
    """The layout of N clients' rows in one stack."""

    def __init__(self, sizes: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.lengths, self.smallest = list(sizes), min(sizes, default=0)
        self.equal = bool(sizes) and self.smallest == max(sizes) > 0
        self.sizes = torch.tensor(sizes, device=device)
        self.starts = torch.cumsum(self.sizes, 0) - self.sizes
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def owner(self) -> Tensor:
        """Whose each row is."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.sizes.device), self.sizes)

    def rows_of(self, clients: list[int]) -> Tensor:
        """The row numbers of some clients, one client after the other."""
        sizes = self.sizes[clients]
        ends = torch.cumsum(sizes, 0)
        rows = torch.arange(int(ends[-1]) if clients else 0, device=sizes.device)
        return rows + torch.repeat_interleave(self.starts[clients] - (ends - sizes), sizes)

    def places(self, clients: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Where the first `rows` rows of some clients are in the stack, and which of those (n, rows) there are."""
        position = torch.arange(rows, device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        return (self.starts[clients, None] + position)[inside], inside

    def segment_sum(self, rows: Tensor) -> Tensor:
        """Σ over each client's rows: (M, ...) → (N, ...)."""
        if self.equal:
            return rows.view(len(self.lengths), self.smallest, *rows.shape[1:]).sum(1)
        return torch.segment_reduce(rows, "sum", lengths=self.sizes, unsafe=True)

    def segment_max(self, rows: Tensor) -> Tensor:
        """The largest of each client's rows."""
        return torch.segment_reduce(rows, "max", lengths=self.sizes, unsafe=True)

    def blocks(self, share: Tensor, width: int) -> list[Block]:
        """All rows, weighted by their (M,) `share`, in the cheapest padded blocks for rows of `width` numbers."""
        return self._cut(share, width, lambda _: CACHE // width, range(len(self)))

    def squares(self, share: Tensor, width: int) -> list[Block]:
        """The same, in blocks for which it is m × m matrices that have to fit into the cache."""
        return self._cut(share, width, lambda m: CACHE // m, range(-1, -len(self) - 1, -1))

    def _cut(self, share: Tensor, width: int, rows: Callable[[int], int], numbers: range) -> list[Block]:
        order = torch.argsort(self.sizes, descending=True, stable=True)
        ordered = self.sizes[order].cpu().numpy()
        cuts = cheapest_cuts(ordered, OVERHEAD.get(self.sizes.device.type, OVERHEAD["cuda"]) / width)
        if self.sizes.device.type == "cpu":
            cuts = finer(cuts, ordered, rows)
        return [
            self._padded(order[first:last], ordered[first:last], share, number)
            for number, (first, last) in zip(numbers, zip([0, *cuts[:-1]], cuts, strict=True), strict=False)
        ]

    def _padded(self, clients: Tensor, sizes: NDArray[np.int64], share: Tensor, number: int) -> Block:
        position = torch.arange(int(sizes[0]), device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        rows = self.starts[clients, None] + torch.where(inside, position, 0)
        consecutive = bool((clients[1:] == clients[:-1] + 1).all()) and sizes[0] == sizes[-1]
        first = int(rows[0, 0]) if consecutive else None
        return Block(clients, rows, torch.where(inside, share[rows], 0), first, number)

    def minibatch(self, uniform: Tensor, clients: Tensor | None = None) -> Block:
        """Rows drawn with replacement, by (N, …, b) `uniform` numbers in [0, 1): b of every client, for every step.

        A client with no more than b rows gives them all. Of some `clients` only, where they are named.
        """
        who = torch.arange(len(self), device=self.sizes.device) if clients is None else clients
        size, shape = uniform.shape[-1], (-1, *[1] * (uniform.ndim - 1))
        sizes, starts, position = self.sizes[who], self.starts[who], torch.arange(size, device=self.sizes.device)
        weight = torch.where(position < sizes[:, None], 1 / sizes[:, None].clamp_max(size).to(self.dtype), 0)
        sizes, starts = sizes.view(shape), starts.view(shape)
        drawn = torch.minimum((uniform * sizes).long(), sizes - 1)
        if self.smallest <= size:
            drawn = torch.where(sizes <= size, torch.where(position < sizes, position, 0), drawn)
        return Block(who, drawn.add_(starts), weight)


def outside(blocks: list[Block], clients: int, device: torch.device) -> Tensor:
    """The numbers of those clients who are in none of the blocks (without waiting for a device if all or none are)."""
    everyone = torch.arange(clients, device=device)
    inside = sum(len(block.clients) for block in blocks)
    if inside in (0, clients):
        return everyone[inside:]
    far = torch.ones(clients, dtype=torch.bool, device=device)
    for block in blocks:
        far[block.clients] = False
    return everyone[far]


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


def finer(ends: list[int], sizes: NDArray[np.int64], rows: Callable[[int], int]) -> list[int]:
    """The same ends of blocks and more, so that no block of several clients has more padded rows than `rows` says.

    Args:
        ends: where blocks end.
        sizes: the clients' numbers of rows, descending.
        rows: how many there may be in a block whose longest client has m of them.
    """
    cuts = []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        longest = max(1, int(sizes[first]))
        cuts += [*range(first, last, max(1, rows(longest) // longest))[1:], last]
    return cuts
