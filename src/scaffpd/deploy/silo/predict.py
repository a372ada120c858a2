"""A trained model on a silo's own rows: what it predicts stays at the site."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from scaffpd.deploy.protocol.setup import Setup, linear
from scaffpd.deploy.silo.reading import Dataset
from scaffpd.errors import InputError


@dataclass(frozen=True)
class Predictions:
    """One row for every row of the silo that has a target, in the file's order.

    Attributes:
        targets: what is true.
        predicted: labels, or numbers for regression.
        probability: of the predicted label; NaN where the loss knows none.
        held: whether the row was held out.
    """

    targets: list[Any]
    predicted: list[Any]
    probability: NDArray[np.float64]
    held: NDArray[np.bool_]


def read_model(path: Path) -> tuple[NDArray[Any], Setup]:
    """X and the agreement that it belongs to, from a run's model.safetensors."""
    try:
        with safe_open(path, framework="np") as file:
            return file.get_tensor("x"), Setup.of(json.loads(file.metadata()["setup"]))
    except FileNotFoundError:
        raise InputError(f"There is no file {str(path)!r}: name a run's model.safetensors.") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        raise InputError(f"{str(path)!r} is not a model that a run has written (model.safetensors).") from None


def predict(data: Dataset, x: NDArray[Any], setup: Setup) -> Predictions:
    """The linear model x on all rows of a silo."""
    if setup.model.get("kind", "linear") != "linear" or data.cohort is not None:
        raise InputError("Only linear models predict from tables; a network's own code has to be used for it.")
    ready = data.encoded(dict(setup.schema), setup.mean, setup.deviation)
    X: NDArray[np.float64] = np.empty((len(data.held), *ready.train[0].shape[1:]))
    X[~data.held] = ready.train[0]
    if ready.test is not None:
        X[data.held] = ready.test[0]
    predicted, probability = answers(X, x, setup)
    labels, places = data.target.labels, data.target.values
    truth = [labels[k] for k in places] if labels else places.tolist()
    return Predictions(truth, predicted, probability, data.held)


def answers(X: NDArray[np.float64], x: NDArray[Any], setup: Setup) -> tuple[list[Any], NDArray[np.float64]]:
    """What the linear model x says of encoded rows, and the probability of that; NaN where the loss knows none."""
    model, labels = linear(setup.model), setup.schema["labels"]
    z = model.outputs(x, X)
    if not labels:
        return z[:, 0].tolist(), np.full(len(z), np.nan)
    if model.loss == "logistic":
        z = np.concatenate([np.zeros_like(z), z], axis=1)
    shares = np.exp(z - z.max(1, keepdims=True))
    probability = (shares / shares.sum(1, keepdims=True)).max(1) if model.loss != "squared" else np.full(len(z), np.nan)
    return [labels[k] for k in z.argmax(1)], probability
