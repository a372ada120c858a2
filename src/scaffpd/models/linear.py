"""`Linear`: f_i(x) = (1/m_i) Σ_j ℓ(⟨a_j, x⟩, y_j) + (l2/2)‖x‖², as users describe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.table import Selection
from scaffpd.errors import InputError, count, real, unknown
from scaffpd.machine import free_memory
from scaffpd.models.glm import LinearOracle
from scaffpd.models.layout import Ragged, StackedSamples
from scaffpd.models.losses import (
    Logistic,
    Poisson,
    Softmax,
    Squared,
    Weighted,
    check_loss,
    loss_named,
)
from scaffpd.models.oracle import ClientData, Features, Oracle, check_range, dtype_name
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.tables import MappedMatrix, numbered
from scaffpd.models.wide import WideOracle
from scaffpd.numbers import format_bytes

VECTORS = 6  # x, c, d, the last two points, and the buffers of an update; as many per client
SHARE = 0.8  # share of free memory for copies of rows that can also be read from disk


def needed(features: int, stored: int, sizes: Sequence[int], outputs: int, number: int) -> int:
    """Count the bytes of one copy of the data, of the clients' eigenvectors (and one workspace), and of vectors.

    Args:
        features: d.
        stored: bytes of a number in the table.
        sizes: the clients' numbers of samples.
        outputs: columns of x.
        number: bytes of a number of x.
    """
    samples = sum(sizes)
    squares = sum(m * m for m in sizes) + 3 * max(sizes) ** 2
    vectors = VECTORS * outputs * ((1 + len(sizes)) * features + samples)
    return stored * samples * features + number * (squares + vectors)


def check_memory(
    one: Selection,
    sizes: Sequence[int],
    outputs: int,
    device: torch.device,
    dtype: torch.dtype,
    testing: bool,
) -> None:
    """Refuse a problem that does not fit into memory and suggest one that does; test rows need the data alone."""
    d = one.shape[1]
    stored = one.dtype.itemsize
    number = dtype.itemsize

    def need(features: int, stored: int) -> int:
        if testing:
            return stored * sum(sizes) * features + 2 * number * outputs * sum(sizes)
        return needed(features, stored, sizes, outputs, number)

    have = free_memory(device)
    want = need(d, stored)
    if want <= have:
        return
    fitting = int(0.95 * d * (have - need(0, stored)) / (want - need(0, stored)))
    advice = f"about {fitting:,} features would fit" if fitting > 0 else "take fewer samples"
    if stored > 2 and need(d, 2) <= have:
        advice = "a table in float16 would fit"
    raise InputError(
        "samples-features-outputs",
        f"{sum(sizes):,} samples × {d:,} features × {outputs} outputs in {len(sizes)} clients need "
        f"{format_bytes(want)} on {device}, of which {format_bytes(have)} are free: {advice}.",
    )


def fits(
    features: Sequence[NDArray[Any] | Selection],
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Return whether rows of tables can be copied, `width` columns each; on a GPU they have to be."""
    if not any(isinstance(x, Selection) for x in features):
        return True
    rows = sum(map(len, features))
    have = free_memory(device)
    want = rows * width * dtype.itemsize
    if device.type == "cpu":
        return want <= SHARE * have
    if want > have:
        raise InputError(
            "model-copies-features",
            f"This model copies its {rows:,} × {width:,} features to {device}, {format_bytes(want)} in "
            f"{dtype_name(dtype)}, and {format_bytes(have)} are free there: on device='cpu' they are read from where "
            "they are stored; squared loss without intercept, on wide rows of one table, needs them in the table's own "
            "number format only.",
        )
    return True


def check_compressed_memory(sizes: Sequence[int], width: int, dtype: torch.dtype) -> None:
    """Refuse squared loss on rows that stay on disk if the rows of all clients' triangles do not fit."""
    want = 2 * sum(min(size, width) for size in sizes) * width * dtype.itemsize
    if want > (have := free_memory(torch.device("cpu"))):
        raise InputError(
            "squared-loss-keeps",
            f"Squared loss keeps up to {width:,} rows of {width:,} numbers for each of {len(sizes):,} clients, twice: "
            f"{format_bytes(want)} in {dtype_name(dtype)}, and {format_bytes(have)} are free. Take fewer features or "
            "clients.",
        )


