"""Colours and type of the page, light and dark, and the parts that its Vega-Lite figures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaffpd.run.page.data import ReportData

Palette = dict[str, Any]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
LIGHT: Palette = {
    "paper": "#fbfaf7",
    "card": "#ffffff",
    "ink": "#1b1e24",
    "soft": "#565d69",
    "line": "#e3e0d9",
    "rest": "#a9adb5",
    "gain": "#00785a",
    "loss": "#b04a00",
    "accent": "#00609a",
    "caution": "#7a4b00",
    "caution-paper": "#fdf4e1",
    "series": ("#0072b2", "#d55e00", "#00835f", "#a4437c", "#946200", "#3b7fb0", "#5b6472"),
    "ramp": ("#eef3f7", "#9cc3de", "#3f8fc0", "#0a5c93", "#063a5e"),
}
DARK: Palette = {
    "paper": "#14161a",
    "card": "#1b1e24",
    "ink": "#eceae6",
    "soft": "#a8aeb9",
    "line": "#31353d",
    "rest": "#6a707b",
    "gain": "#3fcf9f",
    "loss": "#ff9a62",
    "accent": "#6cbcf0",
    "caution": "#f1cf87",
    "caution-paper": "#2b2517",
    "series": ("#56b4e9", "#ff8f4d", "#2fc795", "#e49ac3", "#e6b93f", "#9db8ff", "#a8aeb9"),
    "ramp": ("#20262d", "#24506f", "#2f7fb4", "#6cbcf0", "#d3ecfb"),
}
THEMES = {"light": LIGHT, "dark": DARK}
SHAPES = ("circle", "diamond", "square", "triangle-up", "cross", "triangle-down", "triangle-right")
DASHES = ([5, 3], [1, 0], [2, 2], [8, 3], [8, 3, 2, 3], [1, 3], [12, 4])
PATHS = {
    "circle": "M2 7a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
    "diamond": "M7 1L13 7L7 13L1 7Z",
    "square": "M2.5 2.5h9v9h-9Z",
    "triangle-up": "M7 1.5L13 12H1Z",
    "triangle-down": "M7 12.5L13 2H1Z",
    "triangle-right": "M12.5 7L2 13V1Z",
    "cross": "M5 1h4v4h4v4h-4v4h-4v-4h-4v-4h4Z",
}
COLOURS = (
    "paper",
    "card",
    "ink",
    "soft",
    "line",
    "rest",
    "gain",
    "loss",
    "accent",
    "caution",
    "caution-paper",
)


def look(place: int) -> tuple[int, str, list[int]]:
    """Return colour, shape and dash of the model in this place: 0 is before, 1 after, then all others, no two alike."""
    lap = place // len(SHAPES)
    return (
        place % len(SHAPES),
        SHAPES[(place + lap) % len(SHAPES)],
        DASHES[(place + 2 * lap) % len(DASHES)],
    )


def places(roles: list[str]) -> list[int]:
    """Return every model's place, by its role."""
    others = iter(range(2 if any(roles) else 0, len(roles) + 2))
    return [{"before": 0, "after": 1}.get(role, -1) if role else next(others) for role in roles]


def css() -> str:
    """Write the colours as custom properties: light, and dark by the system's setting or the reader's."""
    light, dark = (
        " ".join(f"--{name}: {palette[name]};" for name in COLOURS)
        + " "
        + " ".join(f"--series-{i}: {colour};" for i, colour in enumerate(palette["series"]))
        for palette in (LIGHT, DARK)
    )
    return (
        f":root {{ color-scheme: light; --font: {FONT}; {light} }}\n"
        f"@media screen {{ :root[data-theme='dark'] {{ color-scheme: dark; {dark} }} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ "
        f":root:not([data-theme='light']) {{ color-scheme: dark; {dark} }} }}\n"
    )


