r"""`Linear`: f_i(x) = (1/m_i) Σ_j ℓ(⟨a_j, x⟩, y_j) + (l2/2)‖x‖², as a user describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, count, real
from scaffpd.models.glm import LinearOracle, Rows
from scaffpd.models.losses import loss_named
from scaffpd.models.oracle import Arrays, Oracle
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.ragged import Ragged


class Coefficients(NamedTuple):
    """A linear model's parameters in their natural shapes."""

    weights: NDArray[np.float64]
    intercept: NDArray[np.float64] | None


@dataclass(frozen=True)
class Linear:
    """A linear model, described; bind it to data with a `Cohort`.

    Args:
        loss: "squared" (one or several target columns), "logistic" (labels 0/1) or "softmax" (labels 0, 1, …).
        l2: the regulariser (l2/2)‖x‖² on *all* of x, the intercept included; it is what the certificate rests on.
        intercept: append a constant feature 1 (as the last one).
        classes: the number of softmax outputs, where the clients at hand might not have seen every class.
    """

    loss: str = "squared"
    l2: float = 1e-3
    intercept: bool = False
    classes: int | None = None

    def __post_init__(self) -> None:
        loss_named(self.loss)
        if not 0 <= real("Linear", "l2", self.l2) < float("inf"):
            raise InputError(f"Linear needs l2 >= 0 and finite, got {self.l2!r}.")
        if self.classes is not None and count("Linear", "classes", self.classes) < 2:
            raise InputError(f"Linear needs classes >= 2, got {self.classes}.")

    def oracle(
        self, features: Arrays, labels: Arrays, names: list[str], device: torch.device, dtype: torch.dtype | None
    ) -> Oracle:
        """Bind to the clients' checked features and raw labels."""
        loss, dtype = loss_named(self.loss), dtype or torch.float64
        targets = loss.encode(labels, names, self.classes)
        if self.intercept:
            features = [np.hstack([a, np.ones((len(a), 1))]) for a in features]
        A = torch.as_tensor(np.concatenate(features), dtype=dtype, device=device)
        y = torch.as_tensor(np.concatenate(targets.arrays), device=device)
        y = y.to(dtype) if y.is_floating_point() else y
        layout = Ragged([len(a) for a in features], device, dtype)
        kind = QuadraticOracle if self.loss == "squared" else LinearOracle
        return kind(Rows(A, y, layout, 1 / layout.sizes[layout.owner].to(dtype)), loss, float(self.l2), targets.outputs)

    def reshape(self, x: NDArray[np.float64] | Tensor, features: int) -> Coefficients:
        """A flat x as (features × outputs) weights and, with `intercept`, the outputs' offsets."""
        flat = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
        rows = features + self.intercept
        if flat.ndim != 1 or flat.size == 0 or flat.size % rows:
            raise InputError(f"x has shape {flat.shape}, which does not fit {features} features.")
        table = flat.reshape(rows, -1)
        return Coefficients(table[:features], table[features] if self.intercept else None)
