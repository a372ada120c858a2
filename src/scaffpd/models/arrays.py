"""The clients' arrays: finite numbers, as many labels as samples, or a refusal by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.models.execution import parallel_map

Array = NDArray[np.generic]
LARGE = 2**26  # bytes that several cores look through


def read_tables(names: Sequence[str], tables: Sequence[object]) -> list[Array]:
    """Check the features of all clients, on all cores where there are many numbers."""
    found: dict[str, Array] = {}

    def work(client: tuple[str, object]) -> None:
        found[client[0]] = read_features(*client)

    clients = list(zip(names, tables, strict=True))
    if sum(getattr(x, "nbytes", 0) for x in tables) < LARGE:
        for client in clients:
            work(client)
    else:
        parallel_map(work, clients, torch.device("cpu"))
    return [found[name] for name in names]


def read_features(name: str, x: object) -> Array:
    """Check a client's features: finite numbers, samples first."""
    raw = _numbers(name, "features", x)
    if raw.ndim < 2:
        hint = " (X.reshape(-1, 1) makes one column)" if raw.ndim == 1 else ""
        raise InputError(
            "features-not-a-table",
            f"Client {name!r} has features of shape {raw.shape}; samples × features are "
            f"expected{hint}.",
        )
    if raw.shape[0] == 0:
        raise InputError("client-without-samples", f"Client {name!r} has no samples.")
    if raw.size == 0:
        raise InputError("client-without-features", f"Client {name!r} has no features.")
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        place = _first(~np.isfinite(raw))
        raise InputError(
            "not-finite",
            f"Client {name!r} has a NaN or infinite value in {_column(x, place)} "
            f"(first in row {place[0]}).",
        )
    return raw


def read_labels(name: str, y: object, rows: int) -> Array:
    """Check a client's labels or targets: finite numbers, one entry or row for each sample."""
    raw = _numbers(name, "labels", y)
    if raw.ndim == 0 or len(raw) != rows:
        found = "a single label" if raw.ndim == 0 else f"{len(raw)} labels"
        raise InputError("labels-length", f"Client {name!r} has {rows} samples but {found}.")
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        row = _first(~np.isfinite(raw))[0]
        raise InputError("not-finite", f"Client {name!r} has a NaN or infinite label in row {row}.")
    return raw


def check_range(names: Sequence[str], sizes: Sequence[int], values: Tensor, what: str) -> None:
    """Refuse numbers whose squares would overflow in this number format."""
    limit = torch.finfo(values.dtype).max ** 0.5 * 1e-4
    low, high = torch.aminmax(values)
    if -float(low) <= limit and float(high) <= limit:
        return
    row, column = (int(k) for k in torch.nonzero(~(values.abs() <= limit))[0])
    client = names[int(np.searchsorted(np.cumsum(sizes), row, side="right"))]
    if not torch.isfinite(values[row, column]):
        raise InputError(
            "not-finite", f"Client {client!r} has a NaN or infinite {what} in column {column}."
        )
    raise InputError(
        "number-too-large",
        f"Client {client!r} has a {what} beyond ±{limit:.0e} in column {column}, "
        f"too large for {dtype_name(values.dtype)}: scale the data first.",
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numbers(name: str, what: str, x: object) -> Array:
    raw = _array(name, what, x)
    if raw.dtype.kind == "O":
        return _from_objects(name, what, x, raw)
    if raw.dtype.kind not in "fiub":
        example = f", such as {raw.flat[0]!s}" if raw.size else ""
        raise InputError(
            "not-numbers",
            f"Client {name!r} has {what} that are not numbers{example}: encode them first.",
        )
    kind = np.float64 if raw.dtype.itemsize > 8 else raw.dtype.newbyteorder("=")
    return raw.astype(kind, copy=False)  # torch has neither wider nor swapped numbers


def _array(name: str, what: str, x: object) -> Array:
    sparse = isinstance(x, Tensor) and x.layout != torch.strided
    if sparse or hasattr(x, "toarray"):
        call = ".to_dense()" if sparse else ".toarray()"
        raise InputError(
            "sparse-array",
            f"Client {name!r} has sparse {what}; dense ones are expected: call {call}.",
        )
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return np.asarray((x.float() if x.dtype == torch.bfloat16 else x).numpy())
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise InputError(
            "masked-array", f"Client {name!r} has masked {what}: fill the missing values first."
        )
    try:
        return np.asarray(x)
    except (TypeError, ValueError):
        raise InputError(
            "not-an-array",
            f"Client {name!r} has {what} that do not form an array; does every sample have as "
            "many values?",
        ) from None


def _from_objects(name: str, what: str, x: object, raw: Array) -> Array:
    """Convert Python objects to float64: None and pandas.NA become NaN, strings are refused."""
    numbers = np.empty(raw.shape)
    for place, value in np.ndenumerate(raw):
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            missing = value is None or type(value).__name__ == "NAType"
            numbers[place] = np.nan if missing else float(value)
        except (TypeError, ValueError):
            where = f" in {_column(x, place)}" if raw.ndim > 1 else ""
            text = " ".join(repr(value).split())
            brief = text if len(text) <= 40 else text[:37] + "..."
            raise InputError(
                "not-numbers",
                f"Client {name!r} has {what} that are not numbers, such as {brief}{where}: "
                "encode them first.",
            ) from None
    return numbers


def _first(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(int(mask.argmax()), mask.shape))


def _column(x: object, place: tuple[int, ...]) -> str:
    """Name the column of an entry: by its label in a data frame, else by its number."""
    if len(place) != 2:
        return f"feature {place[1:]}"
    labels = getattr(x, "columns", None)
    return f"column {place[1]}" if labels is None else f"column {labels[place[1]]!s}"
