"""A model's file and its agreement: columns, scale, model and privacy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_tensors

from scaffpd.data.tabular.agree import Schema, width
from scaffpd.data.tabular.schemas import HUGE, CheckedSchema
from scaffpd.errors import InputError, unknown
from scaffpd.federation import Vector
from scaffpd.fields import Json
from scaffpd.models import Linear
from scaffpd.models.personal import Personal, personalise
from scaffpd.tasks import named, solving
from scaffpd.tasks.base import Task

Answer = str | int | float  # a label or a number
Array = NDArray[Any]  # of parameters in the model's own format, or of labels


class AgreementValues(BaseModel):
    """JSON values of an agreement."""

    model: Json
    columns: Annotated[CheckedSchema, Field(alias="schema")]
    mean: list[Annotated[float, Field(ge=-HUGE, le=HUGE)]]
    deviation: list[Annotated[float, Field(ge=1 / HUGE, le=HUGE)]]
    privacy: Json = {}


@dataclass(frozen=True)
class Setup:
    """The agreement of a run."""

    model: Json  # the loss and its settings, or the silos' name of a network
    schema: Schema  # columns, categories and labels
    mean: Vector = field(repr=False)  # of every encoded column
    deviation: Vector = field(repr=False)  # likewise
    # ε, δ, clips and noise (see `Private`); empty without noise
    privacy: Json = field(default_factory=dict)

    @property
    def task(self) -> Task:
        if "task" in self.model:
            return named(self.model["task"])
        return solving(str(self.model.get("loss")), bool(self.schema["labels"]))

    def values(self) -> Json:
        scale = {name: getattr(self, name).tolist() for name in ("mean", "deviation")}
        values = {"model": self.model, "schema": self.schema, **scale}
        return values | ({"privacy": self.privacy} if self.privacy else {})

    @classmethod
    def of(cls, values: object) -> Setup:
        checked = AgreementValues.model_validate(values, strict=True)
        read = checked.model_dump(exclude_unset=True, by_alias=True)
        scale = {name: np.array(read[name], dtype=np.float64) for name in ("mean", "deviation")}
        schema: Schema = read["schema"]
        sides = [side for pair in schema.get("pairs", ()) for side in (pair["left"], pair["right"])]
        strangers = {side["name"] for side in sides} - {one["name"] for one in schema["columns"]}
        if strangers or {len(part) for part in scale.values()} != {width(schema)}:
            raise ValueError("pairs or a scale of other columns")
        return cls(**(read | scale))

    def with_model(self, **changes: object) -> Setup:
        """Return the agreement with changed settings of the model; `None` removes a setting."""
        settings = {**self.model, **changes}.items()
        return replace(self, model={name: one for name, one in settings if one is not None})


SHAPE = ("loss", "l2", "intercept", "classes", "entry", "periods", "exposed", "dispersion")
LINEAR = (*SHAPE, "strength", "exposure")


def linear(model: Json) -> Linear:
    for name in model:
        if name not in (*LINEAR, "kind", "task"):
            raise unknown("model setting", name, LINEAR)
    return Linear(**{name: model[name] for name in SHAPE if name in model})


def own_model(model: Json, x: Array, X: NDArray[np.float64], y: Array) -> Array:
    """Return a client's model: personal if the agreement has a strength, else the shared one."""
    strength = strength_of(model)
    return x if strength is None else personalise(x, X, y, Personal(linear(model), strength))


def finite(strengths: Sequence[float]) -> list[float | None]:
    """Return strengths as JSON has them: `None` is infinite, a shared coefficient."""
    return [own if math.isfinite(own) else None for own in strengths]


def strength_of(model: Json) -> float | str | list[float] | None:
    """Return κ of an agreement's personal models; `None` if there is one model for all."""
    found: float | str | list[float | None] | None = model.get("strength")
    if not isinstance(found, list):
        return found
    return [math.inf if own is None else own for own in found]


def model_bytes(x: Array, setup: Setup, clients: Sequence[str] = ()) -> bytes:
    """Encode parameters as safetensors, with their agreement and the owners of personal models."""
    tensors = {"x": np.ascontiguousarray(x), "mean": setup.mean, "deviation": setup.deviation}
    more = {"clients": json.dumps(list(clients))} if clients else {}
    return save_tensors(tensors, {"setup": json.dumps(setup.values()), **more})


def read_model(path: Path) -> tuple[Array, Setup]:
    try:
        with safe_open(path, framework="np") as file:
            x = file.get_tensor("x")
            setup = Setup.of(json.loads(file.metadata()["setup"]))
        _check_parameters(x, setup)
        return x, setup
    except FileNotFoundError:
        raise InputError(
            "model-missing", f"There is no file {str(path)!r}: name a run's model.safetensors."
        ) from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        raise InputError(
            "not-a-model-file",
            f"{str(path)!r} is not a model that a run has written (model.safetensors).",
        ) from None


def _check_parameters(x: Array, setup: Setup) -> None:
    """Refuse parameters, or labels, that a linear model of these columns does not have."""
    if setup.model.get("kind", "linear") != "linear":
        return
    model = linear(setup.model)
    labels = len(setup.schema["labels"])
    outputs = model.classes or 1
    size = (width(setup.schema) + len(model.beyond)) * model.outputs_each
    fits = x.ndim in (1, 2) and x.shape[-1] == size and labels in (0, max(outputs, 2))
    if not fits or not np.isfinite(x).all():
        raise ValueError("parameters or labels of another model")


def read_owners(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="np") as file:
            return [str(name) for name in json.loads(file.metadata().get("clients", "[]"))]
    except (OSError, SafetensorError, AttributeError, TypeError, ValueError):
        return []


def predict_encoded(
    X: NDArray[np.float64], x: Array, setup: Setup
) -> tuple[list[Answer], NDArray[np.float64]]:
    """Predict encoded rows by the linear model x: labels with the probability of each, or numbers.

    The array of probabilities has no columns if the loss defines none.
    """
    model = linear(setup.model)
    labels = setup.schema["labels"]
    with np.errstate(over="ignore", invalid="ignore"):
        z = model.outputs(x, X)
    if not np.isfinite(z).all():
        raise InputError(
            "numbers-too-large", "Rows and parameters, once multiplied, are too large to be added."
        )
    found, shares = setup.task.answers(model, z)
    return ([labels[int(k)] for k in found] if labels else found.tolist()), shares
