"""What the clients of a cohort answer, and what it costs to ask them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Clients, LocalPlan, Restriction, Traffic, Vector
from scaffpd.models.oracle import Displacements, EvaluatedPoint

Chosen = list[int]


@dataclass(frozen=True)
class CohortMemory:
    """Vectors that the clients of a cohort keep, (N, d)."""

    vectors: Tensor = field(repr=False)

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i v_i."""
        return torch.as_tensor(weights).to(self.vectors) @ self.vectors

    def plus(self, scale: float, vectors: Any, clients: Clients = None) -> CohortMemory:
        """Add scale·w_i to v_i, for one w or for every client's own."""
        rows, added = self._rows(vectors, clients)
        changed = self.vectors.clone()
        changed[rows] += scale * added
        return CohortMemory(changed)

    def replaced(self, vectors: Any, clients: Clients = None) -> CohortMemory:
        """Put w_i in the place of v_i."""
        rows, new = self._rows(vectors, clients)
        changed = self.vectors.clone()
        changed[rows] = new
        return CohortMemory(changed)

    def _rows(self, vectors: Any, clients: Clients) -> tuple[Chosen | slice, Tensor]:
        chosen = None if clients is None else [int(i) for i in clients]
        if chosen is not None and not all(0 <= i < len(self.vectors) for i in chosen):
            raise InputError(f"clients must be numbers from 0 to {len(self.vectors) - 1}, got {chosen}.")
        if isinstance(vectors, Tensor):
            return slice(None) if chosen is None else chosen, vectors
        if isinstance(vectors, CohortMemory):
            return (slice(None), vectors.vectors) if chosen is None else (chosen, vectors.vectors[chosen])
        own, each = vectors.chosen, vectors.each()
        if chosen is None or chosen == own:
            return own, each
        if not set(chosen) <= set(own):
            raise InputError("Clients can only keep vectors that they have.")
        place = {client: k for k, client in enumerate(own)}
        return chosen, each[[place[i] for i in chosen]]


@dataclass(frozen=True)
class ClientSelection:
    """The clients that were asked.

    Attributes:
        cohort: their federation, which counts further traffic.
        chosen: the numbers of those clients, in the order of their answers.
        n: N, how many clients there are.
        like: a tensor of the format of x.
        everyone: whether these are all clients, in order.
    """

    cohort: TrafficLedger
    chosen: Chosen
    n: int
    like: Tensor
    everyone: bool = False

    @cached_property
    def index(self) -> slice | NDArray[np.int64]:
        """The same numbers, for NumPy."""
        return slice(None) if self.everyone else np.array(self.chosen)


class ClientAnswers:
    """Vectors that some clients of a cohort have just computed."""

    def __init__(self, asked: ClientSelection) -> None:
        self.asked, self.chosen = asked, asked.chosen

    def _weights(self, weights: Vector) -> Tensor:
        """Return the weights of the clients that were asked, on the device; others must have none."""
        w = np.asarray(weights, dtype=np.float64)
        picked = np.array(w[self.asked.index])
        if w.shape != (self.asked.n,) or np.count_nonzero(w) != np.count_nonzero(picked):
            raise InputError("Weights must be zero for clients that were not asked.")
        sent = torch.from_numpy(picked).to(self.asked.like.dtype)
        if self.asked.like.is_cuda:  # from pinned memory, nobody waits for the device
            sent = sent.pin_memory()
        return sent.to(self.asked.like.device, non_blocking=True)

    def _spread(self, values: Tensor) -> Vector:
        return scattered(values, self.asked)


class CohortGradients(ClientAnswers):
    """`Gradients` of a cohort: N-sized results as NumPy float64, vectors as tensors."""

    def __init__(self, asked: ClientSelection, point: EvaluatedPoint, x: Tensor) -> None:
        super().__init__(asked)
        self.point, self.x = point, x
        self.losses: Vector = self._spread(point.losses)

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bounds on the rounding errors of L_i and c_i."""
        loss, gradient = self.point.rounding()
        return self._spread(loss), self._spread(gradient)

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i c_i."""
        return self.point.sum(self._weights(weights))

    def each(self) -> Tensor:
        """The c_i themselves, which have gone up."""
        return self.point.each()

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client: N scalars up."""
        self.asked.cohort.count(exchanges=1, up=len(self.chosen))
        return self._spread(self.point.project(direction))

    def norms(self) -> Vector:
        """‖c_i‖² per client: N scalars up."""
        self.asked.cohort.count(exchanges=1, up=len(self.chosen))
        return self._spread(self.point.norms())

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction:
        """One exchange: one vector down (the others are known); k + 1 scalars and a k×k part of Q up."""
        k = V.shape[1]
        scalars = k + 1 + k * (k + 1) // 2
        self.asked.cohort.count(exchanges=1, down=len(V) * len(self.chosen), up=scalars * len(self.chosen))
        seen = self.point.restriction(V, self._weights(weights), metric)
        Q = seen.curvature.double().cpu().numpy()
        return Restriction(self._spread(seen.slopes), (Q + Q.T) / 2, self._spread(seen.sizes))

    def diagonal(self, weights: Vector) -> Tensor:
        """One exchange: a vector up, and the sum down to everyone."""
        vectors = len(self.asked.like) * len(self.chosen)
        self.asked.cohort.count(exchanges=1, up=vectors, down=vectors)
        return self.point.diagonal(self._weights(weights))

    def diagonals(self) -> Tensor:
        """One exchange: a vector up."""
        self.asked.cohort.count(exchanges=1, up=len(self.asked.like) * len(self.chosen))
        return self.point.diagonals()

    def gram(self) -> NDArray[np.float64]:
        """⟨c_i, c_j⟩, from the c_i that have gone up; float64 whatever the model's numbers are."""
        return inner_products(self.point.each(), self.chosen, self.asked.n)


