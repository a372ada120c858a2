"""Every client before and after: with names while they fit, as curves of gains beyond."""

from __future__ import annotations

from scaffpd.report.cautions import uncertain
from scaffpd.report.figures.base import (
    HEIGHT, MANY, ON, ACROSS, Figure, Rows, Spec, colour, scaled, shape, specification, tip, value_axis, value_format,
)  # fmt: skip
from scaffpd.report.formats import change, plural
from scaffpd.report.story import FEW, Story

STEP = 24


def gains(story: Story) -> Figure | None:
    """The figure that makes the point."""
    if not story.scores:
        return None
    if len(story.clients) > MANY and story.role("before") and story.role("after"):
        return _curves(story)
    return _dots(story)


def values(story: Story) -> dict[str, dict[str, float]]:
    """Per model and client, as on screen."""
    return {
        name: {s.client: v for s in scores if (v := scaled(story, s.value)) is not None}
        for name, scores in story.scores.items()
    }


def order(story: Story) -> list[str]:
    """The clients, the largest gain first; by their value where nothing is to be compared."""
    found, sign = values(story), 1 if story.upwards else -1
    before, after = story.role("before"), story.role("after")
    if before and after:
        old, new = found[before.name], found[after.name]
        return sorted(story.clients, key=lambda c: -sign * (new.get(c, 0.0) - old.get(c, 0.0)))
    only = next(iter(found.values()))
    return sorted(story.clients, key=lambda c: sign * only.get(c, 0.0))


def _points(story: Story) -> Rows:
    found = values(story)
    return [
        {
            "client": s.client, "model": name, "value": found[name][s.client], "train_rows": s.train_rows,
            "test_rows": s.test_rows, "few": uncertain(story, s),
            "weight": "–" if s.weight is None else f"{s.weight:.3f}",
        }
        for name in _behind(story)
        for s in story.scores[name]
        if s.client in found[name]
    ]  # fmt: skip


def _behind(story: Story) -> list[str]:
    """The models as they are drawn: before and after on top."""
    main = [model.name for role in ("before", "after") if (model := story.role(role)) is not None]
    return [*(name for name in story.scores if name not in main), *main]


def _pairs(story: Story) -> Rows:
    before, after, found = story.role("before"), story.role("after"), values(story)
    if not before or not after:
        return []
    sign = 1 if story.upwards else -1
    both = [c for c in story.clients if c in found[before.name] and c in found[after.name]]
    rows = [(c, found[before.name][c], found[after.name][c]) for c in both]
    return [
        {
            "client": c, "before": old, "after": new, "better": sign * (new - old) >= 0, "right": max(old, new),
            "change": change((new - old) / (100 if story.upwards else 1), story.measure),
        }
        for c, old, new in rows
    ]  # fmt: skip


def _dots(story: Story) -> Figure:
    before, after, names = story.role("before"), story.role("after"), order(story)
    points = _points(story)
    few = sorted({str(row["client"]) for row in points if row["few"]})
    y: Spec = {
        "field": "client", "type": "nominal", "sort": None, "scale": {"domain": names}, "title": None,
        "axis": {
            "labelExpr": "indexof(few, datum.value) >= 0 ? datum.value + ' †' : datum.value",
            "labelLimit": {"expr": "clamp(width / 3, 90, 220)"}, "grid": True, "gridDash": [1, 3], "labelFontSize": 13,
        },
    }  # fmt: skip
    x: Spec = {"field": "value", "type": "quantitative", "scale": {"zero": False, "nice": True}, "title": value_axis(story),
               "axis": {"tickCount": ACROSS}}  # fmt: skip
    layers: list[Spec] = []
    if before and after:
        for style, wanted in (("gain", "datum.better"), ("loss", "!datum.better")):
            layers.append({
                "data": {"name": "pairs"}, "transform": [{"filter": f"on_before && on_after && {wanted}"}],
                "mark": {"type": "rule", "style": style},
                "encoding": {"y": y, "x": {**x, "field": "before"}, "x2": {"field": "after"}},
            })  # fmt: skip
            layers.append({
                "data": {"name": "pairs"}, "transform": [{"filter": f"on_before && on_after && {wanted} && datum.change !== '0.0'"}],
                "mark": {"type": "text", "style": f"{style}-words", "align": "left", "dx": 11},
                "encoding": {"y": y, "x": {**x, "field": "right"}, "text": {"field": "change"}},
            })  # fmt: skip
    layers.append({
        "data": {"name": "clients"}, "transform": [{"filter": ON}],
        "mark": {"type": "point", "size": 90, "opacity": 1, "strokeWidth": 1.8},
        "encoding": {
            "y": y, "x": x, "fill": colour(story), "shape": shape(story), "stroke": colour(story),
            "fillOpacity": {"condition": {"test": "datum.few", "value": 0.1}, "value": 1},
            "tooltip": [
                tip("client", story.word), tip("model", "model"), tip("value", value_axis(story), value_format(story)),
                tip("train_rows", "rows trained on", ",d"), tip("test_rows", "test rows", ",d"), tip("weight", "weight λ"),
            ],
        },
    })  # fmt: skip
    params: list[Spec] = [{"name": "few", "value": few}]
    for role, model in (("before", before), ("after", after)):
        if model is not None:  # names go in as values, never into an expression
            params.append({"name": f"{role}_name", "value": model.name})
            params.append({"name": f"on_{role}", "expr": f"indexof(shown, {role}_name) >= 0"})
    spec = specification(story, params=params, height=STEP * max(len(names), 2), layer=layers)
    pairs = _pairs(story)
    return Figure(
        name="clients",
        heading="Who gains, who pays" if pairs else f"How every {story.word} is served",
        caption=_caption(story, bool(pairs), bool(few)),
        alt=f"For each of {len(names)} {plural(story.word)}, the {value_axis(story)} of every model that is switched on.",
        views={"": spec},
        data={"clients": points, "pairs": pairs},
        wide=True,
    )


