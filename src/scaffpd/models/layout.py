r"""The samples of all clients in one stack, without a loop over clients of unequal size.

`owner` is the client of each row. Sums over a client's own rows are segment sums. If every client has its own iterate
(local steps), clients are padded to a common length and handled as one batched product. Padding costs arithmetic
and one more block costs the overhead of a dozen small operations, so the clients, in order of size, are cut where

    Σ_blocks ( overhead + clients · longest · width )

is least: many small clients of any sizes make one block, and large ones are hardly padded at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.models.numerics import (
    ALONE_VECTOR,
    LEAST,
    SINGLE,
    UNDERFLOW,
    gamma,
    norm_above,
    parallel_map,
    quiet,
    tensor_cores,
    thread_count,
)
from scaffpd.models.tables import FINE, TERMS, MappedMatrix, StoredMatrix, TableMatrix

# Padded elements that cost as much as one more block (measured); on a GPU launches are expensive, arithmetic is cheap.
OVERHEAD = {"cpu": 30_000, "cuda": 10_000_000}
WORTH = 2**18  # size of inner products above which steps use one thread per core (measured on two)
SHORT = 1024  # rows of a client that are summed without blocks
CACHE = (
    2**17
)  # numbers that a core's second-level cache holds: half a megabyte, or one in double precision


@dataclass(frozen=True)
class PaddedBlock:
    """Clients with the same padded number of rows.

    Attributes:
        clients: (n,) which clients.
        rows: (n, m) row numbers in the stack; padding repeats a client's first row.
        weight: (n, m) weight of each row in its client's mean; 0 for padding.
        first: the first of n·m consecutive rows if nothing is padded; else `None`.
        number: index of the block in its layout; `None` for a minibatch.
    """

    clients: Tensor
    rows: Tensor
    weight: Tensor
    first: int | None = None
    number: int | None = None

    def of(self, stack: Tensor) -> Tensor:
        """Return the block's part of a stack (M, ...) as (n, m, ...): a view if nothing is padded, else a copy."""
        if self.first is None:
            return stack[self.rows]
        return stack[self.first : self.first + self.rows.numel()].view(
            *self.rows.shape, *stack.shape[1:]
        )

    def add(self, stack: Tensor, values: Tensor) -> None:
        """Add (n, ≥ m, ...) to the block's part of a stack; values at padding must be zero."""
        values = values[:, : self.rows.shape[1]]
        if self.first is None:
            stack.index_add_(0, self.rows.flatten(), values.reshape(-1, *stack.shape[1:]))
        else:
            self.of(stack).add_(values)


