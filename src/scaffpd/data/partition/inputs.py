"""Checks that the partitions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, real

Indices = NDArray[np.int64]


def label_array(owner: str, name: str, values: ArrayLike) -> NDArray[Any]:
    """`values` as a vector with at least one entry, or a sentence; None and masked entries are kept as None."""
    try:
        labels = np.asarray(values)
        if isinstance(values, np.ma.MaskedArray):
            labels = np.asarray(values.tolist(), dtype=object) if np.ma.is_masked(values) else labels
        elif labels.dtype.kind in "US" and not hasattr(values, "dtype"):  # NumPy makes text of ["a", 1] and ["a", nan]
            labels = np.asarray(values, dtype=labels.dtype if _all_text(values) else object)
    except (TypeError, ValueError):
        raise InputError(f"{owner} needs {name} as a vector with one entry per sample, got something ragged.") from None
    if labels.ndim != 1 or not len(labels):
        raise InputError(f"{owner} needs {name} as a vector with one entry per sample, got shape {labels.shape}.")
    return labels


def whole_labels(owner: str, name: str, values: ArrayLike, what: str = "label") -> NDArray[Any]:
    """`values` as a vector without missing entries that can be sorted, or a sentence."""
    labels = label_array(owner, name, values)
    for i in np.flatnonzero(_missing(labels))[:1]:
        raise InputError(f"{owner} needs a {what} for every sample, but sample {i} has none.")
    if labels.dtype.kind == "O":
        try:
            np.sort(labels)
        except (TypeError, ValueError):
            raise InputError(f"{owner} needs {what}s of one type that can be sorted, got a mixture.") from None
    return labels


def sample_count(owner: str, X: Any) -> int:
    """How many samples `X` has, without a copy of them; refused where it is no array of samples."""
    try:
        shape = tuple(X.shape) if hasattr(X, "shape") else np.asarray(X).shape
    except (TypeError, ValueError):
        raise InputError(f"{owner} needs X as an array with one entry per sample, got something ragged.") from None
    if not shape:
        raise InputError(f"{owner} needs X as an array with one entry per sample, got {type(X).__name__}.")
    return int(shape[0])


def _all_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values) or all(isinstance(value, bytes) for value in values)


def _missing(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Which entries are None, NaN, or no date."""
    if labels.dtype.kind == "O":
        return np.array([_is_missing(value) for value in labels.tolist()], dtype=bool)
    if labels.dtype.kind in "fcmM":
        return np.asarray(labels != labels, dtype=bool)
    return np.zeros(len(labels), dtype=bool)


def _is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA is neither
        return True
    except ValueError:
        return False


def client_rows(owner: str, parts: Sequence[ArrayLike], samples: int | None = None) -> list[Indices]:
    """The row numbers of each client, or a sentence that names the first client whose rows cannot be."""
    if not len(parts):
        raise InputError(f"{owner} needs the row numbers of at least one client, got none.")
    checked = []
    for i, part in enumerate(parts):
        rows = np.asarray(part)
        if not rows.size:
            raise InputError(f"{owner} needs samples at every client, but client {i} has none.")
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise InputError(f"{owner} needs whole row numbers, but client {i} has {rows.dtype} of shape {rows.shape}.")
        if rows.min() < 0 or (samples is not None and rows.max() >= samples):
            most = f"below {samples}" if samples is not None else "of at least 0"
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise InputError(f"{owner} needs row numbers {most}, but client {i} has {wrong}.")
        checked.append(rows.astype(np.int64))
    return checked


def share(owner: str, name: str, value: float) -> float:
    """`value` as a float in [0, 1], or a sentence."""
    number = real(owner, name, value)
    if not 0 <= number <= 1:
        raise InputError(f"{owner} needs 0 <= {name} <= 1, got {value!r}.")
    return number
