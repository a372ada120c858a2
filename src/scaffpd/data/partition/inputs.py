"""Checks that the partitions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, real

Indices = NDArray[np.int64]


def label_array(owner: str, name: str, values: ArrayLike) -> NDArray[Any]:
    """`values` as a vector with at least one entry, or a sentence."""
    labels = np.asarray(values)
    if labels.ndim != 1 or not len(labels):
        raise InputError(f"{owner} needs {name} as a vector with one entry per sample, got shape {labels.shape}.")
    return labels


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
