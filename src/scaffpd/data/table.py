r"""A matrix of features that is stored once, and clients that hold numbers of its rows.

Features of images are large (60,000 × 50,000 numbers are 6 GB in half precision), and a comparison cuts the same rows
into many different sets of clients. So a client's X may be a `Selection`: row numbers into a `Table`, which itself may
be mapped from disk. A model that can work on a single copy on its device asks for rows in pieces (`Selection.into`);
everything else sees an array (`np.asarray(selection)`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from scaffpd.errors import InputError

FORMATS = (np.float16, np.float32, np.float64)
PIECE = 256 * 2**20  # bytes that are copied at a time


@dataclass(frozen=True, eq=False)
class Table:
    """Features a_j = scale · values_j of many samples.

    Attributes:
        values: (samples, features) in float16, float32 or float64, in memory or mapped from disk.
        scale: what they are multiplied by; half precision holds numbers around one best.
        key: tells this content from any other, so that nobody has to read it all to find out.
    """

    values: NDArray[Any] = field(repr=False)
    scale: float = 1.0
    key: str = ""

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.dtype not in FORMATS:
            raise InputError(
                f"A table needs samples × features in float16, float32 or float64, got {self.values.dtype} of shape "
                f"{self.values.shape}."
            )

    def __len__(self) -> int:
        return len(self.values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes map the same file instead of being sent its contents."""
        values: Any = self.values
        base: Any = getattr(values, "base", None)
        if isinstance(values, np.memmap) and isinstance(base, mmap):  # the whole map, not a part of it
            place = (str(values.filename), values.dtype.str, values.shape, int(values.offset))
            return _mapped, (*place, self.scale, self.key)
        return Table, (np.asarray(values), self.scale, self.key)

    @cached_property
    def identity(self) -> str:
        """Tells this content from any other."""
        return repr((self.key, self.scale, str(self.values.dtype), self.values.shape))

    def rows(self, numbers: ArrayLike) -> Selection:
        """Some of the samples, by number."""
        chosen = np.asarray(numbers, dtype=np.int64)
        if chosen.ndim != 1 or (len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self)):
            raise InputError(f"A table of {len(self)} rows takes row numbers from 0 to {len(self) - 1}.")
        return Selection(self, chosen)


@dataclass(frozen=True, eq=False)
class Selection:
    """Some rows of a table, not copied before somebody asks for them as an array."""

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
        """The format of storage."""
        return self.table.values.dtype

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, chosen: Any) -> Selection:
        """The same for some of the rows: a slice, a mask or positions."""
        return Selection(self.table, np.atleast_1d(self.numbers[chosen]))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy of the features, scale included: float64 unless another format is asked for."""
        values = self.table.values[self.numbers].astype(dtype or np.float64)
        return values if self.table.scale == 1 else values * values.dtype.type(self.table.scale)

    def pieces(self) -> list[NDArray[np.int64]]:
        """The row numbers cut so that the stored values of a piece fit into `PIECE` bytes."""
        row = self.table.values.itemsize * self.shape[1]
        size = max(1, PIECE // row)
        return [self.numbers[k : k + size] for k in range(0, len(self), size)]


def _mapped(file: str, dtype: str, shape: tuple[int, ...], offset: int, scale: float, key: str) -> Table:
    return Table(np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=shape), scale, key)
