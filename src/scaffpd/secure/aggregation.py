r"""`SecureAggregation`: a federation whose server learns weighted sums of its clients' vectors, and no single one.

What a round of Scaff-PD needs of vectors are Σ λ_i c_i and Σ λ_i d_i; λ_i goes to client i, which scales its own
vector. Losses L_i, weights λ_i and a few scalars are seen by the server. docs/secure-aggregation.md says against whom
this helps, and what it does not hide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scaffpd.cohort import Cohort
from scaffpd.cohort.answers import ClientSelection, TrafficLedger
from scaffpd.cohort.answers import CohortMemory as Kept
from scaffpd.errors import InputError, real
from scaffpd.federation import Clients, ClientScores, Constants, Federation, LocalPlan, ProximalPlan, Vector
from scaffpd.masking import Terms
from scaffpd.models.oracle import same_point
from scaffpd.secure.answers import SecureGradients, SecureMemory, SecureUpdates
from scaffpd.secure.cohort_reach import CohortReach
from scaffpd.secure.reach import Reach
from scaffpd.secure.sums import Sums


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
        self._reach = self._reached(federation, float(share), float(quantum), projections)
        super().__init__(federation.names, federation.start())
        self.inner, self.projections = federation, projections
        Terms.usual("", self.names, colluding, leaving)  # whether so many may collude or leave
        self._sums = Sums(self._reach, colluding, leaving, self._counted, record)

    @staticmethod
    def _reached(federation: Any, share: float, quantum: float, projections: bool) -> Reach:
        if isinstance(federation, Cohort):
            return CohortReach(federation, share, quantum, projections)
        if hasattr(federation, "reach"):
            reach: Reach = federation.reach(share, quantum)
            return reach
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
        if not isinstance(kept, Kept):
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
        return self._reach.losses(x, batch_size, key, chosen)

    def gradients(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
        told: int | None = None,
    ) -> SecureGradients:
        """One exchange: x (or how to form it) down; L_i and the bounds on rounding errors up. c_i stays there."""
        chosen = self._chosen(clients)
        down = self._send(x, chosen) if told is None else told * len(chosen)
        self.count(exchanges=alone, down=down, up=3 * len(chosen))
        return SecureGradients(self._asked(chosen), self, self._reach.gradients(x, batch_size, key, chosen), x)

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
        work = self._reach.local_updates(x, held, correction, plan, chosen)
        return SecureUpdates(self._asked(chosen), self, work, plan.snapshot is not None)

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> SecureUpdates:
        """The correction and β down, with the question for the masked d_i."""
        self.count(down=len(at.chosen) * (self.dimension + 1))
        return SecureUpdates(at.asked, self, self._reach.proximal_steps(at.point, correction, plan), False)

    def evaluate(self, x: Any, split: str = "train") -> ClientScores:
        """Per-client loss, accuracy and sample counts: scalars, in the clear."""
        return self._reach.evaluate(x, split)

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
