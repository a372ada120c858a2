"""The search for a threshold ν with Σ λ_i(ν) = 1, from sums for a few thresholds at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

from scaffpd.federation import Vector
from scaffpd.objectives.rounding import EPSILON

# thresholds that are tried: in widths from where ν is expected, and around the secant between two
GRID = (-8.0, -2.0, -0.5, -0.1, 0.1, 0.5, 2.0, 8.0)
CLOSER = (-0.5, -0.125, -1 / 64, -1 / 1024, 1 / 1024, 1 / 64, 0.125, 0.5)


class Threshold(NamedTuple):
    """A threshold: ν, Σ λ_i(ν) and V(ν)."""

    nu: float
    mass: float
    value: float


class ThresholdSearch:
    """Brackets ν, and interpolates it where Σ λ_i(ν) is known well enough.

    Args:
        expected: where ν should be.
        width: how far from there it may be.
        tilt: ρ, where λ_i = p_i exp((L_i − ν)/ρ): then one threshold gives ν.
    """

    def __init__(self, expected: float, width: float, tilt: float) -> None:
        self.expected = expected
        self.width = width
        self.tilt = tilt
        self.levels: list[Threshold] = []

    def next(self) -> tuple[float, ...]:
        """Return the thresholds to ask for."""
        below, above = self._bracket()
        if below is not None and above is not None:
            h = above.nu - below.nu
            share = (below.mass - 1) / (below.mass - above.mass)
            return tuple(
                below.nu + h * (share + (1 - share) * k if k > 0 else share + share * k)
                for k in CLOSER
            )
        if below is None and above is None:
            return tuple(self.expected + self.width * step for step in GRID)
        self.width *= 16
        reach = [self.width * 2.0**-k for k in range(len(GRID))]
        if below is not None:
            return tuple(below.nu + step for step in reach)
        assert above is not None
        return tuple(above.nu - step for step in reach)

    def take(self, levels: tuple[float, ...], masses: Vector, bounds: Vector) -> None:
        """Take the sums for the thresholds: Σ λ_i(ν), and V(ν) − ν."""
        new = (
            Threshold(nu, float(m), nu + float(b))
            for nu, m, b in zip(levels, masses, bounds, strict=True)
        )
        self.levels = sorted([*self.levels, *new])

    def _bracket(self) -> tuple[Threshold | None, Threshold | None]:
        """Return the last threshold with Σ λ_i ≥ 1, and the first one with less."""
        return (
            next((one for one in reversed(self.levels) if one.mass >= 1), None),
            next((one for one in self.levels if one.mass < 1), None),
        )

    def found(self, fine: float, error: float) -> Threshold | None:
        """Return ν and Φ = V(ν), if enough is known.

        `fine` is the accuracy that V needs, `error` that of sums.
        """
        below, above = self._bracket()
        exact = next((one for one in self.levels if abs(one.mass - 1) <= 8 * EPSILON + error), None)
        if exact is not None:
            return exact
        if self.tilt > 0:
            near = [one for one in self.levels if 0.01 < one.mass <= 1]
            if not near:
                return None
            best = max(near, key=lambda one: one.mass)
            nu = best.nu + self.tilt * math.log(best.mass)
            return Threshold(nu, 1.0, nu)
        if below is None or above is None:
            return None
        h = above.nu - below.nu
        fall = below.mass - above.mass
        share = (below.mass - 1) / fall
        wide = h * fall > 4 * fine and h > 4 * EPSILON * abs(below.nu)
        if wide and not self._straight(below, above):
            return None
        step = share * h
        value = below.value + step * (1 - below.mass) + 0.5 * share * step * fall
        return Threshold(below.nu + step, 1.0, value)

    def _straight(self, below: Threshold, above: Threshold) -> bool:
        """Return whether Σ λ_i falls along a straight line between the two.

        V bends as it should then, and the next line is as steep.
        """
        h = above.nu - below.nu
        fall = below.mass - above.mass
        k = self.levels.index(below)
        bend = abs(above.value - below.value - h * (1 - (below.mass + above.mass) / 2))
        if bend > 64 * EPSILON * (abs(above.value) + abs(below.value)) + 1e-6 * h * fall:
            return False
        sides = [self.levels[i : i + 2] for i in (k - 1, k + 2) if 0 <= i < len(self.levels) - 1]
        sides += [self.levels[k + 1 : k + 3]] if k + 2 < len(self.levels) else []
        steep = [(one.mass - two.mass) / (two.nu - one.nu) for one, two in sides if two.nu > one.nu]
        return any(abs(slope * h - fall) <= 1e-6 * fall for slope in steep)
