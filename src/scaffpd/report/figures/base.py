"""What the figures share: the parts of a Vega-Lite specification, and numbers that are short on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaffpd.report.data import ReportData
from scaffpd.report.theme import look, places

Spec = dict[str, Any]
Rows = list[dict[str, Any]]
MANY = 60  # clients: beyond, names no longer fit beside their marks
MOST_ROUNDS = 200  # points of a line: beyond, it looks the same
HEIGHT, WIDTH = 320, 640
PAPER = 600  # wide is a legend at most, so that it fits on paper too
MARGIN = 80  # beside the legend: the axis and its labels
DASH = {"expr": "dashes[indexof(order, datum.model)]"}
ON = "indexof(shown, datum.model) >= 0"


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: of its file and its place on the page.
        heading: what it answers.
        caption: how to read it, in a sentence or two.
        alt: what it shows, for who does not see it.
        views: a specification for each way to look at it; the first is the usual one.
        data: the tables that the specifications name.
        focus: models of which one at a time is drawn; empty where all are.
        heavy: too many marks for SVG.
        wide: it takes the page's whole width.
    """

    name: str
    heading: str
    caption: str
    alt: str
    views: dict[str, Spec]
    data: dict[str, Rows]
    focus: tuple[str, ...] = ()
    heavy: bool = False
    wide: bool = False


def specification(story: ReportData, **parts: Any) -> Spec:
    """A specification with the signal that says which models are on."""
    params = [{"name": "shown", "value": list(story.shown)}, *parts.pop("params", [])]
    return {
        "width": WIDTH, "height": HEIGHT, "autosize": {"type": "fit-x", "contains": "padding"}, "params": params,
        **parts,
    }  # fmt: skip


def colour(story: ReportData) -> Spec:
    """The model's colour; the legend names those that are on."""
    legend = {"values": {"expr": "shown"}, "title": None, "columns": columns(story.names), "symbolStrokeWidth": 0}
    return {
        "field": "model",
        "type": "nominal",
        "scale": {"domain": list(story.names)},
        "legend": legend if len(story.models) > 1 else None,
    }


def columns(names: Sequence[str]) -> Spec:
    """Of a legend: the room that each takes; whoever draws says how many that makes (`settled`, or the page)."""
    return {"room": 40 + 7 * min(max(map(len, names), default=1), 24)}


def settled(spec: Any, width: int) -> Any:
    """A specification for a certain width: every `room` becomes a number of columns."""
    if isinstance(spec, dict):
        if set(spec) == {"room"}:
            return max(1, min(width - MARGIN, PAPER) // int(spec["room"]))
        return {name: settled(part, width) for name, part in spec.items()}
    return [settled(part, width) for part in spec] if isinstance(spec, list) else spec


def shape(story: ReportData) -> Spec:
    """The model's shape."""
    return {**colour(story), "field": "model"}


def dashes(story: ReportData) -> list[Spec]:
    """The model's dash: not by a scale, for the legend of shapes would draw dashes around them."""
    found = [look(place)[2] for place in places([m.role for m in story.models])]
    return [{"name": "order", "value": list(story.names)}, {"name": "dashes", "value": found}]


def quantity(field: str, title: str, scale: Spec | None = None, **axis: Any) -> Spec:
    """A channel of numbers."""
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale or {},
        "axis": {"tickCount": 6, **axis},
    }


def across(field: str, title: str, scale: Spec | None = None, **axis: Any) -> Spec:
    """The same from left to right: as many ticks as there is room for, and no grid."""
    room = {"expr": "clamp(width / 75, 3, 8)"}
    return quantity(field, title, scale, **{"grid": False, "tickCount": room, **axis})


def which(lines: Sequence[str]) -> Spec:
    """Two lines a model: the first dashed, the second solid."""
    legend = {"title": None, "symbolType": "stroke", "symbolStrokeWidth": 2, "orient": "bottom"}
    scale = {"domain": list(lines), "range": [[4, 3], [1, 0]]}
    return {"field": "which", "type": "nominal", "scale": scale, "legend": legend}


def named(clients: Sequence[str], **axis: Any) -> Spec:
    """A row for every client, in this order."""
    room = {"expr": "clamp(width / 3, 90, 220)"}
    look = {"labelLimit": room, "grid": True, "gridDash": [1, 3], "labelFontSize": 13, **axis}
    return {
        "field": "client",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": list(clients)},
        "title": None,
        "axis": look,
    }


def value_axis(story: ReportData) -> str:
    """The measure and the rows it is about."""
    rows = "test rows" if story.split == "test" else "rows trained on"
    name = {"accuracy": "accuracy", "rmse": "error (RMSE)", "loss": "loss"}[story.measure]
    return f"{name} on {rows}{', %' if story.upwards else ''}"


def value_format(story: ReportData) -> str:
    """How d3 writes a value."""
    return ".1f" if story.upwards else ",.4~r"


def scaled(story: ReportData, value: float | None) -> float | None:
    """Percent for accuracies."""
    return None if value is None else short(100 * value if story.upwards else value)


def short(value: float | None) -> float | None:
    """Seven digits are more than a screen has."""
    return None if value is None else float(f"{value:.7g}")


def thinned(numbers: Sequence[int], most: int = MOST_ROUNDS) -> set[int]:
    """The first, the last, and evenly many between."""
    unique = sorted(set(numbers))
    if len(unique) <= most:
        return set(unique)
    step = (len(unique) - 1) / (most - 1)
    return {unique[round(i * step)] for i in range(most)}


def tip(field: str, title: str, form: str | None = None) -> Spec:
    """A line of a tooltip."""
    title = title.capitalize() if title in ("title", "image") else title  # words that mean more to Vega's tooltip
    kind = {"type": "nominal"} if form is None else {"type": "quantitative", "format": form}
    return {"field": field, "title": title, **kind}
