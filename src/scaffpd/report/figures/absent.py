"""Rounds in which silos were absent, of deployed runs."""

from __future__ import annotations

from scaffpd.report.data import ReportData
from scaffpd.report.figures.base import Figure, across, quantity, specification, tip
from scaffpd.report.figures.progress import kept
from scaffpd.report.formats import plural


def absent(story: ReportData) -> Figure | None:
    """How many silos stood in with earlier answers, round by round; nothing where all were there."""
    if not any(r.absent for r in story.rounds):
        return None
    rows = [{"model": r.model, "round": r.number, "absent": r.absent} for r in kept(story)]
    most = max(r.absent for r in story.rounds)
    x = across("round", "round", {"domain": [0, max(r.number for r in story.rounds)], "nice": False}, tickMinStep=1)
    y = quantity("absent", f"absent {plural(story.word)}", values=[*range(most + 1)], format="d")
    spec = specification(
        story, data={"name": "absences"}, height=140, mark={"type": "bar", "style": "bubble", "width": 5},
        encoding={"x": x, "y": y, "tooltip": [tip("round", "round", "d"), tip("absent", "absent", "d")]},
    )  # fmt: skip
    return Figure(
        name="absent",
        heading="Who was away",
        caption=f"{plural(story.word).capitalize()} that did not answer in a round: a bound on their loss stood in.",
        alt="The number of absent silos in every round.",
        views={"": spec},
        data={"absences": rows},
        wide=True,
    )
