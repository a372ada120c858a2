r"""Silos behind a transport whose vectors are masked: the reach of `SecureAggregation` for a `Remote`.

c_i and d_i stay at their silos: the coordinator has no earlier answer that could stand in for somebody who is away. A
silo that does not answer is lost at once: the run waits for it, or, where all agree to that, begins the round anew
among those who are left. An exchange that somebody has left before its masked vector came is never opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.deploy.coordinator.checks import Shapes, troubles
from scaffpd.deploy.coordinator.events import Lost
from scaffpd.deploy.coordinator.line import Question
from scaffpd.deploy.coordinator.parties import Checks, SiloParties
from scaffpd.deploy.coordinator.sizes import absurd
from scaffpd.deploy.protocol import needs
from scaffpd.deploy.protocol.plans import batch_values, plan_values
from scaffpd.deploy.protocol.wire import Array, Message
from scaffpd.errors import InputError
from scaffpd.federation import Clients, ClientScores, LocalPlan, ProximalPlan, Vector
from scaffpd.masking import Aggregator, Opened, Terms
from scaffpd.masking.fixed_point import SMALLEST
from scaffpd.secure.reach import Masked, Rounding, Wanted

if TYPE_CHECKING:
    from scaffpd.deploy.coordinator.remote import Remote


class SecureReach(SiloParties):
    """The silos of a `Remote`, which mask what they send."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(self.put)
        self.remote, self._like = remote, remote.start()
        self.meet(remote.names)

    def put(self, question: Question, names: Sequence[str], check: Checks) -> dict[str, Message]:
        """A question that everybody has to answer; only shares may come from fewer."""
        replies = self.remote.roster.ask(question, list(names), check)
        lacking = [name for name in names if name not in replies]
        if lacking and question.kind != needs.REVEAL:
            raise Lost(lacking)
        return replies

    def accused(self, claims: Mapping[str, str]) -> None:
        """Whose shares, or keys, several others cannot use is quarantined."""
        names = self.remote.names
        self.remote.accuse(
            {names.index(name): f"{why.rstrip('.')} (masks)" for name, why in claims.items() if name in names}
        )
        super().accused(claims)

    def mask(self, aggregator: Aggregator | None, wanted: Wanted, length: int) -> dict[str, Masked]:
        """Everybody's masked vector; whose size is absurd beside the others' would leave their sum no digits."""
        replies = super().mask(aggregator, wanted, length)
        names, weights = self.remote.names, wanted.weights
        sizes = {
            names.index(name): float(np.ldexp(1.0, reply.exponent)) / abs(weights[name])
            for name, reply in replies.items()
            if weights[name] and reply.exponent > SMALLEST
        }
        found = absurd(sizes, sizes, self.remote.roster.policy.outlier**2)
        self.remote.accuse({
            i: f"its masked vector has size {sizes[i]:.3g}, and the median of the others' {median:.3g} (absurd size)"
            for i, median in found.items()
        })  # fmt: skip
        return replies

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares that open a sum; where more silos have left than it bears, the round is begun anew without them."""
        shares, opened = super().reveal(terms, survivors, following)
        lacking = [name for name in survivors if name not in shares]
        if len(lacking) > terms.leaving:
            raise Lost(lacking)
        return shares, opened

    def parts(self, question: Question, clients: Clients, shapes: Shapes) -> dict[str, NDArray[np.float64]]:
        """Numbers of every silo, by their names (N, …); NaN for those that were not asked."""
        names = self.remote.names
        chosen = [names[i] for i in (range(len(names)) if clients is None else clients)]
        replies = self.put(question, chosen, lambda answers: troubles(answers, shapes, self._like))
        out = {part: np.full((len(names), *shape), np.nan) for part, shape in shapes.items()}
        for name, reply in replies.items():
            for part, table in out.items():
                table[names.index(name)] = reply.arrays[part]
        return out

    def scalars(self, question: Question, clients: Clients, count: int = 1) -> NDArray[np.float64]:
        """A few numbers of every silo, (N, count)."""
        return self.parts(question, clients, {"scalars": (count,)})["scalars"]

    def gradients(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> SiloPoint:
        """Losses at x; c_i stays there."""
        batch = batch_values(batch_size, key)
        seen = self._judged(x, batch_size, self.scalars(Question(needs.GRADIENTS, batch, {"x": x}), clients, 3))
        return SiloPoint(self, x, batch, clients, seen)

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> Vector:
        """L_i."""
        question = Question(needs.LOSSES, batch_values(batch_size, key), {"x": x})
        return self._judged(x, batch_size, self.scalars(question, clients))[:, 0]

    def _judged(self, x: Tensor, batch_size: int | None, seen: NDArray[np.float64]) -> NDArray[np.float64]:
        """Losses of an absurd size give a silo away here as well; the rest of an answer cannot be looked at."""
        got = {i: {"scalars": row} for i, row in enumerate(seen) if not np.isnan(row[0])}
        self.remote.accuse(self.remote.judge.losses(x, batch_size, got))
        return seen

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients
    ) -> SiloWork:
        """Local steps, which silos make when their d_i is asked for."""
        if at is not None and not isinstance(at, SiloPoint):
            raise InputError("Deployed secure sums have no vectors that silos keep from round to round: use ScaffPD.")
        vectors, values = {"x": x}, {"plan": plan_values(plan)}
        if at is not None:
            vectors, values = {**vectors, "at": at.x}, {**values, **at.batch}
        if correction is not None:
            vectors["correction"] = correction
        return SiloWork(self, Question(needs.UPDATES, values, vectors), clients)

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> SiloWork:
        """Local models."""
        known = self.remote.facts.constants
        L = known.smoothness if at.batch["batch_size"] is None else known.steepest
        steepest = float(max(plan.steepest, np.max(L)))
        values = {"pull": plan.pull, "limit": plan.limit, "steepest": steepest, **at.batch}
        vectors = {"at": at.x, "correction": correction, "metric": plan.metric}
        return SiloWork(self, Question(needs.PROXIMAL, values, vectors), at.clients)

    def evaluate(self, x: Any, split: str) -> ClientScores:
        """Scores per silo."""
        return self.remote.evaluate(x, split)


class SiloPoint:
    """Silos at one x."""

    def __init__(
        self, reach: SecureReach, x: Tensor, batch: Mapping[str, Any], clients: Clients, seen: NDArray[np.float64]
    ) -> None:
        self._reach, self.x, self.batch, self.clients = reach, x, batch, clients
        self.losses, *self._rounding = np.ascontiguousarray(seen.T)

    @property
    def rounding(self) -> Rounding:
        """Bounds on the errors of L_i and c_i."""
        return self._rounding[0], self._rounding[1]

    def _question(self, kind: str, **vectors: Tensor) -> Question:
        return Question(kind, self.batch, {"at": self.x, **vectors})

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per silo."""
        return self._reach.scalars(self._question(needs.PROJECT, direction=direction), self.clients)[:, 0]

    def norms(self) -> Vector:
        """‖c_i‖² per silo."""
        return self._reach.scalars(_sizes(self.held("c")), self.clients)[:, 0]

    def slopes(self, V: Tensor, metric: Tensor) -> tuple[NDArray[np.float64], Vector]:
        """Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""
        question = replace(self._question(needs.CURVATURE, metric=metric), arrays={"V": V.numpy()})
        seen = self._reach.parts(question, self.clients, {"slopes": (V.shape[1],), "scalars": (1,)})
        return seen["slopes"], seen["scalars"][:, 0]

    def held(self, what: str, V: Tensor | None = None, metric: Tensor | None = None) -> Question:
        """The question that the vector would answer."""
        if what == "c":
            return Question(needs.GRADIENTS, {**self.batch, "parts": ["c"]}, {"x": self.x})
        if what == "diagonal" or V is None or metric is None:
            return Question(needs.DIAGONAL, {**self.batch, "parts": ["diagonal"]}, {"at": self.x})
        arrays: dict[str, Array] = {"V": V.numpy()}
        vectors = {"at": self.x, "metric": metric}
        return Question(needs.CURVATURE, {**self.batch, "parts": ["curvature"]}, vectors, {}, arrays)


class SiloWork:
    """Local steps of silos."""

    def __init__(self, reach: SecureReach, question: Question, clients: Clients) -> None:
        self._reach, self._question, self._clients = reach, question, clients

    def norms(self) -> Vector:
        """‖d_i‖² per silo."""
        return self._reach.scalars(_sizes(self.held("d")), self._clients)[:, 0]

    def held(self, what: str) -> Question:
        """The question that the vector would answer."""
        return replace(self._question, values={**self._question.values, "parts": [what]})


def _sizes(about: Question) -> Question:
    """How long such a vector is."""
    return replace(about, kind=needs.SIZES, values={**about.values, "about": about.kind})
