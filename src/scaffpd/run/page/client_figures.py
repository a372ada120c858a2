"""Figures of clients: how each is served, who gains, who has which rows, and what fairness costs."""

from __future__ import annotations

from scaffpd.numbers import change, plural, whole
from scaffpd.run.page import vega
from scaffpd.run.page.data import FEW, ReportData, brief
from scaffpd.run.page.vega import (
    MANY,
    ON,
    STEP,
    Figure,
    Rows,
    Spec,
    colour,
    drawn,
    layer,
    named,
    quantity,
    scaled,
    tips,
)
from scaffpd.run.page.verdict import meanings, uncertain

MOST_CELLS = 20_000
PARTS = ("train", "test")
GAINS = "Who gains, who pays"
DAGGER = "indexof(few, datum.value) >= 0 ? datum.value + ' †' : datum.value"


def clients(run: ReportData) -> Figure | None:
    """Show how every client is served: dots joined by lines while names fit, else curves of gains."""
    if not run.scores:
        return None
    return _curves(run) if len(run.clients) > MANY and run.pair else _dots(run)


def _values(run: ReportData) -> dict[str, dict[str, float]]:
    """Return values by model and client, as shown."""
    return {
        name: {s.client: v for s in scores if (v := vega.scaled(run, s.value)) is not None}
        for name, scores in run.scores.items()
    }


def _dots(run: ReportData) -> Figure:
    """Show the clients in the order of their gains; of their values where there is nothing to compare."""
    points = _points(run)
    pairs = _pairs(run)
    title = vega.value_axis(run)
    only = next(iter(_values(run).values()))
    first = (
        run.gains(*run.pair)
        if run.pair
        else {client: -run.sign * value for client, value in only.items()}
    )
    names = sorted(run.clients, key=lambda c: -first.get(c, 0.0))
    few = sorted({str(row["client"]) for row in points if row["few"]})
    y = named(names, labelExpr=DAGGER)
    x = vega.across("value", title, vega.LOOSE, grid=True)
    params: list[Spec] = [{"name": "few", "value": few}]
    for role, name in zip(
        ("before", "after"), run.pair or (), strict=False
    ):  # names are values, never expressions
        params.append({"name": f"{role}_name", "value": name})
        params.append({"name": f"on_{role}", "expr": f"indexof(shown, {role}_name) >= 0"})
    tip = tips(
        client=run.word,
        model="model",
        value=(title, vega.value_format(run)),
        train_rows="rows trained on",
        test_rows="test rows",
        weight="how much it counts (λ)",
    )
    hollow = {"condition": {"test": "datum.few", "value": 0.1}, "value": 1}
    looks = dict.fromkeys(("fill", "shape", "stroke"), colour(run))
    encoding = {"y": y, "x": x, **looks, "tooltip": tip, "fillOpacity": hollow}
    layers = vega.changes("pairs", y, x, "on_before && on_after") if pairs else []
    layers.append(layer("point", encoding, ON, "clients", size=90, opacity=1, strokeWidth=1.8))
    heading = GAINS if pairs else f"How every {run.word} is served"
    alt = f"For each of {len(names)} {plural(run.word)}, the {title} of every model that is on."
    caption = _caption(run, bool(pairs), bool(few))
    data = {"clients": points, "pairs": pairs}
    parts: Spec = {"params": params, "height": STEP * max(len(names), 2), "layer": layers}
    return drawn(run, "clients", heading, caption, alt, data, wide=True, **parts)


def _points(run: ReportData) -> Rows:
    found = _values(run)
    main = run.pair or ()
    behind = [
        *(name for name in run.scores if name not in main),
        *main,
    ]  # before and after are drawn on top
    return [
        {
            "client": s.client,
            "model": name,
            "value": found[name][s.client],
            "train_rows": whole(s.train_rows),
            "test_rows": whole(s.test_rows),
            "few": uncertain(run, s),
            "weight": "–" if s.weight is None else f"{s.weight:.3f}",
        }
        for name in behind
        for s in run.scores[name]
        if s.client in found[name]
    ]