class Ragged:
    """Layout of N clients' rows in one stack."""

    def __init__(self, sizes: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.lengths, self.smallest, self.largest = (
            list(sizes),
            min(sizes, default=0),
            max(sizes, default=0),
        )
        self.equal = self.smallest == self.largest > 0
        self.sizes = torch.tensor(sizes, device=device)
        self.starts = torch.cumsum(self.sizes, 0) - self.sizes
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def owner(self) -> Tensor:
        """The client of each row."""
        return torch.repeat_interleave(
            torch.arange(len(self), device=self.sizes.device), self.sizes
        )

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
            stack.view(len(self.lengths), self.smallest, *stack.shape[1:])[clients] = values[
                :, : self.smallest
            ]
            return
        own, inside = self.places(clients, values.shape[1])
        stack[own] = values[inside]

    def spread(self, values: Tensor) -> Tensor:
        """Repeat each client's number for each of its rows: (N,) → (M,)."""
        return values.repeat_interleave(self.smallest) if self.equal else values[self.owner]

    def scaled(self, rows: Tensor, values: Tensor) -> Tensor:
        """Multiply the rows of each client, (M, k), by its number, (N,)."""
        if self.equal:
            return (
                rows.view(len(self.lengths), self.smallest, -1) * values[:, None, None]
            ).view_as(rows)
        return rows * values[self.owner][:, None]

    def segment_sum(self, rows: Tensor) -> Tensor:
        """Return Σ over each client's rows: (M, ...) → (N, ...)."""
        if self.equal:
            return rows.view(len(self.lengths), self.smallest, *rows.shape[1:]).sum(1)
        return torch.segment_reduce(rows, "sum", lengths=self.sizes, unsafe=True)

    @cached_property
    def _cuts(self) -> tuple[Tensor, Tensor] | None:
        """Cut each client's rows into blocks of about √(most rows); return the blocks' lengths and numbers."""
        if self.largest <= SHORT:
            return None
        width = math.isqrt(self.largest)
        counts = (-(-self.sizes // width)).clamp_min(1)
        lengths = torch.full((int(counts.sum()),), width, device=self.sizes.device)
        lengths[torch.cumsum(counts, 0) - 1] = self.sizes - (counts - 1) * width
        return lengths, counts

    @cached_property
    def additions(self) -> Tensor:
        """Number of additions in `total` that a row of each client takes part in."""
        if self._cuts is None:
            return self.sizes.double()
        return self._cuts[1].double() + math.isqrt(self.largest)

    def total(self, rows: Tensor) -> Tensor:
        """Return Σ over each client's rows, (M,) → (N,), in blocks whose length is the root of their number.

        Then the error of a block is at most γ_{2√m}, in any order of additions.
        """
        if self._cuts is None:
            return self.segment_sum(rows)
        lengths, counts = self._cuts
        within = torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)
        return torch.segment_reduce(within, "sum", lengths=counts, unsafe=True)

    def segment_max(self, rows: Tensor) -> Tensor:
        """Return the largest of each client's rows."""
        if self.equal:
            return rows.view(len(self.lengths), self.smallest, *rows.shape[1:]).amax(1)
        return torch.segment_reduce(rows, "max", lengths=self.sizes, unsafe=True)

    def blocks(self, share: Tensor, width: int) -> list[PaddedBlock]:
        """Cut all rows, weighted by their (M,) `share`, into the cheapest padded blocks for rows of `width` numbers."""
        return self._cut(share, width, lambda _: CACHE // width, range(len(self)))

    def squares(self, share: Tensor, width: int) -> list[PaddedBlock]:
        """Cut all rows into blocks whose m × m matrices fit into the cache and that keep all cores busy."""
        enough = sum(m * m for m in self.lengths) >= WORTH
        each = -(-sum(self.lengths) // thread_count()) if enough else CACHE
        return self._cut(
            share, width, lambda m: min(CACHE // m, each), range(-1, -len(self) - 1, -1)
        )

    def _cut(
        self, share: Tensor, width: int, rows: Callable[[int], int], numbers: range
    ) -> list[PaddedBlock]:
        lengths = np.array(self.lengths)
        order = np.argsort(-lengths, kind="stable")
        ordered = lengths[order]
        device = self.sizes.device
        cuts = (
            [len(self)]
            if self.equal
            else cheapest_cuts(ordered, OVERHEAD.get(device.type, OVERHEAD["cuda"]) / width)
        )
        if device.type == "cpu":
            cuts = finer(cuts, ordered, rows)
        clients = torch.from_numpy(order).to(device)
        return [
            self._padded(clients[first:last], ordered[first:last], share, number, first)
            for number, (first, last) in zip(
                numbers, zip([0, *cuts[:-1]], cuts, strict=True), strict=False
            )
        ]

    def _padded(
        self, clients: Tensor, sizes: NDArray[np.int64], share: Tensor, number: int, at: int
    ) -> PaddedBlock:
        if self.equal:  # clients are in order: client number `at` is the first
            end = (at + len(clients)) * self.smallest
            rows = torch.arange(at * self.smallest, end, device=clients.device).view(
                -1, self.smallest
            )
            return PaddedBlock(
                clients,
                rows,
                share[at * self.smallest : end].view_as(rows),
                at * self.smallest,
                number,
            )
        position = torch.arange(int(sizes[0]), device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        rows = self.starts[clients, None] + torch.where(inside, position, 0)
        consecutive = bool((clients[1:] == clients[:-1] + 1).all()) and sizes[0] == sizes[-1]
        first = int(rows[0, 0]) if consecutive else None
        return PaddedBlock(clients, rows, torch.where(inside, share[rows], 0), first, number)

    def minibatch(self, uniform: Tensor, clients: Tensor | None = None) -> PaddedBlock:
        """Draw rows with replacement, by (N, …, b) `uniform` numbers in [0, 1): b of every client, for every step.

        A client with at most b rows gives them all. Draw for `clients` only, if given.
        """
        who = torch.arange(len(self), device=self.sizes.device) if clients is None else clients
        size = uniform.shape[-1]
        shape = (-1, *[1] * (uniform.ndim - 1))
        sizes = self.sizes[who]
        starts = self.starts[who]
        position = torch.arange(size, device=self.sizes.device)
        weight = torch.where(
            position < sizes[:, None], 1 / sizes[:, None].clamp_max(size).to(self.dtype), 0
        )
        sizes = sizes.view(shape)
        starts = starts.view(shape)
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
    """Find the ends of blocks of descending `sizes` that minimise Σ_blocks (overhead + clients · longest).

    Use dynamic programming over the few places where sizes, rounded up to six binary digits, change.
    """
    fraction, exponent = np.frexp(sizes)
    rounded = np.ldexp(np.ceil(64 * fraction), exponent)
    edges = np.concatenate([[0], 1 + np.flatnonzero(np.diff(rounded)), [len(sizes)]])
    longest = sizes[edges[:-1]]
    cost = np.zeros(len(edges))
    cut = np.zeros(len(edges), dtype=np.int64)
    for end in range(1, len(edges)):
        options = cost[:end] + overhead + longest[:end] * (edges[end] - edges[:end])
        cut[end] = options.argmin()
        cost[end] = options[cut[end]]
    ends = []
    end = len(edges) - 1
    while end > 0:
        ends.append(int(edges[end]))
        end = int(cut[end])
    return ends[::-1]


def finer(ends: list[int], sizes: NDArray[np.int64], rows: Callable[[int], int]) -> list[int]:
    """Split blocks so that no block of several clients has more padded rows than `rows` allows.

    Args:
        ends: ends of the blocks.
        sizes: the clients' numbers of rows, descending.
        rows: most rows of a block whose longest client has m of them.
    """
    cuts = []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        longest = max(1, int(sizes[first]))
        cuts += [*range(first, last, max(1, rows(longest) // longest))[1:], last]
    return cuts


# terms that a GPU adds up in single precision; number of such blocks at a time
BLOCK = 256
TOGETHER = 16


class DoubleProducts:
    """A X and AᵀV in double precision, with bounds on their errors.

    Products of numbers in single precision are exact in double precision, to which A is converted piece by piece. On a
    GPU that would take several times as long: there, blocks of `BLOCK` terms are added up in single precision, without
    matrix units, and the blocks in double precision; a table of halves uses matrix units, `TERMS` at a time.
    """

    def __init__(self, A: Tensor | TableMatrix) -> None:
        self.A = A
        self.features = A.shape[1]
        self.plain = A.dtype == torch.float64
        self.halves = isinstance(A, StoredMatrix) and A.halved
        self.blocks = not self.plain and not self.halves and A.device.type != "cpu"
        self.single = self.halves or self.blocks
        self.wide = A.double() if isinstance(A, TableMatrix) and not self.plain else A

    def slack(self, terms: int) -> float:
        """Bound the error of a sum of n products with A, relative to the sum of their sizes."""
        if self.halves:  # splitting, matrix units, and the sum of their results
            return (4 + 17 / 16 * min(terms, TERMS) + terms / TERMS) * 2 * SINGLE
        if self.blocks:
            return gamma(min(terms, BLOCK) + 4, SINGLE) + gamma(terms / BLOCK + 4)
        return gamma(terms + 4)

    def each_slack(self, terms: int) -> float:
        """Bound the same error for sums over one client's n rows."""
        return gamma(terms + 4, SINGLE) if self.blocks else self.slack(terms)

    @property
    def least(self) -> float:
        """Error of a product that underflows."""
        return 2.0**-126 if self.single else LEAST

    def times(self, X: Tensor) -> Tensor:
        """Return A X for X in the format of A."""
        if self.plain:
            return self.A @ X
        if self.halves:
            return (self.A @ X).double()
        if self.blocks:
            return self._by_parts(lambda part: _blocked(part.mT, X))
        if isinstance(self.wide, TableMatrix):
            return self.wide @ X.double()
        return torch.cat([piece @ X.double() for piece in self._pieces()])

    def transposed(self, V: Tensor) -> Tensor:
        """Return AᵀV for V in double precision."""
        if self.plain:
            return transposed(cast(Tensor, self.A), V)
        if self.halves:
            return (self.A.T @ V.float()).double()
        if self.blocks:
            parts = torch.split(V.float(), [len(part) for part in self._parts()])
            pairs = zip(self._parts(), parts, strict=True)
            return self._scale() * sum((_blocked(part, v) for part, v in pairs), V.new_zeros(()))
        if isinstance(self.wide, TableMatrix):
            return self.wide.T @ V
        out = V.new_zeros(V.shape[1], self.features)
        start = 0
        for piece in self._pieces():
            out.addmm_(V[start : start + len(piece)].mT.contiguous(), piece)
            start += len(piece)
        return out.mT

    def norms(self) -> Tensor:
        """Return ‖a_j‖ per row, from above."""
        if self.plain and isinstance(self.A, Tensor):
            return norm_above(self.A, 1)
        if isinstance(self.wide, TableMatrix):
            wide: Tensor = cast(Any, self.wide).norm(1)
            return wide * (1 + gamma(self.features + 8)) + math.sqrt(self.features) * UNDERFLOW
        return torch.cat([norm_above(piece, 1) for piece in self._pieces()])

    def _pieces(self) -> Iterator[Tensor]:
        for piece in torch.split(cast(Tensor, self.A), max(1, FINE // self.features)):
            yield piece.double()

    def _parts(self) -> list[Tensor]:
        return [self.A] if isinstance(self.A, Tensor) else cast(StoredMatrix, self.A).parts

    def _scale(self) -> float:
        return self.A.scale if isinstance(self.A, StoredMatrix) else 1.0

    def _by_parts(self, work: Callable[[Tensor], Tensor]) -> Tensor:
        return self._scale() * torch.cat([work(part.float()) for part in self._parts()])


def _blocked(A: Tensor, V: Tensor) -> Tensor:
    """Return AᵀV in double precision, for A (n, d) and V (n, k) in single precision, from sums of `BLOCK` terms."""
    cut = len(A) - len(A) % BLOCK
    out = torch.zeros(A.shape[1], V.shape[1], dtype=torch.float64, device=A.device)
    with tensor_cores(A.device, False):
        for k in range(0, cut, BLOCK * TOGETHER):
            rows = slice(k, min(k + BLOCK * TOGETHER, cut))
            left, right = (cast(Any, t[rows]).unflatten(0, (-1, BLOCK)) for t in (A, V))
            out += torch.bmm(left.mT, right).sum(0, dtype=torch.float64)
        return out if cut == len(A) else out + (A[cut:].mT @ V[cut:]).double()


KEPT = 2**23  # numbers of padded copies that are stored between rounds
PIECE = 2**17  # rows for which all per-row numbers fit into a cache


@dataclass(frozen=True)
class StackedSamples:
    """Stacked samples of all clients: features A, targets y, and each row's share in its client's mean."""

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
        """Blocks for work in the space of samples."""
        return self.layout.squares(self.share, self.A.shape[1])

    def of(self, block: PaddedBlock) -> tuple[Tensor, Tensor]:
        """Return a block's (A, y): views if nothing is padded, else copies, which are cached if small in all."""
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
        """Return whether A stays in a table, so that copies of its rows are not cached."""
        return not isinstance(cast(Any, self.A), Tensor)

    def large(self, block: PaddedBlock) -> MappedMatrix | None:
        """Return a block's A if it has to be read piece by piece: that of one client, too large to load at once."""
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
        return (
            {block.number: (block.of(self.A), block.of(self.y)) for block in padded} if few else {}
        )

    def each(self, V: Tensor) -> Tensor:
        """Return A_iᵀ (V_i/m_i) of every client, (N, k, features), for V (M, k); in the format of V, not of A."""
        out = V.new_empty(len(self.layout), V.shape[1], self.A.shape[1])
        fine = V.dtype != self.A.dtype

        def work(block: PaddedBlock) -> None:
            weight = block.of(self.exact[1]) * (block.weight > 0) if fine else block.weight
            own = weight[..., None] * block.of(V)
            large = self.large(block)
            if large is not None:
                out[block.clients] = ((large.double() if fine else large).T @ own[0]).mT
            else:
                out[block.clients] = from_left(own, self.of(block)[0].to(V.dtype))

        parallel_map(work, self.blocks, V.device)
        return out

    @cached_property
    def norms(self) -> Tensor:
        """‖a_j‖ per row."""
        norms: Tensor = self.A.norm(dim=1)
        return norms

    @cached_property
    def products(self) -> DoubleProducts:
        """Products with A in double precision."""
        return DoubleProducts(self.A)

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        """Targets, and the rows' shares in their clients' means, in double precision."""
        if self.share.dtype == torch.float64:
            return self.y, self.share
        share = 1 / self.layout.sizes[self.layout.owner].double()
        return self.y.double() if self.y.is_floating_point() else self.y, share

    @cached_property
    def shares(self) -> Tensor:
        """Share of a row in the mean of its client, (N,), in double precision."""
        return self.layout.segment_max(self.exact[1])

    @cached_property
    def levers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of rounding errors: ‖a_j‖/m_i per row, and the clients' means of ‖a_j‖ and ‖a_j‖², from above."""
        norms = self.products.norms()
        levers = self.exact[1] * norms
        mean, square = self.layout.segment_sum(torch.stack([levers, levers * norms], 1)).unbind(1)
        return levers, mean, square

    def take(self, block: PaddedBlock) -> StackedSamples:
        """Return the rows of one block as a new stack."""
        picked, (n, m) = block.rows.flatten(), block.rows.shape
        return self._part(self.A[picked], picked, [m] * n, block.weight.flatten())

    def only(self, clients: list[int]) -> StackedSamples:
        """Return the rows of some clients as a new stack."""
        picked = self.layout.rows_of(clients)
        A = cast(Any, self.A)
        own = A.take(picked) if isinstance(A, MappedMatrix) else A[picked]
        return self._part(own, picked, self.layout.sizes[clients].tolist(), self.share[picked])

    def _part(
        self, A: Any, rows: Tensor | slice, lengths: list[int], share: Tensor
    ) -> StackedSamples:
        return StackedSamples(A, self.y[rows], Ragged(lengths, self.A.device, self.A.dtype), share)

    @cached_property
    def pieces(self) -> list[tuple[slice, StackedSamples]]:
        """Clients in order, in pieces of about `PIECE` rows, as views; all at once if A is not in main memory."""
        if self.stored or self.A.device.type != "cpu":
            return [(slice(None), self)]
        ends = np.cumsum([0, *self.layout.lengths])
        cuts = np.unique(
            np.searchsorted(ends, [0, *range(PIECE, int(ends[-1]), PIECE), ends[-1]])
        ).tolist()
        if len(cuts) == 2:
            return [(slice(None), self)]
        return [
            (slice(i, j), self._piece(i, j, slice(ends[i], ends[j]))) for i, j in pairwise(cuts)
        ]

    def _piece(self, first: int, last: int, rows: slice) -> StackedSamples:
        return self._part(self.A[rows], rows, self.layout.lengths[first:last], self.share[rows])


@quiet
def from_left(V: Tensor, A: Tensor) -> Tensor:
    """Return V_iᵀA_i, (n, k, features), of n clients; small ones by NumPy's loop over BLAS."""
    if V.is_cuda or V.shape[1] * V.shape[2] * A.shape[2] > ALONE_VECTOR:
        return torch.bmm(V.mT.contiguous(), A)
    return torch.from_numpy(np.matmul(V.numpy().transpose(0, 2, 1), A.numpy()))


def product(A: Tensor, v: Tensor) -> Tensor:
    """Return A v, client by client; a single column goes as a row, see `scaffpd.models.local_steps`."""
    return (v.mT @ A.mT).mT if v.shape[-1] == 1 else A @ v


def transposed(A: Tensor, V: Tensor) -> Tensor:
    """Return AᵀV; several columns go as rows from the left, which takes BLAS half the time."""
    return (V.mT.contiguous() @ A).mT if isinstance(A, Tensor) and V.shape[1] > 1 else A.T @ V
