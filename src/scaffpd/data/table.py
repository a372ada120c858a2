r"""A matrix of features that is stored once, and clients that refer to its rows by number.

Features of images are large (60,000 × 50,000 numbers are 6 GB in half precision), and a comparison cuts the same rows
into many different sets of clients. So a client's X may be a `Selection`: row numbers into a `Table`, which itself may
be mapped from disk. A model that can work on a single copy on its device reads rows in pieces (`Selection.pieces`);
all others see an array (`np.asarray(selection)`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from scaffpd.data.folder import checksums
from scaffpd.errors import InputError, positive

FORMATS = (np.float16, np.float32, np.float64)
PIECE = 256 * 2**20  # bytes that are copied at a time
HASHED = 64 * 2**20  # bytes that are hashed at a time

Identity = tuple[str, float, str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Table:
    """Features a_j = scale · values_j of many samples.

    Attributes:
        values: (samples, features) in float16, float32 or float64, in memory or mapped from disk.
        scale: factor on the values; half precision holds numbers around one best.
        key: identifies this content, so that it need not be read to be compared.
    """

    values: NDArray[Any] = field(repr=False)
    scale: float = 1.0
    key: str = ""

    def __post_init__(self) -> None:
        values: Any = self.values
        if not isinstance(values, np.ndarray):
            raise InputError(
                "table-values-numpy",
                f"A table needs its values as a NumPy array, got {type(values).__name__}.",
            )
        if isinstance(values, np.ma.MaskedArray):
            if np.ma.is_masked(values):
                raise InputError(
                    "table-value-sample",
                    "A table needs a value for every sample and feature, but some of these are masked.",
                )
            object.__setattr__(self, "values", values.data)
        if values.ndim != 2 or values.dtype not in FORMATS:
            raise InputError(
                "table-samples-features",
                f"A table needs samples × features in float16, float32 or float64, got {values.dtype} of shape "
                f"{values.shape}.",
            )
        object.__setattr__(self, "scale", positive("A table", "scale", self.scale))

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        return f"Table of {rows} × {columns} in {self.values.dtype}, scale {self.scale:.3g}; clients take .rows(…)"

    def __reduce__(self) -> tuple[Any, ...]:
        """Let other processes map the same file instead of sending them its contents."""
        place = _file(self.values)
        if place is not None:
            return _mapped, (
                place[0],
                self.values.dtype.str,
                self.values.shape,
                place[1],
                self.scale,
                self.key,
            )
        return Table, (np.asarray(self.values), self.scale, self.key)

    @cached_property
    def identity(self) -> Identity:
        """Return (key, scale, dtype, shape), equal for equal tables only: hash this instead of the values.

        Without a key, "sha256:" and the SHA-256 over those of pieces of the values take its place; they are read once.
        """
        key = self.key
        if not key:
            self.check()
            size = max(1, HASHED // max(1, self.values.itemsize * self.values.shape[1]))
            sums = " ".join(checksums(self.values, range(0, len(self), size), size))
            key = f"sha256:{hashlib.sha256(sums.encode()).hexdigest()}"
        return key, self.scale, self.values.dtype.name, self.values.shape

    def check(self) -> None:
        """Refuse a file that has vanished or been cut off: reading it would kill the process."""
        place = _file(self.values)
        if place is not None:
            file, offset = place
            try:
                whole = os.path.getsize(file) >= offset + self.values.nbytes
            except OSError as error:
                raise _gone(file, error.strerror) from None
            if not whole:
                raise _gone(file, "it has been cut off")

    def rows(self, numbers: ArrayLike) -> Selection:
        """Choose samples by whole numbers from 0 on, or by a mask with True or False for each."""
        refusal = f"A table of {len(self)} rows takes row numbers from 0 to {len(self) - 1} or a mask of that length"
        chosen = _positions(numbers, len(self), refusal)
        if len(chosen) and chosen.min() < 0:
            raise InputError("rows", f"{refusal}, got {chosen.min()}.")
        return Selection(self, chosen)


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows of a table, copied only when used as an array."""

    table: Table
    numbers: NDArray[np.int64] = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Samples × features."""
        return len(self.numbers), self.table.values.shape[1]

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """Format of storage."""
        return self.table.values.dtype

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Selection]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, chosen: Any) -> Selection:
        """Choose some of the rows by a slice, a mask or positions, where -1 is the last."""
        refusal = f"A selection of {len(self)} rows takes a slice, a mask of that length or positions in it"
        if isinstance(chosen, tuple):
            raise InputError(
                "columns-chosen-take",
                f"{refusal}; its columns cannot be chosen, so take np.asarray(selection)[rows, columns].",
            )
        if isinstance(chosen, slice):
            try:
                return Selection(self.table, self.numbers[chosen])
            except (TypeError, ValueError):
                raise InputError("getitem", f"{refusal}, got {chosen}.") from None
        positions = np.reshape(chosen, 1) if np.ndim(chosen) == 0 else chosen
        return Selection(self.table, self.numbers[_positions(positions, len(self), refusal)])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return a copy of the features, scale included: float64 by default."""
        self.table.check()
        values = self.table.values[self.numbers].astype(dtype or np.float64)
        return values if self.table.scale == 1 else values * values.dtype.type(self.table.scale)

    def pieces(self) -> list[NDArray[np.int64]]:
        """Cut the row numbers so that the stored values of a piece fit into `PIECE` bytes."""
        row = self.table.values.itemsize * self.shape[1]
        size = max(1, PIECE // max(1, row))
        return [self.numbers[k : k + size] for k in range(0, len(self), size)]


def _positions(given: Any, length: int, refusal: str) -> NDArray[np.int64]:
    """Return a mask, or whole numbers from -length to length - 1, as numbers; refuse anything else."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("positions", f"{refusal}, got {type(given).__name__}.") from None
    if np.ma.is_masked(given):
        raise InputError("some-masked", f"{refusal}, got some that are masked.")
    if array.dtype == np.bool_ and array.shape == (length,):
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        kind = "a mask" if array.dtype == np.bool_ else str(array.dtype)
        raise InputError("shape-positions", f"{refusal}, got {kind} of shape {array.shape}.")
    for number in (array.min(), array.max()) if array.size else ():
        if not -length <= int(number) < length:
            raise InputError("positions", f"{refusal}, got {number}.")
    return array.astype(np.int64)


def _file(values: Any) -> tuple[str, int] | None:
    """Return file and offset if an array is the whole map of a file, row by row and unchanged; else `None`."""
    whole = isinstance(values, np.memmap) and isinstance(values.base, mmap)
    if not whole or values.filename is None or values.mode == "c" or not values.flags.c_contiguous:
        return None
    return str(values.filename), int(values.offset)


def _gone(file: str, why: str | None) -> InputError:
    return InputError(
        "file-table-values",
        f"The file {file!r} of a table's values cannot be read any more: {why or 'it is gone'}.",
    )


def _mapped(
    file: str, dtype: str, shape: tuple[int, ...], offset: int, scale: float, key: str
) -> Table:
    try:
        return Table(np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=shape), scale, key)
    except OSError as error:
        raise _gone(file, error.strerror) from None
    except ValueError:
        raise _gone(file, "it has been cut off") from None
