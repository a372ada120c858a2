"""Reading what callers hand over: every refusal is one sentence that names the objective and the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.errors import InputError, positive
from scaffpd.objectives.base import Objective, Vector

LARGEST = 1e50  # a loss beyond it means divergence, and products of several such numbers would overflow


def read_scale(owner: str, name: str, value: float) -> float:
    """`value` as a positive number of a size with which floating-point numbers can still be multiplied."""
    number = positive(owner, name, value)
    if not 1.0 / LARGEST <= number <= LARGEST:
        raise InputError(f"{owner} needs {name} between {1.0 / LARGEST:g} and {LARGEST:g}, got {value!r}.")
    return number


def read_scales(owner: str, name: str, values: Any, n: int) -> float | Vector:
    """One such number for all, or one for each of `n` clients."""
    if np.ndim(values) == 0:
        return read_scale(owner, name, values)
    vector = finite_vector(owner, name, values)
    if len(vector) != n:
        raise InputError(f"{owner} needs one {name} or one for each of {n} clients, got {len(vector)}.")
    usable = (vector >= 1.0 / LARGEST) & (vector <= LARGEST)
    if not usable.all():
        first = int(np.argmin(usable))
        limits = f"between {1.0 / LARGEST:g} and {LARGEST:g}"
        raise InputError(f"{owner} needs {name} {limits}, but client {first} has {vector[first]}.")
    return vector


def finite_vector(owner: str, name: str, values: ArrayLike, largest: float = np.inf) -> Vector:
    """`values` as a float64 vector with one finite number per client, none beyond ±`largest`."""
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{owner} needs numbers in {name}, got {values!r}.") from None
    if vector.ndim != 1 or vector.size == 0:
        raise InputError(f"{owner} needs one number per client in {name}, got an array of shape {vector.shape}.")
    usable = np.isfinite(vector) & (np.abs(vector) <= largest)
    if not usable.all():
        first = int(np.argmin(usable))
        limit = f" of at most {largest:g}" if np.isfinite(vector[first]) else ""
        raise InputError(f"{owner} needs finite {name}{limit}, but client {first} has {vector[first]}.")
    return vector


def read_weights(objective: Objective, weights: ArrayLike) -> Vector:
    """λ: one finite number for every client that the prior knows."""
    vector = finite_vector(type(objective).__name__, "weights", weights)
    objective.weights(len(vector))
    return vector


def read_losses(objective: Objective, losses: ArrayLike) -> Vector:
    """L: one finite number for every client that the prior knows."""
    vector = finite_vector(type(objective).__name__, "losses", losses, LARGEST)
    objective.weights(len(vector))
    return vector


def read_step(
    objective: Objective, s: ArrayLike, old: ArrayLike, sigma: ArrayLike
) -> tuple[Vector, Vector, float | Vector]:
    """The three arguments s, l and σ of a proximal step, checked against each other."""
    owner = type(objective).__name__
    slope, anchor = finite_vector(owner, "s", s, LARGEST), finite_vector(owner, "l", old)
    if len(slope) != len(anchor):
        raise InputError(f"{owner} needs s and l of the same length, got {len(slope)} and {len(anchor)}.")
    objective.weights(len(slope))
    return slope, anchor, read_scales(owner, "sigma", sigma, len(slope))
