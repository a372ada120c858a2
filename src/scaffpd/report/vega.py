"""Parts that the figures' Vega-Lite specifications share, and numbers that are short on disk."""

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
        alt: a description for screen readers.
        views: one specification per view; the first is shown at the start.
        data: the tables that the specifications name.
        focus: models to choose one from; empty where all are drawn at once.
        heavy: whether there are too many marks for SVG.
        wide: whether it takes the full width of the page.
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


def specification(run: ReportData, **parts: Any) -> Spec:
    """Make a specification with the signal that says which models are shown."""
    params = [{"name": "shown", "value": list(run.shown)}, *parts.pop("params", [])]
    return {
        "width": WIDTH, "height": HEIGHT, "autosize": {"type": "fit-x", "contains": "padding"}, "params": params,
        **parts,
    }  # fmt: skip


def colour(run: ReportData) -> Spec:
    """Colour (or shape) by model; the legend names the models that are shown."""
    legend = {"values": {"expr": "shown"}, "title": None, "columns": columns(run.names), "symbolStrokeWidth": 0}
    shown = legend if len(run.models) > 1 else None
    return {"field": "model", "type": "nominal", "scale": {"domain": list(run.names)}, "legend": shown}


def columns(names: Sequence[str]) -> Spec:
    """Columns of a legend, as the width of each; `settled`, or the page, turns that into a number of columns."""
    return {"room": 40 + 7 * min(max(map(len, names), default=1), 24)}


def settled(spec: Any, width: int) -> Any:
    """Fit a specification to a width: every `room` becomes a number of columns."""
    if isinstance(spec, dict):
        if set(spec) == {"room"}:
            return max(1, min(width - MARGIN, PAPER) // int(spec["room"]))
        return {name: settled(part, width) for name, part in spec.items()}
    return [settled(part, width) for part in spec] if isinstance(spec, list) else spec


def dashes(run: ReportData) -> list[Spec]:
    """Dash by model; not by a scale, because the legend of shapes would draw dashes around them."""
    found = [look(place)[2] for place in places([m.role for m in run.models])]
    return [{"name": "order", "value": list(run.names)}, {"name": "dashes", "value": found}]


def quantity(field: str, title: str, scale: Spec | None = None, **axis: Any) -> Spec:
    """A channel of numbers, with its axis."""
    look = {"tickCount": 6, **axis}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale or {}, "axis": look}


def across(field: str, title: str, scale: Spec | None = None, **axis: Any) -> Spec:
    """A horizontal channel of numbers: as many ticks as fit, and no grid."""
    room = {"expr": "clamp(width / 75, 3, 8)"}
    return quantity(field, title, scale, **{"grid": False, "tickCount": room, **axis})


def which(lines: Sequence[str]) -> Spec:
    """Two lines per model: the first dashed, the second solid."""
    legend = {"title": None, "symbolType": "stroke", "symbolStrokeWidth": 2, "orient": "bottom"}
    scale = {"domain": list(lines), "range": [[4, 3], [1, 0]]}
    return {"field": "which", "type": "nominal", "scale": scale, "legend": legend}


def named(clients: Sequence[str], **axis: Any) -> Spec:
    """A vertical channel with one row per client, in this order."""
    room = {"expr": "clamp(width / 3, 90, 220)"}
    look = {"labelLimit": room, "grid": True, "gridDash": [1, 3], "labelFontSize": 13, **axis}
    domain = {"domain": list(clients)}
    return {"field": "client", "type": "nominal", "sort": None, "scale": domain, "title": None, "axis": look}


def value_axis(run: ReportData) -> str:
    """Name the measure and the rows it is computed on."""
    rows = "test rows" if run.split == "test" else "rows trained on"
    name = {"accuracy": "accuracy", "rmse": "error (RMSE)", "loss": "loss"}[run.measure]
    return f"{name} on {rows}{', %' if run.upwards else ''}"


def value_format(run: ReportData) -> str:
    """The number format of a value, for d3."""
    return ".1f" if run.upwards else ",.4~r"


def scaled(run: ReportData, value: float | None) -> float | None:
    """Convert accuracies to percent."""
    return None if value is None else short(100 * value if run.upwards else value)


def short(value: float | None) -> float | None:
    """Round to seven digits: more than a screen shows."""
    return None if value is None else float(f"{value:.7g}")


def thinned(numbers: Sequence[int], most: int = MOST_ROUNDS) -> set[int]:
    """Choose at most so many numbers: the first, the last, and evenly spaced ones between."""
    unique = sorted(set(numbers))
    if len(unique) <= most:
        return set(unique)
    step = (len(unique) - 1) / (most - 1)
    return {unique[round(i * step)] for i in range(most)}


def tip(field: str, title: str, form: str | None = None) -> Spec:
    """One line of a tooltip."""
    title = title.capitalize() if title in ("title", "image") else title  # words that mean more to Vega's tooltip
    kind = {"type": "nominal"} if form is None else {"type": "quantitative", "format": form}
    return {"field": field, "title": title, **kind}