def _pairs(run: ReportData) -> Rows:
    """Return every client before and after; a change is quiet where a test calls it noise."""
    if not run.pair:
        return []
    (before, after), clear = (_values(run)[name] for name in run.pair), run.tested
    return [
        {
            "client": c,
            "before": before[c],
            "after": after[c],
            "tone": "quiet"
            if clear.get(c) is False or not moved.strip("0.")
            else "gain"
            if gain > 0
            else "loss",
            "change": moved + ("*" if clear.get(c) else ""),
        }
        for c, gain in run.gains(*run.pair).items()
        for moved in [change(run.sign * gain, run.measure)]
    ]


def _caption(run: ReportData, paired: bool, few: bool) -> str:
    words = f"Each row is one {run.word}; further {'right' if run.upwards else 'left'} is better."
    if paired:
        words += " Sorted by gain: the line runs from before to after, and the number beside it is the change"
        tested = ": green with * for a gain clear of noise, orange with * for such a loss, grey within noise."
        words += (
            tested
            if run.tested
            else ": green for a gain, orange and dashed for a loss; noise was not tested."
        )
    if few:
        words += f" † hollow: fewer than {FEW} test rows, so uncertain."
    return f"{words} {run.note}" if run.note else words


def _curves(run: ReportData) -> Figure:
    """Show the gains of many clients, sorted: one curve per model, without names."""
    assert run.pair is not None
    before = run.pair[0]
    unit = "points" if run.upwards else "units"
    crowd = f"{len(run.clients)} {plural(run.word)}"
    x = vega.across("rank", f"{plural(run.word)}, the largest gain first")
    y = quantity("gain", f"gain, {unit}")
    y["stack"] = None
    form = vega.value_format(run)
    tip = tips(
        client=run.word,
        model="model",
        gain=(f"gain, {unit}", "+.2f"),
        before=("before", form),
        value=("now", form),
    )
    tone = colour(run)
    tone["legend"] = tone["legend"] and {
        **tone["legend"],
        "symbolOpacity": 1,
        "symbolType": "circle",
    }
    ends = {"x": x, "y": y, "color": tone}
    layers = [
        layer("rule", {"y": {"datum": 0}}, style="quiet"),
        layer("area", ends, opacity=0.16, line=False),
        layer("point", {**ends, "tooltip": tip}, filled=True, size=22, opacity=0.9),
    ]
    caption = (
        f"Each dot is one of {crowd}, sorted by gain: above the line they are served better than by "
        f"“{brief(before)}”, below it worse."
    )
    alt = f"The gain of each of {crowd} against {before}, sorted, a curve for every model."
    found = _values(run)
    rows = Rows()
    for name in (name for name in run.scores if name != before):
        moved = run.gains(before, name)
        ranked = enumerate(sorted(moved, key=lambda c, own=moved: -own[c]))  # type: ignore[misc]
        rows += [
            {
                "model": name,
                "client": c,
                "rank": i + 1,
                "gain": scaled(run, moved[c]),
                "before": found[before][c],
                "value": found[name][c],
            }
            for i, c in ranked
        ]
    parts: Spec = {"transform": [{"filter": ON}], "layer": layers}
    return drawn(
        run, "clients", GAINS, caption, alt, {"gains": rows}, heavy=True, wide=True, **parts
    )


def partition(run: ReportData) -> Figure | None:
    """Show who has which rows: a cell per client and label, or bars without labels."""
    if not run.partition:
        return None
    labels = list(dict.fromkeys(row["label"] for row in run.partition))
    sizes: dict[str, list[int]] = {row["client"]: [0, 0] for row in run.partition}
    for row in run.partition:
        sizes[row["client"]] = [
            n + row[f"{part}_rows"] for n, part in zip(sizes[row["client"]], PARTS, strict=True)
        ]
    total = {client: sum(both) for client, both in sizes.items()}
    ranked = sorted(total, key=lambda c: -total[c])
    place = {client: i + 1 for i, client in enumerate(ranked)}
    rows = [
        {
            "client": c,
            "label": row["label"],
            "train": row["train_rows"],
            "test": row["test_rows"],
            "rank": place[c],
            "rows": n,
            "share": round(n / total[c], 4),
        }
        for row in run.partition
        for c, n in [(row["client"], row["train_rows"] + row["test_rows"])]
        if n > 0
    ]
    if labels == [""] or len(rows) > MOST_CELLS:
        return _bars(run, {client: sizes[client] for client in ranked})
    return _cells(run, list(total), labels, rows)


