"""The figures of a page: a function for each, which returns `None` where a run has no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scaffpd.numbers import brief, change, percent, plural, whole
from scaffpd.run.page import vega
from scaffpd.run.page.clients import FEW, shown_models, tone_of, uncertain
from scaffpd.run.page.predictions import ORDER, shown_scores
from scaffpd.run.page.vega import LOOSE, MANY, STEP, Figure, Rows, Spec, layer, short
from scaffpd.run.page.verdict import meanings
from scaffpd.run.record import EVERYONE, ModelRecord, RoundRecord, RunRecord
from scaffpd.training.metrics import NO, NOISE, YES

JOINED = (*ORDER, "alone")  # in the order of their colours
TONES = {YES: "gain", NO: "loss", NOISE: "quiet"}
EXPLAINED = {
    "average": "one for all, made for the mean",
    "fair": "one for all, made for those served worst",
    "personal": "near a shared one, each its own",
}
DAGGER = "indexof(few, datum.value) >= 0 ? datum.value + ' †' : datum.value"
MOST_COLUMNS = 12
MOST_ROUNDS = 200  # points of a line: beyond, it looks the same


def figures(run: RunRecord) -> list[Figure]:
    """Make all figures that the run has the numbers for."""
    makers = (joining, clients, tradeoff, reliability, coefficients, certificate, losses)
    found = [figure for maker in makers if (figure := maker(run)) is not None]
    for part in {figure.part for figure in found}:
        narrow = [i for i, figure in enumerate(found) if not figure.wide and figure.part == part]
        if len(narrow) % 2:  # the last one has no neighbour: give it the full width
            found[narrow[-1]] = replace(found[narrow[-1]], wide=True)
    return found


def joining(run: RunRecord) -> Figure | None:
    """Show every client's held-out loss under every model, and its gain from joining as a line."""
    found = run.joining
    if found is None:
        return None
    models = [model for model in JOINED if model in found.models]
    names = _ends(found.order)
    points: Rows = []
    lines: Rows = []
    for client in names:
        own = found.by_client[client]
        gain = found.gain(client)
        tone = TONES[gain.pays]
        lines.append(
            {
                "client": client,
                "before": short(own["alone"].test_loss),
                "after": short(own[found.shown].test_loss),
                "tone": tone,
                "change": f"{percent(gain.value, signed=True)}{'' if tone == 'quiet' else '*'}",
            }
        )
        for model in models:
            loss = short(own[model].test_loss)
            points.append({"client": client, "model": model, "value": loss})
    y = vega.named(names)
    x = vega.across("value", "loss on held-out rows: less is better", LOOSE, grid=True)
    marks: Spec = {"y": y, "x": x, **vega.looks("model", models)}
    explained = "; ".join(f"{name}: {EXPLAINED[name]}" for name in models if name in EXPLAINED)
    caption = (
        "Loss is the error of a model on rows that no model has seen: further left is better. The "
        f"line leads from alone to {found.shown}, and the number beside it is how much lower the "
        "loss is then: green with * where that is clear of noise, orange with * where joining "
        f"clearly costs, grey within noise. {explained.capitalize()}. Noise: {found.interval}."
    )
    return Figure(
        "joining",
        "Does joining pay?",
        caption,
        f"For each of {len(names)} {plural(run.word)}, the held-out loss of {', '.join(models)}.",
        "joining",
        {"joined": points, "gained": lines},
        [*vega.changes("gained", y, x), vega.dots(marks, "joined", 90)],
        wide=True,
        height=STEP * max(len(names), 2),
    )


