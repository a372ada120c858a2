"""Figures over rounds: the certificate, losses, weights, silos that were absent, and what the communication buys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from scaffpd.numbers import plural
from scaffpd.run.page import vega
from scaffpd.run.page.data import ReportData, Round
from scaffpd.run.page.vega import (
    ON,
    Figure,
    Rows,
    Spec,
    across,
    colour,
    drawn,
    layer,
    quantity,
    scaled,
    short,
    tips,
)

TOP = 12  # clients that have lines of their own
PART = "training"
COSTS = {
    "MB": ("megabytes", "megabytes sent, up and down, all clients"),
    "rounds": ("round", "rounds"),
    "exchanges": ("exchanges", "exchanges"),
}
NOISY = " Losses that clients have sent carry their noise."


def drawn_rounds(run: ReportData) -> Iterator[Round]:
    """Choose the rounds to draw: no more per model than a line can show."""
    for name in run.names:
        mine = [r for r in run.rounds if r.model == name]
        numbers = vega.thinned([r.number for r in mine])
        yield from (r for r in mine if r.number in numbers)


def certificate(run: ReportData) -> Figure | None:
    """Show the proven gap, where there is one."""
    rows: Rows = [
        {
            "model": r.model,
            "round": r.number,
            "certificate": short(r.certificate) if (r.certificate or 0) > 0 else None,
        }
        for r in drawn_rounds(run)
    ]
    proven = {row["model"] for row in rows if row["certificate"] is not None}
    rows = [row for row in rows if row["model"] in proven]
    if not rows:
        return None
    powers = _powers([row["certificate"] for row in rows if row["certificate"] is not None])
    scale = {"type": "log", "domain": [powers[0], powers[-1]], "nice": False}
    y = quantity("certificate", "proven gap to the optimum", scale, format="~e", values=powers)
    tip = tips(model="model", round=("round", "d"), certificate=("proven gap", ".2e"))
    ends = _ends(run, y)
    layers = [layer("line", ends, strokeDash=vega.DASH), _dots(run, ends, tip)]
    caption = (
        "What training minimises is at most this far above its smallest possible value, by proof and with rounding "
        "counted; lower is closer. Gaps in a line are rounds that prove nothing."
    )
    alt = "The certificate of every model over rounds, on a logarithmic scale."
    return drawn(
        run,
        "certificate",
        "How close to optimal, proven",
        caption,
        alt,
        {"certificates": rows},
        PART,
        params=vega.dashes(run),
        transform=[{"filter": ON}],
        layer=layers,
    )


def losses(run: ReportData) -> Figure | None:
    """Show the mean and the worst training loss."""
    rows = [row for r in drawn_rounds(run) if r.losses for row in _two(r)]
    if not rows:
        return None
    found = [row["loss"] for row in rows]
    scale = {
        "type": "log",
        "domain": [0.97 * min(found), 1.03 * max(found)],
        "nice": False,
    }  # whatever models are on
    y = quantity("loss", "training loss", scale, format=",.3~r")
    tip = tips(
        model="model",
        which="over clients",
        client=f"worst {run.word}",
        round=("round", "d"),
        loss=("loss", ",.4~r"),
    )
    ends = _ends(run, y)
    layers = [
        layer("line", {**ends, "strokeDash": vega.which(("mean", "worst"))}),
        _dots(run, ends, tip),
    ]
    both = f"The {run.word} with the largest loss (solid) and the mean over all (dashed), on training rows"
    caption = f"{both}, regulariser included.{NOISY if run.privacy else ''}"
    alt = "Mean and worst training loss of every model over rounds, on a logarithmic scale."
    parts: Spec = {"transform": [{"filter": ON}], "layer": layers}
    return drawn(
        run, "losses", "Losses while training", caption, alt, {"losses": rows}, PART, **parts
    )


def _powers(values: list[float]) -> list[float]:
    """Return powers of ten around some numbers, seven at most."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    step = max(1, math.ceil((high - low) / 6))
    return [float(f"1e{power}") for power in range(low, max(high, low + 1) + step, step)]


