"""`Sketch`: short random sums by which a client remembers the vectors that it has sent."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from scaffpd.federation import Vector

BUCKETS = 32  # buckets of a sketch


class Sketch:
    """Random sums of a vector's entries; distances are nearly kept, and `seed` is secret."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed
        self._drawn: dict[int, tuple[NDArray[np.int64], Vector]] = {}

    def __call__(self, vector: NDArray[np.floating]) -> Vector:
        """Return the sketch of a vector; short vectors keep their distances exactly."""
        own = np.asarray(vector, dtype=np.float64).ravel()
        if len(own) not in self._drawn:
            random = np.random.default_rng([self.seed, len(own)])
            signs = np.where(random.integers(0, 2, len(own)) == 0, 1.0, -1.0)
            self._drawn[len(own)] = random.permutation(len(own)) % BUCKETS, signs
        places, signs = self._drawn[len(own)]
        return np.bincount(places, signs * own, BUCKETS).astype(np.float64)
