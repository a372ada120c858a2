"""The figures of a page: a function for each, which returns `None` where a run has no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from scaffpd.numbers import brief, plural, whole
from scaffpd.report.page import vega
from scaffpd.report.page.model import shown
from scaffpd.report.page.tables import (
    FEW,
    client_lines,
    marked,
    served,
    shown_models,
    shown_scores,
    uncertain,
)
from scaffpd.report.page.vega import LOOSE, MANY, STEP, Figure, Rows, Spec, layer, short
from scaffpd.report.page.verdict import meanings
from scaffpd.report.record import RunRecord
from scaffpd.tasks.base import EVERYONE
from scaffpd.tasks.survival import THIRDS

JOINED = ("average", "fair", "personal", "alone")  # in the order of their colours
EXPLAINED = {
    "average": "for the mean",
    "fair": "for those served worst",
    "personal": "each its own, near a shared one",
}
DAGGER = "indexof(few, datum.value) >= 0 ? datum.value + ' †' : datum.value"
SHARES: Spec = {"domain": [0, 1]}  # a scale
MOST_ROUNDS = 200  # points of a line: beyond, it looks the same


def figures(run: RunRecord) -> list[Figure]:
    """Make all figures that the run has the numbers for."""
    makers = (
        *(joining, clients, tradeoff, newcomers, reliability),
        *(survival, risks),
    )
    found = [figure for maker in makers if (figure := maker(run)) is not None]
    found += shown(run)
    found += [figure for figure in [certificate(run)] if figure is not None]
    for part in {figure.part for figure in found}:
        narrow = [
            i for i, one in enumerate(found) if not (one.wide or one.small) and one.part == part
        ]
        if len(narrow) % 2:  # the last one has no neighbour: give it the full width
            found[narrow[-1]] = replace(found[narrow[-1]], wide=True)
    return found


def joining(run: RunRecord) -> Figure | None:
    """Show how every model serves every client's held-out rows, and what joining changes."""
    found = run.joining
    if found is None:
        return None
    models = [m for m in dict.fromkeys([*JOINED, found.base]) if m in found.models]
    measure, better = run.task.serving
    rows = [
        _Row(client, {m: served(run, own[m]) for m in models}, *marked(run, found, client))
        for client in found.order
        if (own := found.by_client[client])
    ]
    explained = "; ".join(f"{name}: {EXPLAINED[name]}" for name in models if name in EXPLAINED)
    caption = (
        f"On held-out rows. At the end of each line: how much lower the {run.task.lower} is with "
        f"{found.shown} than {found.base}, with * where that is clear. {explained.capitalize()}."
    )
    few = [score.client for score in run.main.clients if uncertain(run, score)]
    title = f"{measure} ({better} is better)"
    words = ("joining", "Does joining pay?", caption)
    return _by_client(run, words, title, rows, models, (found.base, found.shown), few)


class _Row(NamedTuple):
    """A client, its value under every model, and the change from before to after."""

    client: str
    values: dict[str, float | None]
    tone: str
    change: str


