r"""How often a client releases something in a run: what noise is solved from (`Algorithm.releases`).

Where an algorithm asks some clients only, or asks less in some rounds, these are the most that a client can be asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaffpd.errors import InputError
from scaffpd.privacy.accountant import Release


@dataclass(frozen=True)
class Asked:
    """The most releases of a client.

    Attributes:
        gradients: over all of its records.
        losses: over all of them.
        sampled_gradients: over Poisson samples, local steps among them.
        sampled_losses: over Poisson samples.
        batch_size: b, of the samples; `None` where there are none.
    """

    gradients: int = 0
    losses: int = 0
    sampled_gradients: int = 0
    sampled_losses: int = 0
    batch_size: int | None = None

    @classmethod
    def over(cls, batch_size: int | None, gradients: int = 0, losses: int = 0) -> Asked:
        """So many over samples of b records, or over all records where b is `None`."""
        if batch_size is None:
            return cls(gradients, losses)
        return cls(sampled_gradients=gradients, sampled_losses=losses, batch_size=batch_size)

    @classmethod
    def points(cls, n: int, batch_size: int | None = None) -> Asked:
        """Losses and gradients at n points."""
        return cls.over(batch_size, n, n)

    def __add__(self, other: Asked) -> Asked:
        """Both."""
        if None not in (self.batch_size, other.batch_size) and self.batch_size != other.batch_size:
            raise InputError(f"Batches of {self.batch_size} and of {other.batch_size} rows do not share one budget.")
        return Asked(
            self.gradients + other.gradients,
            self.losses + other.losses,
            self.sampled_gradients + other.sampled_gradients,
            self.sampled_losses + other.sampled_losses,
            self.batch_size or other.batch_size,
        )

    def releases(self, noise: float, loss_noise: float, samples: int | None) -> dict[Release, int]:
        """The same for a client of m_i records with these noise multipliers."""
        rate = 1.0 if self.batch_size is None or samples is None else min(1.0, self.batch_size / samples)
        counts: dict[Release, int] = {}
        for release, n in (
            (Release(noise), self.gradients),
            (Release(noise, rate), self.sampled_gradients),
            (Release(loss_noise), self.losses),
            (Release(loss_noise, rate), self.sampled_losses),
        ):
            if n:
                counts[release] = counts.get(release, 0) + n
        return counts