def _two(r: Round) -> Rows:
    worst = max(r.losses, key=r.losses.__getitem__)
    pairs = (
        ("mean", sum(r.losses.values()) / len(r.losses), ""),
        ("worst", r.losses[worst], worst),
    )
    return [
        {"model": r.model, "round": r.number, "which": name, "loss": short(value), "client": who}
        for name, value, who in pairs
        if value > 0
    ]


def _ends(run: ReportData, y: Spec) -> Spec:
    return {"x": across("round", "round", tickMinStep=1), "y": y, "color": colour(run)}


def _dots(run: ReportData, ends: Spec, tip: list[Spec]) -> Spec:
    return layer("point", {**ends, "shape": colour(run), "tooltip": tip}, filled=True, size=26)


def weights(run: ReportData) -> Figure | None:
    """Show the weights λ over rounds: lines of the clients that count most, and a band of all others."""
    rounds = [r for r in run.rounds if r.weights]
    names = tuple(name for name in run.names if sum(r.model == name for r in rounds) > 1)
    if not names:
        return None
    after = run.role("after")
    focus = after if after in names else names[0]
    last = [r for r in rounds if r.model == focus][-1].weights
    top = sorted(last, key=lambda c: -last[c])[:TOP]
    others = len(run.clients) - len(top)
    chosen = [r for r in drawn_rounds(run) if r.weights and r.model in names]
    lines: Rows = [
        {
            "model": r.model,
            "round": r.number,
            "client": c,
            "weight": short(r.weights.get(c)),
        }  # a gap where it was away
        for r in chosen
        for c in top
    ]
    band: Rows = [
        {
            "model": r.model,
            "round": r.number,
            "low": short(min(rest)),
            "high": short(max(rest)),
            "count": len(rest),
        }
        for r in chosen
        if (rest := [w for c, w in r.weights.items() if c not in top])
    ]
    caption = (
        f"Every {run.word} that is served worse gets a larger weight in training, λ, until no other weights would make "
        f"the model look worse; the dotted line is 1/{len(run.clients)}, all alike."
    )
    caption += (
        f" Lines: the {TOP} that count most at the end; the grey band: the other {others}."
        if others > 0
        else ""
    )
    alt = f"The weight λ of the {len(top)} {plural(run.word)} that count most, over rounds, one model at a time."
    parts: Spec = {
        "focus": (focus, *(name for name in names if name != focus)),
        "wide": len(top) > len(vega.LIGHT["series"]),
        "params": [{"name": "focus", "value": focus}],
        "layer": _weight_layers(run, top, bool(band)),
    }
    heading = f"How much each {run.word} counts"
    data = {"weights": lines, "others": band}
    return drawn(run, "weights", heading, caption, alt, data, PART, **parts)