def _rank(run: ReportData) -> Spec:
    title = f"{plural(run.word)}, the largest first"
    axis = {"labels": False, "grid": False}
    return {
        "field": "rank",
        "type": "ordinal",
        "title": title,
        "axis": axis,
        "scale": {"paddingInner": 0},
    }


def _cells(run: ReportData, names: list[str], labels: list[str], rows: Rows) -> Figure:
    """Show a cell per client and label; clients have names, and cells numbers, while they fit."""
    many = len(names) > MANY
    label: Spec = {
        "field": "label",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": labels},
        "title": "label",
    }
    label["axis"] = {"labelOverlap": True, "labelAngle": 0, "labelLimit": 90}
    legend = {"title": f"share of the {run.word}'s rows", "format": ".0%"}
    tone: Spec = {
        "field": "share",
        "type": "quantitative",
        "scale": {"domain": [0, 1]},
        "legend": legend,
    }
    tip = tips(
        client=run.word,
        label="label",
        train=("rows trained on", ",d"),
        test=("test rows", ",d"),
        share=(f"of the {run.word}'s rows", ".0%"),
    )
    place: Spec = (
        {"x": _rank(run), "y": label} if many else {"y": named(names, grid=False), "x": label}
    )
    place["tooltip"] = tip
    layers = [layer("rect", {**place, "color": tone})]
    if not many:
        fits = {"expr": f"width / {len(labels)} > 34 ? 1 : 0"}
        numbers = {**place, "text": {"field": "rows", "type": "quantitative", "format": ",d"}}
        for test, style in (("datum.share <= 0.45", "ink"), ("datum.share > 0.45", "inverse")):
            layers.append(layer("text", numbers, test, style=style, opacity=fits))
    what = (
        f"The stronger the colour, the larger the share of a {run.word}'s rows that has that label"
    )
    caption = f"Each column is one {run.word}. {what}." if many else f"{what}; numbers are rows."
    alt = f"Rows of {len(labels)} labels at {len(names)} {plural(run.word)}, as a heat map."
    height = max(160, min(560, 20 * len(labels))) if many else STEP * max(len(names), 2)
    return drawn(
        run,
        "partition",
        "Who has what",
        caption,
        alt,
        {"partition": rows},
        "rows",
        heavy=many,
        wide=many or len(labels) > 12,
        height=height,
        layer=layers,
    )


def _bars(run: ReportData, sizes: dict[str, list[int]]) -> Figure:
    kinds = ("trained on", "test")
    ranked = list(sizes)
    rows: Rows = [
        {"client": c, "rank": i + 1, "kind": kind, "place": k, "rows": n}
        for i, (c, both) in enumerate(sizes.items())
        for k, (kind, n) in enumerate(zip(kinds, both, strict=True))
        if n
    ]
    many = len(ranked) > MANY
    length = quantity("rows", "rows")
    kind = {
        "field": "kind",
        "type": "ordinal",
        "scale": {"domain": kinds},
        "legend": {"title": None},
    }
    place: Spec = {"x": _rank(run), "y": length} if many else {"y": named(ranked), "x": length}
    tip = tips(client=run.word, kind="rows", rows=("how many", ",d"))
    alt = f"Rows trained on and test rows of {len(ranked)} {plural(run.word)}."
    return drawn(
        run,
        "partition",
        "Who has what",
        f"Rows of every {run.word}.",
        alt,
        {"partition": rows},
        "rows",
        heavy=many,
        wide=True,
        mark={"type": "bar", "opacity": 0.85} | ({} if many else {"height": 10}),
        height=vega.HEIGHT if many else STEP * max(len(ranked), 2),
        encoding={**place, "color": kind, "order": {"field": "place"}, "tooltip": tip},
    )


