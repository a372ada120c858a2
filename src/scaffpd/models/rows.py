"""Clients whose losses are those of rows in one stack; a subclass says which losses."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from scaffpd.models.oracle import Oracle
from scaffpd.models.point import Ridge
from scaffpd.models.samples import StackedSamples


class RowsOracle(Oracle):
    """N clients of a model with `outputs` numbers per row, a regulariser, and their names."""

    most_rows: float | None = float("inf")

    def __init__(self, rows: StackedSamples, ridge: Ridge, outputs: int, names: list[str]) -> None:
        self.rows = rows
        self.ridge = ridge
        self.outputs = outputs
        self.names = names
        self.dimension = rows.A.shape[1] * outputs

    def start(self) -> Tensor:
        return self.rows.share.new_zeros(self.dimension)

    def contents(self) -> list[Tensor]:
        return [self.rows.A, self.rows.y, self.rows.layout.sizes]

    def products(self) -> Tensor:
        """Return [A_i 1]ᵀ[A_i 1] of every client, in double precision."""
        k = self.rows.A.shape[1] + 1
        found = self.rows.A.new_zeros(len(self.names), k, k).double()
        for block in self.rows.blocks:
            there = (block.weight > 0)[..., None].double()
            A = torch.cat([self.rows.of(block)[0] * there, there], -1)
            found[block.clients] = A.mT @ A
        return found

    def using(self, ridge: Ridge) -> Self:
        other = copy(self)
        other.ridge = ridge
        return other
