r"""Columns of mean zero and deviation one, in one pass over the images.

Gradients of different layers differ by orders of magnitude, more than half precision can hold. So a few training
images fix a provisional mean m⁰ and deviation s⁰ of every coordinate, what is stored is z = (g - m⁰) / s⁰, and the sums
of z and z² over *all* training rows, in double precision, give the exact correction

    z ← (z - m¹) / s¹,    m¹ = mean z,    s¹² = mean z² - m¹²,

which is applied in place when the last row is there. Two kinds of coordinates would be blown up by their own deviation
s⁰ s¹: those that are constant on the training rows, and those that hardly ever move (a unit that one training image
touches barely, and a test image fully, lies millions of deviations out). So no deviation is taken for smaller than a
hundredth of the median of its parameter's coordinates, and that median is the deviation of a constant one. All other
columns have mean zero and deviation one on the training rows to the precision of storage. The same floor applies to
s⁰, which keeps z within half precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1 / 100
STILL = 1e-7  # a deviation below this share of the largest |z| is rounding


@dataclass
class Sums:
    """Σ z, Σ z², max |z| of every column, and how many rows; double precision."""

    first: Tensor
    second: Tensor
    largest: Tensor
    rows: int = 0

    @classmethod
    def zeros(cls, columns: int, device: torch.device) -> Sums:
        """Nothing yet."""
        first, second, largest = (torch.zeros(columns, dtype=torch.float64, device=device) for _ in range(3))
        return cls(first, second, largest)

    def add(self, z: Tensor) -> None:
        """More rows."""
        if len(z):
            z = z.double()
            self.first += z.sum(0)
            self.second += z.square().sum(0)
            self.largest = torch.maximum(self.largest, z.abs().amax(0))
            self.rows += len(z)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation; zero for a column that does not vary."""
        mean = self.first / max(self.rows, 1)
        deviation = (self.second / max(self.rows, 1) - mean.square()).clamp_min(0).sqrt()
        return mean, torch.where(deviation > STILL * self.largest, deviation, torch.zeros_like(deviation))


def scales(sums: Sums, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and floored deviation of every column: what to take away, and what to divide by."""
    mean, deviation = sums.moments()
    return mean, floored(deviation, groups)


def correction(sums: Sums, mean: Tensor, deviation: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """m¹ and s¹ from the sums of all z; where g = m⁰ + s⁰ z varies by no more than rounding, it is constant."""
    m, s = sums.moments()
    size = mean.abs() + deviation * sums.largest
    exact = torch.where(s * deviation > 10 * STILL * size, s * deviation, torch.zeros_like(s))
    return m, floored(exact, groups) / deviation


def floored(deviation: Tensor, groups: Tensor) -> Tensor:
    """At least FLOOR of the median positive deviation of the same group, and for a constant coordinate that median.

    A group without any positive deviation takes the median of all; one, where there is none at all.
    """
    moving = deviation > 0
    overall = deviation[moving].median() if moving.any() else deviation.new_ones(())
    result = deviation.clone()
    for group in sorted(set(groups.tolist())):
        inside = groups == group
        alive = deviation[inside & moving]
        usual = alive.median() if len(alive) else overall
        result[inside] = torch.where(deviation[inside] > 0, deviation[inside].clamp_min(FLOOR * usual), usual)
    return result