def tradeoff(run: ReportData) -> Figure | None:
    """Show mean against worst 20 %: one point per model; a path is a line with a ring at the suggested point."""
    if len(run.overall) < 3:  # two models fit into a sentence
        return None
    title = vega.value_axis(run)
    rows = _model_rows(run)
    domains = _domains(run, rows)
    x = quantity("mean", f"mean {title}", {"domain": domains[0], "nice": False}, tickCount=5)
    y = quantity(
        "worst_20", f"worst 20 %: {title}", {"domain": domains[1], "nice": False}, tickCount=5
    )
    ends = {"x": x, "y": y}
    off = {"condition": {"test": ON, "value": 1}, "value": 0.28}
    form = vega.value_format(run)
    looks = {"color": colour(run), "shape": colour(run)}
    more = {"strength": ("strength", ".3~g")} if run.path else {}
    more |= {"worst_20_sd": ("± worst 20 %", ".2f")} if run.kind == "compare" else {}
    tip = tips(
        model="model",
        mean=("mean", form),
        worst_20=("worst 20 %", form),
        worst=("worst", form),
        **more,
    )
    layers = [
        layer("point", {**ends, **looks, "tooltip": tip, "opacity": off}, filled=True, size=130)
    ]
    for side, away in (
        ("!datum.below", -16),
        ("datum.below", 17),
    ):  # names of close points stand apart
        layers.append(
            layer("text", {**ends, "text": {"field": "label"}}, f"{ON} && {side}", dy=away)
        )
    if run.path:
        line = layer("line", {**ends, "order": {"field": "order"}}, style="quiet")
        layers = [line, layer("point", ends, "datum.knee", style="knee", size=420), *layers]
    better = "Up and to the right" if run.upwards else "Down and to the left"
    caption = (
        f"{better} is better for both, and a step is as long on either axis; pale models are off."
    )
    alt = f"{len(run.overall)} models as points: mean against worst 20 % of the {title}."
    caption += _path_words(run)
    return drawn(
        run, "tradeoff", "What fairness costs", caption, alt, {"models": rows}, layer=layers
    )


def _model_rows(run: ReportData) -> Rows:
    knee = (run.path or {}).get("knee")
    low = min(run.pair or (), key=lambda name: run.overall[name].worst_20, default="")
    return [
        {
            "model": m.name,
            "order": i,
            "mean": scaled(run, one.mean),
            "worst_20": scaled(run, one.worst_20),
            "worst": scaled(run, one.worst),
            "strength": m.strength,
            "knee": m.name == knee,
            "below": m.name == low,
            "label": f"{m.name} (suggested)" if m.name == knee else m.name,
            "worst_20_sd": scaled(run, one.worst_20_sd),
        }
        for i, m in enumerate(run.models)
        if (one := run.overall.get(m.name)) is not None
    ]


def _domains(run: ReportData, rows: Rows) -> tuple[list[float], list[float]]:
    """Return two axes of the same length in points, so that a gain on one looks as large as a loss on the other."""
    ends = [
        (min(row[name] for row in rows), max(row[name] for row in rows))
        for name in ("mean", "worst_20")
    ]
    least = 1.0 if run.upwards else 0.01 * max(abs(high) for _, high in ends)
    half = 0.65 * max(least, *(high - low for low, high in ends))
    tops = [(low + high) / 2 + half for low, high in ends]
    tops = [min(top, 100.0 + half / 8) for top in tops] if run.upwards else tops
    first, second = ([round(top - 2 * half, 6), round(top, 6)] for top in tops)
    return first, second


def _path_words(run: ReportData) -> str:
    if not run.path:
        return ""
    words = f" {meanings(run)}Suggested: {run.path.get('why') or run.path.get('knee')}"
    warm = run.path.get("rounds_warm")
    cold = run.path.get("rounds_cold")
    if not warm:
        return words
    words += f" The whole path took {whole(warm)} rounds, each point from its neighbour"
    return f"{words}; from scratch, {whole(cold)}." if cold else f"{words}."
