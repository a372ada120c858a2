"""The figures of what a model has learnt: curves, effects with intervals, and effects over time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from scaffpd.numbers import brief, plain, plural
from scaffpd.pipeline.shapes import MOST_OWN, MOST_SHAPES, Shape
from scaffpd.report.page import vega
from scaffpd.report.page.tables import FAR
from scaffpd.report.page.vega import LOOSE, STEP, Figure, Rows, Spec, layer, short
from scaffpd.report.record import RunRecord

ROOM = "clamp(width / 2, 120, 260)"  # pixels for names of columns
# names of columns often differ at their ends only
MIDDLE = f"truncate(datum.value, floor({ROOM} / 6.8), 'center')"
MOST_COLUMNS = 12
MOST_EFFECTS = 20
MOST_HAZARDS = 6
STRIP = 34  # pixels for the distribution of rows, below a curve
LOW = 190  # pixels of small figures
FLAT = 0.01  # of the curve that is spread most
LEVEL = 0.05  # of all tests of a page together
REACH = 1.96  # standard errors to either side


def shown(run: RunRecord) -> list[Figure]:
    """Return the figures of what the model has learnt."""
    found = [figure for maker in (coefficients, forest) if (figure := maker(run)) is not None]
    return [*shapes(run), *found, *hazards(run)]


def shapes(run: RunRecord) -> Iterator[Figure]:
    """Draw a small figure for each of the columns whose curves are spread most."""
    names = _drawn(run)
    drawn = [one for one in run.shapes if one.column in names]
    every = [
        v for one in drawn for v in (*_ends(one), *(v for own in one.own.values() for v in own))
    ]
    scale: Spec = {
        "domain": [min(every), max(every)] if every else [],
        "nice": False,
        "range": [{"expr": f"height - {STRIP + 8}"}, 4],
    }
    for k, name in enumerate(names, 1):
        own = [one for one in drawn if one.column == name]
        yield _shape(run, f"shape-{k}", own, scale)


def _drawn(run: RunRecord) -> list[str]:
    """Return the columns whose curves are drawn: the first, none of them flat beside another."""
    least = FLAT * max((one.spread for one in run.shapes), default=0.0)
    names = dict.fromkeys(one.column for one in run.shapes if one.spread >= least)
    return [*names][:MOST_SHAPES]


def _ends(one: Shape) -> list[float]:
    errors = one.errors or [0.0] * len(one.shared)
    return [f + s * REACH * e for f, e in zip(one.shared, errors, strict=True) for s in (-1, 1)]


def _at(one: Shape) -> list[float]:
    """Return the values that a curve is known at: both ends of every cell."""
    return [edge for cell in pairwise(one.edges) for edge in cell]


def _shape(run: RunRecord, name: str, several: list[Shape], scale: Spec) -> Figure:
    """Draw clients' curves thin, the shared one bold on its band, and rows below."""
    first = several[0]
    lines: Rows = []
    for one in several:
        errors = one.errors or [0.0] * len(one.shared)
        lines += [
            {
                "at": short(v),
                "value": short(f),
                "low": short(f - REACH * e),
                "high": short(f + REACH * e),
                "label": one.label,
                "order": k,
            }
            for k, (v, f, e) in enumerate(zip(_at(one), one.shared, errors, strict=True))
        ]
    thin: Rows = [
        {"at": short(v), "value": short(f), "client": client, "order": k}
        for client, own in first.own.items()
        for k, (v, f) in enumerate(zip(_at(first), own, strict=True))
    ]
    thinnest = (first.edges[-1] - first.edges[0]) / LOW  # a pixel: no bar is higher than it shows
    cells: Rows = [
        {"from": short(a), "to": short(b), "rows": n, "density": short(n / max(b - a, thinnest))}
        for (a, b), n in zip(pairwise(first.edges), first.rows, strict=True)
    ]
    x = vega.quantity(
        "at",
        "",
        {"nice": False, "zero": False},
        tickCount={"expr": "clamp(width / 75, 2, 6)"},
        grid=False,
    )
    x["title"] = None
    y = vega.quantity("value", "", scale, tickCount=4)
    y["title"] = None
    band: Spec = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    line: Spec = {"x": x, "y": y, "order": {"field": "order", "type": "quantitative"}}
    labels = [one.label for one in several]
    bold: Spec = {**line, "stroke": vega.colour("label", labels)} if len(labels) > 1 else line
    below: Spec = {
        "x": {**x, "field": "from"},
        "x2": {"field": "to"},
        "y2": {"datum": 0},
        "y": {
            "field": "density",
            "type": "quantitative",
            "axis": None,
            "scale": {"range": [{"expr": "height"}, {"expr": f"height - {STRIP}"}], "zero": True},
        },
        "tooltip": [{"field": f, "type": "quantitative"} for f in ("from", "to", "rows")],
    }
    curves: list[Spec] = [
        layer("rule", {"y": {"datum": 0, "type": "quantitative", "scale": scale}}, style="quiet"),
        layer("area", band, "", name, style="band") if first.errors else {},
        layer("line", {**line, "detail": {"field": "client"}}, "", f"{name}-own", style="own")
        if thin
        else {},
        layer("line", bold, "", name, style="bold"),
    ]
    above: Spec = {"layer": [one for one in curves if one]}
    return Figure(
        name,
        first.column,
        "",
        f"What values of {first.column} add to {run.task.adds_to}, and how many rows have them.",
        "shapes",
        {name: lines, f"{name}-own": thin, f"{name}-rows": cells},
        [above, layer("bar", below, "", f"{name}-rows", style="rows")],
        height=LOW,
        resolve={"scale": {"y": "independent"}},
        small=True,
    )


