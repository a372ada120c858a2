"""The mean against the worst-served fifth: what fairness costs."""

from __future__ import annotations

from scaffpd.report.figures.base import (
    Figure,
    Rows,
    Spec,
    colour,
    scaled,
    shape,
    specification,
    tip,
    value_axis,
    value_format,
)
from scaffpd.report.formats import count
from scaffpd.report.story import Story


def tradeoff(story: Story) -> Figure | None:
    """One point a model; a path is a line, its knee has a ring."""
    if len(story.overall) < 2:
        return None
    title = value_axis(story)
    rows = _rows(story)
    across, along = _domains(story, rows)
    ticks = {"tickCount": 5}
    x: Spec = {
        "field": "mean",
        "type": "quantitative",
        "scale": {"domain": across, "nice": False},
        "title": f"mean {title}",
        "axis": ticks,
    }
    y: Spec = {"field": "worst_20", "type": "quantitative", "scale": {"domain": along, "nice": False}, "title": f"worst 20 %: {title}",
               "axis": ticks}  # fmt: skip
    tips = [
        tip("model", "model"), tip("mean", "mean", value_format(story)), tip("worst_20", "worst 20 %", value_format(story)),
        tip("worst", "worst", value_format(story)),
        *([tip("strength", "strength", ".3~g")] if story.path else []),
        *([tip("worst_20_sd", "± worst 20 %", ".2f")] if story.kind == "compare" else []),
    ]  # fmt: skip
    layers: list[Spec] = []
    if story.path:
        layers.append(
            {"mark": {"type": "line", "style": "quiet"}, "encoding": {"x": x, "y": y, "order": {"field": "order"}}}
        )
        layers.append({"transform": [{"filter": "datum.knee"}], "mark": {"type": "point", "style": "knee", "size": 420},
                       "encoding": {"x": x, "y": y}})  # fmt: skip
    layers.append({
        "mark": {"type": "point", "filled": True, "size": 130},
        "encoding": {"x": x, "y": y, "color": colour(story), "shape": shape(story), "tooltip": tips,
                     "opacity": {"condition": {"test": "indexof(shown, datum.model) >= 0", "value": 1}, "value": 0.28}},
    })  # fmt: skip
    for below, side in ((False, "!datum.below"), (True, "datum.below")):  # apart, where two points are close
        layers.append({
            "transform": [{"filter": f"indexof(shown, datum.model) >= 0 && {side}"}],
            "mark": {"type": "text", "dy": 17 if below else -16},
            "encoding": {"x": x, "y": y, "text": {"field": "label"}},
        })  # fmt: skip
    spec = specification(story, data={"name": "models"}, layer=layers)
    better = "Up and to the right" if story.upwards else "Down and to the left"
    return Figure(
        name="tradeoff",
        heading="What fairness costs",
        caption=f"{better} is better for both, and a step is as long on either axis; pale models are switched off.{_path_words(story)}",
        alt=f"{len(story.overall)} models as points: mean against worst 20 % of the {title}.",
        views={"": spec},
        data={"models": rows},
    )


def _domains(story: Story, rows: Rows) -> tuple[list[float], list[float]]:
    """Two axes of the same length in points, so that a gain on one looks as large as a loss on the other."""
    ends = [(min(row[name] for row in rows), max(row[name] for row in rows)) for name in ("mean", "worst_20")]
    least = 1.0 if story.upwards else 0.01 * max(abs(high) for _, high in ends)
    half = 0.65 * max(least, *(high - low for low, high in ends))
    tops = [(low + high) / 2 + half for low, high in ends]
    tops = [min(top, 100.0 + half / 8) for top in tops] if story.upwards else tops
    first, second = ([round(top - 2 * half, 6), round(top, 6)] for top in tops)
    return first, second


def _rows(story: Story) -> Rows:
    knee = (story.path or {}).get("knee")
    totals = story.overall
    return [
        {
            "model": m.name, "order": i, "mean": scaled(story, one.mean), "worst_20": scaled(story, one.worst_20),
            "worst": scaled(story, one.worst), "strength": m.strength, "knee": m.name == knee,  "below": m.role == "before",
            "label": f"{m.name} (knee)" if m.name == knee else m.name, "worst_20_sd": scaled(story, one.worst_20_sd),
        }
        for i, m in enumerate(story.models)
        if (one := totals.get(m.name)) is not None
    ]  # fmt: skip


def _path_words(story: Story) -> str:
    if not story.path:
        return ""
    words = f" {story.path['why']}" if story.path.get("why") else ""
    warm, cold = story.path.get("rounds_warm"), story.path.get("rounds_cold")
    if warm and cold:
        words += (
            f" The whole path took {count(warm)} rounds, each point from its neighbour; from scratch, {count(cold)}."
        )
    elif warm:
        words += f" The whole path took {count(warm)} rounds, each point from its neighbour."
    return words
