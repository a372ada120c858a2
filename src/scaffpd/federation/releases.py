"""How often a method asks a client for something that depends on its records.

The noise of private runs is solved from these counts before the first round (`privacy`).
"""

from __future__ import annotations

from dataclasses import dataclass

from scaffpd.errors import InputError


@dataclass(frozen=True)
class ReleaseCounts:
    """The most releases of a client, each over all of its records.

    Attributes:
        gradients: of gradients; a local step is one.
        losses: of losses.
    """

    gradients: int = 0
    losses: int = 0

    @classmethod
    def over(cls, batch_size: int | None, gradients: int = 0, losses: int = 0) -> ReleaseCounts:
        """Count so many over all records; refuse minibatches."""
        if batch_size is not None:
            raise InputError(
                "private-minibatch",
                "Private clients answer with all of their records: leave batch_size out.",
            )
        return cls(gradients, losses)

    @classmethod
    def points(cls, n: int, batch_size: int | None = None) -> ReleaseCounts:
        """Count losses and gradients at n points."""
        return cls.over(batch_size, n, n)

    def __add__(self, other: ReleaseCounts) -> ReleaseCounts:
        """Add up two plans that share one budget."""
        return ReleaseCounts(self.gradients + other.gradients, self.losses + other.losses)
