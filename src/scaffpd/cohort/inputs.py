"""Reading what a cohort is made of: clients and their names, columns, device and number format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from scaffpd.errors import InputError


def named_pairs(
    clients: Sequence[tuple[Any, Any]] | Mapping[str, tuple[Any, Any]], names: Sequence[str] | None
) -> tuple[list[tuple[Any, Any]], list[str]]:
    """The clients' (X, y) and their names."""
    if isinstance(clients, Mapping):
        if names is not None:
            raise InputError("The clients are a mapping and carry their names: leave `names` out.")
        names, clients = list(clients), list(clients.values())
    if not isinstance(clients, Iterable):
        raise InputError(f"A cohort needs a list of pairs (X, y), got {type(clients).__name__}.")
    pairs = list(clients)
    if not pairs:
        raise InputError("A cohort needs at least one client.")
    labels = [f"client-{i}" for i in range(len(pairs))] if names is None else _checked_names(names, len(pairs))
    for name, pair in zip(labels, pairs, strict=True):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"Client {name!r} must be a pair (X, y), got {type(pair).__name__}.")
    return [(x, y) for x, y in pairs], labels


def _checked_names(names: Any, n: int) -> list[str]:
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise InputError(f"names must be a list with one name per client, got {names!r}.")
    labels = [str(name) for name in names]
    if len(labels) != n:
        raise InputError(f"There are {n} clients but {len(labels)} names.")
    for name, times in Counter(labels).items():
        if times > 1:
            raise InputError(f"Two clients are named {name!r}; names must differ.")
    return labels


def agreed_columns(names: Sequence[str], features: Sequence[Any], known: list[str] | None) -> list[str] | None:
    """The column names of those clients that have any (data frames): the same names in the same order, everywhere."""
    for name, X in zip(names, features, strict=True):
        own = [str(column) for column in X.columns] if hasattr(X, "columns") else None
        known = own if known is None else known
        if own is not None and known is not None and own != known and len(own) == len(known):
            at = next(i for i, (a, b) in enumerate(zip(own, known, strict=True)) if a != b)
            raise InputError(
                f"Client {name!r} has column {own[at]!r} where others have {known[at]!r}: "
                "name and order the columns alike everywhere."
            )
    return known


def width(shape: tuple[int, ...]) -> str:
    """A sample's shape in words."""
    return "×".join(map(str, shape))


def checked_device(device: str | torch.device) -> torch.device:
    """A device that is there."""
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        reason = "there is no such kind of device" if reason.startswith("Expected one of") else reason
        raise InputError(f"Device {device!r} cannot be used here: {reason}.") from None
    return chosen


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """A floating-point type."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype must be a floating-point type such as torch.float32, got {dtype!r}.")
    return dtype
