"""The figures of a page, each defined once: the page draws them in the browser, `--format` into files."""

from __future__ import annotations

from dataclasses import replace

from scaffpd.report.data import ReportData
from scaffpd.report.figures import absent, clients, communication, partition, progress, tradeoff, weights
from scaffpd.report.figures.base import Figure

MAKERS = (
    clients.clients, tradeoff.tradeoff, weights.weights, progress.certificate, progress.losses,
    communication.communication, partition.partition, absent.absent,
)  # fmt: skip


def figures(story: ReportData) -> tuple[Figure, ...]:
    """All figures that a folder has the numbers for."""
    found = [figure for maker in MAKERS if (figure := maker(story)) is not None]
    narrow = [i for i, figure in enumerate(found) if not figure.wide]
    if len(narrow) % 2:  # nobody beside the last one: it may have the whole width
        found[narrow[-1]] = replace(found[narrow[-1]], wide=True)
    return tuple(found)


__all__ = ["Figure", "figures"]
