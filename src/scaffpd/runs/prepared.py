"""What a run is about, ready to train on: clients, held-out rows, model, and how to speak of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.cohort import Cohort
from scaffpd.deploy.protocol.setup import FORMATS, Setup
from scaffpd.federation import ClientScores, Vector
from scaffpd.models import Linear
from scaffpd.runs.config import RunConfig
from scaffpd.tabular.schema import CLASSIFICATION

Pair = tuple[Any, Any]
LOSS = {"logistic": "logistic regression", "softmax": "softmax regression", "squared": "least squares"}


@dataclass(frozen=True)
class Prepared:
    """Clients and a model.

    Attributes:
        names: the clients.
        train: their (X, y).
        test: the same of held-out rows; empty where there are none.
        model: `Linear` or `Module`.
        task: "classification" or "regression".
        labels: of the classes, in the order of their numbers.
        about: the data in a phrase.
        word: what a client is.
        unit: what one unit of the target is in units of the data.
        centre: what zero is, likewise.
        schema: what was agreed about columns, of tables.
        mean: of encoded columns.
        deviation: likewise.
        remarks: what was left out, and why.
        fills: what stands in for missing values, by client and column.
    """

    names: tuple[str, ...]
    train: list[Pair] = field(repr=False)
    test: list[Pair] = field(repr=False)
    model: Any
    task: str
    labels: tuple[str, ...]
    about: str
    word: str = "client"
    unit: float = 1.0
    centre: float = 0.0
    schema: Mapping[str, Any] | None = field(default=None, repr=False)
    mean: Vector = field(default_factory=lambda: np.empty(0), repr=False)
    deviation: Vector = field(default_factory=lambda: np.empty(0), repr=False)
    remarks: tuple[str, ...] = ()
    fills: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict, repr=False)

    @property
    def measure(self) -> str:
        """What a client is scored by."""
        return "accuracy" if self.task == CLASSIFICATION else "rmse"

    @property
    def split(self) -> str:
        """The rows that clients are scored on."""
        return "test" if self.test else "train"

    def cohort(self, config: RunConfig, model: Any = None) -> Cohort:
        """The clients in this process; `model` takes the place of the run's own, as a private one does."""
        numbers = FORMATS.get(config.training.numbers)
        device, test = config.training.device, self.test or None
        chosen = self.model if model is None else model
        return Cohort(self.train, chosen, self.names, device=device, dtype=numbers, test=test)

    def scores(self, cohort: Cohort, x: Any, split: str) -> ClientScores:
        """Losses without the regulariser; for regression, the root of the mean squared error in the data's units."""
        found, l2 = cohort.evaluate(x, split), float(self.model.l2)
        point = torch.as_tensor(x).double()
        found = replace(found, loss=found.loss - l2 / 2 * float(point @ point))
        if self.task == CLASSIFICATION:
            return found
        return replace(found, accuracy=self.unit * np.sqrt(np.maximum(found.loss, 0.0)))

    def setup(self, algorithm: str) -> Setup | None:
        """What the parameters expect of a row; `None` where the rows are no table."""
        if self.schema is None or not isinstance(self.model, Linear):
            return None
        model = {"kind": "linear", **{name: getattr(self.model, name) for name in ("loss", "l2", "intercept")}}
        if self.model.classes is not None:
            model["classes"] = self.model.classes
        return Setup(algorithm, model, self.schema, self.mean, self.deviation)

    def metadata(self) -> dict[str, str]:
        """What a network's parameters expect of a row of a table, and what its outputs mean."""
        about = {"unit": repr(self.unit), "centre": repr(self.centre), "labels": json.dumps(self.labels)}
        if self.schema is None:
            return about
        scale = {"mean": json.dumps(self.mean.tolist()), "deviation": json.dumps(self.deviation.tolist())}
        return about | {"schema": json.dumps(self.schema), **scale}

    def in_units(self, x: NDArray[Any]) -> NDArray[Any]:
        """The parameters for the target as it is in the file."""
        if self.task == CLASSIFICATION or not isinstance(self.model, Linear):
            return x
        scaled = x * self.unit
        if self.model.intercept:
            scaled[-1] += self.centre
        return scaled


def described(model: Any) -> str:
    """A model in a phrase."""
    if isinstance(model, Linear):
        return f"{LOSS[model.loss]}, l2 = {model.l2:g}{'' if model.intercept else ', no intercept'}"
    return repr(model)
