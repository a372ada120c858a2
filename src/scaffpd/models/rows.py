"""Clients whose losses are those of rows in one stack; a subclass says which losses."""

from __future__ import annotations

from copy import copy
from typing import Self

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

    def using(self, ridge: Ridge) -> Self:
        other = copy(self)
        other.ridge = ridge
        return other
