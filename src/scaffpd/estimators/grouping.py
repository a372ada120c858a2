"""Who has which row: the `clients` that a user hands to `fit`, read and checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.partition import is_missing
from scaffpd.errors import InputError

ALONE = "all"  # the name of the one client where nobody was named


class Grouping(NamedTuple):
    """The clients in sorted order, and which of them every row belongs to."""

    clients: NDArray[Any]
    owner: NDArray[np.intp]

    @property
    def names(self) -> list[str]:
        """The clients' names as text."""
        return [str(client) for client in self.clients.tolist()]

    def split(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """One part of `values` per client, its rows in their order."""
        ends = np.cumsum(np.bincount(self.owner, minlength=len(self.clients)))
        return np.split(values[np.argsort(self.owner, kind="stable")], ends[:-1])

    def means(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """The mean of one number per row, over every client's rows."""
        return np.array([part.mean() for part in self.split(values)])

    def mapping(self, values: Iterable[float]) -> dict[Any, float]:
        """Client → its number."""
        return {client: float(value) for client, value in zip(self.clients.tolist(), values, strict=True)}


def grouping(clients: Any, rows: int) -> Grouping:
    """Read names, numbers or categories, one per row; `None` is one client that has all rows."""
    if clients is None:
        return Grouping(np.array([ALONE]), np.zeros(rows, dtype=np.intp))
    values = _values(clients)
    if len(values) != rows:
        raise InputError(f"There are {rows} rows but {len(values)} values in clients: give one client per row.")
    try:
        first = {value: row for row, value in reversed(list(enumerate(values)))}
    except TypeError:
        raise InputError("clients must be names or numbers, one per row.") from None
    if gone := [row for value, row in first.items() if is_missing(value)]:
        raise InputError(
            f"clients has a missing value (row {min(gone)}): every row needs a client, or is to be left out."
        )
    try:
        ordered = sorted(first)
    except TypeError:  # names and numbers together
        ordered = sorted(first, key=str)
    number = {value: i for i, value in enumerate(ordered)}
    return Grouping(_array(ordered), np.array([number[value] for value in values], dtype=np.intp))


def _values(clients: Any) -> list[Any]:
    """The entries as plain Python values: NumPy would make the name 'nan' of a missing one among names."""
    if isinstance(clients, str | bytes):
        raise InputError(f"clients must have one value per row, got {clients!r}: pass the column itself.")
    array = clients if isinstance(clients, np.ndarray) else getattr(clients, "to_numpy", lambda: None)()
    if array is not None:
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1:
            raise InputError(f"clients must have one value per row, got an array of shape {array.shape}.")
        return list(array.tolist())
    if not isinstance(clients, Iterable):
        raise InputError(f"clients must have one value per row, got {clients!r}.")
    return [value.item() if isinstance(value, np.generic) else value for value in clients]


def _array(values: list[Any]) -> NDArray[Any]:
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        return np.array(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
