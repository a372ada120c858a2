"""Numbers of events, with means e^z times their exposures; coefficients are rate ratios."""

from __future__ import annotations

from collections.abc import Sequence

from scaffpd.tasks.base import Task

SAID = (
    "Counts have the mean e^z, times their exposures if there are such, and losses are half the "
    "mean deviance."
)


class EventCounts(Task):
    """Counts from 0 on, scored as numbers are; no column is read so unasked."""

    name = "counts"
    losses = ("poisson",)
    exposed = True
    adds_to = "the logarithm of the rate"
    ratios = "rate"

    def said(self, periods: Sequence[float]) -> list[str]:
        return [SAID]
