"""The mean against the worst-served fifth: what fairness costs."""

from __future__ import annotations

from scaffpd.report.data import ReportData
from scaffpd.report.figures.base import (
    ON,
    Figure,
    Rows,
    Spec,
    colour,
    quantity,
    scaled,
    shape,
    specification,
    tip,
    value_axis,
    value_format,
)
from scaffpd.report.formats import count


def tradeoff(story: ReportData) -> Figure | None:
    """One point a model; a path is a line, its knee has a ring."""
    if len(story.overall) < 2:
        return None
    title, rows = value_axis(story), _rows(story)
    domains = _domains(story, rows)
    x = quantity("mean", f"mean {title}", {"domain": domains[0], "nice": False}, tickCount=5)
    y = quantity("worst_20", f"worst 20 %: {title}", {"domain": domains[1], "nice": False}, tickCount=5)
    layers = [*(_line(x, y) if story.path else []), _points(story, x, y), *_labels(x, y)]
    better = "Up and to the right" if story.upwards else "Down and to the left"
    return Figure(
        name="tradeoff",
        heading="What fairness costs",
        caption=f"{better} is better for both, and a step is as long on either axis; pale models are off."
        f"{_path_words(story)}",
        alt=f"{len(story.overall)} models as points: mean against worst 20 % of the {title}.",
        views={"": specification(story, data={"name": "models"}, layer=layers)},
        data={"models": rows},
    )


def _rows(story: ReportData) -> Rows:
    knee = (story.path or {}).get("knee")
    main = [m.name for role in ("before", "after") if (m := story.role(role)) is not None]
    low = min(main, key=lambda name: story.overall[name].worst_20, default="")
    return [
        {
            "model": m.name, "order": i, "mean": scaled(story, one.mean), "worst_20": scaled(story, one.worst_20),
            "worst": scaled(story, one.worst), "strength": m.strength, "knee": m.name == knee,
            "below": m.name == low, "label": f"{m.name} (suggested)" if m.name == knee else m.name,
            "worst_20_sd": scaled(story, one.worst_20_sd),
        }
        for i, m in enumerate(story.models)
        if (one := story.overall.get(m.name)) is not None
    ]  # fmt: skip


def _domains(story: ReportData, rows: Rows) -> tuple[list[float], list[float]]:
    """Two axes of the same length in points, so that a gain on one looks as large as a loss on the other."""
    ends = [(min(row[name] for row in rows), max(row[name] for row in rows)) for name in ("mean", "worst_20")]
    least = 1.0 if story.upwards else 0.01 * max(abs(high) for _, high in ends)
    half = 0.65 * max(least, *(high - low for low, high in ends))
    tops = [(low + high) / 2 + half for low, high in ends]
    tops = [min(top, 100.0 + half / 8) for top in tops] if story.upwards else tops
    first, second = ([round(top - 2 * half, 6), round(top, 6)] for top in tops)
    return first, second


def _line(x: Spec, y: Spec) -> list[Spec]:
    ends = {"x": x, "y": y}
    ring = {"type": "point", "style": "knee", "size": 420}
    return [
        {"mark": {"type": "line", "style": "quiet"}, "encoding": {**ends, "order": {"field": "order"}}},
        {"transform": [{"filter": "datum.knee"}], "mark": ring, "encoding": ends},
    ]


def _points(story: ReportData, x: Spec, y: Spec) -> Spec:
    form = value_format(story)
    tips = [
        tip("model", "model"), tip("mean", "mean", form), tip("worst_20", "worst 20 %", form),
        tip("worst", "worst", form),
        *([tip("strength", "strength", ".3~g")] if story.path else []),
        *([tip("worst_20_sd", "± worst 20 %", ".2f")] if story.kind == "compare" else []),
    ]  # fmt: skip
    visible = {"condition": {"test": ON, "value": 1}, "value": 0.28}
    return {
        "mark": {"type": "point", "filled": True, "size": 130},
        "encoding": {
            "x": x, "y": y, "color": colour(story), "shape": shape(story), "tooltip": tips, "opacity": visible,
        },
    }  # fmt: skip


def _labels(x: Spec, y: Spec) -> list[Spec]:
    """Names above the points, but that of the lower of before and after below: they may be close."""
    return [
        {
            "transform": [{"filter": f"{ON} && {side}"}], "mark": {"type": "text", "dy": away},
            "encoding": {"x": x, "y": y, "text": {"field": "label"}},
        }
        for side, away in (("!datum.below", -16), ("datum.below", 17))
    ]  # fmt: skip


def _path_words(story: ReportData) -> str:
    if not story.path:
        return ""
    words = f" {story.path['why']}" if story.path.get("why") else ""
    warm, cold = story.path.get("rounds_warm"), story.path.get("rounds_cold")
    if not warm:
        return words
    words += f" The whole path took {count(warm)} rounds, each point from its neighbour"
    return f"{words}; from scratch, {count(cold)}." if cold else f"{words}."