def _weight_layers(run: ReportData, top: Sequence[str], others: bool) -> list[Spec]:
    x = across("round", "round", tickMinStep=1)
    y = quantity("weight", "how much it counts (weight λ)")
    tip = tips(client=run.word, round=("round", "d"), weight=("weight λ", ".4f"))
    legend = {"title": None, "symbolType": "stroke", "columns": vega.columns(top)}
    domain = {"domain": list(top)}
    client: Spec = {
        "field": "client",
        "type": "ordinal",
        "sort": None,
        "scale": domain,
        "legend": legend,
    }
    hues = len(vega.LIGHT["series"])
    dashes = [
        [1, 0] if i < hues else vega.DASHES[(1 + i // hues) % len(vega.DASHES)]
        for i in range(len(top))
    ]
    ends = {"x": x, "y": y, "color": client}
    mine = "datum.model === focus"
    layers = [
        layer(
            "line",
            {**ends, "strokeDash": {**client, "scale": {**domain, "range": dashes}}},
            mine,
            "weights",
        ),
        layer("point", {**ends, "tooltip": tip}, mine, "weights", filled=True, size=18),
        layer(
            "rule", {"y": {"datum": 1 / max(len(run.clients), 1)}}, style="quiet", strokeDash=[2, 3]
        ),
    ]
    if others:
        tip = tips(
            count=(f"other {plural(run.word)}", ",d"), low=("from", ".4f"), high=("to", ".4f")
        )
        between = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "tooltip": tip}
        layers.insert(0, layer("area", between, mine, "others", style="rest"))
    return layers


def absent(run: ReportData) -> Figure | None:
    """Show how many silos did not answer, round by round; nothing where all did."""
    if not any(r.absent for r in run.rounds):
        return None
    rows = [{"model": r.model, "round": r.number, "absent": r.absent} for r in drawn_rounds(run)]
    most = max(r.absent for r in run.rounds)
    x = across(
        "round",
        "round",
        {"domain": [0, max(r.number for r in run.rounds)], "nice": False},
        tickMinStep=1,
    )
    y = quantity("absent", f"absent {plural(run.word)}", values=[*range(most + 1)], format="d")
    caption = f"{plural(run.word).capitalize()} that did not answer in a round: a bound on their loss stood in."
    alt = "The number of absent silos in every round."
    return drawn(
        run,
        "absent",
        "Who was away",
        caption,
        alt,
        {"absences": rows},
        "rows",
        True,
        height=140,
        mark={"type": "bar", "style": "bubble", "width": 5},
        encoding={"x": x, "y": y, "tooltip": tips(round=("round", "d"), absent=("absent", "d"))},
    )


def communication(run: ReportData) -> Figure | None:
    """Show what was sent against what it brought: curves where rounds were scored, else one point per model."""
    rows = _cost_curves(run) or _cost_ends(run)
    curves = any(
        row["round"] != rows[0]["round"] for row in rows if row["model"] == rows[0]["model"]
    )
    views = {
        label: _cost_spec(run, field, title, curves)
        for label, (field, title) in COSTS.items()
        if any(row[field] is not None for row in rows)
    }
    if not views or (not curves and len(rows) < 2):
        return None
    points = "The worst 20 % of the finished models; pale ones are off."
    how = "Solid: the worst 20 %; dashed: the mean." if curves else points
    caption = f"{how} {'Up' if run.upwards else 'Down'} and to the left is better: more for less."
    alt = f"The {vega.value_axis(run)} of every model against what was sent."
    heading = "What the communication buys"
    data = {"costs": rows}
    return Figure("communication", heading, caption, alt, views, data, part="training")


def _cost_curves(run: ReportData) -> Rows:
    return [
        {
            "model": r.model,
            "round": r.number,
            "megabytes": short(r.megabytes),
            "exchanges": r.exchanges,
            "which": name,
            "value": scaled(run, value),
        }
        for r in drawn_rounds(run)
        for name, value in (("mean", r.mean), ("worst 20 %", r.worst_20))
        if value is not None
    ]


def _cost_ends(run: ReportData) -> Rows:
    return [
        {
            "model": m.name,
            "round": m.rounds,
            "megabytes": short(m.megabytes),
            "exchanges": m.exchanges,
            "which": "worst 20 %",
            "value": scaled(run, run.overall[m.name].worst_20),
        }
        for m in run.models
        if m.name in run.overall and m.rounds is not None
    ]


def _cost_spec(run: ReportData, field: str, title: str, curves: bool) -> Spec:
    x = vega.across(field, title, {"zero": curves, "padding": 0 if curves else 20}, format=",.3~r")
    y = quantity("value", vega.value_axis(run), {"zero": False})
    tip = tips(
        model="model",
        which="over clients",
        value=(vega.value_axis(run), vega.value_format(run)),
        round=("rounds", ",d"),
        exchanges=("exchanges", ",.0f"),
        megabytes=("MB", ".3~g"),
    )
    ends = {"x": x, "y": y, "color": colour(run)}
    mark = {**ends, "shape": colour(run), "tooltip": tip}
    if not curves:
        mark["opacity"] = {"condition": {"test": ON, "value": 1}, "value": 0.28}
    layers = [layer("point", mark, filled=True, opacity=1, size=26 if curves else 130)]
    if curves:
        layers.insert(0, layer("line", {**ends, "strokeDash": vega.which(("mean", "worst 20 %"))}))
    only = {"transform": [{"filter": ON}]} if curves else {}
    return vega.specification(run, data={"name": "costs"}, **only, layer=layers)
