"""Computations of clients, for all clients at once, and the reading of their arrays.

A model (`Linear`, `Module`) is a description; bound to the clients' data it becomes an `Oracle`. Client-side numerics
exist here exactly once: a simulated cohort holds an oracle over N clients, a real silo an oracle over one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.table import Selection
from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector
from scaffpd.federation.clients import Displacements, EvaluatedPoint


class StackedDisplacements:
    """The d_i of all clients as one (N, d) tensor."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i."""
        return weights @ self.vectors

    def each(self) -> Tensor:
        """Return the d_i themselves."""
        return self.vectors


def refuse_curvature(*_: object) -> NoReturn:
    """Refuse a question about second derivatives."""
    raise InputError(
        "no-second-derivatives",
        "Networks and private clients have no second derivatives to offer: use ScaffPD or another "
        "method of gradients and local steps.",
    )


class StackedPoint(StackedDisplacements):
    """Losses at one x and the c_i as one (N, d) tensor, without curvature and bounds on rounding."""

    restriction = curvatures = diagonal = diagonals = refuse_curvature

    def __init__(self, x: Tensor, losses: Tensor, gradients: Tensor) -> None:
        super().__init__(gradients)
        self.x = x
        self.losses = losses
        self.gradients = gradients

    def project(self, direction: Tensor) -> Tensor:
        """Return ⟨c_i, v⟩ per client."""
        return self.gradients @ direction

    def norms(self) -> Tensor:
        """Return ‖c_i‖² per client."""
        return torch.einsum("nd,nd->n", self.gradients, self.gradients)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Return infinite bounds."""
        unbounded = torch.full_like(self.losses, float("inf"))
        return unbounded, unbounded


def shift(at: EvaluatedPoint | Tensor | None, correction: Tensor | None) -> Tensor | float:
    """Return c − c_i, which local steps add to g_i(u): (N, d), or a single row or number if clients agree."""
    c = 0.0 if correction is None else correction
    return c if at is None else c - (at if isinstance(at, Tensor) else at.each())


class Oracle(Protocol):
    """Losses, gradients, second derivatives and local steps of N clients.

    Attributes:
        dimension: d, the length of x.
        most_rows: most rows of a client that a pass over the data reads; `None` if the work is elsewhere.
    """

    dimension: int
    most_rows: float | None

    def start(self) -> Tensor:
        """Return x⁰."""

    def contents(self) -> list[Tensor]:
        """Return all data that the losses depend on, besides the model's description."""

    def constants(self) -> Constants:
        """Return L_i and μ_i."""

    def only(self, clients: list[int]) -> Oracle:
        """Select some of the clients, in the order given."""

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> Tensor:
        """Return f_i(x) without the gradients."""

    def evaluate(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> EvaluatedPoint:
        """Evaluate all clients at x."""

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """Take all clients' local steps u ← u − η_i (g_i(u) − c_i + correction + μ(u − x)) from x.

        `at` is a point of this oracle's own `evaluate`, the c_i as an (N, d) tensor, or `None` for c_i = 0.
        """

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> Displacements:
        """Return d_i ≈ argmin ½dᵀH_i d + (β/2)‖d‖²_D − ⟨correction, d⟩ at a point of this oracle's own `evaluate`."""

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(x) and accuracy per client."""


def dtype_name(dtype: torch.dtype) -> str:
    """Name a number format without its package."""
    return str(dtype).removeprefix("torch.")


Arrays = list[NDArray[np.generic]]
Features = list[NDArray[np.generic] | Selection]  # per client: an array, or rows of a table


@dataclass(frozen=True)
class ClientData:
    """Input of a model: the clients' checked features, labels and names, the device and the number format.

    `columns` names the features, if the clients' data frames do.
    """

    features: Features
    labels: Arrays
    names: list[str]
    device: torch.device
    dtype: torch.dtype | None
    columns: list[str] | None = None


Array = NDArray[np.generic]


def read_features(name: str, x: Any) -> Array | Selection:
    """Check a client's features: finite numbers, samples first; rows of a table are not copied."""
    if isinstance(x, Selection):
        if 0 in x.shape:
            raise InputError(
                "client-read-features",
                f"Client {name!r} has no {'samples' if len(x) == 0 else 'features'}.",
            )
        return x
    raw = _numbers(name, "features", x)
    if raw.ndim < 2:
        hint = " (X.reshape(-1, 1) makes one column)" if raw.ndim == 1 else ""
        raise InputError(
            "client-features-shape",
            f"Client {name!r} has features of shape {raw.shape}; samples × features are expected{hint}.",
        )
    if raw.shape[0] == 0:
        raise InputError("client-samples", f"Client {name!r} has no samples.")
    if raw.size == 0:
        raise InputError("client-features", f"Client {name!r} has no features.")
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        place = _first(~np.isfinite(raw))
        raise InputError(
            "client-nan-infinite",
            f"Client {name!r} has a NaN or infinite value in {_column(x, place)} (first in row {place[0]}).",
        )
    return raw


def read_labels(name: str, y: Any, rows: int) -> Array:
    """Check a client's labels or targets: finite numbers, one entry or row for each of its samples."""
    raw = _numbers(name, "labels", y)
    if raw.ndim == 0 or len(raw) != rows:
        found = "a single label" if raw.ndim == 0 else f"{len(raw)} labels"
        raise InputError("client-samples", f"Client {name!r} has {rows} samples but {found}.")
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        row = _first(~np.isfinite(raw))[0]
        raise InputError(
            "client-nan-infinite", f"Client {name!r} has a NaN or infinite label in row {row}."
        )
    return raw


def check_range(names: Sequence[str], sizes: Sequence[int], values: Tensor, what: str) -> None:
    """Refuse numbers whose squares would overflow in this number format."""
    limit = torch.finfo(values.dtype).max ** 0.5 * 1e-4
    low, high = torch.aminmax(values)
    if -float(low) <= limit and float(high) <= limit:
        return
    row, column = (int(k) for k in torch.nonzero(~(values.abs() <= limit))[0])
    client = int(np.searchsorted(np.cumsum(sizes), row, side="right"))
    if not torch.isfinite(values[row, column]):
        raise InputError(
            "client-nan-infinite",
            f"Client {names[client]!r} has a NaN or infinite {what} in column {column}.",
        )
    raise InputError(
        "client-beyond-column",
        f"Client {names[client]!r} has a {what} beyond ±{limit:.0e} in column {column}, "
        f"too large for {dtype_name(values.dtype)}: scale the data first.",
    )


def _numbers(name: str, what: str, x: Any) -> Array:
    raw = _array(name, what, x)
    if raw.dtype.kind == "O":
        return _from_objects(name, what, x, raw)
    if raw.dtype.kind not in "fiub":
        example = f", such as {raw.flat[0]!s}" if raw.size else ""
        raise InputError(
            "client-numbers-encode",
            f"Client {name!r} has {what} that are not numbers{example}: encode them first.",
        )
    return raw.astype(np.float64) if raw.dtype.itemsize > 8 else raw


def _array(name: str, what: str, x: Any) -> Array:
    if isinstance(x, Tensor):
        if x.layout != torch.strided:
            raise InputError(
                "client-sparse-dense",
                f"Client {name!r} has sparse {what}; dense ones are expected: call .to_dense().",
            )
        x = x.detach().cpu()
        return np.asarray((x.float() if x.dtype == torch.bfloat16 else x).numpy())
    if hasattr(x, "toarray"):
        raise InputError(
            "client-sparse-dense",
            f"Client {name!r} has sparse {what}; dense ones are expected: call .toarray().",
        )
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise InputError(
            "client-masked-fill",
            f"Client {name!r} has masked {what}: fill the missing values first.",
        )
    try:
        return np.asarray(x)
    except (TypeError, ValueError):
        raise InputError(
            "client-form-array",
            f"Client {name!r} has {what} that do not form an array; has every sample as many values?",
        ) from None


def _from_objects(name: str, what: str, x: Any, raw: Array) -> Array:
    """Convert an array of Python objects to float64: None and pandas.NA become NaN, strings are refused."""
    numbers = np.empty(raw.shape)
    for place, value in np.ndenumerate(raw):
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            missing = value is None or type(value).__name__ == "NAType"
            numbers[place] = np.nan if missing else float(value)
        except (TypeError, ValueError):
            where = f" in {_column(x, place)}" if raw.ndim > 1 else ""
            raise InputError(
                "client-numbers-such",
                f"Client {name!r} has {what} that are not numbers, such as {_brief(value)}{where}: encode them first.",
            ) from None
    return numbers


def _first(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(int(mask.argmax()), mask.shape))


def _column(x: Any, place: tuple[int, ...]) -> str:
    """Name the column of an entry: by its label in a data frame, else by its number."""
    labels = getattr(x, "columns", None)
    if labels is not None and len(place) == 2:
        return f"column {labels[place[1]]!s}"
    return f"column {place[1]}" if len(place) == 2 else f"feature {place[1:]}"


def _brief(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
