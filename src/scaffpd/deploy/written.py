"""Questions written as messages and read back, strictly: every value has a declared type.

An algorithm declares the questions it asks, and a silo answers no others: one that has agreed to
federated averaging sends no gradient. `Scores` (a loss, an accuracy, a count) are part of every
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, fields
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch import Tensor

from scaffpd.deploy.messages import Array, Json, JsonMapping
from scaffpd.errors import InputError
from scaffpd.federation import Key, LocalPlan, ProximalPlan
from scaffpd.federation.questions import GradientsAt, Question, Reply

reader_of = cache(TypeAdapter)


def read_values(kinds: JsonMapping, values: Any, sentence: str) -> Json:
    """Read values of these types strictly; refuse anything else, naming the value."""
    read = {}
    for name, kind in kinds.items():
        try:
            read[name] = reader_of(kind).validate_python(values.get(name), strict=True)
        except (ValidationError, AttributeError):
            raise InputError("value-unreadable", f"{sentence.rstrip('.')} ({name}).") from None
    return read


def names_of(values: JsonMapping, key: str) -> list[str]:
    """Read a list of names."""
    names: list[str] = read_values(
        {key: list[str]}, values, "The question does not name what it is about."
    )[key]
    return names


def number(values: JsonMapping, name: str) -> float:
    """Read a finite number."""
    return float(
        read_values({name: FiniteFloat}, values, f"The question needs a number {name}.")[name]
    )


BATCH: Json = {"batch_size": PositiveInt | None, "key": list[NonNegativeInt]}
PLAN: Json = {
    "steps": PositiveInt,
    "rate": FiniteFloat | None,
    "scale": FiniteFloat,
    "prox": FiniteFloat,
}
PLAN |= BATCH | {"snapshot": PositiveInt | None}
types_of = cache(get_type_hints)  # the types of a question's fields
DIRECTIONS = 256  # most columns of a matrix: d of them would reveal the whole Hessian


def question_parts(question: Question | ProximalPlan) -> tuple[Json, dict[str, Array]]:
    """Split a question into JSON values, and vectors and matrices by their roles."""
    values: Json = {}
    arrays: dict[str, Array] = {}
    for item in fields(question):
        part = getattr(question, item.name)
        if isinstance(part, GradientsAt):
            arrays[item.name] = part.x.detach().numpy()
            values |= {"batch_size": part.batch_size, "key": [int(k) for k in part.key]}
        elif isinstance(part, LocalPlan):
            values[item.name] = asdict(part) | {"key": [int(k) for k in part.key]}
        elif isinstance(part, ProximalPlan):
            more, vectors = question_parts(part)
            values |= more
            arrays |= vectors
        elif isinstance(part, Tensor):
            arrays[item.name] = part.detach().numpy()
        elif part is not None:
            values[item.name] = [int(k) for k in part] if isinstance(part, tuple) else part
    return values, arrays


class WrittenQuestion(NamedTuple):
    """A question as written in a message: values, vectors by their roles, and matrices."""

    values: JsonMapping
    vectors: Mapping[str, Tensor]
    arrays: Mapping[str, Array]

    def read(self, kind: Any, point: Callable[[str], GradientsAt]) -> Any:
        """Read what `question_parts` wrote; `point` returns earlier points by their roles."""
        if kind is GradientsAt:
            return point("x")
        hints = types_of(kind)
        return kind(
            **{item.name: self._field(item, hints[item.name], point) for item in fields(kind)}
        )

    def _field(self, item: Field[Any], hint: Any, point: Callable[[str], GradientsAt]) -> Any:
        name = item.name
        kinds = set(get_args(hint)) or {hint}
        if GradientsAt in kinds:
            return point(name) if name in self.vectors or NoneType not in kinds else None
        if hint is LocalPlan:
            return self.plan()
        if hint is ProximalPlan:
            return self.read(hint, point)
        if "matrix" in item.metadata:
            return self._matrix(name)
        if Tensor in kinds:
            return None if NoneType in kinds and name not in self.vectors else self.vector(name)
        if name in BATCH:
            return self.batch()[list(BATCH).index(name)]
        if hint in (float, int):
            return hint(number(self.values, name))
        if hint is bool and name not in self.values:
            return item.default
        return read_values({name: hint}, self.values, "The question is not complete.")[name]

    def vector(self, name: str) -> Tensor:
        """Return the vector of a role."""
        if name not in self.vectors:
            raise InputError("vector-missing", f"The question lacks the vector {name}.")
        return self.vectors[name]

    def _matrix(self, name: str) -> Tensor:
        """Return a matrix with few columns, each as long as the vectors."""
        V = self.arrays.get(name)
        like = next(iter(self.vectors.values()), None)
        if V is None or like is None:
            raise InputError("matrix-missing", f"The question lacks the matrix {name}.")
        if V.ndim != 2 or V.shape[0] != len(like) or not 1 <= V.shape[1] <= DIRECTIONS:
            raise InputError(
                "directions-of-other-model", f"The directions {name} do not fit this model."
            )
        return torch.from_numpy(np.array(V)).to(like)

    def batch(self) -> tuple[int | None, Key]:
        """Return the size and the key of a minibatch."""
        batch = read_values(
            BATCH, {"key": [0], **self.values}, "The question's batch size or key cannot be used."
        )
        return batch["batch_size"], tuple(batch["key"])

    def plan(self) -> LocalPlan:
        """Return the plan of local steps."""
        sentence = "The plan of local steps is not complete, or cannot be carried out."
        plan = read_values(PLAN, self.values.get("plan"), sentence)
        if (plan["snapshot"] or 1) > plan["steps"]:
            raise InputError("plan-unusable", sentence)
        return LocalPlan(**{**plan, "key": tuple(plan["key"])})


def reply_arrays(question: Question, reply: Reply, like: Tensor) -> dict[str, Array]:
    """Write one client's answer: vectors in the model's format, everything else in float64.

    Vectors with shared noise are left out, as they appear in sums only.
    """
    shapes = question.shapes(len(like))
    arrays = dict[str, Array]()
    shared = {part for part, vectors in reply.vectors.items() if vectors.addends is not None}
    for part in (*question.vectors, *shapes):  # slopes accompany curvatures
        if part in shapes.keys() - shared and part not in arrays:
            hidden = part in question.vectors
            found = (
                reply.vectors[part].sum(like.new_ones(1)) if hidden else reply.numbers[part]()[0]
            )
            arrays[part] = (
                found if found.shape == like.shape and hidden else found.double()
            ).numpy(force=True)
    if question.scalars:
        arrays["scalars"] = np.array([float(reply.numbers[name]()[0]) for name in question.scalars])
    return arrays
