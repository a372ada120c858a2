"""Samples of all clients, and products with them in double precision with bounds on errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaffpd.models.layout import PaddedBlock, Ragged
from scaffpd.models.numerics import ALONE, ALONE_VECTOR, norm_above, quiet
from scaffpd.models.threads import parallel_map

# Numbers in all padded copies up to which they are stored between rounds.
STORED = 2**23
# Samples of a client up to which its inner products are multiplied number by number.
FEW = 4
# Numbers that are converted to double precision at a time: on a CPU they stay in the cache.
PIECE = {"cpu": 2**16, "cuda": 2**24}


class DoubleProducts:
    """A X and AᵀV in double precision.

    Products of numbers in single precision are exact in double precision, to which A is converted
    piece by piece, so that no second copy of A is stored.
    """

    def __init__(self, A: Tensor) -> None:
        self.A = A
        self.double = A.dtype == torch.float64

    def times(self, X: Tensor) -> Tensor:
        """Return A X."""
        if self.double:
            return self.A @ X
        return torch.cat([piece @ X.double() for piece in self._pieces()])

    def transposed(self, V: Tensor) -> Tensor:
        """Return AᵀV for V in double precision."""
        if self.double:
            return transposed(self.A, V)
        out = V.new_zeros(V.shape[1], self.A.shape[1])
        start = 0
        for piece in self._pieces():
            out.addmm_(V[start : start + len(piece)].mT.contiguous(), piece)
            start += len(piece)
        return out.mT

    def norms(self, factors: Tensor | float = 1.0) -> Tensor:
        """Return ‖a_j‖ per row, from above, with columns times `factors`."""
        return torch.cat([norm_above(piece * factors, 1) for piece in self._pieces()])

    def _pieces(self) -> Iterator[Tensor]:
        size = PIECE.get(self.A.device.type, PIECE["cuda"])
        for piece in torch.split(self.A, max(1, size // self.A.shape[1])):
            yield piece.double()


class Levers(NamedTuple):
    """Factors of rounding errors of Ãᵀr, from above, for rows ã_j with scaled columns.

    Attributes:
        each: ‖ã_j‖/m_i per row.
        mean: the clients' means of ‖ã_j‖.
        cross: of ‖ã_j‖‖a_j‖, with the lengths of rows as they multiply x.
        square: of ‖ã_j‖².
    """

    each: Tensor
    mean: Tensor
    cross: Tensor
    square: Tensor

    @classmethod
    def of(cls, rows: StackedSamples, norms: Tensor, plain: Tensor) -> Levers:
        """Return the factors for ‖ã_j‖ = norms and ‖a_j‖ = plain."""
        each = rows.exact[1] * norms
        sums = torch.stack([each, each * plain, each * norms], 1)
        return cls(each, *rows.layout.segment_sum(sums).unbind(1))


@dataclass(frozen=True)
class StackedSamples:
    """Stacked samples of all clients: features A, targets y, a row's share in its client's mean."""

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
        """Return a block's (A, y): views if nothing is padded, else copies, stored if small."""
        return self._copies.get(block.number) or (block.of(self.A), block.of(self.y))

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
        return {block.number: (block.of(self.A), block.of(self.y)) for block in padded}

    def each(self, V: Tensor) -> Tensor:
        """Return A_iᵀV_i of every client, (N, features, k), for V (M, k); in the format of V."""
        out = V.new_empty(len(self.layout), V.shape[1], self.A.shape[1])

        def work(block: PaddedBlock) -> None:
            own = block.of(V)
            if block.first is None:
                own = torch.where(block.weight[..., None] > 0, own, 0)
            out[block.clients] = from_left(own, self.of(block)[0].to(V.dtype))

        parallel_map(work, self.blocks, V.device)
        return out.mT

    def along(self, U: Tensor) -> Tensor:
        """Return A_i u_i of every client, (M, k), for U (N, features, k)."""
        out = U.new_zeros(len(self.layout.owner), U.shape[2])

        def work(block: PaddedBlock) -> None:
            block.put(out, product(self.of(block)[0], U[block.clients]))

        parallel_map(work, self.blocks, U.device)
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
    def row_norms(self) -> Tensor:
        """‖a_j‖ per row, in double precision and from above."""
        return self.products.norms()

    def take(self, block: PaddedBlock) -> StackedSamples:
        """Return the rows of one block as a new stack."""
        picked = block.rows.flatten()
        lengths = [block.rows.shape[1]] * len(block.rows)
        return self._part(picked, lengths, block.weight.flatten())

    def only(self, clients: list[int]) -> StackedSamples:
        """Return the rows of some clients as a new stack."""
        picked = self.layout.rows_of(clients)
        lengths = [self.layout.lengths[i] for i in clients]
        return self._part(picked, lengths, self.share[picked])

    def _part(self, rows: Tensor, lengths: list[int], share: Tensor) -> StackedSamples:
        layout = Ragged(lengths, self.A.device, self.A.dtype)
        return StackedSamples(self.A[rows], self.y[rows], layout, share)