def config(palette: Palette, model_places: list[int]) -> dict[str, Any]:
    """Make Vega-Lite's configuration for a theme: quiet axes, and the colours of models in their order."""
    series = palette["series"]
    words = {
        "labelColor": palette["soft"],
        "titleColor": palette["soft"],
        "labelFont": FONT,
        "titleFont": FONT,
    }
    return {
        "background": "transparent",
        "font": FONT,
        "padding": 4,
        "view": {"stroke": None},
        "axis": {
            **words,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 10,
            "gridColor": palette["line"],
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
        },
        "legend": {
            **words,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "orient": "top",
            "labelColor": palette["ink"],
            "symbolSize": 90,
            "symbolStrokeWidth": 2,
            "labelLimit": 180,
            "rowPadding": 4,
        },
        "text": {"font": FONT, "fontSize": 12, "color": palette["ink"]},
        "line": {"strokeWidth": 2},
        "range": {
            "category": [series[look(place)[0]] for place in model_places],
            "symbol": [look(place)[1] for place in model_places],
            "ordinal": list(series),
            "heatmap": list(palette["ramp"]),
            "ramp": list(palette["ramp"]),
            "diverging": [palette["loss"], palette["card"], palette["accent"]],
        },
        "style": {
            "quiet": {"color": palette["rest"], "strokeWidth": 1.2},
            "rest": {"color": palette["rest"], "opacity": 0.35, "strokeWidth": 1},
            "gain": {"color": palette["gain"], "strokeWidth": 3, "opacity": 0.55},
            "loss": {
                "color": palette["loss"],
                "strokeWidth": 3,
                "opacity": 0.55,
                "strokeDash": [3, 2],
            },
            "gain-words": {"color": palette["gain"], "fontSize": 12, "font": FONT},
            "loss-words": {"color": palette["loss"], "fontSize": 12, "font": FONT},
            "bubble": {"color": palette["accent"], "opacity": 0.75},
            "own": {"color": palette["accent"]},
            "ink": {"color": palette["ink"], "font": FONT, "fontSize": 12},
            "inverse": {"color": palette["card"], "font": FONT, "fontSize": 12},
            "knee": {"color": palette["ink"], "filled": False, "strokeWidth": 1.6},
            "soft": {"color": palette["soft"], "font": FONT, "fontSize": 12},
        },
    }


Spec = dict[str, Any]
Rows = list[dict[str, Any]]
MANY = 60  # clients: beyond, names no longer fit beside their marks
MOST_ROUNDS = 200  # points of a line: beyond, it looks the same
HEIGHT = 320
WIDTH = 640
BESIDE = 66  # pixels to the right of a chart, for a column of numbers
STEP = 24  # pixels per client
LOOSE = {"zero": False, "padding": 10}  # a scale with room at its ends
PAPER = 600  # wide is a legend at most, so that it fits on paper too
MARGIN = 80  # beside the legend: the axis and its labels
DASH = {"expr": "dashes[indexof(order, datum.model)]"}
ON = "indexof(shown, datum.model) >= 0"


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # of its file and its place on the page
    heading: str  # what it answers
    caption: str  # how to read it, in a sentence or two
    alt: str  # a description for screen readers
    views: dict[str, Spec]  # one specification per view; the first is shown at the start
    data: dict[str, Rows]  # the tables that the specifications name
    focus: tuple[str, ...] = ()  # models to choose one from; empty where all are drawn at once
    heavy: bool = False  # whether there are too many marks for SVG
    wide: bool = False  # whether it takes the full width of the page
    part: str = (
        "models"  # of the page: joining, models, predictions, rows, or training, which is folded
    )


def specification(run: ReportData, **parts: Any) -> Spec:
    """Make a specification with the signal that says which models are shown."""
    params = [{"name": "shown", "value": list(run.shown)}, *parts.pop("params", [])]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": params,
        **parts,
    }


def drawn(
    run: ReportData,
    name: str,
    heading: str,
    caption: str,
    alt: str,
    data: dict[str, Rows],
    part: str = "models",
    wide: bool = False,
    heavy: bool = False,
    focus: tuple[str, ...] = (),
    **parts: Any,
) -> Figure:
    """Make a figure with one view; its layers name their table where it has several."""
    only = {"data": {"name": next(iter(data))}} if len(data) == 1 else {}
    return Figure(
        name,
        heading,
        caption,
        alt,
        {"": specification(run, **only, **parts)},
        data,
        focus,
        heavy,
        wide,
        part,
    )


def colour(run: ReportData) -> Spec:
    """Give marks colours (or shapes) by model; the legend names the models that are shown."""
    legend = {
        "values": {"expr": "shown"},
        "title": None,
        "columns": columns(run.names),
        "symbolStrokeWidth": 0,
    }
    shown = legend if len(run.models) > 1 else None
    return {
        "field": "model",
        "type": "nominal",
        "scale": {"domain": list(run.names)},
        "legend": shown,
    }


def looks(field: str, names: Sequence[str]) -> Spec:
    """Give every name a colour and a shape, in one legend."""
    legend = {"title": None, "symbolStrokeWidth": 0, "symbolOpacity": 1, "columns": columns(names)}
    start: Spec = {"field": field, "type": "nominal", "legend": legend}
    ranges = {"fill": "ordinal", "shape": list(SHAPES[: len(names)])}
    return {
        name: {**start, "scale": {"domain": list(names), "range": of}}
        for name, of in ranges.items()
    }


def columns(names: Sequence[str]) -> Spec:
    """Give the width of a legend's columns; `settled`, or the page, turns it into a number of columns."""
    return {"room": 40 + 7 * min(max(map(len, names), default=1), 24)}


