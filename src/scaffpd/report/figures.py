"""All figures of a page; here, what fairness costs and what the communication buys."""

from __future__ import annotations

from dataclasses import replace

from scaffpd.report import client_figures, round_figures, vega
from scaffpd.report.data import ReportData, count
from scaffpd.report.vega import ON, Figure, Rows, Spec, colour, quantity, scaled, short, specification, tip, value_axis

COSTS = {"MB": ("megabytes", "megabytes sent, up and down, all clients"), "rounds": ("round", "rounds"),
         "exchanges": ("exchanges", "exchanges")}  # fmt: skip


def tradeoff(run: ReportData) -> Figure | None:
    """Show mean against worst 20 %: one point per model; a path is a line with a ring at the suggested point."""
    if len(run.overall) < 2:
        return None
    title, rows = value_axis(run), _rows(run)
    domains = _domains(run, rows)
    x = quantity("mean", f"mean {title}", {"domain": domains[0], "nice": False}, tickCount=5)
    y = quantity("worst_20", f"worst 20 %: {title}", {"domain": domains[1], "nice": False}, tickCount=5)
    layers = [*(_line(x, y) if run.path else []), _points(run, x, y), *_labels(x, y)]
    better = "Up and to the right" if run.upwards else "Down and to the left"
    caption = f"{better} is better for both, and a step is as long on either axis; pale models are off."
    alt = f"{len(run.overall)} models as points: mean against worst 20 % of the {title}."
    spec = specification(run, data={"name": "models"}, layer=layers)
    return Figure("tradeoff", "What fairness costs", f"{caption}{_path_words(run)}", alt, {"": spec}, {"models": rows})


def _rows(run: ReportData) -> Rows:
    knee = (run.path or {}).get("knee")
    low = min((m.name for m in run.pair or ()), key=lambda name: run.overall[name].worst_20, default="")
    return [
        {
            "model": m.name, "order": i, "mean": scaled(run, one.mean), "worst_20": scaled(run, one.worst_20),
            "worst": scaled(run, one.worst), "strength": m.strength, "knee": m.name == knee,
            "below": m.name == low, "label": f"{m.name} (suggested)" if m.name == knee else m.name,
            "worst_20_sd": scaled(run, one.worst_20_sd),
        }
        for i, m in enumerate(run.models)
        if (one := run.overall.get(m.name)) is not None
    ]  # fmt: skip


def _domains(run: ReportData, rows: Rows) -> tuple[list[float], list[float]]:
    """Two axes of the same length in points, so that a gain on one looks as large as a loss on the other."""
    ends = [(min(row[name] for row in rows), max(row[name] for row in rows)) for name in ("mean", "worst_20")]
    least = 1.0 if run.upwards else 0.01 * max(abs(high) for _, high in ends)
    half = 0.65 * max(least, *(high - low for low, high in ends))
    tops = [(low + high) / 2 + half for low, high in ends]
    tops = [min(top, 100.0 + half / 8) for top in tops] if run.upwards else tops
    first, second = ([round(top - 2 * half, 6), round(top, 6)] for top in tops)
    return first, second


def _line(x: Spec, y: Spec) -> list[Spec]:
    ends = {"x": x, "y": y}
    ring = {"type": "point", "style": "knee", "size": 420}
    return [
        {"mark": {"type": "line", "style": "quiet"}, "encoding": {**ends, "order": {"field": "order"}}},
        {"transform": [{"filter": "datum.knee"}], "mark": ring, "encoding": ends},
    ]