@quiet
def from_left(V: Tensor, A: Tensor) -> Tensor:
    """Return V_iᵀA_i, (n, k, features), of n clients; small ones by NumPy's loop over BLAS."""
    if V.is_cuda or V.shape[1] * V.shape[2] * A.shape[2] > ALONE_VECTOR:
        return torch.bmm(V.mT.contiguous(), A)
    return torch.from_numpy(np.matmul(V.numpy().transpose(0, 2, 1), A.numpy()))


def product(A: Tensor, v: Tensor) -> Tensor:
    """Return A v, client by client; one column goes as a row from the left, which is faster."""
    return (v.mT @ A.mT).mT if v.shape[-1] == 1 else A @ v


def transposed(A: Tensor, V: Tensor) -> Tensor:
    """Return AᵀV; several columns go as rows from the left, which takes BLAS half the time."""
    return (V.mT.contiguous() @ A).mT if V.shape[1] > 1 else A.T @ V


class Products:
    """Products R A_i and D A_iᵀ of n clients, in buffers that the next such product overwrites.

    On a CPU, NumPy's loop over BLAS takes down to an eighth of the time of torch.bmm for small
    matrices; inner products of a few samples go number by number, for all clients at once.
    """

    def __init__(self, A: Tensor, k: int) -> None:
        n, m, features = A.shape
        self.A = A
        self.out = A.new_empty(n, k, m)
        self.own = A.new_empty(n, k, features)
        most = ALONE if k > 1 else ALONE_VECTOR
        self.few = not A.is_cuda and m == features <= FEW
        self.small = not A.is_cuda and not self.few and k * m * features <= most
        self._last: Tensor | None = None
        if self.small:
            self.arrays = A.numpy(), self.out.numpy(), self.own.numpy()

    def along(self, D: Tensor) -> Tensor:
        """Return D A_iᵀ, (n, k, m), for D (n, k, features)."""
        if self.small:
            np.matmul(D.numpy(), self.arrays[0].transpose(0, 2, 1), out=self.arrays[1])
            return self.out
        if D.shape[1] == 1:
            return torch.bmm(D, self.A.mT, out=self.out)
        # Several rows are transposed, because torch.bmm is slow at Aᵀ.
        return self.out.copy_(torch.bmm(self.A, D.mT.contiguous()).mT)

    def times(self, R: Tensor) -> Tensor:
        """Return R A_i, (n, k, features), for R (n, k, m)."""
        if self.few:
            out = torch.zeros_like(R)
            for one, row in zip(R.unbind(2), self.A.unbind(1), strict=True):
                out.addcmul_(one[..., None], row[:, None])
            return out
        if not self.small:
            return torch.bmm(R, self.A, out=self.own)
        if self._last is not R:
            self._last = R
            self._array = R.numpy()
        np.matmul(self._array, self.arrays[0], out=self.arrays[2])
        return self.own

    def back(self, R: Tensor, D: Tensor) -> Tensor:
        """Compute D + R A_i in place, for R (n, k, m)."""
        return D.add_(self.times(R)) if self.small else D.baddbmm_(R, self.A)
