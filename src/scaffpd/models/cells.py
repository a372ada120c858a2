"""Columns of few values (steps, categories, products of them) as numbers of cells.

Neighbouring columns of two values, each implied by the next or excluding it, take few values
together: A_g = T_g[c_g], for the cell c_g of each row. With Z_g = 1[c_g = ·]

    A_g x = (T_g x)[c_g],    A_gᵀr = T_gᵀ(Z_gᵀr),    A_gᵀ diag(w) A_h = T_gᵀ(Z_gᵀ diag(w) Z_h)T_h

where Zᵀr and Z_gᵀ diag(w) Z_h are sums of numbers by cells. They take a few additions for every two
groups and row, in place of a multiplication for every two columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.models.numerics import product

Matrix = NDArray[np.float64]

PIECE = 2**20  # numbers of A that are looked at together
ROWS = 2**12  # rows whose cells are counted together
MERGED = 64  # cells up to which two groups are made one
# Products of two columns of A in the time of a sum by cells of two groups, and in that of an entry
# of Z times one of a column (measured).
PAIR, SINGLE = 100, 20


@dataclass(frozen=True)
class ColumnGroup:
    """Columns, and what they are in each of their cells, (cells, columns); the first cell."""

    columns: NDArray[np.intp]
    table: Matrix
    start: int

    @property
    def cells(self) -> slice:
        return slice(self.start, self.start + len(self.table))


@dataclass(frozen=True)
class Cells:
    """Rows by the cells of their columns' groups.

    Attributes:
        groups: of columns of two values.
        codes: (rows, groups), the cells, numbered through all groups.
        rest: all other columns.
        others: their numbers.
    """

    groups: tuple[ColumnGroup, ...]
    codes: NDArray[np.int32]
    rest: Matrix
    others: NDArray[np.intp]

    @classmethod
    def of(cls, A: Tensor) -> Self | None:
        """Find the groups in A; `None` if products of whole rows are as fast."""
        if A.is_cuda or not len(A) or A.dtype == torch.bfloat16:
            return None
        rows: Matrix = A.numpy()
        low, most = rows.min(0), rows.max(0)
        high = np.where(low < most, most, np.inf)  # a constant is never at its upper value
        step = max(1, PIECE // rows.shape[1])
        pieces = [rows[k : k + step] for k in range(0, len(rows), step)]
        two = np.ones(len(low), dtype=bool)
        nested, disjoint = two[1:].copy(), two[1:].copy()
        for piece in pieces:
            upper = piece == high
            two &= (upper | (piece == low)).all(0)
            nested &= (upper[:, :-1] | ~upper[:, 1:]).all(0)
            disjoint &= ~(upper[:, :-1] & upper[:, 1:]).any(0)
        chains = [
            part
            for first, end, is_nested in _chains(two, nested, disjoint)
            for part in (
                [(first, end, True)]
                if is_nested
                else _split([piece[:, first:end] == high[first:end] for piece in pieces], first)
            )
        ]
        parts = _merged([end - first + 1 for first, end, _ in chains])
        others = np.flatnonzero(~two)
        work = PAIR * len(parts) ** 2 / 2 + SINGLE * len(parts) * len(others)
        if not parts or work > len(low) ** 2:
            return None
        place = np.empty((len(rows), len(chains)), dtype=np.int32)
        k = 0
        for piece in pieces:
            upper = piece == high
            for j, (first, end, is_nested) in enumerate(chains):
                own = upper[:, first:end]
                number = own.sum(1, dtype=np.int32)
                if not is_nested:
                    number = own @ np.arange(1, end - first + 1, dtype=np.int32)
                place[k : k + len(piece), j] = number
            k += len(piece)
        groups: list[ColumnGroup] = []
        codes = np.empty((len(rows), len(parts)), dtype=np.int32)
        start = 0
        for k, part in enumerate(parts):
            own_chains = [chains[j] for j in part]
            sizes = [end - first + 1 for first, end, _ in own_chains]
            digits = np.unravel_index(np.arange(np.prod(sizes)), sizes)
            codes[:, k] = start + np.ravel_multi_index(tuple(place[:, part].T), sizes)
            upper = np.column_stack(
                [
                    digit[:, None] > np.arange(end - first)
                    if is_nested
                    else digit[:, None] == np.arange(1, end - first + 1)
                    for digit, (first, end, is_nested) in zip(digits, own_chains, strict=True)
                ]
            )
            columns = np.concatenate([np.arange(first, end) for first, end, _ in own_chains])
            table = np.where(upper, most[columns], low[columns]).astype(np.float64)
            groups.append(ColumnGroup(columns, table, start))
            start += len(table)
        return cls(tuple(groups), codes, rows[:, others].astype(np.float64), others)

    @cached_property
    def width(self) -> int:
        return len(self.others) + sum(len(group.columns) for group in self.groups)

    @cached_property
    def number(self) -> int:
        return sum(len(group.table) for group in self.groups)

    def pays(self, rows: int) -> bool:
        """Return whether sums over so many rows are faster by cells."""
        largest = max((len(group.table) for group in self.groups), default=0)
        return rows >= self.width and rows * self.width**2 > 2 * self.number**2 * largest

    def part(self, first: int, end: int) -> Self:
        return replace(self, codes=self.codes[first:end], rest=self.rest[first:end])

    def scaled(self, factors: Tensor) -> Self:
        f = factors.numpy()
        groups = tuple(replace(g, table=g.table * f[g.columns]) for g in self.groups)
        return replace(self, groups=groups, rest=self.rest * f[self.others])

    def times(self, X: Tensor) -> Tensor:
        x = X.numpy()
        own = np.concatenate([group.table @ x[group.columns] for group in self.groups])
        out = self.rest @ x[self.others]
        for k in range(0, len(out), ROWS):
            out[k : k + ROWS] += own[self.codes[k : k + ROWS]].sum(1)
        return torch.from_numpy(out)

    def transposed(self, V: Tensor) -> Tensor:
        v = V.numpy()
        return torch.from_numpy(self._columns(self._sums(v), self.rest.T @ v))

    def gram(self, weights: Tensor) -> Tensor:
        n = self.number
        pairs = np.zeros((n, n))
        weight = weights.numpy()
        for k in range(0, len(self.codes), ROWS):
            w = weight[k : k + ROWS]
            codes = np.ascontiguousarray(self.codes[k : k + ROWS].T, dtype=np.intp)
            for j, group in enumerate(self.groups):
                places = (codes[j] - group.start) * n + codes[: j + 1]
                size = len(group.table) * n
                sums = np.bincount(places.ravel(), np.tile(w, j + 1), minlength=size)
                pairs[group.cells] += sums.reshape(-1, n)
        pairs[np.arange(n), np.arange(n)] /= 2  # of a symmetric matrix, half
        weighted = weight[:, None] * self.rest
        left = self._columns(pairs, self._sums(weighted).T)
        rest = np.zeros((len(self.others), self.width))
        rest[:, self.others] = self.rest.T @ weighted / 2
        half = self._columns(np.ascontiguousarray(left.T), rest)
        return torch.from_numpy(half + half.T)

    def _sums(self, V: Matrix) -> Matrix:
        """Return ZᵀV, the sums over cells."""
        sums = np.zeros((V.shape[1], self.number))
        for k in range(0, len(V), ROWS):
            codes = self.codes[k : k + ROWS]
            places = codes.ravel()
            for own, v in zip(sums, V[k : k + ROWS].T, strict=True):
                own += np.bincount(places, np.repeat(v, codes.shape[1]), self.number)
        return sums.T

    def _columns(self, cells: Matrix, rest: Matrix) -> Matrix:
        """Go from sums over cells, and those of all other columns, to sums over columns."""
        out = np.empty((self.width, cells.shape[1]))
        for group in self.groups:
            out[group.columns] = group.table.T @ cells[group.cells]
        out[self.others] = rest
        return out


def along(A: Tensor | Cells, X: Tensor) -> Tensor:
    """Return A_i X of n clients, (n, rows, k), for X (q, k) or (n, q, k); cells are of one."""
    if isinstance(A, Cells):
        return A.times(X.reshape(X.shape[-2:]))[None]
    return product(A, X)


def back(A: Tensor | Cells, V: Tensor) -> Tensor:
    return A.transposed(V[0])[None] if isinstance(A, Cells) else product(A.mT, V)


def _chains(
    two: NDArray[np.bool_], nested: NDArray[np.bool_], disjoint: NDArray[np.bool_]
) -> list[tuple[int, int, bool]]:
    """Return runs of columns of two values, the longest from each on, and whether they are nested.

    Of columns that exclude the next one, `_split` finds those that all exclude each other.
    """
    found = []
    k = 0
    while k < len(two):
        ends = []
        for relation in (nested, disjoint):
            end = k + 1
            while end < len(two) and two[end] and relation[end - 1]:
                end += 1
            ends.append(end)
        if two[k]:
            found.append((k, max(ends), ends[0] >= ends[1]))
        k = max(ends) if two[k] else k + 1
    return found


def _split(pieces: list[NDArray[np.bool_]], first: int) -> list[tuple[int, int, bool]]:
    """Cut columns, the first of which has a number, into runs that exclude each other."""
    together = np.zeros((pieces[0].shape[1],) * 2, dtype=bool)
    for piece in pieces:
        ones = piece.astype(np.float32)
        together |= ones.T @ ones > 0
    cuts = [0]
    for k in range(1, len(together)):
        if together[k, cuts[-1] : k].any():
            cuts.append(k)
    cuts.append(len(together))
    return [(first + a, first + b, False) for a, b in pairwise(cuts)]


def _merged(sizes: list[int]) -> list[list[int]]:
    """Put neighbouring chains together as long as they have few cells."""
    parts: list[list[int]] = []
    cells = MERGED
    for k, size in enumerate(sizes):
        if cells * size <= MERGED:
            parts[-1].append(k)
            cells *= size
        else:
            parts.append([k])
            cells = size
    return parts