def _ends(names: Sequence[str]) -> list[str]:
    """Return names as they are; of many, the first and the last."""
    return [*names] if len(names) <= MANY else [*names[: MANY // 2], *names[-MANY // 2 :]]


def _axis(run: RunRecord) -> str:
    """Name the measure and the rows it is computed on."""
    rows = "test rows" if run.split == "test" else "rows trained on"
    name = {"accuracy": "accuracy", "rmse": "error (RMSE)", "loss": "loss"}[run.measure]
    return f"{name} on {rows}{', %' if run.upwards else ''}"


def _scaled(run: RunRecord, value: float | None) -> float | None:
    """Convert accuracies to percent."""
    return None if value is None else short(100 * value if run.upwards else value)


def clients(run: RunRecord) -> Figure | None:
    """Show every client's score under every model, and its change from before to after."""
    models = shown_models(run)
    if not models:
        return None
    values = {
        model.name: {score.client: run.value(score) for score in model.clients} for model in models
    }
    pair = run.pair
    if pair:
        gains = run.gains(*pair)
    else:  # the worst-served first
        only = values[models[0].name]
        gains = {c: -run.sign * value for c, value in only.items() if value is not None}
    names = _ends(sorted(run.clients, key=lambda client: -gains.get(client, 0.0)))
    few = [s.client for s in run.main.clients if s.client in names and uncertain(run, s)]
    points: Rows = [
        {
            "client": score.client,
            "model": model.name,
            "value": _scaled(run, run.value(score)),
            "few": score.client in few,
        }
        for model in reversed(models)  # before and after are drawn on top
        for score in model.clients
        if score.client in names
    ]
    lines: Rows = []
    for client in names if pair else ():
        moved = change(run.sign * gains.get(client, 0.0), run.measure)
        clear = run.tested.get(client)
        tone = "" if clear is False else tone_of(gains.get(client, 0.0), moved)
        lines.append(
            {
                "client": client,
                "before": _scaled(run, values[pair[0].name].get(client)) if pair else None,
                "after": _scaled(run, values[pair[1].name].get(client)) if pair else None,
                "tone": tone or "quiet",
                "change": f"{moved}*" if clear else moved,
            }
        )
    title = _axis(run)
    y = vega.named(names, labelExpr=DAGGER)
    x = vega.across("value", title, LOOSE, grid=True)
    hollow: Spec = {"condition": {"test": "datum.few", "value": 0.1}, "value": 1}
    order = [model.name for model in models]
    encoding: Spec = {
        "y": y,
        "x": x,
        **vega.looks("model", order),
        "stroke": vega.colour("model", order),
        "fillOpacity": hollow,
    }
    marks = layer(
        "point", encoding, "", "clients", size=90, opacity=1, strokeWidth=1.8, tooltip=True
    )
    caption = f"Each row is one {run.word}; further {'right' if run.upwards else 'left'} is better."
    if pair:
        caption += " The line runs from before to after, and the number beside it is the change"
        caption += (
            ": green with * for a gain clear of noise, orange with * for such a loss, grey within."
            if run.tested
            else ": green for a gain, orange and dashed for a loss; noise was not tested."
        )
    if few:
        caption += f" † hollow: fewer than {FEW} test rows, so uncertain."
    return Figure(
        "clients",
        "Who gains, and who pays?" if pair else f"How every {run.word} is served",
        caption,
        f"For each of {len(names)} {plural(run.word)}, the {title} of {', '.join(order)}.",
        "models",
        {"clients": points, "pairs": lines},
        [*vega.changes("pairs", y, x), marks],
        wide=True,
        height=STEP * max(len(names), 2),
        params={"few": few},
    )


def tradeoff(run: RunRecord) -> Figure | None:
    """Show mean against worst 20 %: one point per model; a path is a line with a ring."""
    models = [model for model in run.models if model.overall]
    if len(models) < 3:  # two models fit into a sentence
        return None
    knee = run.path.knee if run.path else None
    shown = [model.name for model in shown_models(run)]
    names = [*shown, *(model.name for model in models if model.name not in shown)]
    # names of close points would hide one another: the legend has the others
    labelled = {*shown[:2], models[-1].name}
    rows: Rows = []
    for i, model in enumerate(models):
        assert model.overall is not None
        rows.append(
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
        )
    title = _axis(run)
    scales = _scales(run, models)
    ends: Spec = {
        "x": vega.quantity("mean", f"mean {title}", scales[0], tickCount=5),
        "y": vega.quantity("worst_20", f"worst 20 %: {title}", scales[1], tickCount=5),
    }
    looks = {**vega.looks("model", names)}
    layers = [
        vega.dots({**ends, **looks}, "models", 130),
        layer("text", {**ends, "text": {"field": "label"}}, "", "models", dy=-16),
    ]
    better = "Up and to the right" if run.upwards else "Down and to the left"
    caption = f"{better} is better for both, and a step is as long on either axis."
    if run.path:
        line = layer("line", {**ends, "order": {"field": "order"}}, "", "models", style="quiet")
        ring = layer("point", ends, "datum.knee", "models", style="knee", size=420)
        layers = [line, ring, *layers]
        caption += f" {meanings(run)}Suggested: {run.path.why}"
        caption += f" The whole path took {whole(run.path.rounds)} rounds, each point from its "
        caption += "neighbour."
    return Figure(
        "tradeoff",
        "What fairness costs",
        caption,
        f"{len(models)} models as points: mean against worst 20 % of the {title}.",
        "models",
        {"models": rows},
        layers,
    )


def _scales(run: RunRecord, models: Sequence[ModelRecord]) -> list[Spec]:
    """Return two axes of the same length, so that a gain on one looks as large as on the other."""
    known = [model.overall for model in models if model.overall]
    factor = 100 if run.upwards else 1
    ends = []
    for name in ("mean", "worst_20"):
        values = [factor * float(getattr(one, name)) for one in known]
        ends.append((min(values), max(values)))
    least = 1.0 if run.upwards else 0.01 * max(abs(high) for _, high in ends)
    half = 0.65 * max(least, *(high - low for low, high in ends))
    scales: list[Spec] = []
    for low, high in ends:
        top = (low + high) / 2 + half
        top = min(top, 100.0 + half / 8) if run.upwards else top
        scales.append({"domain": [round(top - 2 * half, 6), round(top, 6)], "nice": False})
    return scales


def reliability(run: RunRecord) -> Figure | None:
    """Show which share came true of rows with similar probabilities."""
    rows = [row for row in run.bins if row.client == EVERYONE]
    binned = {row.model for row in rows}
    names = [name for name in shown_scores(run) if name in binned] if rows else []
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
        for row in rows
        if row.model in names
    ]
    whole_axis: Spec = {"domain": [0, 1]}
    two = len(run.labels) == 2
    label = f"of “{brief(run.labels[1])}”" if two else "of the predicted label"
    title = f"predicted probability {label}"
    x = vega.across("p", title, whole_axis, format=".0%", grid=True)
    y = vega.quantity("share", "came true", whole_axis, format=".0%")
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


def coefficients(run: RunRecord) -> Figure | None:
    """Show what one deviation of a column adds to the output: the columns that add most."""
    if not run.coefficients:
        return None
    known = run.coefficients[0].values
    names = [name for name in dict.fromkeys([*ORDER[:2], *run.names]) if name in known][:6]
    if not names:
        return None
    ranked = sorted(run.coefficients, key=lambda row: -max(abs(row.values[n]) for n in names))
    ranked = ranked[:MOST_COLUMNS]
    called = [f"{row.column} → {row.label}" if row.label else row.column for row in ranked]
    points: Rows = []
    ranges: Rows = []
    for client, row in zip(called, ranked, strict=True):
        points += [{"client": client, "model": n, "value": short(row.values[n])} for n in names]
        if "personal_low" in row.values:
            low, high = (short(row.values[f"personal_{end}"]) for end in ("low", "high"))
            ranges.append({"client": client, "low": low, "high": high})
    unit = "log-odds" if run.upwards else "the target"
    y = vega.named(called, labelLimit={"expr": "clamp(width / 2, 120, 260)"})
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
        "predictions",
        {"columns": points, "ranges": ranges},
        [
            layer("rule", {"x": {"datum": 0}}, style="quiet"),
            layer("rule", ends, "", "ranges", style="rest", strokeWidth=7),
            vega.dots(marks, "columns"),
        ],
        height=STEP * max(len(called), 2),
    )


