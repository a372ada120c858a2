"""`Weighted`: a loss whose samples count by weights, or by what they were exposed to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.models.arrays import Array
from scaffpd.models.losses import Accuracy, Loss, Softmax, Targets, concordance


class Weighted(Loss):
    """Weighted loss w ℓ(z, y), the weights in the last column of the targets.

    Weights are divided by their mean over a client's samples, so that f_i = Σ w_j ℓ_j / Σ w_j: only
    their proportions count, and only among the samples of one client. Weights that are whole
    numbers are counts of equal samples, for the evidence (`totals`).

    A count y with exposure E (hours, persons) has the mean E e^z: its loss is E ℓ(z, y/E), a weight
    again, which is not divided by its mean, because a row of twice the exposure says twice as much.

    Args:
        inner: ℓ.
        weighted: whether y ends with a column of weights.
        exposed: whether y ends with a column of exposures, before that of the weights.
    """

    def __init__(self, inner: Loss, weighted: bool = True, exposed: bool = False) -> None:
        self.inner = inner
        self.columns = weighted, exposed
        self.name = inner.name
        self.curvature = inner.curvature
        self.concordance = concordance(inner)
        self.fastest = inner.fastest
        self.quadratic = inner.quadratic
        self.heaviest = float("inf")
        self.totals: list[float] = []  # of every client, the number of samples

    @property
    def even(self) -> bool:
        return self.inner.even

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Encode targets of ℓ, exposures > 0 and weights >= 0, not all of them zero."""
        weighted, exposed = self.columns
        arrays: list[Array] = []
        weights = []
        totals = []
        for name, y in zip(names, labels, strict=True):
            own = y.shape[1] - weighted - exposed if y.ndim == 2 else 0
            if own < 1:
                more = ["exposure"] * exposed + ["weight"] * weighted
                raise InputError(
                    "target-columns-missing",
                    f"Client {name!r} needs these columns of y: target, {', '.join(more)}.",
                )
            target = y[:, 0] if own == 1 else y[:, :own]
            w = row_weights(name, y[:, -1]) if weighted else np.ones(len(y))
            if exposed:
                E = np.asarray(y[:, own], dtype=np.float64)
                if not np.all((E > 0) & np.isfinite(E)):
                    raise InputError(
                        "exposure-not-positive",
                        f"Client {name!r} has an exposure that is not positive.",
                    )
                target = np.column_stack([np.asarray(target, dtype=np.float64) / E, E])
                w = w * E
            arrays.append(target)
            weights.append(w)
            raw = np.asarray(y[:, -1], dtype=np.float64) if weighted else np.ones(len(y))
            totals.append(float(raw.sum()) if np.all(raw == np.round(raw)) else float(len(y)))
        targets = self.inner.encode(arrays, names, classes)
        self.heaviest = max(float(w.max()) for w in weights)
        self.totals = totals
        pairs = zip(targets.arrays, weights, strict=True)
        both: list[Array] = [np.column_stack([np.asarray(y, np.float64), w]) for y, w in pairs]
        return Targets(both, targets.outputs)

    def accuracy(self, outputs: int) -> Accuracy:
        """Add one product; absolute errors grow with the weights."""
        value, offset, slope, jump = self.inner.accuracy(outputs)
        more = 1.01 * max(self.heaviest, 1.0)
        return Accuracy(value + 2, offset * more, slope + 2, jump * more)

    def steepness(self, y: Tensor) -> Tensor:
        own, w = self._split(y)
        return w[..., 0].double() * self.inner.steepness(own)

    def widening(self, z: Tensor, y: Tensor) -> Tensor | float:
        return self.inner.widening(z, self._split(y)[0])

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        own, w = self._split(y)
        return w[..., 0] * self.inner.value(z, own)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        own, w = self._split(y)
        return self.inner.residual(z, own).mul_(w)

    def dense(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        own, w = self._split(y)
        return torch.cat([self.inner.dense(own, outputs, dtype), w.to(dtype)], -1)

    def bend(self, z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        own, w = self._split(y)
        return w[..., None] * self.inner.bend(z, own, t)

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
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


def row_weights(name: str, column: Array) -> NDArray[np.float64]:
    """Return a client's weights, over their mean."""
    w = np.asarray(column, dtype=np.float64)
    total = float(w.sum())
    if not np.all(w >= 0) or not np.isfinite(total):
        raise InputError(
            "weight-out-of-range", f"Client {name!r} has a weight that is negative or not finite."
        )
    if total == 0:
        raise InputError(
            "client-without-weight",
            f"Client {name!r} has weights of zero only: leave it out, or give its rows weights.",
        )
    return w * (len(w) / total)
