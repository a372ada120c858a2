"""Reading what callers hand to an objective: every refusal is one sentence that names the objective and the argument."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, positive

Vector = NDArray[np.float64]


def read_vector(owner: str, name: str, values: ArrayLike) -> Vector:
    """`values` as a float64 vector with one finite number per client."""
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{owner} needs numbers in {name}, got {values!r}.") from None
    if vector.ndim != 1 or vector.size == 0:
        raise InputError(
            f"{owner} needs one number per client in {name}, got an array of shape {vector.shape}."
        )
    finite = np.isfinite(vector)
    if not finite.all():
        first = int(np.argmin(finite))
        raise InputError(f"{owner} needs finite {name}, but client {first} has {vector[first]}.")
    return vector


def read_step(owner: str, s: ArrayLike, l: ArrayLike, sigma: float) -> tuple[Vector, Vector, float]:  # noqa: E741
    """The three arguments of a proximal step, checked against each other."""
    slope, anchor = read_vector(owner, "s", s), read_vector(owner, "l", l)
    if len(slope) != len(anchor):
        raise InputError(f"{owner} needs s and l of the same length, got {len(slope)} and {len(anchor)}.")
    return slope, anchor, positive(owner, "sigma", sigma)