def about_shapes(run: RunRecord) -> str:
    """Say how to read the curves, and which columns have one that is not drawn."""
    drawn = _drawn(run)
    flat = [c for c in dict.fromkeys(one.column for one in run.shapes) if c not in drawn]
    first = run.shapes[0]
    of = f" of “{brief(run.labels[1])}”" if len(run.labels) == 2 else ""
    said = [
        f"What a value of a column adds to {run.task.adds_to}{of}, against the mean over training "
        f"rows, by the “{first.model}” model; all on one scale. It jumps at thresholds that all "
        f"{plural(run.word)} have agreed on."
    ]
    if first.errors:
        said.append(
            "Bands: 95 %, from the curvature of the likelihood, with every row counted alike"
            f"{', ' if run.shapes_said else ''}{run.shapes_said}."
        )
    if first.own:
        most = len(run.clients) > MOST_OWN
        who = (
            f"the {MOST_OWN} {plural(run.word)} with the most rows" if most else f"every {run.word}"
        )
        said.append(f"Thin: {who} by a model of its own.")
    said.append("Below: where training rows are, in cells of ten rows or more.")
    if flat:
        said.append(f"Flatter, and not drawn: {', '.join(map(brief, flat))}.")
    return " ".join(said)


def forest(run: RunRecord) -> Figure | None:
    """Draw the effects that are clearest with their intervals: ratios on a logarithmic axis."""
    ratios = run.task.ratios
    ends = ("ratio_low", "ratio", "ratio_high") if ratios else ("low", "estimate", "high")
    most = 13.8 if ratios else FAR
    known: dict[str, dict[str, float]] = {}
    ordered = run.task.ordered
    for one in run.effects:
        values = {name: value for name, value in one.values.items() if value is not None}
        if one.column.split(": ")[0] == "intercept" or (ordered and one.column.startswith("cut ")):
            continue  # that is no column
        if len(values) < len(one.values):
            continue  # one that is not known is no point
        if -most < values["low"] * values["unit"] <= values["high"] * values["unit"] < most:
            known[one.column] = values
    ranked = sorted(known, key=lambda c: -abs(known[c]["estimate"]) / (known[c]["error"] or 1))
    chosen = set(ranked[:MOST_EFFECTS])
    rows: Rows = []
    references = {name.split("=")[0] for name, values in known.items() if not values["error"]}
    references &= {name.split("=")[0] for name in chosen}
    for column, values in known.items():
        reference = not values["error"] and column.split("=")[0] in references
        if column not in chosen and not reference:
            continue
        unit = values["unit"]
        per = "" if unit == 1 else f", per {float(f'{unit:.2g}'):g}"
        # a ratio for one unit, to the power of a step
        low, value, high = (values[end] ** unit if ratios else values[end] * unit for end in ends)
        rows.append(
            {
                "client": f"{column}{' (reference)' if reference else per}",
                "value": short(value),
                "low": short(low),
                "high": short(high),
                "text": f"{plain(value)} ({plain(low)} to {plain(high)})" if not reference else "",
            }
        )
    if not rows:
        return None
    aside = vega.beside(12 + 6.3 * max(len(str(row["text"])) for row in rows), "whole > 560")
    title = f"{ratios} ratio" if ratios else f"adds to {run.task.adds_to}"
    but = " but for pairs" if any(" × " in column for column in known) else ""
    scale: Spec = {"type": "log", "nice": False, "padding": 10} if ratios else LOOSE
    called = [str(row["client"]) for row in rows]
    y = vega.named(called, labelExpr=MIDDLE, labelLimit={"expr": ROOM})
    room: Spec = {"expr": "clamp(width / 90, 3, 6)"}
    x = vega.quantity(
        "value", title, scale, grid=True, tickCount=room, **({"format": "~g"} if ratios else {})
    )
    bar: Spec = {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    nothing: Spec = {"x": {"datum": 1 if ratios else 0, "type": "quantitative", "scale": scale}}
    words: Spec = {"y": y, "text": {"value": {"expr": "whole > 560 ? datum.text : ''"}}}
    return Figure(
        "forest",
        "What every column adds",
        f"{_unit(run)} with its 95 % interval; on the grey line a column adds nothing. "
        f"{_against(run)}This is a model without curves{but}; what it finds need not be causes.",
        f"{title.capitalize()} of {len(rows)} columns, with intervals.",
        "model",
        {"forest": rows},
        [
            layer("rule", nothing, style="quiet"),
            layer("rule", bar, "", "forest", style="interval"),
            layer("point", {"y": y, "x": x}, "", "forest", style="estimate", tooltip=True),
            layer("text", words, "", "forest", style="quiet-words", **aside),
        ],
        wide=True,
        height=STEP * max(len(rows), 2),
    )


def _unit(run: RunRecord) -> str:
    several = len(run.labels) > 2 and not run.task.ordered
    of = f" of a label against “{brief(run.labels[0])}”" if several else ""
    of = " of a higher category" if run.task.ordered else of
    does = f"multiplies the {run.task.ratios}{of} by," if run.task.ratios else "adds"
    to = "" if run.task.ratios else f" to {run.task.adds_to}"
    return f"What one deviation more of a number (“per”), or a category, {does}{to}"


def _against(run: RunRecord) -> str:
    """Say what categories are compared with, and how many effects are not drawn."""
    references = [one.column for one in run.effects if one.values["error"] == 0]
    if references:
        return f"Categories are against {' and '.join(map(brief, references))}. "
    if any("=" in one.column for one in run.effects):
        return "Categories are against the mean over rows (--reference takes one of them). "
    return ""


def hazards(run: RunRecord) -> Iterator[Figure]:
    """Draw effects on a hazard over time, those that change most clearly."""
    ranked = sorted(run.hazards, key=lambda one: one.p)[:MOST_HAZARDS]
    points: Rows = [
        {
            "column": one.column,
            "time": short(t),
            "value": short(f),
            "low": short(f - REACH * e),
            "high": short(f + REACH * e),
        }
        for one in ranked
        for t, f, e in zip(one.times, one.effects, one.errors, strict=True)
        if f is not None and e is not None
    ]
    for k, one in enumerate(ranked, 1):
        own = [row for row in points if row["column"] == one.column]
        x = vega.quantity(
            "time",
            "time",
            {"type": "log", "nice": False, "padding": 10},
            tickCount=4,
            grid=False,
            format="~g",
        )
        y = vega.quantity("value", "", LOOSE, tickCount=4)
        y["title"] = None
        bar: Spec = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
        nothing: Spec = {"y": {"datum": 0, "type": "quantitative"}}
        p = "p < 0.001" if one.p < 0.001 else f"p = {one.p:.2g}"
        name = f"hazard-{k}"
        yield Figure(
            name,
            one.column,
            p,
            f"The effect of {one.column} on the logarithm of the hazard, over time.",
            "hazards",
            {name: own},
            [
                layer("rule", nothing, style="quiet"),
                layer("rule", bar, "", name, style="interval"),
                layer("point", {"x": x, "y": y}, "", name, style="estimate", tooltip=True),
            ],
            height=LOW,
            small=True,
        )


def about_hazards(run: RunRecord) -> str:
    """Say what the test found, and how to read its pictures."""
    clear = [one.column for one in run.hazards if one.p <= LEVEL / len(run.hazards)]
    found = (
        f"The effects of {', '.join(map(brief, clear))} change with time"
        if clear
        else "No column's effect clearly changes with time"
    )
    return (
        f"{found} (Grambsch and Therneau’s test of each, at 5 % corrected for {len(run.hazards)} "
        "columns). Cox’s model takes effects to be the same at all times. The pictures have the "
        "columns with the smallest p: what one deviation adds to the logarithm of the hazard, in "
        "parts of the events one after the other, with 95 % intervals; level is as the model says."
    )


def coefficients(run: RunRecord) -> Figure | None:
    """Show what one deviation of the columns that add most adds, where there are no effects."""
    known = run.coefficients[0].values if run.coefficients else {}
    names = [name for name in dict.fromkeys(["average", "fair", *run.names]) if name in known][:6]
    if not names or run.effects or run.shapes:
        return None
    ranked = sorted(
        run.coefficients, key=lambda row: -max(abs(row.values[n] or 0.0) for n in names)
    )
    ranked = ranked[:MOST_COLUMNS]
    called = [f"{row.column} → {row.label}" if row.label else row.column for row in ranked]
    rows = [(client, row.values) for client, row in zip(called, ranked, strict=True)]
    points: Rows = [
        {"client": client, "model": n, "value": short(own[n])}
        for client, own in rows
        for n in names
    ]
    ranges: Rows = [
        {"client": client, **{end: short(own[f"personal_{end}"]) for end in ("low", "high")}}
        for client, own in rows
        if "personal_low" in own
    ]
    unit = run.task.adds_to
    y = vega.named(called, labelExpr=MIDDLE, labelLimit={"expr": ROOM})
    x = vega.across("value", f"what one deviation adds to {unit}", LOOSE, grid=True)
    ends: Spec = {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    of = f" of “{brief(run.labels[1])}”" if len(run.labels) == 2 else ""
    grey = "Grey: from the least to the largest of the personal models. " if ranges else ""
    marks: Spec = {"y": y, "x": x, **vega.looks("model", names)}
    return Figure(
        "coefficients",
        "What do models look at?",
        f"The {len(ranked)} columns that move predictions most: what one standard deviation more "
        f"of it adds to {unit}{of}; to the left it speaks against. {grey}This is what models use, "
        "not what causes anything.",
        f"Standardised coefficients of {len(ranked)} columns under {', '.join(names)}.",
        "model",
        {"columns": points, "ranges": ranges},
        [
            layer("rule", {"x": {"datum": 0}}, style="quiet"),
            layer("rule", ends, "", "ranges", style="rest", strokeWidth=7),
            vega.dots(marks, "columns"),
        ],
        height=STEP * max(len(called), 2),
    )
