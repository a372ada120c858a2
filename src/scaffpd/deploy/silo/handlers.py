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
from scaffpd.deploy import questions
from scaffpd.deploy.messages import Array, Message, local_plan, number, read_batch
from scaffpd.errors import InputError
from scaffpd.federation import ProximalPlan
from scaffpd.models.numerics import limit_threads


class NamedVector(NamedTuple):
    """A vector, and the name that the coordinator has given it."""

    name: str
    value: Tensor


Vectors = Mapping[str, NamedVector]
Handler = Callable[["SiloCohort", Mapping[str, Any], Vectors, Mapping[str, Array]], Message]
DIRECTIONS = 256  # most columns of V: with d of them the whole Hessian would leave
POINTS = 2  # how many points' answers are kept: this round's and, where a step is rejected, the last one's


class SiloCohort:
    """A cohort of one that remembers its last answers, so that local steps do not compute c_i again."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort, self.like = cohort, cohort.start()
        self._points: dict[Any, CohortGradients] = {}

    def vector(self, array: Array) -> Tensor:
        """Return a vector in the model's format, or refuse it."""
        if array.shape != self.like.shape:
            raise InputError(f"A vector of shape {array.shape} came for a model of {self.like.numel()} parameters.")
        return torch.from_numpy(array).to(self.like)

    def at(self, x: NamedVector, values: Mapping[str, Any]) -> CohortGradients:
        """Return losses and gradients at x, computed once."""
        asked = (x.name, *read_batch(values))
        if asked not in self._points:
            while len(self._points) >= POINTS:
                self._points.pop(next(iter(self._points)))
            self._points[asked] = self.cohort.gradients(x.value, *asked[1:])
        return self._points[asked]

    def has_gone(self, way: Tensor, at: CohortGradients) -> bool:
        """Tell whether `way` leads from `at` to a point that was asked about, or back."""
        return any(torch.equal(way, p.x - at.x) or torch.equal(way, at.x - p.x) for p in self._points.values())

    def spent(self) -> dict[str, float]:
        """Return (ε, δ) so far: it says how often the silo was asked, and no fact about its rows."""
        found = self.cohort.privacy
        assert found is not None
        return {"epsilon": found.worst, "delta": found.delta}

    def answer(self, kind: str, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]) -> Message:
        """Answer one question."""
        if kind not in HANDLERS:
            raise InputError(f"This silo knows no question {kind!r}.")
        with limit_threads(self.cohort.numbers):
            return HANDLERS[kind](self, values, vectors, arrays)


def gradients(work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]) -> Message:
    """L_i, c_i and the bounds on their rounding errors."""
    at = work.at(vectors["x"], values)
    loss, gradient = at.rounding
    return _answer(c=at.each()[0], scalars=np.array([at.losses[0], loss[0], gradient[0]]))


def losses(work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]) -> Message:
    """L_i."""
    return _answer(scalars=work.cohort.losses(vectors["x"].value, *read_batch(values)))


def local_updates(
    work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]
) -> Message:
    """d_i = x − u_{i,J}, and the snapshot's where one is asked for."""
    plan, at = local_plan(values.get("plan")), None
    if "at" in vectors:
        at = work.at(vectors["at"], values)
    correction = vectors["correction"].value if "correction" in vectors else None
    updates = work.cohort.local_updates(vectors["x"].value, at, correction, plan)
    one, more = np.ones(1), {}
    if plan.snapshot is not None:
        more["snapshot"] = updates.snapshot(one)
    return _answer(d=updates.sum(one), **more)


def proximal_steps(
    work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]
) -> Message:
    """d_i, the solution of the local model."""
    limit, steepest = int(number(values, "limit")), number(values, "steepest")
    plan = ProximalPlan(number(values, "pull"), vectors["metric"].value, limit, steepest)
    at = work.at(vectors["at"], values)
    return _answer(d=work.cohort.proximal_steps(at, vectors["correction"].value, plan).sum(np.ones(1)))


def curvature(work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]) -> Message:
    """VᵀH_iV, Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""
    V = arrays.get("V")
    if V is None or V.ndim != 2 or V.shape[0] != work.like.numel() or not 1 <= V.shape[1] <= DIRECTIONS:
        raise InputError("The directions V do not fit this model.")
    columns = torch.from_numpy(np.array(V)).to(work.like)
    seen = work.at(vectors["at"], values).restriction(columns, np.ones(1), vectors["metric"].value)
    return _answer(curvature=seen.curvature, slopes=seen.slopes[0], scalars=seen.sizes)


def diagonal(work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]) -> Message:
    """Diag ∇²f_i."""
    return _answer(diagonal=work.at(vectors["at"], values).diagonal(np.ones(1)))


def project(work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]) -> Message:
    """⟨c_i, v⟩, for the way v between two points that were asked about, and no other direction."""
    at, v = work.at(vectors["at"], values), vectors["direction"].value
    if not work.has_gone(v, at):
        raise InputError("This silo shows its gradient along the way that x has gone, and nowhere else.")
    return _answer(scalars=at.project(v))


def evaluate(work: SiloCohort, values: Mapping[str, Any], vectors: Vectors, arrays: Mapping[str, Array]) -> Message:
    """A loss, an accuracy and a count."""
    scores = work.cohort.evaluate(vectors["x"].value, str(values.get("split", "train")))
    return _answer(scalars=np.array([scores.loss[0], scores.accuracy[0], float(scores.counts[0])]))


HANDLERS: dict[str, Handler] = {
    questions.GRADIENTS: gradients,
    questions.LOSSES: losses,
    questions.UPDATES: local_updates,
    questions.PROXIMAL: proximal_steps,
    questions.CURVATURE: curvature,
    questions.DIAGONAL: diagonal,
    questions.EVALUATE: evaluate,
    questions.PROJECT: project,
}


def _answer(**arrays: Tensor | Array) -> Message:
    return Message("answer", {}, {k: v.numpy(force=True) if isinstance(v, Tensor) else v for k, v in arrays.items()})
