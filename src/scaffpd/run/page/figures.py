"""All figures of a page; here, what joining brings, how alike models should be, and who gains from whom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scaffpd.numbers import percent, plural
from scaffpd.run.page import client_figures, predictions, round_figures, vega
from scaffpd.run.page.data import JoiningReport, ReportData, StrengthPoint
from scaffpd.run.page.vega import (
    LOOSE,
    MANY,
    STEP,
    Figure,
    Rows,
    Spec,
    drawn,
    layer,
    named,
    quantity,
    short,
    tips,
)

JOINED = ("average", "fair", "personal", "alone")  # in the order of their colours
TONES = {"yes": "gain", "no": "loss", "within noise": "quiet"}
PART = "joining"
CELL = 26  # pixels
PARTS = ("gets", "brings (Shapley)", "others lose without it")


def joining(run: ReportData) -> Figure | None:
    """Show every client's held-out loss alone, with one average or fair model and with its own, the gain as a line."""
    if (found := run.joining) is None:
        return None
    names = found.order
    models = [model for model in JOINED if model in found.models]
    names = names if len(names) <= MANY else [*names[: MANY // 2], *names[-MANY // 2 :]]
    points = [
        {
            "client": c,
            "model": model,
            "place": k,
            "value": short(row["test_loss"]),
            "score": _score(row),
            "train_rows": row.get("train_rows"),
            "test_rows": row.get("test_rows"),
        }
        for c in names
        for k, model in enumerate(models)
        for row in [found.rows[c][model]]
    ]
    y = named(names)
    x = vega.across("value", "loss on held-out rows: less is better", LOOSE, grid=True)
    tip = tips(
        client=run.word,
        model="model",
        value=("loss", ",.4~r"),
        score="score",
        train_rows=("rows trained on", ",d"),
        test_rows=("test rows", ",d"),
    )
    marks = vega.dots(
        {"y": y, "x": x, **vega.looks("model", models), "tooltip": tip}, 90, table="joined"
    )
    caption = (
        f"Loss is the error of a model on rows that no model has seen: further left is better. The line leads from "
        f"alone to {found.shown}, and the number beside it is how much lower the loss is then: green with * where that "
        f"is clear of noise, orange with * where joining clearly costs, grey within noise. {_explained(models)} "
        f"Noise: {found.interval}."
    )
    alt = f"For each of {len(names)} {plural(run.word)}, the loss on held-out rows of {', '.join(models)}."
    layers = [*vega.changes("gained", y, x), marks]
    data = {"joined": points, "gained": _gained(found, names)}
    height = STEP * max(len(names), 2)
    return drawn(
        run,
        "joining",
        "Does joining pay?",
        caption,
        alt,
        data,
        PART,
        True,
        height=height,
        layer=layers,
    )


def _explained(models: list[str]) -> str:
    """Say what the models are, those that are drawn."""
    said = {
        "average": "one for all, made for the mean",
        "fair": "one for all, made for those served worst",
        "personal": "near a shared one, each its own",
    }
    return (
        "; ".join(f"{name}: {words}" for name, words in said.items() if name in models).capitalize()
        + "."
    )


def _score(row: Mapping[str, Any]) -> str:
    if row.get("test_accuracy") is not None:
        return f"{100 * row['test_accuracy']:.1f} % right"
    return f"error (RMSE) {row['test_rmse']:.4g}" if row.get("test_rmse") is not None else ""


def _gained(found: JoiningReport, names: list[str]) -> Rows:
    rows = []
    for client in names:
        gain, pays = found.gain(client)
        old, new = (
            short(found.rows[client][model]["test_loss"]) for model in ("alone", found.shown)
        )
        tone = TONES.get(pays, "")
        words = f"{percent(gain, signed=True)}{'' if tone == 'quiet' else '*'}"
        rows.append({"client": client, "before": old, "after": new, "tone": tone, "change": words})
    return rows


def strengths(run: ReportData) -> Figure | None:
    """Show held-out losses from one model for all (κ = ∞) to everybody alone (κ = 0), the chosen κ with a ring."""
    if len(run.strengths) < 2:
        return None
    points = sorted(run.strengths, key=lambda point: -point.strength)
    labels = [point.label for point in points]
    rows: Rows = [
        {
            "strength": one.label,
            "which": which,
            "loss": short(loss),
            "low": short(loss - error),
            "high": short(loss + error),
            "chosen": one.chosen,
        }
        for one in points
        for which, loss, error in (
            ("mean", one.mean, one.mean_error),
            ("worst fifth", one.worst, one.worst_error),
        )
    ]
    title = "how strongly models are held together (κ)"
    axis = {
        "labelAngle": 0,
        "labelOverlap": True,
        "grid": False,
        "labelExpr": "split(datum.value, ' ')",
    }
    x: Spec = {
        "field": "strength",
        "type": "ordinal",
        "sort": None,
        "title": title,
        "axis": axis,
        "scale": {"domain": labels, "padding": 0.5, "type": "point"},
    }
    y = quantity("loss", "loss on rows left out", {"zero": False})
    tip = tips(
        strength="κ",
        which=f"over {plural(run.word)}",
        loss=("loss", ",.4~r"),
        low=("one error less", ",.4~r"),
        high=("one error more", ",.4~r"),
    )
    ends = {"x": x, "y": y}
    one = {"detail": {"field": "which"}}
    layers = [
        layer(
            "rule",
            {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, **one},
            style="quiet",
        ),
        layer(
            "line",
            {**ends, "strokeDash": vega.which(("mean", "worst fifth"))},
            "datum.strength !== 'alone'",
            style="own",
        ),
        layer(
            "point", {**ends, **one, "tooltip": tip}, filled=True, size=70, opacity=1, style="own"
        ),
        layer("point", ends, "datum.chosen", style="knee", size=320),
    ]
    chosen, own = (
        next((one for one in points if getattr(one, flag)), None) for flag in ("chosen", "personal")
    )
    ring = f" The ring is what was chosen: {_held_together(chosen, run.word)}." if chosen else ""
    if own is not None and own is not chosen:
        ring += f" The personal models of this page are {_held_together(own, run.word)}."
    caption = (
        f"On the left all {plural(run.word)} share one model, on the right each trains alone, regularised on its "
        f"own. Training rows were left out in turn to see what is best; bars are one standard error.{ring}"
    )
    alt = f"Mean and worst fifth of the losses on rows left out, for {len(points)} strengths from one model to alone."
    heading = "How alike should models be?"
    return drawn(run, "strengths", heading, caption, alt, {"strengths": rows}, PART, layer=layers)


def _held_together(point: StrengthPoint, word: str) -> str:
    if math.isinf(point.strength) or not point.strength:
        return (
            f"every {word} alone"
            if not point.strength
            else "one model for all, the simplest of the good ones"
        )
    return f"models of their own, held together with κ = {point.label}"


def coalition(run: ReportData) -> Figure | None:
    """Show who gains from whom: by how much the loss of a row's client rises when a column's client leaves."""
    found = run.coalition
    if found is None or len(found.names) > MANY:
        return None
    rows: Rows = [
        {
            "client": i,
            "other": j,
            "effect": short(effect),
            "words": percent(effect, signed=True),
            "place": a,
            "own": i == j,
        }
        for a, i in enumerate(found.names)
        for j in found.names
        for effect in [found.effect(i, j)]
    ]
    most = max((abs(row["effect"]) for row in rows if not row["own"]), default=0.0) or 1.0
    N = len(found.names)
    tone = {"domain": [-most, 0, most], "range": "diverging", "interpolate": "rgb"}
    legend = {"title": "change of the row's loss", "format": "+.0%", "gradientLength": 160}
    axis = {
        "labelAngle": 40,
        "labelAlign": "right",
        "orient": "top",
        "labelLimit": 130,
        "grid": False,
    }
    x: Spec = {
        "field": "other",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": list(found.names)},
        "title": f"if this {run.word} left",
        "axis": axis,
    }
    y = named(found.names, grid=False)
    colour: Spec = {"field": "effect", "type": "quantitative", "scale": tone, "legend": legend}
    tip = tips(client="stays", other="leaves", words="its loss")
    strong = f"abs(datum.effect) > {0.8 * most}"
    fits = {"expr": f"width / {N} > 40 ? 1 : 0"}
    cell = {"x": x, "y": y, "tooltip": tip}
    layers = [
        layer("rect", {**cell, "color": colour}, "!datum.own"),
        *(
            layer(
                "text",
                {**cell, "text": {"field": "words"}},
                f"!datum.own && {test}",
                style=style,
                opacity=fits,
            )
            for test, style in ((f"!({strong})", "ink"), (strong, "inverse"))
        ),
    ]
    caption = (
        f"Blue: the {run.word} of the row gains from the one of the column, its loss would be that much higher without "
        f"it; orange: it would do better without it. {found.peace} None of this is tested for noise."
    )
    alt = f"By how much the loss of each of {N} {plural(run.word)} changes when another one leaves, as a heat map."
    data = {"effects": rows}
    return drawn(
        run,
        "coalition",
        "Who gains from whom?",
        caption,
        alt,
        data,
        PART,
        True,
        height=CELL * N,
        layer=layers,
    )


def shares(run: ReportData) -> Figure | None:
    """Show what every client gets of all that is saved, its Shapley value, and what others would lose without it."""
    found = run.coalition
    if found is None or len(found.names) > MANY:
        return None
    names = sorted(found.names, key=lambda name: -found.rows[name]["shapley"])
    rows: Rows = [
        {
            "client": client,
            "kind": kind,
            "value": short(found.share(value)),
            "low": short(found.share(value - error)),
            "high": short(found.share(value + error)),
        }
        for client in names
        for own in [found.rows[client]]
        for kind, value, error in zip(
            PARTS,
            (own["gets"], own["shapley"], found.missed(client)),
            (0.0, own["errors"], 0.0),
            strict=True,
        )
    ]
    y = named(names)
    percent = ".0%" if found.saved > 0 else ",.3~r"
    x = vega.across("value", found.unit, LOOSE, grid=True, format=percent)
    form = ".1%" if found.saved > 0 else ",.4~r"
    tip = tips(
        client=run.word,
        kind="what",
        value=(found.unit, form),
        low=("from", form),
        high=("to", form),
    )
    layers = [
        layer("rule", {"x": {"datum": 0}}, style="quiet"),
        layer("rule", {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}, style="knee"),
        vega.dots({"y": y, "x": x, **vega.looks("kind", PARTS), "tooltip": tip}),
    ]
    some = any(own["errors"] for own in found.rows.values())
    bars = " Bars are one standard error: not all orders were tried." if some else ""
    caption = (
        f"What a {run.word} gets is how much lower its own loss is than alone. What it brings is what all save when it "
        f"comes, on average over the orders in which {plural(run.word)} could join (Shapley's value). Both add up to "
        f"everything that is saved. The third is what the others would lose if it left now.{bars}"
    )
    alt = f"What each of {len(names)} {plural(run.word)} gets, brings, and what others would lose without it."
    heading = "What each brings and gets"
    height = STEP * len(names)
    return drawn(
        run,
        "shares",
        heading,
        caption,
        alt,
        {"shares": rows},
        PART,
        True,
        height=height,
        layer=layers,
    )


MAKERS = (
    joining,
    strengths,
    coalition,
    shares,
    client_figures.clients,
    client_figures.tradeoff,
    predictions.reliability,
    predictions.coefficients,
    round_figures.weights,
    round_figures.certificate,
    round_figures.losses,
    round_figures.communication,
    client_figures.partition,
    round_figures.absent,
)


def figures(run: ReportData) -> tuple[Figure, ...]:
    """Make all figures that the run has the numbers for."""
    found = [figure for maker in MAKERS if (figure := maker(run)) is not None]
    for part in {figure.part for figure in found}:
        narrow = [i for i, figure in enumerate(found) if not figure.wide and figure.part == part]
        if len(narrow) % 2:  # the last one has no neighbour: give it the full width
            found[narrow[-1]] = replace(found[narrow[-1]], wide=True)
    return tuple(found)