def settled(spec: Any, width: int) -> Any:
    """Fit a specification to a width: every `room` becomes a number of columns."""
    if isinstance(spec, dict):
        if set(spec) == {"room"}:
            return max(1, min(width - MARGIN, PAPER) // int(spec["room"]))
        return {name: settled(part, width) for name, part in spec.items()}
    return [settled(part, width) for part in spec] if isinstance(spec, list) else spec


def dashes(run: ReportData) -> list[Spec]:
    """Give lines dashes by model; not by a scale, because the legend of shapes would draw dashes around them."""
    found = [look(place)[2] for place in places([m.role for m in run.models])]
    return [{"name": "order", "value": list(run.names)}, {"name": "dashes", "value": found}]


def quantity(field: str, title: str, scale: Spec | None = None, **axis: Any) -> Spec:
    """Make a channel of numbers, with its axis."""
    look = {"tickCount": 6, **axis}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale or {},
        "axis": look,
    }


def across(field: str, title: str, scale: Spec | None = None, **axis: Any) -> Spec:
    """Make a horizontal channel of numbers: as many ticks as fit, and no grid."""
    room = {"expr": "clamp(width / 75, 3, 8)"}
    return quantity(field, title, scale, **{"grid": False, "tickCount": room, **axis})


def which(lines: Sequence[str]) -> Spec:
    """Draw two lines per model: the first dashed, the second solid."""
    legend = {"title": None, "symbolType": "stroke", "symbolStrokeWidth": 2, "orient": "bottom"}
    scale = {"domain": list(lines), "range": [[4, 3], [1, 0]]}
    return {"field": "which", "type": "nominal", "scale": scale, "legend": legend}


def named(clients: Sequence[str], **axis: Any) -> Spec:
    """Make a vertical channel with one row per client, in this order."""
    room = {"expr": "clamp(width / 3, 90, 220)"}
    look = {"labelLimit": room, "grid": True, "gridDash": [1, 3], "labelFontSize": 13, **axis}
    domain = {"domain": list(clients)}
    return {
        "field": "client",
        "type": "nominal",
        "sort": None,
        "scale": domain,
        "title": None,
        "axis": look,
    }


def value_axis(run: ReportData) -> str:
    """Name the measure and the rows it is computed on."""
    rows = "test rows" if run.split == "test" else "rows trained on"
    name = {"accuracy": "accuracy", "rmse": "error (RMSE)", "loss": "loss"}[run.measure]
    return f"{name} on {rows}{', %' if run.upwards else ''}"


def value_format(run: ReportData) -> str:
    """Return the number format of a value, for d3."""
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


def tips(**lines: str | tuple[str, str]) -> list[Spec]:
    """Make a tooltip: by field a title, or a title and the format of its numbers."""
    found: list[Spec] = []
    for field, said in lines.items():
        title, form = (said, "") if isinstance(said, str) else said
        title = (
            title.capitalize() if title in ("title", "image") else title
        )  # words that mean more to Vega's tooltip
        kind = {"type": "quantitative", "format": form} if form else {"type": "nominal"}
        found.append({"field": field, "title": title, **kind})
    return found


def layer(mark: str, encoding: Spec, where: str = "", table: str = "", **look: Any) -> Spec:
    """Draw marks of one kind: of the rows `where` an expression holds, of a `table` where a figure has several.

    One mark, where all its channels are constant.
    """
    constant = all("datum" in channel for channel in encoding.values())
    rows: Spec = {"name": table} if table else {"values": [{}]} if constant else {}
    source = {"data": rows} if rows else {}
    chosen = {"transform": [{"filter": where}]} if where else {}
    return {**source, **chosen, "mark": {"type": mark, **look}, "encoding": encoding}


def dots(encoding: Spec, size: int = 80, where: str = "", table: str = "") -> Spec:
    """Draw points with the colours and shapes of `looks`."""
    return layer("point", encoding, where, table, size=size, opacity=1, strokeWidth=0)


def changes(table: str, y: Spec, x: Spec, when: str = "true") -> list[Spec]:
    """Draw lines from before to after, and write the change to their right; gains, losses and noise apart."""
    layers: list[Spec] = []
    ends = {"y": y, "x": {**x, "field": "before"}, "x2": {"field": "after"}}
    words = {"y": y, "text": {"field": "change"}}
    for tone, style in (("gain", "gain-words"), ("loss", "loss-words"), ("quiet", "soft")):
        wanted = f"{when} && datum.tone === '{tone}'"
        right = {"expr": f"width + {BESIDE}"}
        layers.append(layer("rule", ends, wanted, table, style=tone))
        layers.append(layer("text", words, wanted, table, style=style, align="right", x=right))
    return layers