class CohortUpdates(ClientAnswers):
    """`Updates` of a cohort."""

    def __init__(self, asked: ClientSelection, plan: LocalPlan, work: Callable[[int], Displacements]) -> None:
        super().__init__(asked)
        self._work, self._plan, self._done = work, plan, work(plan.steps)

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i d_i."""
        return self._done.sum(self._weights(weights))

    def each(self) -> Tensor:
        """The d_i of the clients that were asked; they stay with them."""
        return self._done.each()

    def norms(self) -> Vector:
        """‖d_i‖² per client: N scalars up, along with d_i."""
        self.asked.cohort.count(up=len(self.chosen))
        return self._spread(self._done.each().square().sum(1))

    def snapshot(self, weights: Vector) -> Tensor:
        """Σ_i w_i (x − u_{i,t'}): the first t' steps once more, with the same minibatches."""
        return self._snapshot().sum(self._weights(weights))

    def snapshots(self) -> Tensor:
        """Every client's own x − u_{i,t'}; they stay with them."""
        return self._snapshot().each()

    def _snapshot(self) -> Displacements:
        if self._plan.snapshot is None:
            raise InputError("There is no snapshot: the plan asked for none.")
        return self._work(self._plan.snapshot)


def inner_products(each: Tensor, chosen: Chosen, n: int) -> NDArray[np.float64]:
    """Return ⟨v_i, v_j⟩ in float64 in the order of all clients, NaN for those that were not asked."""
    each = each.double()
    out = np.full((n, n), np.nan)
    out[np.ix_(chosen, chosen)] = (each @ each.T).cpu().numpy()
    return out


def scattered(values: Tensor, asked: ClientSelection) -> Vector:
    """Put per-client numbers in the order of all clients, NaN for those that were not asked."""
    out = np.full((asked.n, *values.shape[1:]), np.nan)
    out[asked.index] = values.double().cpu().numpy()
    return out


class TrafficLedger:
    """What a federation has sent: the part that all kinds of federations share.

    Args:
        names: the clients.
        like: a tensor of the length and format of x.
    """

    def __init__(self, names: Sequence[str], like: Tensor) -> None:
        self._names, self._like, self._traffic = list(names), like, Traffic()
        self._everyone = list(range(len(names)))
        self._sent: tuple[Tensor | None, set[int] | None] = (None, set())

    @property
    def names(self) -> Sequence[str]:
        """The clients, in the order given."""
        return tuple(self._names)

    @property
    def dimension(self) -> int:
        """d, the length of x."""
        return len(self._like)

    @property
    def traffic(self) -> Traffic:
        """What training has sent so far; for clients in this process, what it would have sent."""
        return self._traffic

    def count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        """Add to the traffic, in numbers of the format of x."""
        size = self._like.element_size()
        self._traffic.add(exchanges=exchanges, up=up * size, down=down * size)

    def _chosen(self, clients: Clients) -> Chosen:
        """Return the numbers of the clients to ask."""
        if clients is None:
            return self._everyone
        chosen = [int(i) for i in clients]
        last = len(self._names) - 1
        if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) > last:
            raise InputError(f"clients must be distinct numbers from 0 to {last}, got {chosen}.")
        return self._everyone if chosen == self._everyone else chosen

    def _send(self, x: Tensor, chosen: Chosen) -> int:
        """Count the numbers that go down for these clients to have x; those that were just asked about it have it."""
        last, known = self._sent
        known = known if last is x else set()
        if known is None:  # everyone has it
            return 0
        if chosen is self._everyone:
            self._sent = x, None
            return (len(chosen) - len(known)) * self.dimension
        new = set(chosen) - known
        self._sent = x, known | new
        return len(new) * self.dimension

    def _asked(self, chosen: Chosen) -> ClientSelection:
        return ClientSelection(self, chosen, len(self._names), self._like, chosen is self._everyone)
