"""Too many clients for names: their gains, sorted, one curve a model."""

from __future__ import annotations

from scaffpd.report.data import ReportData
from scaffpd.report.figures.base import (
    ON,
    Figure,
    Rows,
    Spec,
    across,
    colour,
    quantity,
    scaled,
    specification,
    tip,
    value_format,
)
from scaffpd.report.formats import brief, plural


def curves(story: ReportData) -> Figure:
    """A dot for every client, the largest gain first."""
    before = story.role("before")
    assert before is not None
    unit, crowd = ("points" if story.upwards else "units"), f"{len(story.clients)} {plural(story.word)}"
    x, y = across("rank", f"{plural(story.word)}, the largest gain first"), quantity("gain", f"gain, {unit}")
    y["stack"] = None
    tips = [
        tip("client", story.word), tip("model", "model"), tip("gain", f"gain, {unit}", "+.2f"),
        tip("before", "before", value_format(story)), tip("value", "now", value_format(story)),
    ]  # fmt: skip
    tone = colour(story)
    tone["legend"] = tone["legend"] and {**tone["legend"], "symbolOpacity": 1, "symbolType": "circle"}
    layers: list[Spec] = [
        {"mark": {"type": "rule", "style": "quiet"}, "encoding": {"y": {"datum": 0}}},
        {"mark": {"type": "area", "opacity": 0.16, "line": False}, "encoding": {"x": x, "y": y, "color": tone}},
        {"mark": {"type": "point", "filled": True, "size": 22, "opacity": 0.9},
         "encoding": {"x": x, "y": y, "color": tone, "tooltip": tips}},
    ]  # fmt: skip
    return Figure(
        name="clients",
        heading="Who gains, who pays",
        caption=f"Each dot is one of {crowd}, sorted by gain: above the line they are served better than by "
        f"“{brief(before.name)}”, below it worse.",
        alt=f"The gain of each of {crowd} against {before.name}, sorted, a curve for every model.",
        views={"": specification(story, data={"name": "gains"}, transform=[{"filter": ON}], layer=layers)},
        data={
            "gains": [row for name in story.scores if name != before.name for row in _ranked(story, before.name, name)]
        },
        heavy=True,
        wide=True,
    )


def _ranked(story: ReportData, before: str, name: str) -> Rows:
    old, new = ({s.client: scaled(story, s.value) for s in story.scores[which]} for which in (before, name))
    sign = 1 if story.upwards else -1
    pairs = [(c, a, b) for c in story.clients if (a := old.get(c)) is not None and (b := new.get(c)) is not None]
    moved = sorted(((round(sign * (b - a), 5), c, a, b) for c, a, b in pairs), key=lambda one: -one[0])
    return [
        {"model": name, "client": c, "rank": i + 1, "gain": gain, "before": a, "value": b}
        for i, (gain, c, a, b) in enumerate(moved)
    ]
