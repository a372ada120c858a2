"""The clients of a `Cohort` in a secure sum: each with keys of its own, none with another's secrets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.cohort import Cohort
from scaffpd.cohort.answers import CohortGradients, CohortUpdates
from scaffpd.federation import Clients, ClientScores, LocalPlan, ProximalPlan, Vector
from scaffpd.masking import Aggregator, Identity, Opened, Party, Terms
from scaffpd.secure.company import Company
from scaffpd.secure.reach import Masked, Member, Part, Rounding, Wanted, quantised

Held = Callable[[], tuple[list[int], Tensor]]


class CohortReach:
    """The clients of a cohort, in this process: each with an identity of its own, none with another's secrets.

    Args:
        cohort: whose clients.
        share: the largest share of a sum that a client agrees to.
        quantum: losses are rounded to multiples of it before they leave; 0 leaves them as they are.
        projections: whether clients show their gradients along directions anyway.
    """

    def __init__(self, cohort: Cohort, share: float, quantum: float, projections: bool = False) -> None:
        self.cohort, self.share, self.quantum = cohort, share, quantum
        counted = not projections
        self.members = {name: Member(Party(Identity(name)), Company(counted=counted)) for name in cohort.names}
        cards = [member.party.identity.card for member in self.members.values()]
        for member in self.members.values():
            member.party.meet(cards)

    def gradients(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> CohortPoint:
        """Losses at x."""
        return CohortPoint(self.cohort.gradients(x, batch_size, key, clients), self)

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients
    ) -> CohortWork:
        """Local steps."""
        inner = at.inner if isinstance(at, CohortPoint) else at
        return CohortWork(self.cohort.local_updates(x, inner, correction, plan, clients))

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> CohortWork:
        """Local models."""
        return CohortWork(self.cohort.proximal_steps(at.inner, correction, plan))

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> Vector:
        """L_i, rounded."""
        return quantised(self.cohort.losses(x, batch_size, key, clients), self.quantum)

    def evaluate(self, x: Any, split: str) -> ClientScores:
        """Scores per client, the losses rounded."""
        scores = self.cohort.evaluate(x, split)
        return replace(scores, loss=quantised(scores.loss, self.quantum))

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Everybody opens an exchange."""
        return {name: self.members[name].party.share(terms) for name in terms.names}

    def mask(self, aggregator: Aggregator | None, wanted: Wanted, length: int) -> dict[str, Masked]:
        """Everybody's masked vector, or its size."""
        chosen, vectors = wanted.held()
        names = [self.cohort.names[i] for i in chosen]
        terms = None if aggregator is None else aggregator.terms
        answers = {}
        for name, vector in zip(names, vectors, strict=True):
            around = {} if aggregator is None else aggregator.around(name)
            part, row = Part(wanted.weights[name], wanted.total, self.share), vector.detach().cpu().numpy()
            answers[name] = self.members[name].answer(part, terms, around, wanted.numbers, row)
        return answers

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares, and the next exchange's opening."""
        shares = {name: self.members[name].party.reveal(terms.exchange, survivors) for name in survivors}
        return shares, self.open(following)


class CohortPoint:
    """A cohort's clients at one x."""

    def __init__(self, inner: CohortGradients, reach: CohortReach) -> None:
        self.inner, self._reach = inner, reach
        self.losses = quantised(inner.losses, reach.quantum)

    @property
    def rounding(self) -> Rounding:
        """Bounds on the errors of L_i and c_i; a rounded loss is off by up to half of its quantum."""
        loss, gradient = self.inner.rounding
        return loss + self._reach.quantum / 2, gradient

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client, a change of the loss, and as coarse as losses are."""
        return quantised(self.inner.project(direction), self._reach.quantum)

    def norms(self) -> Vector:
        """‖c_i‖² per client."""
        return self.inner.norms()

    def slopes(self, V: Tensor, metric: Tensor) -> tuple[NDArray[np.float64], Vector]:
        """Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""
        seen = self.inner.restriction(V, np.zeros(self.inner.asked.n), metric)
        return seen.slopes, seen.sizes

    def held(self, what: str, V: Tensor | None = None, metric: Tensor | None = None) -> Held:
        """The c_i, the diagonals or the curvatures, when they are asked for."""
        if what == "curvature":
            return lambda: (self.inner.chosen, self._curvatures(V, metric))
        return lambda: (self.inner.chosen, self.inner.each() if what == "c" else self.inner.diagonals())

    def _curvatures(self, V: Any, metric: Any) -> Tensor:
        """VᵀH_iV, one client at a time."""
        one = np.eye(self.inner.asked.n)
        return torch.stack(
            [torch.from_numpy(self.inner.restriction(V, one[i], metric).curvature) for i in self.inner.chosen]
        )


class CohortWork:
    """A cohort's local steps."""

    def __init__(self, inner: CohortUpdates) -> None:
        self.inner = inner

    def norms(self) -> Vector:
        """‖d_i‖² per client."""
        return self.inner.norms()

    def held(self, what: str) -> Held:
        """The d_i, or what they were at the snapshot."""
        return lambda: (self.inner.chosen, self.inner.each() if what == "d" else self.inner.snapshots())
