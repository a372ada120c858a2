"""One scale for everybody out of the silos' sums; nobody sees anybody else's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scaffpd.errors import InputError
from scaffpd.tabular.columns import Matrix
from scaffpd.tabular.schema import Json, width


def mean_of(totals: Mapping[str, Any], schema: Json | None = None) -> Matrix:
    """The mean of every encoded column, from the silos' n and Σx; zero where nobody has a value."""
    n, sums = _added(totals, "sum", None if schema is None else width(schema))
    return np.divide(sums, n, out=np.zeros_like(sums), where=n > 0)


def deviation_of(totals: Mapping[str, Any], mean: Matrix) -> Matrix:
    """The standard deviation of every encoded column, from n and Σ(x − mean)²; one where it is constant."""
    n, squares = _added(totals, "squares", len(mean))
    deviation = np.sqrt(np.divide(squares, n, out=np.zeros_like(squares), where=n > 0))
    constant = deviation <= 1e-12 * np.maximum(1.0, np.abs(mean))
    return np.where(constant, 1.0, deviation)


def _added(totals: Mapping[str, Any], what: str, length: int | None) -> tuple[Matrix, Matrix]:
    """Sums over silos, in the order of their names so that whoever answers first changes nothing."""
    if not totals:
        raise InputError("Sums of at least one silo are needed.")
    counts, sums = [], []
    for silo in sorted(totals):
        n, values = (_numbers(silo, totals[silo], key, length) for key in ("n", what))
        length = len(n)
        if len(values) != length or (n < 0).any() or (n != np.round(n)).any() or (n > 2**53).any():
            raise _useless(silo, "its counts are no counts")
        if (values[n == 0] != 0).any() or (what == "squares" and (values < 0).any()):
            raise _useless(silo, f"{what!r} and 'n' do not fit each other")
        counts.append(n)
        sums.append(values)
    with np.errstate(over="ignore"):
        total = np.sum(sums, axis=0)
    if not np.isfinite(total).all():
        raise InputError(f"The silos' numbers are too large to be added (encoded column {int(total.argmax())}).")
    return np.sum(counts, axis=0), total


def _numbers(silo: str, given: Any, key: str, length: int | None) -> Matrix:
    values = given.get(key) if isinstance(given, Mapping) else None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "fiu":
        raise _useless(silo, f"{key!r} is no list of numbers")
    if length is not None and len(values) != length:
        raise _useless(silo, f"{key!r} has {len(values)} numbers, and {length} are expected")
    if not np.isfinite(values).all():
        raise _useless(silo, f"{key!r} has a number that is not finite")
    return values.astype(np.float64)


def _useless(silo: str, why: str) -> InputError:
    return InputError(f"Silo {silo!r} sent sums that cannot be used: {why}.")
