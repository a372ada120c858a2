"""Colours and type of the page and its figures, light and dark: the one place where they are chosen.

The hues are Okabe and Ito's, moved in lightness until they stand out from the paper of their theme (3 : 1 for marks,
4.5 : 1 for words). Nothing is said by hue alone: models have shapes and dashes too.
"""

from __future__ import annotations

from typing import Any

Palette = dict[str, Any]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
LIGHT: Palette = {
    "paper": "#fbfaf7", "card": "#ffffff", "ink": "#1b1e24", "soft": "#565d69", "line": "#e3e0d9", "rest": "#a9adb5",
    "gain": "#00785a", "loss": "#b04a00", "accent": "#00609a", "caution": "#7a4b00", "caution-paper": "#fdf4e1",
    "series": ("#0072b2", "#d55e00", "#00835f", "#a4437c", "#946200", "#3b7fb0", "#5b6472"),
    "ramp": ("#eef3f7", "#9cc3de", "#3f8fc0", "#0a5c93", "#063a5e"),
}  # fmt: skip
DARK: Palette = {
    "paper": "#14161a", "card": "#1b1e24", "ink": "#eceae6", "soft": "#a8aeb9", "line": "#31353d", "rest": "#6a707b",
    "gain": "#3fcf9f", "loss": "#ff9a62", "accent": "#6cbcf0", "caution": "#f1cf87", "caution-paper": "#2b2517",
    "series": ("#56b4e9", "#ff8f4d", "#2fc795", "#e49ac3", "#e6b93f", "#9db8ff", "#a8aeb9"),
    "ramp": ("#20262d", "#24506f", "#2f7fb4", "#6cbcf0", "#d3ecfb"),
}  # fmt: skip
THEMES = {"light": LIGHT, "dark": DARK}
SHAPES = ("circle", "diamond", "square", "triangle-up", "cross", "triangle-down", "triangle-right")
DASHES = ([5, 3], [1, 0], [2, 2], [8, 3], [8, 3, 2, 3], [1, 3], [12, 4])
PATHS = {
    "circle": "M2 7a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z", "diamond": "M7 1L13 7L7 13L1 7Z", "square": "M2.5 2.5h9v9h-9Z",
    "triangle-up": "M7 1.5L13 12H1Z", "triangle-down": "M7 12.5L13 2H1Z", "triangle-right": "M12.5 7L2 13V1Z",
    "cross": "M5 1h4v4h4v4h-4v4h-4v-4h-4v-4h4Z",
}  # fmt: skip
COLOURS = ("paper", "card", "ink", "soft", "line", "rest", "gain", "loss", "accent", "caution", "caution-paper")


def look(place: int) -> tuple[int, str, list[int]]:
    """Colour, shape and dash of the model in this place: 0 is before, 1 after, then all others, no two alike."""
    lap = place // len(SHAPES)
    return place % len(SHAPES), SHAPES[(place + lap) % len(SHAPES)], DASHES[(place + 2 * lap) % len(DASHES)]


def places(roles: list[str]) -> list[int]:
    """Every model's place, by its role."""
    others = iter(range(2 if any(roles) else 0, len(roles) + 2))
    return [{"before": 0, "after": 1}.get(role, -1) if role else next(others) for role in roles]


def css() -> str:
    """The colours as custom properties: light, and dark by the system's wish or the reader's."""
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
    """Vega-Lite's configuration for a theme: quiet axes, and the colours of models in their order."""
    series = palette["series"]
    words = {"labelColor": palette["soft"], "titleColor": palette["soft"], "labelFont": FONT, "titleFont": FONT}
    return {
        "background": "transparent", "font": FONT, "padding": 4,
        "view": {"stroke": None},
        "axis": {
            **words, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 10,
            "gridColor": palette["line"], "domain": False, "ticks": False, "labelPadding": 6,
        },
        "legend": {
            **words, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "orient": "top",
            "labelColor": palette["ink"], "symbolSize": 90, "symbolStrokeWidth": 2, "labelLimit": 180, "rowPadding": 4,
        },
        "text": {"font": FONT, "fontSize": 12, "color": palette["ink"]},
        "line": {"strokeWidth": 2},
        "range": {
            "category": [series[look(place)[0]] for place in model_places],
            "symbol": [look(place)[1] for place in model_places],
            "ordinal": list(series), "heatmap": list(palette["ramp"]), "ramp": list(palette["ramp"]),
        },
        "style": {
            "quiet": {"color": palette["rest"], "strokeWidth": 1.2},
            "rest": {"color": palette["rest"], "opacity": 0.35, "strokeWidth": 1},
            "gain": {"color": palette["gain"], "strokeWidth": 3, "opacity": 0.55},
            "loss": {"color": palette["loss"], "strokeWidth": 3, "opacity": 0.55, "strokeDash": [3, 2]},
            "gain-words": {"color": palette["gain"], "fontSize": 12, "font": FONT},
            "loss-words": {"color": palette["loss"], "fontSize": 12, "font": FONT},
            "bubble": {"color": palette["accent"], "opacity": 0.75},
            "knee": {"color": palette["ink"], "filled": False, "strokeWidth": 1.6},
            "soft": {"color": palette["soft"], "font": FONT, "fontSize": 12},
        },
    }  # fmt: skip
