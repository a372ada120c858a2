"""What silos have answered, on the coordinator's side: their vectors came up, so that sums need no further exchange.

A silo that did not answer has a row as well: the one that the rule of `roster` puts in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.cohort.answers import ClientAnswers, ClientSelection, inner_products
from scaffpd.deploy.protocol.needs import CURVATURE, DIAGONAL
from scaffpd.deploy.protocol.wire import Array
from scaffpd.errors import InputError
from scaffpd.federation import Restriction, Vector


class Asking(Protocol):
    """Whoever can ask these silos something more."""

    def further(
        self, kind: str, at: RemoteGradients, vectors: Mapping[str, Tensor], arrays: Mapping[str, Array], up: int
    ) -> dict[int, Mapping[str, Array]]:
        """Another question about a point that silos have answered at; the answers of those who are there."""


class RemoteGradients(ClientAnswers):
    """`Gradients` of silos: c_i and L_i are here.

    Attributes:
        x: where they were asked.
        batch: the minibatch's size and key; all samples where the size is `None`.
        stale: the numbers of silos for which earlier answers stand in.
    """

    def __init__(
        self,
        asked: ClientSelection,
        remote: Asking,
        x: Tensor,
        batch: tuple[int | None, tuple[int, ...]],
        vectors: Tensor,
        scalars: NDArray[np.float64],
        stale: list[int],
    ) -> None:
        super().__init__(asked)
        self.remote, self.x, self.batch, self.stale = remote, x, batch, stale
        self._vectors = vectors
        self.losses, *self._rounding = np.ascontiguousarray(self._spread(torch.from_numpy(scalars)).T)

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bounds on the errors of L_i and c_i; infinite for a silo whose answer is an earlier one."""
        loss, gradient = (part.copy() for part in self._rounding)
        loss[self.stale] = gradient[self.stale] = np.inf
        return loss, gradient

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i c_i."""
        return self._weights(weights) @ self._vectors

    def each(self) -> Tensor:
        """The c_i."""
        return self._vectors

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per silo; nothing is sent, the c_i are here."""
        return self._spread(self._vectors @ direction)

    def norms(self) -> Vector:
        """‖c_i‖² per silo; nothing is sent."""
        return self._spread(self._vectors.square().sum(1))

    def gram(self) -> NDArray[np.float64]:
        """⟨c_i, c_j⟩; nothing is sent."""
        return inner_products(self._vectors, self.chosen, self.asked.n)

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction:
        """One exchange: V down, VᵀH_iV up. A silo that does not answer bends like the mean of the others."""
        k = V.shape[1]
        got = self.remote.further(CURVATURE, self, {"metric": metric}, {"V": V.numpy()}, up=k * k + k + 1)
        Q = self._average({i: parts["curvature"] for i, parts in got.items()}, self._weights(weights))
        slopes, sizes = self._vectors @ V, (self._vectors.square() / metric).sum(1)
        bend = Q.double().numpy()
        return Restriction(self._spread(slopes), (bend + bend.T) / 2, self._spread(sizes))

    def diagonal(self, weights: Vector) -> Tensor:
        """One exchange: a vector up."""
        return self._average(self._diagonals(), self._weights(weights))

    def diagonals(self) -> Tensor:
        """One exchange: a vector up; the mean of the others for a silo that does not answer."""
        got = self._diagonals()
        mean: Array = np.mean(list(got.values()), axis=0)
        rows: list[Array] = [got.get(i, mean) for i in self.chosen]
        return self._tensor(np.stack(rows))

    def _diagonals(self) -> dict[int, Array]:
        got = self.remote.further(DIAGONAL, self, {}, {}, up=len(self.asked.like))
        return {i: parts["diagonal"] for i, parts in got.items()}

    def _average(self, got: Mapping[int, Array], weights: Tensor) -> Tensor:
        """Σ w_i M_i, where those who did not answer have the weighted mean of those who did."""
        there = [j for j, i in enumerate(self.chosen) if i in got]
        total, heard = float(weights.sum()), float(weights[there].sum())
        stack = self._tensor(np.stack([got[self.chosen[j]] for j in there]))
        if heard == 0:
            return stack.mean(0) * total
        mixed: Tensor = torch.tensordot(weights[there], stack, dims=1)
        return mixed if len(there) == len(weights) else mixed * (total / heard)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.asked.like)


class RemoteUpdates(ClientAnswers):
    """`Updates` of silos: the d_i are here.

    Attributes:
        vectors: d_i, (n, d), with something in the rows of absent silos.
        snapshots: the same after t' steps.
        skipped: rows that averages leave out: absent silos, where there is no correction that could stand in.
    """

    def __init__(self, asked: ClientSelection, vectors: Tensor, snapshots: Tensor | None, skipped: list[int]) -> None:
        super().__init__(asked)
        self.vectors, self.snapshots, self.skipped = vectors, snapshots, skipped

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i d_i."""
        return self._mixed(self.vectors, weights)

    def each(self) -> Tensor:
        """The d_i."""
        return self.vectors

    def norms(self) -> Vector:
        """‖d_i‖² per silo; nothing is sent."""
        return self._spread(self.vectors.square().sum(1))

    def snapshot(self, weights: Vector) -> Tensor:
        """Σ_i w_i (x − u_{i,t'})."""
        if self.snapshots is None:
            raise InputError("There is no snapshot: the plan asked for none.")
        return self._mixed(self.snapshots, weights)

    def _mixed(self, vectors: Tensor, weights: Vector) -> Tensor:
        """Σ w_i v_i over those who answered, scaled up to the weight of all."""
        w = self._weights(weights)
        if not self.skipped:
            return w @ vectors
        heard = w.clone()
        heard[self.skipped] = 0
        if float(heard.sum()) == 0:
            return w @ vectors  # rows of the skipped hold the mean of the others
        return (heard @ vectors) * (w.sum() / heard.sum())
