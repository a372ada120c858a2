"""A table of clients in a few numbers: no worst client without the mean, and no mean without the worst."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaffpd.federation import ClientScores, Vector


@dataclass(frozen=True)
class Spread:
    """One measure over all clients.

    Attributes:
        mean: over clients, each counting the same.
        weighted_mean: over samples, so that clients count by their size.
        worst: of the client that is served worst.
        best: of the client that is served best.
        worst_client: its name (the first of several).
        best_client: its name (the first of several).
        deviation: the standard deviation over clients.
    """

    mean: float
    weighted_mean: float
    worst: float
    best: float
    worst_client: str
    best_client: str
    deviation: float


@dataclass(frozen=True)
class Summary:
    """`ClientScores` in a few numbers.

    Attributes:
        loss: over the clients' losses (the worst is the largest).
        accuracy: over the clients' accuracies (the worst is the smallest); `None` for regression.
    """

    loss: Spread
    accuracy: Spread | None

    @classmethod
    def of(cls, scores: ClientScores) -> Summary:
        """Summarise the scores of one model."""
        accuracy = (
            None if np.isnan(scores.accuracy).all() else _spread(scores, scores.accuracy, badness=-scores.accuracy)
        )
        return cls(_spread(scores, scores.loss, badness=scores.loss), accuracy)


def _spread(scores: ClientScores, values: Vector, badness: Vector) -> Spread:
    worst, best = int(badness.argmax()), int(badness.argmin())
    return Spread(
        mean=float(values.mean()),
        weighted_mean=float(np.average(values, weights=scores.counts)),
        worst=float(values[worst]),
        best=float(values[best]),
        worst_client=scores.names[worst],
        best_client=scores.names[best],
        deviation=float(values.std()),
    )
