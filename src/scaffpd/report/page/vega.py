"""Colours and type of the page, and the parts that its Vega-Lite figures share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from scaffpd.fields import Json

Value = str | int | float | bool | None | Sequence["Value"] | dict[str, "Value"]
Spec = dict[str, Value]
Rows = list[dict[str, str | int | float | bool | None]]
MANY = 60  # clients: beyond, names no longer fit beside their marks
HEIGHT = 320
WIDTH = 640
BESIDE = 66  # pixels to the right of a chart, for a column of numbers
STEP = 24  # pixels per client
LEGEND = 250  # pixels that the narrowest chart has for it
LOOSE: Spec = {"zero": False, "padding": 10}  # a scale with room at its ends


def packaged(name: str) -> str:
    return files("scaffpd.report.page").joinpath(name).read_text(encoding="utf-8")


# Colours are Okabe and Ito's, which people with colour blindness tell from one another; a shape
# beside each, so that no two models look alike without colours either.
THEME: Json = json.loads(packaged("theme.json"))
PALETTE: dict[str, str] = THEME["palette"]
SERIES: list[str] = THEME["series"]
SHAPES: dict[str, str] = THEME["shapes"]


def css() -> str:
    named = PALETTE | {f"series-{i}": colour for i, colour in enumerate(SERIES)}
    colours = " ".join(f"--{name}: {colour};" for name, colour in named.items())
    return f":root {{ color-scheme: light; --font: {THEME['font']}; {colours} }}\n"


def config() -> Spec:
    """Make Vega-Lite's configuration: quiet axes, and styles by name, in the page's colours."""
    text = json.dumps(THEME["vega"])
    for name, value in {
        **THEME["palette"],
        "font": THEME["font"],
        "series": THEME["series"],
    }.items():
        text = text.replace(f'"${name}"', json.dumps(value))
    made: Spec = json.loads(text)
    return made


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # of its file and its place on the page
    heading: str  # what it answers
    caption: str  # how to read it, in a sentence or two
    alt: str  # a description for screen readers
    part: str  # of the page: joining, models, predictions or training
    data: dict[str, Rows]  # the tables that the layers name
    layers: list[Spec]
    wide: bool = False  # whether it takes the full width of the page
    height: int = HEIGHT
    # values that expressions use by name: a client's name must never be part of an expression
    params: dict[str, Value] = field(default_factory=dict)
    resolve: Spec = field(default_factory=dict)  # which scales of the layers differ
    small: bool = False  # whether three of its kind stand beside one another

    @property
    def specification(self) -> Spec:
        """The whole figure but for its data."""
        return {
            "width": WIDTH,
            "height": self.height,
            "autosize": {"type": "fit-x", "contains": "padding"},
            # `whole` is the width that the figure has on its page
            "params": [
                {"name": name, "value": value}
                for name, value in {"whole": WIDTH, **self.params}.items()
            ],
            "layer": self.layers,
            "resolve": self.resolve,
        }


def looks(field: str, names: Sequence[str]) -> Spec:
    """Give every name a colour and a shape, in one legend."""
    return {"fill": colour(field, names), "shape": colour(field, names, list(SHAPES))}


def colour(field: str, names: Sequence[str], of: Value = "ordinal") -> Spec:
    """Give every name a colour, or another mark of a range.

    The legend wraps by the width of the whole figure: that of the chart may shrink after the first
    layout, and Vega leaves room for the rows of that one only.
    """
    room = 28 + 6.5 * min(max(map(len, names), default=1), 24)
    legend: Spec = {
        "title": None,
        "symbolStrokeWidth": 0,
        "symbolOpacity": 1,
        "columns": {"expr": f"max(1, floor(max({LEGEND}, whole - {LEGEND}) / {room}))"},
    }
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(names), "range": of},
        "legend": legend if len(names) > 1 else None,
    }


def quantity(field: str, title: str, scale: Spec | None = None, **axis: Value) -> Spec:
    """Make a channel of numbers, with its axis."""
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale or {},
        "axis": {"tickCount": 6, **axis},
    }


def across(field: str, title: str, scale: Spec | None = None, **axis: Value) -> Spec:
    """Make a horizontal channel of numbers: as many ticks as fit, and no grid."""
    room: Spec = {"expr": "clamp(width / 75, 3, 8)"}
    return quantity(field, title, scale, **{"grid": False, "tickCount": room, **axis})


def named(clients: Sequence[str], **axis: Value) -> Spec:
    """Make a vertical channel with one row per client, in this order."""
    look: Spec = {
        "labelLimit": {"expr": "clamp(width / 3, 150, 220)"},
        "grid": True,
        "gridDash": [1, 3],
        "labelFontSize": 13,
        **axis,
    }
    return {
        "field": "client",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": list(clients)},
        "title": None,
        "axis": look,
    }


def short(value: float | None) -> float | None:
    """Round to seven digits: more than a screen shows."""
    return None if value is None else float(f"{value:.7g}")


def layer(mark: str, encoding: Spec, where: str = "", table: str = "", **look: Value) -> Spec:
    """Draw marks of one kind: of a `table`, of the rows `where` an expression holds.

    One mark, where all its channels are constant.
    """
    source: Spec = {"data": {"name": table} if table else {"values": [{}]}}
    chosen: Spec = {"transform": [{"filter": where}]} if where else {}
    return {**source, **chosen, "mark": {"type": mark, **look}, "encoding": encoding}


def dots(encoding: Spec, table: str, size: int = 80) -> Spec:
    """Draw points with the colours and shapes of `looks`."""
    return layer("point", encoding, "", table, size=size, opacity=1, strokeWidth=0, tooltip=True)


def beside(room: float = BESIDE, where: str = "true") -> Spec:
    """Place words in a column of their own, to the right of a chart that is wide enough."""
    return {"align": "right", "x": {"expr": f"width + ({where} ? {room} : 0)"}}


def changes(table: str, y: Spec, x: Spec) -> list[Spec]:
    """Draw lines from before to after, and write the change to their right, coloured by tone."""
    ends: Spec = {"y": y, "x": {**x, "field": "before"}, "x2": {"field": "after"}}
    words: Spec = {"y": y, "text": {"field": "change"}}
    return [
        one
        for tone in ("gain", "loss", "quiet")
        if (where := f"datum.tone === '{tone}'")
        for one in (
            layer("rule", ends, where, table, style=tone),
            layer("text", words, where, table, style=f"{tone}-words", **beside()),
        )
    ]
