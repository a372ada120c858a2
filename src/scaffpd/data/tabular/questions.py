"""Questions about the rows of a client, before there is a model: every answer leaves in a sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scaffpd.data.curves import counted
from scaffpd.data.tabular.agree import Schema, width
from scaffpd.data.tabular.columns import Matrix
from scaffpd.data.tabular.encode import ClientRows
from scaffpd.federation.border import Announced, Shown, summed


@dataclass(frozen=True, eq=False)
class RowQuestion(Announced):
    """A question whose answer is one table of numbers.

    Attributes:
        whole: whether they are whole numbers.
    """

    whole: ClassVar[bool] = False

    @property
    def part(self) -> Shown:
        """The part that the answer is."""
        return self.shows[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the answer, from what everybody knows."""
        raise NotImplementedError

    def answer(self, rows: ClientRows, place: int) -> Matrix:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RowCounts(RowQuestion):
    """Training rows, and whether there are any, in all cells between edges of every number."""

    kind = "counts"
    shows = (
        summed(
            "rows",
            "how many rows, and of how many silos, lie between given numbers, column by column; "
            "where there are many, between finer ones",
        ),
        summed("noisy", "how many rows, with noise, lie between given numbers, column by column"),
    )
    whole = True

    schema: Schema
    edges: Sequence[Matrix]
    noisy: bool = False  # then rows alone, as whoever has the noise answers

    @property
    def part(self) -> Shown:
        return self.shows[self.noisy]

    @property
    def shape(self) -> tuple[int, ...]:
        return 2 - self.noisy, sum(len(own) + 1 for own in self.edges)

    def answer(self, rows: ClientRows, place: int) -> Matrix:
        return counted(rows.sorted_numbers(self.schema), self.edges)


@dataclass(frozen=True, eq=False)
class ColumnSums(RowQuestion):
    """Sums over training rows of every encoded column: n and Σx, or n and Σ(x − mean)²."""

    kind = "columns"
    shows = (
        summed("sum", "of every column, how many rows have a value, and their sum"),
        summed("squares", "of every column, the sum of squared distances from the mean"),
    )

    schema: Schema
    mean: Matrix | None = None

    @property
    def part(self) -> Shown:
        return self.shows[self.mean is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        return 2, width(self.schema)

    def answer(self, rows: ClientRows, place: int) -> Matrix:
        return rows.totals(self.schema, self.mean)


def added(rows: Sequence[ClientRows], question: RowQuestion) -> Matrix:
    found: Matrix = np.sum([question.answer(own, k) for k, own in enumerate(rows)], axis=0)
    return found