def _points(run: ReportData, x: Spec, y: Spec) -> Spec:
    form = vega.value_format(run)
    tips = [
        tip("model", "model"), tip("mean", "mean", form), tip("worst_20", "worst 20 %", form),
        tip("worst", "worst", form),
        *([tip("strength", "strength", ".3~g")] if run.path else []),
        *([tip("worst_20_sd", "± worst 20 %", ".2f")] if run.kind == "compare" else []),
    ]  # fmt: skip
    visible = {"condition": {"test": ON, "value": 1}, "value": 0.28}
    return {
        "mark": {"type": "point", "filled": True, "size": 130},
        "encoding": {
            "x": x, "y": y, "color": colour(run), "shape": colour(run), "tooltip": tips, "opacity": visible,
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


def _path_words(run: ReportData) -> str:
    if not run.path:
        return ""
    words = f" {run.path['why']}" if run.path.get("why") else ""
    warm, cold = run.path.get("rounds_warm"), run.path.get("rounds_cold")
    if not warm:
        return words
    words += f" The whole path took {count(warm)} rounds, each point from its neighbour"
    return f"{words}; from scratch, {count(cold)}." if cold else f"{words}."


def communication(run: ReportData) -> Figure | None:
    """Show what was sent against what it brought: curves where rounds were scored, else one point per model."""
    rows = _curves(run) or _ends(run)
    curves = any(row["round"] != rows[0]["round"] for row in rows if row["model"] == rows[0]["model"])
    views = {
        label: _spec(run, field, title, curves)
        for label, (field, title) in COSTS.items()
        if any(row[field] is not None for row in rows)
    }
    if not views or (not curves and len(rows) < 2):
        return None
    points = "The worst 20 % of the finished models; pale ones are off."
    how = "Solid: the worst 20 %; dashed: the mean." if curves else points
    caption = f"{how} {'Up' if run.upwards else 'Down'} and to the left is better: more for less."
    alt = f"The {value_axis(run)} of every model against what was sent."
    return Figure("communication", "What the communication buys", caption, alt, views, {"costs": rows})


def _curves(run: ReportData) -> Rows:
    return [
        {"model": r.model, "round": r.number, "megabytes": short(r.megabytes), "exchanges": r.exchanges,
         "which": name, "value": scaled(run, value)}
        for r in round_figures.drawn_rounds(run)
        for name, value in (("mean", r.mean), ("worst 20 %", r.worst_20))
        if value is not None
    ]  # fmt: skip


def _ends(run: ReportData) -> Rows:
    return [
        {"model": m.name, "round": m.rounds, "megabytes": short(m.megabytes), "exchanges": m.exchanges,
         "which": "worst 20 %", "value": scaled(run, run.overall[m.name].worst_20)}
        for m in run.models
        if m.name in run.overall and m.rounds is not None
    ]  # fmt: skip


def _spec(run: ReportData, field: str, title: str, curves: bool) -> Spec:
    x = vega.across(field, title, {"zero": curves, "padding": 0 if curves else 20}, format=",.3~r")
    y = quantity("value", value_axis(run), {"zero": False})
    tips = [
        tip("model", "model"), tip("which", "over clients"), tip("value", value_axis(run), vega.value_format(run)),
        tip("round", "rounds", ",d"), tip("exchanges", "exchanges", ",.0f"), tip("megabytes", "MB", ".3~g"),
    ]  # fmt: skip
    ends = {"x": x, "y": y, "color": colour(run)}
    mark = {"type": "point", "filled": True, "opacity": 1, "size": 26 if curves else 130}
    layers: list[Spec] = [{"mark": mark, "encoding": {**ends, "shape": colour(run), "tooltip": tips}}]
    if curves:
        dashed = vega.which(("mean", "worst 20 %"))
        layers.insert(0, {"mark": {"type": "line"}, "encoding": {**ends, "strokeDash": dashed}})
        return specification(run, data={"name": "costs"}, transform=[{"filter": ON}], layer=layers)
    layers[0]["encoding"]["opacity"] = {"condition": {"test": ON, "value": 1}, "value": 0.28}
    return specification(run, data={"name": "costs"}, layer=layers)


MAKERS = (
    client_figures.joining, client_figures.clients, tradeoff, round_figures.weights, round_figures.certificate,
    round_figures.losses, communication, client_figures.partition, round_figures.absent,
)  # fmt: skip


def figures(run: ReportData) -> tuple[Figure, ...]:
    """Make all figures that the run has the numbers for."""
    found = [figure for maker in MAKERS if (figure := maker(run)) is not None]
    narrow = [i for i, figure in enumerate(found) if not figure.wide]
    if len(narrow) % 2:  # the last one has no neighbour: give it the full width
        found[narrow[-1]] = replace(found[narrow[-1]], wide=True)
    return tuple(found)