def _rounds(run: RunRecord) -> Iterator[tuple[ModelRecord, RoundRecord]]:
    """Choose the rounds to draw: no more per model than a line can show."""
    for model in shown_models(run) or run.models:
        count = len(model.history)
        step = max((count - 1) / (MOST_ROUNDS - 1), 1.0)
        places = {min(round(i * step), count - 1) for i in range(min(count, MOST_ROUNDS))}
        yield from ((model, model.history[k]) for k in sorted(places))


def certificate(run: RunRecord) -> Figure | None:
    """Show the proven gap, where there is one."""
    rows: Rows = []
    gaps = []
    for model, one in _rounds(run):
        if one.certificate is not None and one.certificate > 0:
            gaps.append(one.certificate)
            gap = short(one.certificate)
            rows.append({"model": model.name, "round": one.round, "certificate": gap})
    if not rows:
        return None
    low = math.floor(math.log10(min(gaps)))
    high = max(math.ceil(math.log10(max(gaps))), low + 1)
    step = max(1, math.ceil((high - low) / 6))
    powers = [float(f"1e{power}") for power in range(low, high + step, step)]
    scale: Spec = {"type": "log", "domain": [powers[0], powers[-1]], "nice": False}
    y = vega.quantity("certificate", "proven gap to the optimum", scale, format="~e", values=powers)
    return Figure(
        "certificate",
        "How close to optimal, proven",
        "What training minimises is at most this far above its smallest possible value, by proof "
        "and with rounding counted; lower is closer.",
        "The certificate of every model over rounds, on a logarithmic scale.",
        "training",
        {"certificates": rows},
        _lines(run, rows, y, "certificates"),
    )


