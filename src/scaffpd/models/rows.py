"""The stacked samples of all clients, and the products that linear models make of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaffpd.models.mapped import Mapped
from scaffpd.models.ragged import Block, Ragged
from scaffpd.models.threads import shared

KEPT = 2**23  # numbers of padded copies that are kept from round to round
PIECE = 2**17  # rows for which everything that has a number per row fits into a cache


@dataclass(frozen=True)
class Rows:
    """The stacked samples of all clients: features A, targets y, and each row's share in its client's mean."""

    A: Tensor
    y: Tensor
    layout: Ragged
    share: Tensor

    @cached_property
    def blocks(self) -> list[Block]:
        """The same samples, padded for batched products."""
        return self.layout.blocks(self.share, self.A.shape[1])

    @cached_property
    def squares(self) -> list[Block]:
        """The same, for work in the space of samples."""
        return self.layout.squares(self.share, self.A.shape[1])

    def of(self, block: Block) -> tuple[Tensor, Tensor]:
        """A block's (A, y): views where nothing is padded, else copies, which are kept if they are small in all."""
        return self._copies.get(block.number) or (block.of(self.A), block.of(self.y))

    def alone(self, block: Block) -> tuple[Tensor, Tensor]:
        """The same with zeros for padding, so that only a client's own rows count in what is made of them."""
        A, y = self.of(block)
        if block.first is not None:
            return A, y
        own = (block.weight > 0)[..., None]
        return A * own, y * own

    @property
    def stored(self) -> bool:
        """Whether A stays where it is stored: copies of its rows are not kept."""
        A: Any = self.A
        return not isinstance(A, Tensor)

    def large(self, block: Block) -> Mapped | None:
        """A block's A where it is read piece by piece: it is one client's and larger than should be held together."""
        A: Any = self.A
        if not isinstance(A, Mapped) or block.first is None or len(block.rows) > 1:
            return None
        return A.large(block.first, block.rows.numel())

    def squared(self) -> Rows:
        """The same with A ∘ A."""
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

        def work(block: Block) -> None:
            own, large = (block.weight[..., None] * block.of(V)), self.large(block)
            if large is not None:
                out[block.clients] = (large.T @ own[0]).mT
            else:
                out[block.clients] = torch.bmm(own.mT.contiguous(), self.of(block)[0])

        shared(work, self.blocks, V.device)
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
        return float(self.A.slack(terms)) if hasattr(self.A, "slack") else 4 * terms**0.5

    def take(self, block: Block) -> Rows:
        """The rows of one block as a stack of their own."""
        picked = block.rows.flatten()
        layout = Ragged([block.rows.shape[1]] * len(block.rows), self.A.device, self.A.dtype)
        return Rows(self.A[picked], self.y[picked], layout, block.weight.flatten())

    @cached_property
    def pieces(self) -> list[tuple[slice, Rows]]:
        """Clients in order, in pieces of about `PIECE` rows, as views; all at once where A is not in main memory."""
        if self.stored or self.A.device.type != "cpu":
            return [(slice(None), self)]
        ends = np.cumsum([0, *self.layout.lengths])
        cuts = np.unique(np.searchsorted(ends, [0, *range(PIECE, int(ends[-1]), PIECE), ends[-1]])).tolist()
        if len(cuts) == 2:
            return [(slice(None), self)]
        return [(slice(i, j), self._piece(i, j, slice(ends[i], ends[j]))) for i, j in pairwise(cuts)]

    def _piece(self, first: int, last: int, rows: slice) -> Rows:
        layout = Ragged(self.layout.lengths[first:last], self.A.device, self.A.dtype)
        return Rows(self.A[rows], self.y[rows], layout, self.share[rows])

    def only(self, clients: list[int]) -> Rows:
        """The rows of some clients as a stack of their own."""
        picked = self.layout.rows_of(clients)
        layout = Ragged(self.layout.sizes[clients].tolist(), self.A.device, self.A.dtype)
        A: Any = self.A
        own: Any = A.take(picked) if isinstance(A, Mapped) else A[picked]
        return Rows(own, self.y[picked], layout, self.share[picked])


def product(A: Tensor, v: Tensor) -> Tensor:
    """A v, client by client; a single column goes as a row, see `scaffpd.models.local_steps`."""
    return (v.mT @ A.mT).mT if v.shape[-1] == 1 else A @ v


def transposed(A: Tensor, V: Tensor) -> Tensor:
    """AᵀV; several columns go as rows from the left, which takes BLAS half the time."""
    return (V.mT.contiguous() @ A).mT if isinstance(A, Tensor) and V.shape[1] > 1 else A.T @ V
