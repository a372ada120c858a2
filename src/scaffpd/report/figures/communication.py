"""What was sent against what it bought."""

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
    shape,
    short,
    specification,
    tip,
    value_axis,
    value_format,
    which,
)
from scaffpd.report.figures.progress import kept

COSTS = {"MB": ("megabytes", "megabytes sent, up and down, all clients"), "rounds": ("round", "rounds"),
         "exchanges": ("exchanges", "exchanges")}  # fmt: skip


def communication(story: ReportData) -> Figure | None:
    """Curves where rounds were measured, else one point a model."""
    rows = _curves(story) or _ends(story)
    curves = (
        any(row["round"] != rows[0]["round"] for row in rows if row["model"] == rows[0]["model"]) if rows else False
    )
    views = {
        label: _spec(story, field, title, curves)
        for label, (field, title) in COSTS.items()
        if any(row[field] is not None for row in rows)
    }
    if not views or (not curves and len(rows) < 2):
        return None
    how = (
        "Solid: the worst 20 %; dashed: the mean."
        if curves
        else "The worst 20 % of the finished models; pale ones are off."
    )
    return Figure(
        name="communication",
        heading="What the communication buys",
        caption=f"{how} {'Up' if story.upwards else 'Down'} and to the left is better: more for less.",
        alt=f"The {value_axis(story)} of every model against what was sent.",
        views=views,
        data={"costs": rows},
    )


def _curves(story: ReportData) -> Rows:
    return [
        {"model": r.model, "round": r.number, "megabytes": short(r.megabytes), "exchanges": r.exchanges,
         "which": name, "value": scaled(story, value)}
        for r in kept(story)
        for name, value in (("mean", r.mean), ("worst 20 %", r.worst_20))
        if value is not None
    ]  # fmt: skip


def _ends(story: ReportData) -> Rows:
    return [
        {"model": m.name, "round": m.rounds, "megabytes": short(m.megabytes), "exchanges": m.exchanges,
         "which": "worst 20 %", "value": scaled(story, story.overall[m.name].worst_20)}
        for m in story.models
        if m.name in story.overall and m.rounds is not None
    ]  # fmt: skip


def _spec(story: ReportData, field: str, title: str, curves: bool) -> Spec:
    x = across(field, title, {"zero": curves, "padding": 0 if curves else 20}, format=",.3~r")
    y = quantity("value", value_axis(story), {"zero": False})
    tips = [
        tip("model", "model"), tip("which", "over clients"), tip("value", value_axis(story), value_format(story)),
        tip("round", "rounds", ",d"), tip("exchanges", "exchanges", ",.0f"), tip("megabytes", "MB", ".3~g"),
    ]  # fmt: skip
    ends = {"x": x, "y": y, "color": colour(story)}
    mark = {"type": "point", "filled": True, "opacity": 1, "size": 26 if curves else 130}
    layers: list[Spec] = [{"mark": mark, "encoding": {**ends, "shape": shape(story), "tooltip": tips}}]
    if curves:
        dashed = which(("mean", "worst 20 %"))
        layers.insert(0, {"mark": {"type": "line"}, "encoding": {**ends, "strokeDash": dashed}})
        return specification(story, data={"name": "costs"}, transform=[{"filter": ON}], layer=layers)
    layers[0]["encoding"]["opacity"] = {"condition": {"test": ON, "value": 1}, "value": 0.28}
    return specification(story, data={"name": "costs"}, layer=layers)
