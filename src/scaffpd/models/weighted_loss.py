"""`Weighted`: a loss whose samples count by weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.models.arrays import Array
from scaffpd.models.losses import Accuracy, Loss, Softmax, Targets


class Weighted(Loss):
    """Weighted loss w ℓ(z, y), the weights in the last column of the targets.

    Weights are divided by their mean over a client's samples, so that f_i = Σ w_j ℓ_j / Σ w_j: only
    their proportions count, and only among the samples of one client.

    Args:
        inner: ℓ.
    """

    def __init__(self, inner: Loss) -> None:
        self.inner = inner
        self.name = inner.name
        self.curvature = inner.curvature
        self.quadratic = inner.quadratic
        self.heaviest = float("inf")

    @property
    def uneven(self) -> bool:
        """Return True."""
        return True

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Encode targets of ℓ and weights >= 0, not all of them zero."""
        arrays = []
        weights = []
        for name, y in zip(names, labels, strict=True):
            if y.ndim != 2 or y.shape[1] < 2:
                raise InputError(
                    "weights-missing",
                    f"Client {name!r} needs two columns where samples are weighted: target and "
                    "weight.",
                )
            w = np.asarray(y[:, -1], dtype=np.float64)
            total = float(w.sum())
            if not np.all(w >= 0) or not np.isfinite(total):
                raise InputError(
                    "weight-range", f"Client {name!r} has a weight that is negative or not finite."
                )
            if total == 0:
                raise InputError(
                    "weights-zero",
                    f"Client {name!r} has weights of zero only: leave it out, or weight its rows.",
                )
            arrays.append(y[:, 0] if y.shape[1] == 2 else y[:, :-1])
            weights.append(w * (len(w) / total))
        targets = self.inner.encode(arrays, names, classes)
        self.heaviest = max(float(w.max()) for w in weights)
        pairs = zip(targets.arrays, weights, strict=True)
        both: list[Array] = [np.column_stack([np.asarray(y, np.float64), w]) for y, w in pairs]
        return Targets(both, targets.outputs)

    def accuracy(self, outputs: int) -> Accuracy:
        """Add one product; absolute errors grow with the weights."""
        value, offset, slope, jump = self.inner.accuracy(outputs)
        more = 1.01 * max(self.heaviest, 1.0)
        return Accuracy(value + 2, offset * more, slope + 2, jump * more)

    def steepness(self, y: Tensor) -> Tensor:
        """Return the bound of ℓ, times w."""
        own, w = self._split(y)
        return w[..., 0].double() * self.inner.steepness(own)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return w ℓ."""
        own, w = self._split(y)
        return w[..., 0] * self.inner.value(z, own)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        """Return w ∂ℓ/∂z."""
        own, w = self._split(y)
        return self.inner.residual(z, own).mul_(w)

    def dense(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Return dense targets with w as the last column."""
        own, w = self._split(y)
        return torch.cat([self.inner.dense(own, outputs, dtype), w.to(dtype)], -1)

    def bend(self, z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """Return w ∂²ℓ/∂z² t."""
        own, w = self._split(y)
        return w[..., None] * self.inner.bend(z, own, t)

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        """Return w times the diagonal."""
        own, w = self._split(y)
        return w * self.inner.bends(z, own)

    def correct(self, z: Tensor, y: Tensor) -> Tensor | None:
        """Delegate to ℓ: all samples count equally."""
        return self.inner.correct(z, self._split(y)[0])

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Split targets and weights; one column of softmax becomes whole numbers again."""
        own = y[..., :-1]
        labels = isinstance(self.inner, Softmax) and own.shape[-1] == 1
        return own.long() if labels else own, y[..., -1:]
