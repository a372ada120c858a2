"""Seeds, and random numbers of their own for every step of a chain."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaffpd.errors import InputError

THIN, MATCH = 2, 3  # streams; 0 is the seed itself, 1 holds rows out


def checked_seed(owner: str, seed: Any) -> int:
    """`seed` as an int, or refuse it unless it is a whole number of at least zero."""
    if isinstance(seed, (bool, np.bool_)) or not hasattr(seed, "__index__") or np.ndim(seed) or int(seed) < 0:
        raise InputError(f"{owner} needs a whole number seed >= 0, got {seed!r}.")
    return int(seed)


def generator(owner: str, seed: Any, stream: int = 0) -> np.random.Generator:
    """Random numbers that the seed fixes; other streams of the same seed are independent of each other."""
    number = checked_seed(owner, seed)
    return np.random.default_rng([number, stream] if stream else number)
