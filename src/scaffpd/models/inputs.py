r"""Reading the clients' arrays: every refusal is one sentence that names the client and, if any, the column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.table import Selection
from scaffpd.errors import InputError

Array = NDArray[np.generic]


def read_features(name: str, x: Any) -> Array | Selection:
    """A client's features as finite numbers, samples first; rows of a table are left where they are."""
    if isinstance(x, Selection):
        if 0 in x.shape:
            raise InputError(f"Client {name!r} has no {'samples' if len(x) == 0 else 'features'}.")
        return x
    raw = _numbers(name, "features", x)
    if raw.ndim < 2:
        hint = " (X.reshape(-1, 1) makes one column)" if raw.ndim == 1 else ""
        raise InputError(f"Client {name!r} has features of shape {raw.shape}; samples × features are expected{hint}.")
    if raw.shape[0] == 0:
        raise InputError(f"Client {name!r} has no samples.")
    if raw.size == 0:
        raise InputError(f"Client {name!r} has no features.")
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        place = _first(~np.isfinite(raw))
        raise InputError(
            f"Client {name!r} has a NaN or infinite value in {_column(x, place)} (first in row {place[0]})."
        )
    return raw


def read_labels(name: str, y: Any, rows: int) -> Array:
    """A client's labels or targets as finite numbers, one entry or row for each of its samples."""
    raw = _numbers(name, "labels", y)
    if raw.ndim == 0 or len(raw) != rows:
        found = "a single label" if raw.ndim == 0 else f"{len(raw)} labels"
        raise InputError(f"Client {name!r} has {rows} samples but {found}.")
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        row = _first(~np.isfinite(raw))[0]
        raise InputError(f"Client {name!r} has a NaN or infinite label in row {row}.")
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
        raise InputError(f"Client {names[client]!r} has a NaN or infinite {what} in column {column}.")
    raise InputError(
        f"Client {names[client]!r} has a {what} beyond ±{limit:.0e} in column {column}, "
        f"too large for {str(values.dtype).removeprefix('torch.')}: scale the data first."
    )


def _numbers(name: str, what: str, x: Any) -> Array:
    raw = _array(name, what, x)
    if raw.dtype.kind == "O":
        return _from_objects(name, what, x, raw)
    if raw.dtype.kind not in "fiub":
        example = f", such as {raw.flat[0]!s}" if raw.size else ""
        raise InputError(f"Client {name!r} has {what} that are not numbers{example}: encode them first.")
    return raw.astype(np.float64) if raw.dtype.itemsize > 8 else raw


def _array(name: str, what: str, x: Any) -> Array:
    if isinstance(x, Tensor):
        if x.layout != torch.strided:
            raise InputError(f"Client {name!r} has sparse {what}; dense ones are expected: call .to_dense().")
        x = x.detach().cpu()
        return np.asarray((x.float() if x.dtype == torch.bfloat16 else x).numpy())
    if hasattr(x, "toarray"):
        raise InputError(f"Client {name!r} has sparse {what}; dense ones are expected: call .toarray().")
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise InputError(f"Client {name!r} has masked {what}: fill the missing values first.")
    try:
        return np.asarray(x)
    except (TypeError, ValueError):
        raise InputError(
            f"Client {name!r} has {what} that do not form an array; has every sample as many values?"
        ) from None


def _from_objects(name: str, what: str, x: Any, raw: Array) -> Array:
    """An array of Python objects as float64; missing values (None, pandas.NA) become NaN, strings are refused."""
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
                f"Client {name!r} has {what} that are not numbers, such as {_brief(value)}{where}: encode them first."
            ) from None
    return numbers


def _first(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(int(mask.argmax()), mask.shape))


def _column(x: Any, place: tuple[int, ...]) -> str:
    """The column of an entry: by its label in a data frame, by its number elsewhere."""
    labels = getattr(x, "columns", None)
    if labels is not None and len(place) == 2:
        return f"column {labels[place[1]]!s}"
    return f"column {place[1]}" if len(place) == 2 else f"feature {place[1:]}"


def _brief(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
