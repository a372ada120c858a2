"""Local plans and minibatches as JSON has them: written by the coordinator, checked by the silo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from scaffpd.errors import InputError
from scaffpd.federation import LocalPlan


def local_plan(values: Any) -> LocalPlan:
    """A plan as JSON has it, checked; `plan_values` makes it."""
    names = {item.name for item in fields(LocalPlan)}
    if not isinstance(values, dict) or set(values) != names:
        raise InputError("The plan of local steps is not complete.")
    numbers = {name: number(values, name) for name in ("steps", "scale", "prox")}
    rate = None if values["rate"] is None else number(values, "rate")
    snapshot = None if values["snapshot"] is None else int(number(values, "snapshot"))
    batch, key = read_batch(values)
    steps = int(numbers["steps"])
    if steps < 1 or (snapshot is not None and not 1 <= snapshot <= steps):
        raise InputError("The plan of local steps cannot be carried out.")
    return LocalPlan(steps, rate, numbers["scale"], batch, key, numbers["prox"], snapshot)


def plan_values(plan: LocalPlan) -> dict[str, Any]:
    """A plan as JSON has it."""
    values = {item.name: getattr(plan, item.name) for item in fields(plan)}
    return {**values, "key": [int(k) for k in plan.key]}


def batch_values(batch_size: int | None, key: tuple[int, ...]) -> dict[str, Any]:
    """A minibatch as JSON has it."""
    return {"batch_size": batch_size, "key": [int(k) for k in key]}


def read_batch(values: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The minibatch's size and key, checked."""
    batch, key = values.get("batch_size"), values.get("key", [0])
    whole = isinstance(key, list) and all(isinstance(k, int) and not isinstance(k, bool) for k in key)
    if not whole or not (batch is None or (isinstance(batch, int) and batch >= 1)):
        raise InputError("The question's batch size or key cannot be used.")
    return batch, tuple(key)


def names_of(values: Any) -> list[str]:
    """A list of names, checked."""
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        raise InputError("The question does not name what it is about.")
    return values


def number(values: Mapping[str, Any], name: str) -> float:
    """A finite number of a question."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise InputError(f"The question needs a number {name}.")
    return float(value)