def losses(run: RunRecord) -> Figure | None:
    """Show the mean and the worst training loss."""
    rows: Rows = []
    found = []
    for model, one in _rounds(run):
        known = {
            client: loss
            for client, loss in zip(run.clients, one.losses, strict=False)
            if loss is not None
        }
        if not known:
            continue
        worst = max(known, key=known.__getitem__)
        mean = sum(known.values()) / len(known)
        for name, value, who in (("mean", mean, ""), ("worst", known[worst], worst)):
            if value > 0:
                found.append(value)
                rows.append(
                    {
                        "model": model.name,
                        "round": one.round,
                        "client": who,
                        "which": name,
                        "loss": short(value),
                    }
                )
    if not rows:
        return None
    domain: list[float] = [0.97 * min(found), 1.03 * max(found)]
    scale: Spec = {"type": "log", "domain": domain, "nice": False}
    y = vega.quantity("loss", "training loss", scale, format=",.3~r")
    noisy = " Losses that clients have sent carry their noise." if run.privacy else ""
    return Figure(
        "losses",
        "Losses while training",
        f"The {run.word} with the largest loss (solid) and the mean over all (dashed), on training "
        f"rows, regulariser included.{noisy}",
        "Mean and worst training loss of every model over rounds, on a logarithmic scale.",
        "training",
        {"losses": rows},
        _lines(run, rows, y, "losses", strokeDash=vega.which(("mean", "worst"))),
    )


def _lines(run: RunRecord, rows: Rows, y: Spec, table: str, **more: Spec) -> list[Spec]:
    """Draw a line per model over rounds, with its points."""
    drawn = {row["model"] for row in rows}
    names = [model.name for model in shown_models(run) or run.models if model.name in drawn]
    x = vega.across("round", "round", tickMinStep=1)
    ends: Spec = {"x": x, "y": y}
    line: Spec = {**ends, "stroke": vega.colour("model", names), **more}
    dots: Spec = {**ends, **vega.looks("model", names)}
    return [layer("line", line, "", table), vega.dots(dots, table, 26)]
