"""Rows of an estimator and whose they are: clients in any kind of column, weights, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import _check_sample_weight

from scaffpd.data.silos import is_missing
from scaffpd.errors import InputError

ALONE = "all"  # the name of the one client if nobody was named
Array = NDArray[np.float64]
Labels = NDArray[np.generic]
Data: TypeAlias = Any  # what scikit-learn takes: arrays, lists, sparse matrices, data frames
Client: TypeAlias = str | int | float | bool | object  # a name or a number


Kind = TypeVar("Kind", bound=np.generic)


class Grouping(NamedTuple):
    """The clients in sorted order, and which of them every row belongs to."""

    clients: Labels
    owner: NDArray[np.intp]

    @property
    def names(self) -> list[str]:
        return [str(client) for client in self.clients.tolist()]

    def split(self, values: NDArray[Kind]) -> list[NDArray[Kind]]:
        """Split `values` by client, rows in their order."""
        ends = np.cumsum(np.bincount(self.owner, minlength=len(self.clients)))
        return np.split(values[np.argsort(self.owner, kind="stable")], ends[:-1])

    def means(self, values: Array, weights: Array | None = None) -> Array:
        """Return the (weighted) mean of one number per row, over every client's rows."""
        parts = self.split(np.ones(len(values)) if weights is None else weights)
        return np.array(
            [np.average(part, weights=w) for part, w in zip(self.split(values), parts, strict=True)]
        )

    def only(self, rows: NDArray[np.bool_]) -> Grouping:
        return Grouping(self.clients, self.owner[rows])

    def mapping(self, values: Iterable[float]) -> dict[Client, float]:
        return {
            client: float(value)
            for client, value in zip(self.clients.tolist(), values, strict=True)
        }


def grouping(clients: Data, rows: int) -> Grouping:
    """Read names, numbers or categories, one per row; `None` is one client that has all rows."""
    if clients is None:
        return Grouping(np.array([ALONE]), np.zeros(rows, dtype=np.intp))
    values = _values(clients)
    if len(values) != rows:
        raise InputError(
            "clients-length",
            f"There are {rows} rows but {len(values)} values in clients: give one client per row.",
        )
    try:
        first = {value: row for row, value in reversed(list(enumerate(values)))}
    except TypeError:  # lists, the rows of a matrix
        raise InputError(
            "clients-not-a-column", "clients must be names or numbers, one per row."
        ) from None
    missing = [row for value, row in first.items() if is_missing(value)]
    if missing:
        raise InputError(
            "client-missing",
            f"clients has a missing value (row {min(missing)}): every row needs a client.",
        )
    try:
        ordered: list[Client] = sorted(first)  # type: ignore[type-var]
    except TypeError:  # names and numbers together
        ordered = sorted(first, key=str)
    number = {value: i for i, value in enumerate(ordered)}
    return Grouping(_array(ordered), np.array([number[value] for value in values], dtype=np.intp))


def _values(clients: Data) -> list[Client]:
    """Return plain Python values: NumPy would make the name 'nan' of a missing one among names."""
    for method in ("to_pylist", "to_list", "tolist"):  # of pyarrow, of data frames, of NumPy
        if hasattr(clients, method):
            return list(getattr(clients, method)())
    if isinstance(clients, str | bytes) or not isinstance(clients, Iterable):
        raise InputError(
            "clients-not-a-column",
            f"clients must have one value per row, got {clients!r}: pass the column itself.",
        )
    return [value.item() if isinstance(value, np.generic) else value for value in clients]


def _array(values: list[Client]) -> Labels:
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        return np.array(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def check_columns(X: Data) -> None:
    """Refuse a data frame with columns of categories, whose codes would be read as numbers."""
    for name, kind in zip(getattr(X, "columns", ()), getattr(X, "dtypes", ()), strict=False):
        if str(kind).lower().startswith(("str", "category", "enum", "categorical", "date")):
            raise InputError(
                "column-not-numbers",
                f"Column {str(name)!r} holds {kind} values, not numbers: encode it first, as by "
                "make_column_transformer((OneHotEncoder(handle_unknown='ignore'), "
                f"[{str(name)!r}]), remainder='passthrough').",
            )


def row_weights(sample_weight: Data, X: Data, group: Grouping) -> Array | None:
    """Return a weight for every row, or `None` where rows count alike; a client's weights must not
    all be zero.
    """
    if sample_weight is None:
        return None
    weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if np.any(weights < 0):
        raise InputError(
            "weight-out-of-range",
            f"sample_weight has the value {weights.min():g}; weights of rows are >= 0.",
        )
    for name, own in zip(group.names, group.split(weights), strict=True):
        if not own.sum() > 0:
            raise InputError(
                "client-without-weight",
                f"All rows of client {name!r} have weight zero: leave them out, or give them "
                "weights.",
            )
    return weights


def owners(estimator: str, clients: Data, rows: int) -> Grouping:
    """Return who owns which row; warn where nobody says so."""
    if clients is None:
        warnings.warn(
            f"{estimator}.fit got no clients, so all rows are one client's: pass "
            "clients=, one name per row. In cross_val_score and searches groups= does not reach "
            "fit: set_config(enable_metadata_routing=True) and pass params={'clients': ...}.",
            UserWarning,
            stacklevel=4,
        )
    return grouping(clients, rows)
