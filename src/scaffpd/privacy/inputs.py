"""Reading what a private model is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scaffpd.errors import InputError, real

SECRET = 16  # bytes of a secret, at least
Multiplier = float | tuple[float, ...]  # of all clients, or of each


def multiplier(name: str, value: Any, clip: float) -> Multiplier:
    """One number or one for every client, >= 0; noise needs something that is clipped."""
    several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    numbers = [real("Private", name, z) for z in (value if several else [value])]
    if not numbers or not all(0 <= z < float("inf") for z in numbers):
        raise InputError(f"Private needs {name} >= 0 and finite, got {value!r}.")
    if clip == float("inf") and any(numbers):
        limit = "clip" if name == "noise" else "loss_clip"
        raise InputError(f"Private needs a finite {limit} with {name} > 0: what is not bounded cannot be hidden.")
    return tuple(numbers) if several else numbers[0]


def spread(name: str, value: Multiplier, n: int) -> tuple[float, ...]:
    """A number for every client."""
    if not isinstance(value, tuple):
        return (value,) * n
    if len(value) != n:
        raise InputError(f"Private has {name} for {len(value)} clients, but there are {n}.")
    return value


def check_delta(delta: Any) -> None:
    """A probability."""
    if not 0 < real("Private", "delta", delta) < 1:
        raise InputError(f"Private needs 0 < delta < 1, got {delta!r}.")


def check_secret(secret: Any) -> None:
    """Enough of it; never with the secret in the sentence."""
    whole = isinstance(secret, int | np.integer) and not isinstance(secret, bool) and secret >= 0
    if secret is not None and not whole and not (isinstance(secret, bytes) and len(secret) >= SECRET):
        raise InputError(f"Private needs a secret of at least {SECRET} bytes, or a whole number >= 0 for experiments.")