def stack(
    features: Sequence[NDArray[Any] | Selection],
    intercept: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Stack the rows of all clients in one tensor, rows of tables copied piece by piece; an intercept is a last 1."""
    width = features[0].shape[1]
    A = torch.empty(sum(map(len, features)), width + intercept, dtype=dtype, device=device)
    if intercept:
        A[:, width:] = 1
    if device.type == "cpu" and not any(isinstance(x, Selection) for x in features):
        np.concatenate(features, out=A.numpy()[:, :width], casting="unsafe")
        return A
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    start = 0
    for x in features:
        pieces = [len(piece) for piece in x.pieces()] if isinstance(x, Selection) else [len(x)]
        for k, size in zip(np.cumsum([0, *pieces[:-1]]), pieces, strict=True):
            values = x[int(k) : int(k) + size]
            if isinstance(values, Selection) or not values.flags.writeable:
                values = np.array(values, dtype=kind)
            A[start : start + size, :width] = torch.from_numpy(values)  # converted on the way
            start += size
    return A


DTYPES = (torch.float32, torch.float64)
PRECISIONS = ("full", "half")


class Coefficients(NamedTuple):
    """Parameters of a linear model in their natural shapes."""

    weights: NDArray[np.float64]
    intercept: NDArray[np.float64] | None


@dataclass(frozen=True)
class Linear:
    """Description of a linear model; bind it to data with a `Cohort`.

    Args:
        loss: "squared" (one or several target columns), "logistic" (labels 0/1), "softmax" (labels 0, 1, …) or
            "poisson" (counts, with mean log(1 + e^z)).
        l2: the regulariser (l2/2)‖x‖² on *all* of x, the intercept included; the certificate rests on it.
        intercept: append a constant feature 1 (as the last one).
        classes: the number of softmax outputs, if the clients at hand might not have seen every class; with squared
            loss, labels 0, 1, … become one-hot targets of `classes` columns, and models are scored by accuracy.
        local_precision: "full", or "half": on a GPU, local steps on features stored in half precision then take eleven
            binary digits of the correction, at half the cost. Losses, gradients and certificates do not change.
        weighted: the last column of y is the weight of a row among its client's rows: f_i is a weighted mean.
    """

    loss: str = "squared"
    l2: float = 1e-3
    intercept: bool = False
    classes: int | None = None
    local_precision: str = "full"
    weighted: bool = False

    def __post_init__(self) -> None:
        loss_named(self.loss)
        if not 0 <= real("Linear", "l2", self.l2) < float("inf"):
            raise InputError(
                "linear-l2-finite", f"Linear needs l2 >= 0 and finite, got {self.l2!r}."
            )
        if not isinstance(self.intercept, bool):
            raise InputError(
                "linear-true-false",
                f"Linear needs True or False for intercept, got {self.intercept!r}.",
            )
        if self.local_precision not in PRECISIONS:
            raise unknown("local_precision", self.local_precision, PRECISIONS)
        if self.classes is not None and count("Linear", "classes", self.classes) < 2:
            raise InputError("linear-classes", f"Linear needs classes >= 2, got {self.classes}.")
        if self.classes is not None and self.loss in ("logistic", "poisson"):
            have = "logistic loss has two" if self.loss == "logistic" else "counts have none"
            raise InputError(
                "linear-takes-classes",
                f"Linear takes classes with loss='softmax' or 'squared'; {have}.",
            )

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' checked data; x takes its length from `like` if given."""
        features = data.features
        names = data.names
        device = data.device
        loss = loss_named(self.loss)
        dtype = data.dtype or torch.float64
        if dtype not in DTYPES:
            raise InputError(
                "linear-computes-torch",
                f"Linear computes in torch.float32 or torch.float64, not in {dtype}.",
            )
        if features[0].ndim != 2:
            raise InputError(
                "linear-takes-samples",
                f"Linear takes samples × features, but samples of shape {features[0].shape[1:]} were given: "
                "flatten them, or use Module.",
            )
        width = features[0].shape[1] + self.intercept
        sizes = [len(a) for a in features]
        classes = (
            self.classes if like is None or self.loss != "softmax" else like.dimension // width
        )
        if self.weighted:
            loss = Weighted(loss)
        targets = loss.encode(data.labels, names, classes)
        y = torch.as_tensor(np.concatenate(targets.arrays), device=device)
        y = y.to(dtype) if y.is_floating_point() else y
        check_range(names, sizes, y.to(dtype), "target")
        if type(loss) not in (Squared, Logistic, Softmax, Poisson, Weighted):
            check_loss(loss, y, targets.outputs)
        if (wide := self._wide(features, like)) is not None:
            check_memory(wide[0], sizes, targets.outputs, device, dtype, testing=like is not None)
            rough = self.local_precision == "half"
            return WideOracle(
                wide, y, loss, float(self.l2), targets.outputs, names, device, dtype, rough
            )
        A = self._matrix(features, names, device, dtype, testing=like is not None)
        layout = Ragged(sizes, device, dtype)
        rows = StackedSamples(cast(Tensor, A), y, layout, 1 / layout.sizes[layout.owner].to(dtype))
        kind = QuadraticOracle if isinstance(loss, Squared) else LinearOracle
        return kind(rows, loss, float(self.l2), targets.outputs, names)

    def _matrix(
        self,
        features: Features,
        names: list[str],
        device: torch.device,
        dtype: torch.dtype,
        testing: bool,
    ) -> Tensor | MappedMatrix:
        """Return the checked rows of all clients: a copy, or a reader for tables that are too large for one."""
        width = features[0].shape[1] + self.intercept
        sizes = [len(x) for x in features]
        if fits(features, width, device, dtype):
            A = stack(features, self.intercept, device, dtype)
            check_range(names, sizes, A, "feature")
            return A
        if self.loss == "squared" and not testing:
            check_compressed_memory(sizes, width, dtype)
        large = MappedMatrix(*numbered(features), self.intercept, dtype)
        large.check(names, sizes)
        return large

    def _wide(self, features: Features, like: Oracle | None) -> list[Selection] | None:
        """Return the rows of one table if squared loss can work on them in place at no larger cost than on a copy.

        Held-out rows, however many, are only multiplied.
        """
        rows = [x for x in features if isinstance(x, Selection)]
        one = len(rows) == len(features) and len({id(x.table) for x in rows}) == 1
        if not one or self.loss != "squared" or self.intercept or self.weighted:
            return None
        cheap = sum(len(x) ** 2 for x in rows) <= sum(len(x) for x in rows) * rows[0].shape[1]
        return rows if cheap or isinstance(like, WideOracle) else None

    def reshape(self, x: NDArray[np.float64] | Tensor, features: int) -> Coefficients:
        """Reshape a flat x to (features × outputs) weights and, with `intercept`, the outputs' offsets."""
        flat = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
        rows = count("Linear.reshape", "features", features) + self.intercept
        if flat.ndim != 1 or flat.size == 0 or flat.size % rows:
            raise InputError(
                "shape-fit-features",
                f"x has shape {flat.shape}, which does not fit {features} features.",
            )
        table = flat.reshape(rows, -1)
        return Coefficients(table[:features], table[features] if self.intercept else None)

    def predict(
        self, x: NDArray[np.float64] | Tensor, rows: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the expected value of every row: ⟨a_j, x⟩, or the mean of a count."""
        return loss_named(self.loss).mean(self.outputs(x, rows)[:, 0])

    def outputs(
        self, x: NDArray[np.float64] | Tensor, rows: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return ⟨a_j, x⟩ of every row, (rows × outputs)."""
        weights, intercept = self.reshape(x, rows.shape[1])
        z: NDArray[np.float64] = rows @ weights + (0.0 if intercept is None else intercept)
        return z
