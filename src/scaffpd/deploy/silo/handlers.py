"""Answer the questions of the waist with a cohort of one.

An answer holds the arrays that are named here and nothing else (a test looks at every message).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaffpd.cohort import Cohort
from scaffpd.cohort.answers import CohortGradients
from scaffpd.deploy import messages
from scaffpd.deploy.messages import Array, Message, local_plan, number, read_batch
from scaffpd.errors import InputError
from scaffpd.federation import ProximalPlan
from scaffpd.models.numerics import limit_threads

DIRECTIONS = 256  # most columns of V: with d of them the whole Hessian would leave
POINTS = 2  # how many points' answers are kept: this round's and, where a step is rejected, the last one's
ONE = np.ones(1)  # the weight of the only client


class Query(NamedTuple):
    """What a question says: its values, its vectors by their roles, their names, and other arrays."""

    values: Mapping[str, Any]
    vectors: Mapping[str, Tensor]
    names: Mapping[str, str]
    arrays: Mapping[str, Array]


class SiloCohort:
    """A cohort of one that remembers its last answers, so that local steps do not compute c_i again."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort, self.like = cohort, cohort.start()
        self._points: dict[Any, CohortGradients] = {}

    def answer(
        self, kind: str, values: Mapping[str, Any], named: Mapping[str, tuple[str, Array]], arrays: Mapping[str, Array]
    ) -> Message:
        """Answer one question; `named` has the name and the numbers of the vector in every role."""
        if kind not in HANDLERS:
            raise InputError(f"This silo knows no question {kind!r}.")
        vectors = {role: self._vector(array) for role, (_, array) in named.items()}
        query = Query(values, vectors, {role: name for role, (name, _) in named.items()}, arrays)
        with limit_threads(self.cohort.numbers):
            found = HANDLERS[kind](self, query)
        return Message("answer", {}, {k: v.numpy(force=True) if isinstance(v, Tensor) else v for k, v in found.items()})

    def spent(self) -> Message:
        """Answer with (ε, δ) so far: how often the silo was asked, and no fact about its rows."""
        found = self.cohort.privacy
        assert found is not None
        return Message("answer", {"epsilon": found.worst, "delta": found.delta})

    def _vector(self, array: Array) -> Tensor:
        if array.shape != self.like.shape:
            raise InputError(f"A vector of shape {array.shape} came for a model of {self.like.numel()} parameters.")
        return torch.from_numpy(array).to(self.like)

    def _at(self, query: Query, role: str = "at") -> CohortGradients:
        """Return losses and gradients at a point, computed once."""
        asked = (query.names[role], *read_batch(query.values))
        if asked not in self._points:
            while len(self._points) >= POINTS:
                self._points.pop(next(iter(self._points)))
            self._points[asked] = self.cohort.gradients(query.vectors[role], *asked[1:])
        return self._points[asked]

    def gradients(self, query: Query) -> Found:
        """L_i, c_i and the bounds on their rounding errors."""
        at = self._at(query, "x")
        loss, gradient = at.rounding
        return {"c": at.each()[0], "scalars": np.array([at.losses[0], loss[0], gradient[0]])}

    def losses(self, query: Query) -> Found:
        """L_i."""
        return {"scalars": self.cohort.losses(query.vectors["x"], *read_batch(query.values))}

    def local_updates(self, query: Query) -> Found:
        """d_i = x − u_{i,J}, and the snapshot's where one is asked for."""
        plan = local_plan(query.values.get("plan"))
        at = self._at(query) if "at" in query.vectors else None
        updates = self.cohort.local_updates(query.vectors["x"], at, query.vectors.get("correction"), plan)
        snapshot = {} if plan.snapshot is None else {"snapshot": updates.snapshot(ONE)}
        return {"d": updates.sum(ONE), **snapshot}

    def proximal_steps(self, query: Query) -> Found:
        """d_i, the solution of the local model."""
        limit, steepest = int(number(query.values, "limit")), number(query.values, "steepest")
        plan = ProximalPlan(number(query.values, "pull"), query.vectors["metric"], limit, steepest)
        return {"d": self.cohort.proximal_steps(self._at(query), query.vectors["correction"], plan).sum(ONE)}

    def curvature(self, query: Query) -> Found:
        """VᵀH_iV, Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""
        V = query.arrays.get("V")
        if V is None or V.ndim != 2 or V.shape[0] != self.like.numel() or not 1 <= V.shape[1] <= DIRECTIONS:
            raise InputError("The directions V do not fit this model.")
        columns = torch.from_numpy(np.array(V)).to(self.like)
        seen = self._at(query).restriction(columns, ONE, query.vectors["metric"])
        return {"curvature": seen.curvature, "slopes": seen.slopes[0], "scalars": seen.sizes}

    def diagonal(self, query: Query) -> Found:
        """Diag ∇²f_i."""
        return {"diagonal": self._at(query).diagonal(ONE)}

    def project(self, query: Query) -> Found:
        """⟨c_i, v⟩, for the way v between two points that were asked about, and no other direction."""
        at, v = self._at(query), query.vectors["direction"]
        if not any(torch.equal(v, p.x - at.x) or torch.equal(v, at.x - p.x) for p in self._points.values()):
            raise InputError("This silo shows its gradient along the way that x has gone, and nowhere else.")
        return {"scalars": at.project(v)}

    def evaluate(self, query: Query) -> Found:
        """A loss, an accuracy and a count."""
        scores = self.cohort.evaluate(query.vectors["x"], str(query.values.get("split", "train")))
        return {"scalars": np.array([scores.loss[0], scores.accuracy[0], float(scores.counts[0])])}


Found = dict[str, Tensor | Array]
HANDLERS: dict[str, Callable[[SiloCohort, Query], Found]] = {
    messages.GRADIENTS: SiloCohort.gradients,
    messages.LOSSES: SiloCohort.losses,
    messages.UPDATES: SiloCohort.local_updates,
    messages.PROXIMAL: SiloCohort.proximal_steps,
    messages.CURVATURE: SiloCohort.curvature,
    messages.DIAGONAL: SiloCohort.diagonal,
    messages.EVALUATE: SiloCohort.evaluate,
    messages.PROJECT: SiloCohort.project,
}
