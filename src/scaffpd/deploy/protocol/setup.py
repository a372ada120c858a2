"""What a coordinator and its silos agree on before training: features, model, algorithm. Its name is its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from scaffpd.errors import InputError, unknown
from scaffpd.federation import Vector
from scaffpd.models import Linear

FORMATS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Setup:
    """One agreement.

    Attributes:
        algorithm: its name, which decides what may be asked.
        model: the loss and its settings; or the name under which silos know a network.
        schema: columns, categories and labels (see `tabular`).
        mean: of every encoded column; empty where nothing is standardised.
        deviation: likewise.
        numbers: "float32" or "float64", for the model's numbers; empty leaves it to the model.
        secure: how vectors are masked (see `masks`); empty where they are not.
        privacy: ε, δ, clips and noise (see `Private`); empty where there is none.
    """

    algorithm: str
    model: Mapping[str, Any]
    schema: Mapping[str, Any]
    mean: Vector = field(repr=False)
    deviation: Vector = field(repr=False)
    numbers: str = ""
    secure: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """As JSON has it; floats come back exactly."""
        values = {
            "algorithm": self.algorithm, "model": dict(self.model), "schema": dict(self.schema),
            "mean": np.asarray(self.mean).tolist(), "deviation": np.asarray(self.deviation).tolist(),
            "numbers": self.numbers,
        }  # fmt: skip
        more = {"secure": dict(self.secure), "privacy": dict(self.privacy)}
        return values | {name: part for name, part in more.items() if part}

    @cached_property
    def digest(self) -> str:
        """The name of this agreement, the same on both sides."""
        return hashlib.sha256(json.dumps(self.values(), sort_keys=True).encode()).hexdigest()[:32]

    @classmethod
    def of(cls, values: Any) -> Setup:
        """What `values` made, checked."""
        try:
            algorithm, model, schema = values["algorithm"], values["model"], values["schema"]
            mean, deviation = (np.array(values[name], dtype=np.float64) for name in ("mean", "deviation"))
            numbers, *more = values["numbers"], values.get("secure", {}), values.get("privacy", {})
        except (KeyError, TypeError, ValueError):
            raise InputError("The coordinator's agreement is not complete.") from None
        if not (isinstance(algorithm, str) and all(isinstance(part, dict) for part in (model, schema, *more))):
            raise InputError("The coordinator's agreement is not complete.")
        if mean.ndim != 1 or mean.shape != deviation.shape or not (np.isfinite(mean).all() and (deviation > 0).all()):
            raise InputError("The coordinator's means and deviations cannot be used.")
        if numbers not in ("", *FORMATS):
            raise unknown("number format", numbers, FORMATS)
        return cls(algorithm, model, schema, mean, deviation, numbers, *more)

    @property
    def dtype(self) -> torch.dtype | None:
        """The number format of the model, or `None` for the model's own choice."""
        return FORMATS.get(self.numbers)


PRIVACY = ("epsilon", "delta", "noise", "loss_noise", "clip", "loss_clip", "radius", "smoothness")
LINEAR = ("loss", "l2", "intercept", "classes")


def linear(model: Mapping[str, Any]) -> Linear:
    """The linear model that an agreement describes."""
    given = {name: value for name, value in model.items() if name != "kind"}
    for name in given:
        if name not in LINEAR:
            raise unknown("model setting", name, LINEAR)
    return Linear(**given)