def _by_client(
    run: RunRecord,
    words: tuple[str, str, str],
    title: str,
    rows: Sequence[_Row],
    models: Sequence[str],
    pair: Sequence[str],
    few: Sequence[str],
) -> Figure:
    """Draw a row per client: a mark per model, and a line from before to after with the change.

    Of many clients, the first and the last.
    """
    name, heading, caption = words
    rows = rows if len(rows) <= MANY else [*rows[: MANY // 2], *rows[-MANY // 2 :]]
    names = [row.client for row in rows]
    points: Rows = [
        {"client": row.client, "model": model, "value": short(row.values[model])}
        for model in sorted(models, key=[*pair, *models].index, reverse=True)
        for row in rows
    ]
    lines: Rows = [
        {
            "client": row.client,
            **{end: short(row.values[m]) for end, m in zip(("before", "after"), pair, strict=True)},
            "tone": row.tone or "quiet",
            "change": row.change,
        }
        for row in (rows if pair else ())
    ]
    y = vega.named(names, labelExpr=DAGGER)
    x = vega.across("value", title, LOOSE, grid=True)
    uncertain_one: Spec = {"test": "indexof(few, datum.client) >= 0", "value": 0.1}
    hollow: Spec = {"condition": uncertain_one, "value": 1}
    marks: Spec = {
        "y": y,
        "x": x,
        **vega.looks("model", models),
        "stroke": vega.colour("model", models),
        "fillOpacity": hollow,
    }
    dots = layer("point", marks, "", name, size=90, opacity=1, strokeWidth=1.8, tooltip=True)
    return Figure(
        name,
        heading,
        caption,
        f"For each of {len(names)} {plural(run.word)}, the {title} of {', '.join(models)}.",
        "joining" if name == "joining" else "models",
        {name: points, f"{name}-changes": lines},
        [*vega.changes(f"{name}-changes", y, x), dots],
        wide=True,
        height=STEP * max(len(names), 2),
        params={"few": list(few)},
    )


def _axis(run: RunRecord) -> str:
    return f"{run.measure.title} on {run.scored_rows}{', %' if run.measure.upwards else ''}"


def _scaled(run: RunRecord, value: float | None) -> float | None:
    return None if value is None else short(100 * value if run.measure.upwards else value)


def clients(run: RunRecord) -> Figure | None:
    """Show every client's score under every model, and its change from before to after."""
    order = [model.name for model in shown_models(run)]
    if not order or run.joining:
        return None
    pair = [model.name for model in run.pair or ()]
    lines = client_lines(run, gaining=True)
    rows = [
        _Row(
            line.score.client,
            {m: _scaled(run, cell.value) for m, cell in zip(order, line.values, strict=True)},
            line.change.tone,
            line.change.text,
        )
        for line in lines
    ]
    few = [line.score.client for line in lines if line.few]
    better = "right" if run.measure.upwards else "left"
    caption = f"Each row is one {run.word}; further {better} is better."
    if pair:
        caption += (
            " The line runs from before to after, and the number beside it is the change: green "
            "for a gain, orange and dashed for a loss; noise was not tested."
        )
    if few:
        caption += f" † hollow: fewer than {FEW} test rows, so uncertain."
    heading = "Who gains, and who pays?" if pair else f"How every {run.word} is served"
    return _by_client(run, ("clients", heading, caption), _axis(run), rows, order, pair, few)


def tradeoff(run: RunRecord) -> Figure | None:
    """Show mean against worst 20 %: one point per model of a path, a line with a ring."""
    models = [model for model in run.models if model.overall]
    if run.path is None or not models:
        return None
    knee = run.path.knee
    shown = [model.name for model in shown_models(run)]
    names = [*shown, *(model.name for model in models if model.name not in shown)]
    # names of close points would hide one another: the legend has the others
    labelled = {*shown[:2], models[-1].name}
    rows: Rows = [
        {
            "model": model.name,
            "order": i,
            "mean": _scaled(run, model.overall.mean),
            "worst_20": _scaled(run, model.overall.worst_20),
            "knee": model.name == knee,
            "label": f"{model.name} (suggested)"
            if model.name == knee
            else model.name * (model.name in labelled),
        }
        for i, model in enumerate(models)
        if model.overall
    ]
    better = "Up and to the right" if run.measure.upwards else "Down and to the left"
    caption = (
        f"{better} is better for both. {meanings(run)}Suggested: {run.path.why} The whole path "
        f"took {whole(run.path.rounds)} rounds, each point from its neighbour."
    )
    return _points_of("tradeoff", "What fairness costs", caption, _axis(run), names, rows)


def newcomers(run: RunRecord) -> Figure | None:
    """Show how models serve clients that they were not trained on: a point per objective."""
    found = run.newcomers
    if found is None:
        return None
    best = found.recommendation if found.enough else ""
    rows: Rows = [
        {
            "model": one.name,
            "mean": short(one.mean),
            "worst_20": short(one.worst_20),
            "knee": one.name == best,
            "label": f"{one.name} (recommended)" if one.name == best else one.name,
        }
        for one in found.points
    ]
    caption = (
        f"The loss of every {run.word}, left out in turn, under the model of the others: in the "
        "mean, and in the mean over the worst-served fifth. Down and to the left is better for "
        "both. A point that is chosen here looks too good by chance: the sentences above choose "
        "without whoever judges."
    )
    heading = f"Which model for a {run.word} that joins later?"
    title = f"loss of {plural(run.word)} left out"
    names = [one.name for one in found.points]
    return _points_of("newcomers", heading, caption, title, names, rows)


def _points_of(
    name: str, heading: str, caption: str, title: str, names: Sequence[str], rows: Rows
) -> Figure:
    """Draw models as points, mean against worst 20 %, in their order if any; one has a ring."""
    ends: Spec = {
        "x": vega.quantity("mean", f"mean {title}", LOOSE, tickCount=5),
        "y": vega.quantity("worst_20", f"worst 20 %: {title}", LOOSE, tickCount=5),
    }
    along = layer("line", {**ends, "order": {"field": "order"}}, "", name, style="quiet")
    layers = [
        *([along] if "order" in rows[0] else []),
        layer("point", ends, "datum.knee", name, style="knee", size=420),
        vega.dots({**ends, **vega.looks("model", names)}, name, 130),
        layer("text", {**ends, "text": {"field": "label"}}, "", name, dy=-16),
    ]
    alt = f"{len(names)} models as points: mean against worst 20 % of the {title}."
    return Figure(name, heading, caption, alt, "models", {name: rows}, layers)


def reliability(run: RunRecord) -> Figure | None:
    """Show which share came true of rows with similar probabilities."""
    binned = {row.model for row in run.bins}
    names = [name for name in shown_scores(run) if name in binned]
    if not names:
        return None
    points: Rows = [
        {
            "model": row.model,
            "p": short(row.mean_probability),
            "share": short(row.base_rate),
            "low": short(row.low),
            "high": short(row.high),
        }
        for row in run.bins
        if row.model in names
    ]
    two = len(run.labels) == 2
    label = f"of “{brief(run.labels[1])}”" if two else "of the predicted label"
    title = f"predicted probability {label}"
    x = vega.across("p", title, SHARES, format=".0%", grid=True)
    y = vega.quantity("share", "came true", SHARES, format=".0%")
    line: Spec = {"x": {"datum": 0}, "y": {"datum": 0}, "x2": {"datum": 1}, "y2": {"datum": 1}}
    looks = vega.looks("model", names)
    bar: Spec = {
        "x": x,
        "y": {**y, "field": "low"},
        "y2": {"field": "high"},
        "stroke": vega.colour("model", names),
    }
    return Figure(
        "reliability",
        "Do probabilities hold?",
        "Held-out rows, sorted by their predicted probability and cut into bins. On the line as "
        "many came true as was predicted; above it more, below it fewer. Bars are 95 % intervals.",
        f"Predicted probability against what came true, for {', '.join(names)}.",
        "predictions",
        {"bins": points},
        [
            layer("rule", line, style="quiet"),
            layer("rule", bar, "", "bins", opacity=0.45),
            vega.dots({"x": x, "y": y, **looks}, "bins"),
        ],
    )


def survival(run: RunRecord) -> Figure | None:
    """Show what was observed at clients, and the mean of what the model predicts there."""
    points = _points(run, ("observed", "predicted"), thirds=False)
    shown = len({row["group"] for row in points})
    caption = (
        "Share of held-out rows without an event. Steps: observed (Kaplan and Meier); dashed: the "
        f"mean of what “{brief(run.main.name)}” predicts there."
    )
    if shown < len(run.clients):
        caption += f" These are the {shown} {plural(run.word)} with the most of them."
    dash: Spec = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": ["observed", "predicted"], "range": [[1, 0], [5, 4]]},
        "legend": None,
    }
    title = ("survival", f"How long, {run.word} by {run.word}?", caption)
    return _curves(title, points, {"strokeDash": dash})


def risks(run: RunRecord) -> Figure | None:
    everyone = run.score_rows(run.main.name).get(EVERYONE)
    chance = None if everyone is None else everyone.values.get("log_rank_p")
    within = f" Log-rank test within {plural(run.word)}: p = "
    tested = "" if chance is None else f"{within}{chance:.2g}."
    caption = f"Share of held-out rows without an event, by thirds of their predicted risk.{tested}"
    points = _points(run, ("observed",), thirds=True)
    return _curves(("risks", "Does the risk tell who?", caption), points)


def _points(run: RunRecord, kinds: Sequence[str], thirds: bool) -> Rows:
    """Return points of the main model's curves, by thirds of the risk or by client."""
    return [
        {
            "group": row.group,
            "time": short(row.values["time"] or 0.0),
            "share": short(row.values[kind] or 0.0),
            "kind": kind,
        }
        for row in run.curves
        if row.model == run.main.name and (row.group in THIRDS) == thirds
        for kind in kinds
    ]


def _curves(words: tuple[str, str, str], points: Rows, more: Spec | None = None) -> Figure | None:
    name, heading, caption = words
    if not points:
        return None
    names = list(dict.fromkeys(str(row["group"]) for row in points))
    marks: Spec = {
        "x": vega.across("time", "time", LOOSE, grid=True),
        "y": vega.quantity("share", "without an event", SHARES, format=".0%"),
        "stroke": vega.colour("group", names),
        **(more or {}),
    }
    lines = layer("line", marks, "", name, interpolate="step-after", strokeWidth=1.8)
    return Figure(name, heading, caption, caption, "predictions", {name: points}, [lines])


def certificate(run: RunRecord) -> Figure | None:
    """Show the proven gap, where there is one: a line per model over rounds."""
    rows: Rows = []
    for model in shown_models(run) or run.models:
        count = len(model.history)
        # no more points than can be seen
        step = max((count - 1) / (MOST_ROUNDS - 1), 1.0)
        places = {min(round(i * step), count - 1) for i in range(min(count, MOST_ROUNDS))}
        rows += [
            {"model": model.name, "round": one.round, "value": short(gap)}
            for one in (model.history[k] for k in sorted(places))
            if (gap := one.certificate) is not None and gap > 0
        ]
    if not rows:
        return None
    names = list(dict.fromkeys(str(row["model"]) for row in rows))
    scale: Spec = {"type": "log", "nice": False, "padding": 8}
    y = vega.quantity("value", "proven gap to the optimum", scale, format=".1~e")
    last = max(int(row["round"] or 0) for row in rows)
    ticks = [*range(0, last + 1, max(1, -(-last // 5)))]
    # of more values than tickCount Vega shows the ends alone
    x = vega.across("round", "round", values=ticks, tickCount=len(ticks), format="d")
    ends: Spec = {"x": x, "y": y}
    line: Spec = {**ends, "stroke": vega.colour("model", names)}
    return Figure(
        "certificate",
        "How close to optimal, proven",
        "What training minimises is at most this far above its smallest possible value, by proof "
        "and with rounding counted; lower is closer.",
        "The proven gap of every model over rounds, on a logarithmic scale.",
        "training",
        {"certificate": rows},
        [
            layer("line", line, "", "certificate"),
            vega.dots({**ends, **vega.looks("model", names)}, "certificate", 26),
        ],
    )
