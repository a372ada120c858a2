"""Numbers of events, by Poisson's likelihood; rows may have exposures."""

from __future__ import annotations

from scaffpd.tasks.base import Task


class EventCounts(Task):
    """Counts from 0 on, scored as numbers are; no column is read so unasked."""

    name = "counts"
    losses = ("poisson",)
    exposed = True
