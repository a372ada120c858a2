r"""`SecureAggregation`: a federation whose server learns weighted sums of its clients' vectors, and no single one.

A round of Scaff-PD needs Σ λ_i c_i and Σ λ_i d_i; λ_i goes to client i, which scales its own vector. The server sees
losses L_i, weights λ_i and a few scalars. docs/secure-aggregation.md says against whom this helps, and what it does
not hide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from scaffpd.cohort import Cohort
from scaffpd.cohort.answers import ClientAnswers, ClientSelection, CohortMemory, TrafficLedger
from scaffpd.errors import InputError, real
from scaffpd.federation import (
    Clients,
    ClientScores,
    Constants,
    Federation,
    LocalPlan,
    ProximalPlan,
    Restriction,
    Vector,
    same_point,
)
from scaffpd.masking import Terms
from scaffpd.secure.channel import Channel, CohortChannel, MaskedPoint, MaskedSteps, Rounding
from scaffpd.secure.sums import SecureSums


class SecureGradients(ClientAnswers):
    """`Gradients` whose c_i stay with their clients.

    Attributes:
        x: where they were asked.
        point: the clients at x.
    """

    def __init__(self, asked: ClientSelection, secure: SecureAggregation, point: MaskedPoint, x: Tensor) -> None:
        super().__init__(asked)
        self._secure, self.point, self.x = secure, point, x
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
            self._sums[name] = self._secure.add("c", self.point.held("c"), self.asked, weights, length)
            total = float(np.abs(weights).sum()) or 1.0
            self._error = max(self._error, length**0.5 * self._secure.error / total)
        return self._sums[name]

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client: N scalars up, in the clear."""
        self._secure.count(exchanges=1, up=len(self.chosen))
        return self.point.project(direction)

    def norms(self) -> Vector:
        """‖c_i‖² per client: N scalars up, in the clear."""
        self._secure.count(exchanges=1, up=len(self.chosen))
        return self.point.norms()

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction:
        """Q masked; the slopes Vᵀc_i, k numbers of every client, in the clear, if that is allowed."""
        if not self._secure.projections:
            raise InputError(
                "This method has every client show the server its gradient along several directions, which secure "
                "sums are meant to hide: use ScaffPD, or allow it with projections=True."
            )
        k, clients = V.shape[1], len(self.chosen)
        self._secure.count(exchanges=1, down=len(V) * clients, up=(k + 1) * clients)
        slopes, sizes = self.point.slopes(V, metric)
        held = self.point.held("curvature", V, metric)
        Q = self._secure.add("curvature", held, self.asked, weights, k * k).double().cpu().numpy().reshape(k, k)
        return Restriction(slopes, (Q + Q.T) / 2, sizes)

    def diagonal(self, weights: Vector) -> Tensor:
        """Σ_i w_i diag ∇²f_i(x), masked; the sum goes down to everyone."""
        length = len(self.asked.like)
        self._secure.count(down=length * len(self.chosen))
        return self._secure.add("diagonal", self.point.held("diagonal"), self.asked, weights, length)

    def each(self) -> NoReturn:
        """Refuse: no single vector leaves its client."""
        raise InputError(
            "Secure sums hide every client's own vector: use a method that needs sums only, such as ScaffPD."
        )

    gram = diagonals = each


