"""Seeds, checked, and the random numbers that they fix."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaffpd.errors import InputError


def checked_seed(owner: str, seed: Any) -> int:
    """`seed` as an int, or refuse it unless it is a whole number of at least zero."""
    if isinstance(seed, (bool, np.bool_)) or not hasattr(seed, "__index__") or np.ndim(seed) or int(seed) < 0:
        raise InputError(f"{owner} needs a whole number seed >= 0, got {seed!r}.")
    return int(seed)


def generator(owner: str, seed: Any) -> np.random.Generator:
    """Random numbers that the seed fixes."""
    return np.random.default_rng(checked_seed(owner, seed))
