r"""The samples of all clients in one stack, without a loop over clients of unequal size.

`owner` says whose a row is. Sums over a client's own rows are segment sums. Where every client has an iterate of its
own (local steps), clients are padded to a common length and handled as one batched product. Padding costs arithmetic
and one more block costs the fixed price of a dozen small operations, so the clients, in order of size, are cut where

    Σ_blocks ( overhead + clients · longest · width )

is least: many small clients make one block whatever their sizes, large ones are hardly padded at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.models.numerics import parallel_map, thread_count
from scaffpd.models.tables import MappedMatrix, TableMatrix

# Padded elements that cost as much as one more block (measured); on a GPU launches are dear and arithmetic is cheap.
OVERHEAD = {"cpu": 30_000, "cuda": 10_000_000}
WORTH = 2**16  # numbers of inner products from which on steps are worth a thread for each core
CACHE = 2**17  # numbers that a core's second-level cache holds: half a megabyte, or one in double precision


@dataclass(frozen=True)
class PaddedBlock:
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
        """Return the block's part of a stack (M, ...) as (n, m, ...): a view where nothing is padded, else a copy."""
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
        """The client of each row."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.sizes.device), self.sizes)

    def rows_of(self, clients: list[int]) -> Tensor:
        """Return the row numbers of some clients, one client after the other."""
        sizes = self.sizes[clients]
        ends = torch.cumsum(sizes, 0)
        rows = torch.arange(int(ends[-1]) if clients else 0, device=sizes.device)
        return rows + torch.repeat_interleave(self.starts[clients] - (ends - sizes), sizes)

    def places(self, clients: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Locate the first `rows` rows of some clients in the stack, and mark which of those (n, rows) exist."""
        position = torch.arange(rows, device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        return (self.starts[clients, None] + position)[inside], inside

    def put(self, stack: Tensor, clients: Tensor, values: Tensor) -> None:
        """Write the rows of some clients, (n, ≥ m, ...), into a stack (M, ...); skip rows that a client lacks."""
        if self.equal:
            stack.view(len(self.lengths), self.smallest, *stack.shape[1:])[clients] = values[:, : self.smallest]
            return
        own, inside = self.places(clients, values.shape[1])
        stack[own] = values[inside]

    def spread(self, values: Tensor) -> Tensor:
        """Repeat a number of every client for each of its rows: (N,) → (M,)."""
        return values.repeat_interleave(self.smallest) if self.equal else values[self.owner]

    def segment_sum(self, rows: Tensor) -> Tensor:
        """Σ over each client's rows: (M, ...) → (N, ...)."""
        if self.equal:
            return rows.view(len(self.lengths), self.smallest, *rows.shape[1:]).sum(1)
        return torch.segment_reduce(rows, "sum", lengths=self.sizes, unsafe=True)

    def segment_max(self, rows: Tensor) -> Tensor:
        """The largest of each client's rows."""
        if self.equal:
            return rows.view(len(self.lengths), self.smallest, *rows.shape[1:]).amax(1)
        return torch.segment_reduce(rows, "max", lengths=self.sizes, unsafe=True)

    def blocks(self, share: Tensor, width: int) -> list[PaddedBlock]:
        """Cut all rows, weighted by their (M,) `share`, into the cheapest padded blocks for rows of `width` numbers."""
        return self._cut(share, width, lambda _: CACHE // width, range(len(self)))

    def squares(self, share: Tensor, width: int) -> list[PaddedBlock]:
        """Cut all rows into blocks whose m × m matrices fit into the cache, and that keep all cores busy."""
        enough = sum(m * m for m in self.lengths) >= WORTH
        each = -(-sum(self.lengths) // thread_count()) if enough else CACHE
        return self._cut(share, width, lambda m: min(CACHE // m, each), range(-1, -len(self) - 1, -1))

    def _cut(self, share: Tensor, width: int, rows: Callable[[int], int], numbers: range) -> list[PaddedBlock]:
        lengths = np.array(self.lengths)
        order = np.argsort(-lengths, kind="stable")
        ordered, device = lengths[order], self.sizes.device
        cuts = (
            [len(self)] if self.equal else cheapest_cuts(ordered, OVERHEAD.get(device.type, OVERHEAD["cuda"]) / width)
        )
        if device.type == "cpu":
            cuts = finer(cuts, ordered, rows)
        clients = torch.from_numpy(order).to(device)
        return [
            self._padded(clients[first:last], ordered[first:last], share, number, first)
            for number, (first, last) in zip(numbers, zip([0, *cuts[:-1]], cuts, strict=True), strict=False)
        ]

    def _padded(self, clients: Tensor, sizes: NDArray[np.int64], share: Tensor, number: int, at: int) -> PaddedBlock:
        if self.equal:  # nobody was moved: client number `at` is the first
            first, last = at * self.smallest, (at + len(clients)) * self.smallest
            rows = torch.arange(first, last, device=clients.device).view(-1, self.smallest)
            return PaddedBlock(clients, rows, share[first:last].view_as(rows), first, number)
        position = torch.arange(int(sizes[0]), device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        rows = self.starts[clients, None] + torch.where(inside, position, 0)
        consecutive = bool((clients[1:] == clients[:-1] + 1).all()) and sizes[0] == sizes[-1]
        first = int(rows[0, 0]) if consecutive else None
        return PaddedBlock(clients, rows, torch.where(inside, share[rows], 0), first, number)

    def minibatch(self, uniform: Tensor, clients: Tensor | None = None) -> PaddedBlock:
        """Draw rows with replacement, by (N, …, b) `uniform` numbers in [0, 1): b of every client, for every step.

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
        return PaddedBlock(who, drawn.add_(starts), weight)


def outside(blocks: list[PaddedBlock], clients: int, device: torch.device) -> Tensor:
    """Return the clients that are in none of the blocks, without waiting for a device if all or none are."""
    everyone = torch.arange(clients, device=device)
    inside = sum(len(block.clients) for block in blocks)
    if inside in (0, clients):
        return everyone[inside:]
    far = torch.ones(clients, dtype=torch.bool, device=device)
    for block in blocks:
        far[block.clients] = False
    return everyone[far]


def cheapest_cuts(sizes: NDArray[np.int64], overhead: float) -> list[int]:
    """Find the ends of blocks of descending `sizes` for which Σ_blocks (overhead + clients · longest) is least.

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
    """Add ends of blocks, so that no block of several clients has more padded rows than `rows` says.

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


KEPT = 2**23  # numbers of padded copies that are kept from round to round
PIECE = 2**17  # rows for which everything that has a number per row fits into a cache


@dataclass(frozen=True)
class StackedSamples:
    """The stacked samples of all clients: features A, targets y, and each row's share in its client's mean."""

    A: Tensor
    y: Tensor
    layout: Ragged
    share: Tensor

    @cached_property
    def blocks(self) -> list[PaddedBlock]:
        """The same samples, padded for batched products."""
        return self.layout.blocks(self.share, self.A.shape[1])

    @cached_property
    def squares(self) -> list[PaddedBlock]:
        """The same, for work in the space of samples."""
        return self.layout.squares(self.share, self.A.shape[1])

    def of(self, block: PaddedBlock) -> tuple[Tensor, Tensor]:
        """A block's (A, y): views where nothing is padded, else copies, which are kept if they are small in all."""
        return self._copies.get(block.number) or (block.of(self.A), block.of(self.y))

    def alone(self, block: PaddedBlock) -> tuple[Tensor, Tensor]:
        """Return a block's (A, y) with zeros for padding, so that only a client's own rows count in products."""
        A, y = self.of(block)
        if block.first is not None:
            return A, y
        own = (block.weight > 0)[..., None]
        return A * own, y * own

    @property
    def stored(self) -> bool:
        """Whether A stays in a table: copies of its rows are not cached."""
        return not isinstance(cast(Any, self.A), Tensor)

    def large(self, block: PaddedBlock) -> MappedMatrix | None:
        """Return a block's A if it is to be read piece by piece: one client's, and too large to be held together."""
        A = cast(Any, self.A)
        if not isinstance(A, MappedMatrix) or block.first is None or len(block.rows) > 1:
            return None
        return A.large(block.first, block.rows.numel())

    def squared(self) -> StackedSamples:
        """Return the samples with A ∘ A."""
        return replace(self, A=self.A.square())

    @cached_property
    def _copies(self) -> dict[int | None, tuple[Tensor, Tensor]]:
        if self.stored:
            return {}
        padded = [block for block in self.blocks if block.first is None]
        few = sum(block.rows.numel() for block in padded) * self.A.shape[1] <= KEPT
        return {block.number: (block.of(self.A), block.of(self.y)) for block in padded} if few else {}

    def each(self, V: Tensor) -> Tensor:
        """A_iᵀ (V_i/m_i) of every client, (N, k, features), for V (M, k)."""
        out = V.new_empty(len(self.layout), V.shape[1], self.A.shape[1])

        def work(block: PaddedBlock) -> None:
            own, large = (block.weight[..., None] * block.of(V)), self.large(block)
            if large is not None:
                out[block.clients] = (large.T @ own[0]).mT
            else:
                out[block.clients] = torch.bmm(own.mT.contiguous(), self.of(block)[0])

        parallel_map(work, self.blocks, V.device)
        return out

    @cached_property
    def norms(self) -> Tensor:
        """‖a_j‖ per row."""
        norms: Tensor = self.A.norm(dim=1)
        return norms

    @cached_property
    def levers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What rounding goes with: (‖a_j‖, ‖y_j‖)/m_i per row, and the clients' means of ‖a‖², ‖a‖‖y‖ and ‖y‖².

        Class numbers have no size.
        """
        y = self.y.norm(dim=1) if self.y.is_floating_point() else torch.zeros_like(self.share)
        both = torch.stack([self.norms, y], 1)
        levers = self.share[:, None] * both
        aa, ay = self.layout.segment_sum(levers * self.norms[:, None]).unbind(1)
        return levers, aa, ay, self.layout.segment_sum(levers[:, 1] * y)

    def slack(self, terms: int) -> float:
        """s(n): how many ε a sum of n products with A may be off."""
        A: Tensor | TableMatrix = self.A
        return A.slack(terms) if isinstance(A, TableMatrix) else 4 * terms**0.5

    def take(self, block: PaddedBlock) -> StackedSamples:
        """Return the rows of one block as a stack of their own."""
        picked, (n, m) = block.rows.flatten(), block.rows.shape
        return self._part(self.A[picked], picked, [m] * n, block.weight.flatten())

    def only(self, clients: list[int]) -> StackedSamples:
        """Return the rows of some clients as a stack of their own."""
        picked, A = self.layout.rows_of(clients), cast(Any, self.A)
        own = A.take(picked) if isinstance(A, MappedMatrix) else A[picked]
        return self._part(own, picked, self.layout.sizes[clients].tolist(), self.share[picked])

    def _part(self, A: Any, rows: Tensor | slice, lengths: list[int], share: Tensor) -> StackedSamples:
        return StackedSamples(A, self.y[rows], Ragged(lengths, self.A.device, self.A.dtype), share)

    @cached_property
    def pieces(self) -> list[tuple[slice, StackedSamples]]:
        """Clients in order, in pieces of about `PIECE` rows, as views; all at once where A is not in main memory."""
        if self.stored or self.A.device.type != "cpu":
            return [(slice(None), self)]
        ends = np.cumsum([0, *self.layout.lengths])
        cuts = np.unique(np.searchsorted(ends, [0, *range(PIECE, int(ends[-1]), PIECE), ends[-1]])).tolist()
        if len(cuts) == 2:
            return [(slice(None), self)]
        return [(slice(i, j), self._piece(i, j, slice(ends[i], ends[j]))) for i, j in pairwise(cuts)]

    def _piece(self, first: int, last: int, rows: slice) -> StackedSamples:
        return self._part(self.A[rows], rows, self.layout.lengths[first:last], self.share[rows])


def product(A: Tensor, v: Tensor) -> Tensor:
    """A v, client by client; a single column goes as a row, see `scaffpd.models.local_steps`."""
    return (v.mT @ A.mT).mT if v.shape[-1] == 1 else A @ v


def transposed(A: Tensor, V: Tensor) -> Tensor:
    """AᵀV; several columns go as rows from the left, which takes BLAS half the time."""
    return (V.mT.contiguous() @ A).mT if isinstance(A, Tensor) and V.shape[1] > 1 else A.T @ V
