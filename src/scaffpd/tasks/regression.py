"""Amounts of anything, by least squares."""

from __future__ import annotations

from math import sqrt

from scaffpd.tasks.base import TargetColumn, Task


class Regression(Task):
    """Numbers, trained on with deviation one and scored in the units of the table."""

    name = "regression"
    losses = ("squared",)
    scaled = True
    lower = "error"
    serving = ("typical error", "less")

    def suits(self, column: TargetColumn) -> bool:
        return True

    def served(self, loss: float, score: float | None) -> float:
        """Return the root mean squared error, which is lower where the squared one is."""
        return score or 0.0

    def gained(self, gain: float) -> float:
        """Return how much lower the error is: errors are roots of squared losses."""
        return 1 - sqrt(max(1 - gain, 0.0))
