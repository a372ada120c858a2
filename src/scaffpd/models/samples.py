r"""Samples of N clients in one stack, without a loop over clients of unequal size.

`owner` is the client of each row. Sums over a client's own rows are segment sums. If every client
has its own iterate (local steps), clients are padded to a common length and handled as one batched
product. Padding costs arithmetic and one more block costs the overhead of a dozen small operations,
so the clients, in order of size, are cut where

    Σ_blocks ( overhead + clients · longest · width )

is least: many small clients of any sizes make one block, and large ones are hardly padded at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.models.arrays import Array
from scaffpd.models.cells import Cells
from scaffpd.models.execution import parallel_map, thread_count
from scaffpd.models.numerics import SHORT, DoubleProducts, product, transposed

# Padded numbers that cost as much as one more block (measured); on a GPU launches are expensive and
# arithmetic is cheap.
OVERHEAD = {"cpu": 30_000, "cuda": 10_000_000}
# Numbers of all m × m matrices above which work in the space of samples is split over the cores.
WORTH = 2**18
# Numbers that a core's second-level cache holds: half a megabyte, or one in double precision.
CACHE = 2**17
# Numbers in all padded copies up to which they are stored between rounds.
STORED = 2**23
# Binary orders of magnitude between columns up to which one bound on rounding serves them all.
ALIKE = 4
# Numbers of a row on a GPU that are read at once, to which rows are filled up.
LINE = 16
# Numbers that are brought to a GPU at a time.
SENT = 2**23
# numbers in A from which columns of few values are looked for
CELLS = 2**18


@dataclass(frozen=True)
class PaddedBlock:
    """Clients with the same padded number of rows.

    Attributes:
        clients: (n,) which clients.
        rows: (n, m) row numbers in the stack; padding repeats a client's first row.
        weight: (n, m) weight of each row in its client's mean; 0 for padding.
        first: the first of n·m consecutive rows if nothing is padded; else `None`.
        number: place among the blocks of `Ragged.blocks`; `None` for others.
    """

    clients: Tensor
    rows: Tensor
    weight: Tensor
    first: int | None = None
    number: int | None = None

    def of(self, stack: Tensor) -> Tensor:
        if self.first is None:
            return stack[self.rows]
        part = stack[self.first : self.first + self.rows.numel()]
        return part.view(*self.rows.shape, *stack.shape[1:])

    def put(self, stack: Tensor, values: Tensor) -> None:
        """Write (n, ≥ m, ...) to the block's part of a stack, and nothing for padding."""
        values = values[:, : self.rows.shape[1]]
        if self.first is not None:
            self.of(stack).copy_(values)
        else:
            inside = self.weight > 0
            stack[self.rows[inside]] = values[inside]


