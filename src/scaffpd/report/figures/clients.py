"""Every client before and after, with its name."""

from __future__ import annotations

from scaffpd.report.data import FEW, ReportData
from scaffpd.report.figures.base import (
    MANY,
    ON,
    Figure,
    Rows,
    Spec,
    across,
    colour,
    named,
    scaled,
    shape,
    specification,
    tip,
    value_axis,
    value_format,
)
from scaffpd.report.figures.gains import curves
from scaffpd.report.formats import change, plural
from scaffpd.report.verdict import uncertain

STEP = 24
DAGGER = "indexof(few, datum.value) >= 0 ? datum.value + ' †' : datum.value"


def clients(story: ReportData) -> Figure | None:
    """The figure that makes the point: dots and lines while names fit, curves of gains beyond."""
    if not story.scores:
        return None
    if len(story.clients) > MANY and story.role("before") and story.role("after"):
        return curves(story)
    return _dots(story)


def values(story: ReportData) -> dict[str, dict[str, float]]:
    """Per model and client, as on screen."""
    return {
        name: {s.client: v for s in scores if (v := scaled(story, s.value)) is not None}
        for name, scores in story.scores.items()
    }


def order(story: ReportData) -> list[str]:
    """The clients, the largest gain first; by their value where nothing is to be compared."""
    found, sign = values(story), 1 if story.upwards else -1
    before, after = story.role("before"), story.role("after")
    if before and after:
        old, new = found[before.name], found[after.name]
        return sorted(story.clients, key=lambda c: -sign * (new.get(c, 0.0) - old.get(c, 0.0)))
    only = next(iter(found.values()))
    return sorted(story.clients, key=lambda c: sign * only.get(c, 0.0))


def _dots(story: ReportData) -> Figure:
    names, points, pairs = order(story), _points(story), _pairs(story)
    few = sorted({str(row["client"]) for row in points if row["few"]})
    y, x = named(names, labelExpr=DAGGER), across("value", value_axis(story), {"zero": False}, grid=True)
    params: list[Spec] = [{"name": "few", "value": few}]
    for role in ("before", "after") if pairs else ():  # names go in as values, never into an expression
        model = story.role(role)
        params.append({"name": f"{role}_name", "value": model.name if model else ""})
        params.append({"name": f"on_{role}", "expr": f"indexof(shown, {role}_name) >= 0"})
    layers = [*(_lines(y, x) if pairs else []), _marks(story, y, x)]
    return Figure(
        name="clients",
        heading="Who gains, who pays" if pairs else f"How every {story.word} is served",
        caption=_caption(story, bool(pairs), bool(few)),
        alt=f"For each of {len(names)} {plural(story.word)}, the {value_axis(story)} of every model that is on.",
        views={"": specification(story, params=params, height=STEP * max(len(names), 2), layer=layers)},
        data={"clients": points, "pairs": pairs},
        wide=True,
    )


def _points(story: ReportData) -> Rows:
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


def _behind(story: ReportData) -> list[str]:
    """The models as they are drawn: before and after on top."""
    main = [model.name for role in ("before", "after") if (model := story.role(role)) is not None]
    return [*(name for name in story.scores if name not in main), *main]


def _pairs(story: ReportData) -> Rows:
    before, after, found = story.role("before"), story.role("after"), values(story)
    if not before or not after:
        return []
    sign, unit = (1, 100) if story.upwards else (-1, 1)
    both = [c for c in story.clients if c in found[before.name] and c in found[after.name]]
    return [
        {
            "client": c, "before": old, "after": new, "better": sign * (new - old) >= 0, "right": max(old, new),
            "change": change((new - old) / unit, story.measure),
        }
        for c in both
        for old, new in [(found[before.name][c], found[after.name][c])]
    ]  # fmt: skip


def _lines(y: Spec, x: Spec) -> list[Spec]:
    """From before to after, and by how much; gains and losses apart."""
    layers: list[Spec] = []
    for style, wanted in (("gain", "datum.better"), ("loss", "!datum.better")):
        both = f"on_before && on_after && {wanted}"
        layers.append({
            "data": {"name": "pairs"}, "transform": [{"filter": both}], "mark": {"type": "rule", "style": style},
            "encoding": {"y": y, "x": {**x, "field": "before"}, "x2": {"field": "after"}},
        })  # fmt: skip
        layers.append({
            "data": {"name": "pairs"}, "transform": [{"filter": f"{both} && datum.before !== datum.after"}],
            "mark": {"type": "text", "style": f"{style}-words", "align": "left", "dx": 11},
            "encoding": {"y": y, "x": {**x, "field": "right"}, "text": {"field": "change"}},
        })  # fmt: skip
    return layers


def _marks(story: ReportData, y: Spec, x: Spec) -> Spec:
    tips = [
        tip("client", story.word), tip("model", "model"), tip("value", value_axis(story), value_format(story)),
        tip("train_rows", "rows trained on", ",d"), tip("test_rows", "test rows", ",d"), tip("weight", "weight λ"),
    ]  # fmt: skip
    return {
        "data": {"name": "clients"}, "transform": [{"filter": ON}],
        "mark": {"type": "point", "size": 90, "opacity": 1, "strokeWidth": 1.8},
        "encoding": {
            "y": y, "x": x, "fill": colour(story), "shape": shape(story), "stroke": colour(story), "tooltip": tips,
            "fillOpacity": {"condition": {"test": "datum.few", "value": 0.1}, "value": 1},
        },
    }  # fmt: skip


def _caption(story: ReportData, paired: bool, few: bool) -> str:
    words = f"Each row is one {story.word}; further {'right' if story.upwards else 'left'} is better."
    if paired:
        words += " Sorted by gain: the line runs from before to after, and is dashed where it is a loss."
    if few:
        words += f" † hollow: fewer than {FEW} test rows, so uncertain."
    return " ".join([words, *(note for figure, note in story.notes if figure == "clients")])