def _caption(story: Story, paired: bool, few: bool) -> str:
    worst = "further right" if story.upwards else "further left"
    words = f"Each row is one {story.word}; {worst} is better."
    if paired:
        words += " Sorted by gain: the line runs from before to after, and is dashed where it is a loss."
    if few:
        words += f" † hollow: fewer than {FEW} test rows, so uncertain."
    return " ".join([words, *(note for figure, note in story.notes if figure == "clients")])


def _curves(story: Story) -> Figure:
    """Too many clients for names: their gains, sorted, one curve a model."""
    found, before, sign = values(story), story.role("before"), 1 if story.upwards else -1
    assert before is not None
    rows: Rows = []
    for name in story.scores:
        if name == before.name:
            continue
        both = [c for c in story.clients if c in found[name] and c in found[before.name]]
        ranked = sorted(both, key=lambda c, n=name: -sign * (found[n][c] - found[before.name][c]))  # type: ignore[misc]
        rows += [
            {"model": name, "client": c, "rank": i + 1, "gain": round(sign * (found[name][c] - found[before.name][c]), 5),
             "before": found[before.name][c], "value": found[name][c]}
            for i, c in enumerate(ranked)
        ]  # fmt: skip
    unit = "points" if story.upwards else "units"
    x = {
        "field": "rank",
        "type": "quantitative",
        "title": f"{plural(story.word)}, the largest gain first",
        "axis": {"grid": False, "tickCount": ACROSS},
    }
    y = {"field": "gain", "type": "quantitative", "title": f"gain against {before.name}, {unit}", "stack": None}
    tips = [
        tip("client", story.word), tip("model", "model"), tip("gain", f"gain, {unit}", "+.2f"),
        tip("before", "before", value_format(story)), tip("value", "now", value_format(story)),
    ]  # fmt: skip
    top = colour(story)
    if top["legend"]:
        top["legend"] = {**top["legend"], "symbolOpacity": 1, "symbolType": "circle"}
    layers = [
        {"mark": {"type": "rule", "style": "quiet"}, "encoding": {"y": {"datum": 0}}},
        {"mark": {"type": "area", "opacity": 0.16, "line": False}, "encoding": {"x": x, "y": y, "color": top}},
        {"mark": {"type": "point", "filled": True, "size": 22, "opacity": 0.9},
         "encoding": {"x": x, "y": y, "color": top, "tooltip": tips}},
    ]  # fmt: skip
    spec = specification(story, data={"name": "gains"}, transform=[{"filter": ON}], layer=layers, height=HEIGHT)
    return Figure(
        name="clients",
        heading="Who gains, who pays",
        caption=f"Each dot is one of {len(story.clients)} {plural(story.word)}, sorted by gain: above the line they are served "
        f"better than by “{before.name}”, below it worse.",
        alt=f"The gain of each of {len(story.clients)} {plural(story.word)} against {before.name}, sorted, a curve for every model.",
        views={"": spec},
        data={"gains": rows},
        heavy=True,
        wide=True,
    )
