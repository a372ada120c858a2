"""What algorithms see of clients that mask their vectors: sums and scalars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.cohort.answers import ClientAnswers, ClientSelection
from scaffpd.cohort.answers import CohortMemory as Kept
from scaffpd.errors import InputError
from scaffpd.federation import Clients, Restriction, Vector
from scaffpd.secure.reach import Point, Rounding, Work

ALONE = "Secure sums hide every client's own vector: use a method that needs sums only, such as ScaffPD."


class Adding(Protocol):
    """Whoever makes secure sums."""

    projections: bool

    @property
    def error(self) -> float:
        """The most that an entry of the last sum is off by its number format."""

    def add(self, kind: str, held: Any, asked: ClientSelection, weights: Vector, length: int) -> Tensor:
        """Σ w_i v_i."""

    def count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        """Add to the traffic."""


class SecureGradients(ClientAnswers):
    """`Gradients` whose c_i stay with their clients.

    Attributes:
        x: where they were asked.
        point: the clients at x.
    """

    def __init__(self, asked: ClientSelection, adding: Adding, point: Point, x: Tensor) -> None:
        super().__init__(asked)
        self._adding, self.point, self.x = adding, point, x
        self.losses: Vector = point.losses
        self._sums: dict[bytes, Tensor] = {}
        self._error = 0.0

    @property
    def rounding(self) -> Rounding:
        """Bounds on the errors of L_i and c_i; what sums are off by their number format is everybody's part of it."""
        loss, gradient = self.point.rounding
        return loss, gradient + self._error

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i c_i, masked; the same sum is not asked for twice."""
        self._weights(weights)
        name = np.asarray(weights, dtype=np.float64).tobytes()
        if name not in self._sums:
            length = len(self.asked.like)
            self._sums[name] = self._adding.add("c", self.point.held("c"), self.asked, weights, length)
            total = float(np.abs(weights).sum()) or 1.0
            self._error = max(self._error, length**0.5 * self._adding.error / total)
        return self._sums[name]

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client: N scalars up, in the clear."""
        self._adding.count(exchanges=1, up=len(self.chosen))
        return self.point.project(direction)

    def norms(self) -> Vector:
        """‖c_i‖² per client: N scalars up, in the clear."""
        self._adding.count(exchanges=1, up=len(self.chosen))
        return self.point.norms()

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction:
        """Q masked; the slopes Vᵀc_i, k numbers of every client, in the clear, if that is allowed."""
        if not self._adding.projections:
            raise InputError(
                "This method has every client show the server its gradient along several directions, which secure "
                "sums are meant to hide: use ScaffPD, or allow it with projections=True."
            )
        k, clients = V.shape[1], len(self.chosen)
        self._adding.count(exchanges=1, down=len(V) * clients, up=(k + 1) * clients)
        slopes, sizes = self.point.slopes(V, metric)
        held = self.point.held("curvature", V, metric)
        Q = self._adding.add("curvature", held, self.asked, weights, k * k).double().cpu().numpy().reshape(k, k)
        return Restriction(slopes, (Q + Q.T) / 2, sizes)

    def diagonal(self, weights: Vector) -> Tensor:
        """Σ_i w_i diag ∇²f_i(x), masked; the sum goes down to everyone."""
        length = len(self.asked.like)
        self._adding.count(down=length * len(self.chosen))
        return self._adding.add("diagonal", self.point.held("diagonal"), self.asked, weights, length)

    def gram(self) -> NDArray[np.float64]:
        """Refused."""
        raise InputError(ALONE)

    def each(self) -> Tensor:
        """Refused."""
        raise InputError(ALONE)

    def diagonals(self) -> Tensor:
        """Refused."""
        raise InputError(ALONE)


class SecureUpdates(ClientAnswers):
    """`Updates` whose d_i stay with their clients."""

    def __init__(self, asked: ClientSelection, adding: Adding, work: Work, snapshot: bool) -> None:
        super().__init__(asked)
        self._adding, self.work, self._snapshot = adding, work, snapshot

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i d_i, masked."""
        self._weights(weights)
        return self._adding.add("d", self.work.held("d"), self.asked, weights, len(self.asked.like))

    def norms(self) -> Vector:
        """‖d_i‖² per client: N scalars up, in the clear."""
        self._adding.count(up=len(self.chosen))
        return self.work.norms()

    def snapshot(self, weights: Vector) -> Tensor:
        """Σ_i w_i (x − u_{i,t'}), masked."""
        if not self._snapshot:
            raise InputError("There is no snapshot: the plan asked for none.")
        self._weights(weights)
        return self._adding.add("snapshot", self.work.held("snapshot"), self.asked, weights, len(self.asked.like))


@dataclass(frozen=True)
class SecureMemory:
    """Vectors that a cohort's clients keep; the server sees masked sums of them.

    Attributes:
        kept: the vectors, each its client's own.
        adding: makes the sums.
        asked: all clients.
    """

    kept: Kept
    adding: Adding = field(repr=False, metadata={"transient": True})
    asked: ClientSelection = field(repr=False, metadata={"transient": True})

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i v_i, masked."""
        vectors = self.kept.vectors
        held = lambda: (self.asked.chosen, vectors)  # noqa: E731
        return self.adding.add("memory", held, self.asked, weights, vectors.shape[1])

    def plus(self, scale: float, vectors: Any, clients: Clients = None) -> SecureMemory:
        """v_i + scale·w_i: every client by itself."""
        return SecureMemory(self.kept.plus(scale, _own(vectors), clients), self.adding, self.asked)

    def replaced(self, vectors: Any, clients: Clients = None) -> SecureMemory:
        """w_i in the place of v_i."""
        return SecureMemory(self.kept.replaced(_own(vectors), clients), self.adding, self.asked)


def _own(vectors: Any) -> Any:
    """What the clients of a cohort have, by the handle that the server has."""
    if isinstance(vectors, SecureMemory):
        return vectors.kept
    handle = getattr(vectors, "point", None) or getattr(vectors, "work", None)
    return vectors if handle is None else handle.inner