class SecureUpdates(ClientAnswers):
    """`Updates` whose d_i stay with their clients."""

    def __init__(self, asked: ClientSelection, secure: SecureAggregation, work: MaskedSteps, snapshot: bool) -> None:
        super().__init__(asked)
        self._secure, self.work, self._snapshot = secure, work, snapshot

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i d_i, masked."""
        self._weights(weights)
        return self._secure.add("d", self.work.held("d"), self.asked, weights, len(self.asked.like))

    def norms(self) -> Vector:
        """‖d_i‖² per client: N scalars up, in the clear."""
        self._secure.count(up=len(self.chosen))
        return self.work.norms()

    def snapshot(self, weights: Vector) -> Tensor:
        """Σ_i w_i (x − u_{i,t'}), masked."""
        if not self._snapshot:
            raise InputError("There is no snapshot: the plan asked for none.")
        self._weights(weights)
        return self._secure.add("snapshot", self.work.held("snapshot"), self.asked, weights, len(self.asked.like))


@dataclass(frozen=True)
class SecureMemory:
    """Vectors that a cohort's clients keep; the server sees masked sums of them.

    Attributes:
        kept: the vectors, each its client's own.
        secure: makes the sums.
        asked: all clients.
    """

    kept: CohortMemory
    secure: SecureAggregation = field(repr=False, metadata={"transient": True})
    asked: ClientSelection = field(repr=False, metadata={"transient": True})

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i v_i, masked."""
        vectors = self.kept.vectors
        held = lambda: (self.asked.chosen, vectors)  # noqa: E731
        return self.secure.add("memory", held, self.asked, weights, vectors.shape[1])

    def plus(self, scale: float, vectors: Any, clients: Clients = None) -> SecureMemory:
        """v_i + scale·w_i: every client by itself."""
        return SecureMemory(self.kept.plus(scale, _own(vectors), clients), self.secure, self.asked)

    def replaced(self, vectors: Any, clients: Clients = None) -> SecureMemory:
        """w_i in the place of v_i."""
        return SecureMemory(self.kept.replaced(_own(vectors), clients), self.secure, self.asked)


def _own(vectors: Any) -> Any:
    """What the clients of a cohort have, by the handle that the server has."""
    if isinstance(vectors, SecureMemory):
        return vectors.kept
    handle = getattr(vectors, "point", None) or getattr(vectors, "work", None)
    return vectors if handle is None else handle.inner


class SecureAggregation(TrafficLedger):
    """Clients that mask every vector; implements `Federation`.

    Args:
        federation: a `Cohort`, whose clients then have keys of their own, in this process; or a deployed federation,
            whose silos do the same where they are.
        colluding: t, how many clients may show the server all that they know without harm to the others; by default a
            third of those who take part (10 at most).
        leaving: D, how many may stop answering in the middle of a sum; by default as many as t, where N allows it.
        share: the largest share of a sum, as Σ|w_i| counts it, that a single client's vector may have; beyond it the
            client refuses, for the sum would nearly be its vector.
        quantum: losses are rounded to multiples of it before they leave a client; certificates allow for it.
        projections: whether clients may show their gradients along directions that the server chooses: the subspace
            saddle method needs that.
        record: is handed everything that the server receives of a vector, as (kind, client, array), for tests.
    """

    def __init__(
        self,
        federation: Federation,
        colluding: int | None = None,
        leaving: int | None = None,
        share: float = 0.9,
        quantum: float = 0.0,
        projections: bool = False,
        record: Callable[[str, str, Any], None] | None = None,
    ) -> None:
        if not 0 < real("SecureAggregation", "share", share) <= 1:
            raise InputError(f"SecureAggregation needs 0 < share <= 1, got {share!r}.")
        if not 0 <= real("SecureAggregation", "quantum", quantum) < float("inf"):
            raise InputError(f"SecureAggregation needs quantum >= 0, got {quantum!r}.")
        self._channel = self._channel_to(federation, float(share), float(quantum), projections)
        super().__init__(federation.names, federation.start())
        self.inner, self.projections = federation, projections
        Terms.usual("", self.names, colluding, leaving)  # whether so many may collude or leave
        self._sums = SecureSums(self._channel, colluding, leaving, self._counted, record)

    @staticmethod
    def _channel_to(federation: Any, share: float, quantum: float, projections: bool) -> Channel:
        if isinstance(federation, Cohort):
            return CohortChannel(federation, share, quantum, projections)
        if hasattr(federation, "channel"):
            channel: Channel = federation.channel(share, quantum)
            return channel
        raise InputError(f"SecureAggregation takes a Cohort or a deployed federation, got {type(federation).__name__}.")

    def _counted(self, exchanges: int, up: int, down: int) -> None:
        self.traffic.add(exchanges=exchanges, up=up, down=down)

    @property
    def fingerprint(self) -> str:
        """Of the federation itself: masks change no problem."""
        return self.inner.fingerprint

    @property
    def numbers(self) -> float:
        """How many numbers a pass over the training features reads."""
        return float(getattr(self.inner, "numbers", float("inf")))

    @property
    def absent(self) -> int:
        """How many clients do not answer at present."""
        return int(getattr(self.inner, "absent", 0))

    @property
    def account(self) -> Any:
        """The books of private clients; `None` where they are not private."""
        return getattr(self.inner, "account", None)

    @property
    def privacy(self) -> Any:
        """What private clients' answers have cost; `None` where they are not private."""
        return getattr(self.inner, "privacy", None)

    def constants(self) -> Constants:
        """L_i, μ_i, max_j L_ij and n_i; and whether curvature may be asked for."""
        self.count(exchanges=1, up=4 * len(self.names))
        known = self.inner.constants()
        return known if self.projections else replace(known, first_order=True)

    def start(self) -> Tensor:
        """The default x⁰."""
        return self.inner.start()

    def memory(self) -> SecureMemory:
        """A zero vector at every client of a cohort."""
        kept = self.inner.memory()
        if not isinstance(kept, CohortMemory):
            raise InputError("This method keeps vectors at clients, which deployed secure sums do not have.")
        return SecureMemory(kept, self, self._asked(self._everyone))

    def losses(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
    ) -> Vector:
        """One exchange: x down, L_i up."""
        chosen = self._chosen(clients)
        self.count(exchanges=alone, down=self._send(x, chosen), up=len(chosen))
        return self._channel.losses(x, batch_size, key, chosen)

    def gradients(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
        coefficients_sent: int | None = None,
    ) -> SecureGradients:
        """One exchange: x (or how to form it) down; L_i and the bounds on rounding errors up. c_i stays there."""
        chosen = self._chosen(clients)
        down = self._send(x, chosen) if coefficients_sent is None else coefficients_sent * len(chosen)
        self.count(exchanges=alone, down=down, up=3 * len(chosen))
        return SecureGradients(self._asked(chosen), self, self._channel.gradients(x, batch_size, key, chosen), x)

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients = None
    ) -> SecureUpdates:
        """The correction, and x to whom it has not been sent, down with the question for the masked d_i."""
        chosen, held = self._chosen(clients), at
        if isinstance(at, SecureGradients):
            held = at.point
        elif isinstance(at, SecureMemory):
            held = at.kept
        known = isinstance(at, SecureGradients) and same_point(at.x, x)
        corrections = len(chosen) * self.dimension * (correction is not None)
        self.count(down=(0 if known else self._send(x, chosen)) + corrections)
        work = self._channel.local_updates(x, held, correction, plan, chosen)
        return SecureUpdates(self._asked(chosen), self, work, plan.snapshot is not None)

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> SecureUpdates:
        """The correction and β down, with the question for the masked d_i."""
        self.count(down=len(at.chosen) * (self.dimension + 1))
        return SecureUpdates(at.asked, self, self._channel.proximal_steps(at.point, correction, plan), False)

    def evaluate(self, x: Any, split: str = "train") -> ClientScores:
        """Per-client loss, accuracy and sample counts: scalars, in the clear."""
        return self._channel.evaluate(x, split)

    def add(self, kind: str, held: Any, asked: ClientSelection, weights: Vector, length: int) -> Tensor:
        """Σ w_i v_i of the clients that were asked."""
        names = self.names
        own = {names[i]: float(weights[i]) for i in asked.chosen}
        return torch.from_numpy(self._sums.sum(kind, held, own, length)).to(self._like)

    @property
    def error(self) -> float:
        """The most that an entry of the last sum is off by its number format."""
        return 0.0 if self._sums.last is None else self._sums.last.error

    def __repr__(self) -> str:
        return f"Secure sums over {self.inner!r}"