class Ragged:
    """Where N clients' rows are in one stack."""

    def __init__(self, sizes: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = list(sizes)
        self.smallest = min(sizes, default=0)
        self.largest = max(sizes, default=0)
        self.equal = self.smallest == self.largest > 0
        self.sizes = torch.tensor(sizes, device=device)
        self.starts = torch.cumsum(self.sizes, 0) - self.sizes
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def owner(self) -> Tensor:
        clients = torch.arange(len(self), device=self.sizes.device)
        return torch.repeat_interleave(clients, self.sizes)

    def rows_of(self, clients: list[int]) -> Tensor:
        sizes = self.sizes[clients]
        ends = torch.cumsum(sizes, 0)
        rows = torch.arange(int(ends[-1]) if clients else 0, device=sizes.device)
        return rows + torch.repeat_interleave(self.starts[clients] - (ends - sizes), sizes)

    def put(self, stack: Tensor, clients: Tensor, values: Tensor) -> None:
        """Write the rows of some clients, (n, ≥ m, ...), into a stack; skip rows they lack."""
        position = torch.arange(values.shape[1], device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        stack[(self.starts[clients, None] + position)[inside]] = values[inside].to(stack.dtype)

    def scaled(self, rows: Tensor, values: Tensor) -> Tensor:
        """Multiply the rows of each client, (M, k), by its number, (N,)."""
        return rows * values[self.owner][:, None]

    def segment_sum(self, rows: Tensor) -> Tensor:
        if self.equal:
            return rows.view(len(self), self.smallest, *rows.shape[1:]).sum(1)
        return torch.segment_reduce(rows, "sum", lengths=self.sizes, unsafe=True)

    def segment_max(self, rows: Tensor) -> Tensor:
        return torch.segment_reduce(rows, "max", lengths=self.sizes, unsafe=True)

    @cached_property
    def _cuts(self) -> tuple[Tensor, Tensor] | None:
        """Cut each client's rows into blocks of about √(most rows): their lengths and numbers."""
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
        """Return Σ over each client's rows, (M,) → (N,), in blocks of about √m rows.

        A row then takes part in 2√m additions in place of m, and the error is at most γ_{2√m}
        whatever the order within a block: certificates of long clients stay tight.
        """
        if self._cuts is None:
            return self.segment_sum(rows)
        lengths, counts = self._cuts
        within = torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)
        return torch.segment_reduce(within, "sum", lengths=counts, unsafe=True)

    def blocks(self, share: Tensor, width: int) -> list[PaddedBlock]:
        """Cut all rows, weighted by their (M,) `share`, into the cheapest padded blocks.

        A row has `width` numbers, and the rows of a block fit into the cache.
        """
        blocks = self._cut(share, width, lambda _: CACHE // width)
        return [replace(block, number=number) for number, block in enumerate(blocks)]

    def squares(self, share: Tensor, width: int) -> list[PaddedBlock]:
        """Cut all rows into blocks whose m × m matrices fit into the cache, for all cores."""
        enough = sum(m * m for m in self.lengths) >= WORTH
        each = -(-sum(self.lengths) // thread_count()) if enough else CACHE
        return self._cut(share, width, lambda m: min(CACHE // m, each))

    def _cut(self, share: Tensor, width: int, most: Callable[[int], int]) -> list[PaddedBlock]:
        lengths = np.array(self.lengths)
        order = np.argsort(-lengths, kind="stable")
        ordered = lengths[order]
        device = self.sizes.device
        overhead = OVERHEAD.get(device.type, OVERHEAD["cuda"])
        cuts = cheapest_cuts(ordered, overhead / width)
        if device.type == "cpu":
            cuts = finer(cuts, ordered, most)
        clients = torch.from_numpy(order).to(device)
        return [
            self._padded(clients[first:last], ordered[first:last], share)
            for first, last in zip([0, *cuts[:-1]], cuts, strict=True)
        ]

    def _padded(self, clients: Tensor, sizes: NDArray[np.int64], share: Tensor) -> PaddedBlock:
        position = torch.arange(int(sizes[0]), device=self.sizes.device)
        inside = position < self.sizes[clients, None]
        rows = self.starts[clients, None] + torch.where(inside, position, 0)
        consecutive = bool((clients[1:] == clients[:-1] + 1).all()) and sizes[0] == sizes[-1]
        first = int(rows[0, 0]) if consecutive else None
        return PaddedBlock(clients, rows, torch.where(inside, share[rows], 0), first)

    def minibatch(self, uniform: Tensor, clients: Tensor | None = None) -> PaddedBlock:
        """Draw rows with replacement: b of every client, for every step.

        A client with at most b rows gives them all.

        Args:
            uniform: numbers in [0, 1), (N, …, b).
            clients: draw for these only.
        """
        who = torch.arange(len(self), device=self.sizes.device) if clients is None else clients
        size = uniform.shape[-1]
        sizes = self.sizes[who]
        position = torch.arange(size, device=self.sizes.device)
        share = 1 / sizes[:, None].clamp_max(size).to(self.dtype)
        weight = torch.where(position < sizes[:, None], share, 0)
        shape = (-1, *[1] * (uniform.ndim - 1))
        sizes = sizes.view(shape)
        drawn = torch.minimum((uniform * sizes).long(), sizes - 1)
        if self.smallest <= size:
            drawn = torch.where(sizes <= size, torch.where(position < sizes, position, 0), drawn)
        return PaddedBlock(who, drawn.add_(self.starts[who].view(shape)), weight)


def table(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for A; on a GPU each row begins at a whole line."""
    filled = -width % LINE if device.type == "cuda" and dtype != torch.float64 else 0
    A = torch.empty(rows, width + filled, dtype=dtype, device=device)
    A[:, width:] = 0
    return A[:, :width]


def stack(
    features: Sequence[Array], intercept: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Stack the rows of all clients in one tensor; an intercept is a last column of ones."""
    width = features[0].shape[1]
    A = table(sum(map(len, features)), width + intercept, dtype, device)
    A[:, width:] = 1

    def work(client: tuple[Tensor, Array]) -> None:
        part, x = client
        given = torch.from_numpy(np.require(x, requirements=["C", "W"]))
        if device.type != "cuda":
            part.copy_(given)
            return
        step = max(1, SENT // width)
        for into, piece in zip(torch.split(part, step), torch.split(given, step), strict=True):
            into.copy_(piece.pin_memory(), non_blocking=True)

    clients = list(
        zip(torch.split(A[:, :width], [len(x) for x in features]), features, strict=True)
    )
    if device.type == "cuda":  # which several cores feed
        parallel_map(work, clients, torch.device("cpu"))
    else:
        for client in clients:
            work(client)
    return A


def cheapest_cuts(sizes: NDArray[np.int64], overhead: float) -> list[int]:
    """Find the ends of blocks of descending `sizes`: least Σ_blocks (overhead + clients·longest).

    Use dynamic programming over the few places where sizes, rounded up to six bits, change.
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


def finer(ends: list[int], sizes: NDArray[np.int64], most: Callable[[int], int]) -> list[int]:
    """Split blocks so that no block of several clients has more padded rows than allowed.

    Args:
        ends: ends of the blocks.
        sizes: the clients' numbers of rows, descending.
        most: most rows of a block whose longest client has m of them.
    """
    cuts = []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        longest = max(1, int(sizes[first]))
        cuts += [*range(first, last, max(1, most(longest) // longest))[1:], last]
    return cuts


class Levers(NamedTuple):
    """Factors of rounding errors of Ãᵀr, from above, for rows ã_j with scaled columns.

    Attributes:
        each: ‖ã_j‖/m_i per row.
        plain: ‖a_j‖/m_i, with the lengths of rows as they multiply a vector.
        mean: the clients' means of ‖ã_j‖.
        cross: of ‖ã_j‖‖a_j‖.
        square: of ‖ã_j‖².
        across: of ‖a_j‖.
        flat: of ‖a_j‖².
    """

    each: Tensor
    plain: Tensor
    mean: Tensor
    cross: Tensor
    square: Tensor
    across: Tensor
    flat: Tensor

    @classmethod
    def of(cls, rows: StackedSamples, norms: Tensor, plain: Tensor) -> Levers:
        """Return the factors for ‖ã_j‖ = norms and ‖a_j‖ = plain."""
        each = rows.exact[1] * norms
        own = each if plain is norms else rows.exact[1] * plain
        sums = torch.stack([each, each * plain, each * norms, own, own * plain], 1)
        return cls(each, own, *rows.layout.segment_sum(sums).unbind(1))


class Reach(NamedTuple):
    """Rows, with the lengths `plain`, multiply vectors of this size: one, or one per client."""

    size: Tensor | float
    levers: Levers


@dataclass(frozen=True)
class StackedSamples:
    """Stacked samples of all clients: features A, targets y, a row's share in its client's mean.

    A may have the two bytes of bfloat16 where all else has four: it is what it is rounded to.
    """

    A: Tensor
    y: Tensor
    layout: Ragged
    share: Tensor

    @cached_property
    def cells(self) -> Cells | None:
        """Columns of few values as numbers of cells, if that makes products cheaper."""
        return Cells.of(self.A) if self.A.numel() >= CELLS else None

    @cached_property
    def blocks(self) -> list[PaddedBlock]:
        return self.layout.blocks(self.share, self.A.shape[1])

    @cached_property
    def squares(self) -> list[PaddedBlock]:
        return self.layout.squares(self.share, self.A.shape[1])

    def of(self, block: PaddedBlock) -> tuple[Tensor, Tensor]:
        """Return a block's (A, y): views if nothing is padded, else copies, stored if small."""
        return self._copies.get(block.number) or self._of(block)

    def _of(self, block: PaddedBlock) -> tuple[Tensor, Tensor]:
        return block.of(self.A).to(self.share.dtype), block.of(self.y)

    def alone(self, block: PaddedBlock) -> tuple[Tensor, Tensor]:
        """Return a block's (A, y) with zeros for padding, so that only own rows count."""
        A, y = self.of(block)
        if block.first is not None:
            return A, y
        own = (block.weight > 0)[..., None]
        return A * own, y * own

    @cached_property
    def _copies(self) -> dict[int | None, tuple[Tensor, Tensor]]:
        padded = [block for block in self.blocks if block.first is None]
        if sum(block.rows.numel() for block in padded) * self.A.shape[1] > STORED:
            return {}
        return {block.number: self._of(block) for block in padded}

    def each(self, V: Tensor) -> Tensor:
        """Return A_iᵀV_i of every client, (N, features, k), for V (M, k); in the format of V."""
        out = V.new_empty(len(self.layout), V.shape[1], self.A.shape[1])

        def work(block: PaddedBlock) -> None:
            own = block.of(V)
            if block.first is None:
                own = torch.where(block.weight[..., None] > 0, own, 0)
            out[block.clients] = torch.bmm(own.mT.contiguous(), self.of(block)[0].to(V.dtype))

        parallel_map(work, self.blocks, V.device)
        return out.mT

    def along(self, U: Tensor) -> Tensor:
        """Return A_i u_i of every client, (M, k), for U (N, features, k)."""
        out = U.new_zeros(len(self.layout.owner), U.shape[2])

        def work(block: PaddedBlock) -> None:
            block.put(out, product(self.of(block)[0].to(U.dtype), U[block.clients]))

        parallel_map(work, self.blocks, U.device)
        return out

    @cached_property
    def norms(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.A, dim=1, dtype=self.share.dtype)
        return norms

    def times(self, X: Tensor) -> Tensor:
        """Return A X in the format of X."""
        return self.products.times(X).to(X.dtype) if self._fused(X) else self.A @ X

    def transposed(self, V: Tensor) -> Tensor:
        """Return AᵀV in the format of V."""
        return self.products.transposed(V).to(V.dtype) if self._fused(V) else transposed(self.A, V)

    def _fused(self, X: Tensor) -> bool:
        return self.A.dtype != X.dtype or self.products.fused(X.shape[1]) is not None

    @cached_property
    def products(self) -> DoubleProducts:
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
    def scales(self) -> Tensor:
        """Powers of two above the largest entries of columns."""
        # two passes, which take a quarter of the time of `aminmax`
        most = torch.maximum(self.A.amax(0), -self.A.amin(0)).to(self.share.dtype)
        exponents = torch.frexp(most).exponent
        return torch.ldexp(torch.ones_like(most, dtype=torch.float64), exponents)

    @cached_property
    def alike(self) -> bool:
        """Whether one bound on rounding serves all columns."""
        return not len(self.A) or bool(self.scales.max() <= 2**ALIKE * self.scales.min())

    @cached_property
    def row_norms(self) -> Tensor:
        """‖a_j‖ per row, in double precision and from above."""
        return self.products.norms()

    def take(self, block: PaddedBlock) -> StackedSamples:
        picked = block.rows.flatten()
        lengths = [block.rows.shape[1]] * len(block.rows)
        return self._part(picked, lengths, block.weight.flatten())

    def only(self, clients: list[int]) -> StackedSamples:
        picked = self.layout.rows_of(clients)
        lengths = [self.layout.lengths[i] for i in clients]
        return self._part(picked, lengths, self.share[picked])

    def _part(self, rows: Tensor, lengths: list[int], share: Tensor) -> StackedSamples:
        layout = Ragged(lengths, self.A.device, self.layout.dtype)
        return StackedSamples(self.A[rows], self.y[rows], layout, share)
