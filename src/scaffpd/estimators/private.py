"""What an estimator with `epsilon` trains: the same model, with noise for so many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaffpd.errors import positive
from scaffpd.models import Linear
from scaffpd.privacy import Private
from scaffpd.privacy.defaults import RADIUS


def private(asked: Any, model: Linear, algorithm: Any, rounds: int, samples: Sequence[int]) -> Private:
    """The model of an estimator with these parameters; rows longer than R, once scaled, are shortened."""
    epsilon = positive(type(asked).__name__, "epsilon", asked.epsilon)
    return Private.solved(
        model, epsilon, algorithm, rounds, samples, asked.delta, clip=asked.clip, radius=RADIUS,
        secret=asked.noise_seed,
    )  # fmt: skip
