"""λ over rounds: how much every client counts."""

from __future__ import annotations

from collections.abc import Sequence

from scaffpd.report.data import ReportData, Round
from scaffpd.report.figures.base import (
    MANY,
    Figure,
    Rows,
    Spec,
    across,
    columns,
    quantity,
    short,
    specification,
    thinned,
    tip,
)
from scaffpd.report.formats import plural
from scaffpd.report.theme import DASHES, LIGHT

TOP = 12


def weights(story: ReportData) -> Figure | None:
    """Lines of those who count most, all others dim."""
    rounds = [r for r in story.rounds if r.weights]
    names = tuple(name for name in story.names if sum(r.model == name for r in rounds) > 1)
    if not names:
        return None
    after = story.role("after")
    focus = after.name if after and after.name in names else names[0]
    top = _heaviest(rounds, focus)
    kept = {name: thinned([r.number for r in rounds if r.model == name]) for name in names}
    chosen = [r for r in rounds if r.model in names and r.number in kept[r.model]]
    return Figure(
        name="weights",
        heading=f"How much each {story.word} counts",
        caption=_caption(story, len(story.clients) - len(top)),
        alt=f"The weight λ of the {len(top)} {plural(story.word)} that count most, over rounds, one model at a time.",
        views={"": _spec(story, focus, top)},
        data={"weights": _lines(chosen, top), "others": _others(chosen, top)},
        focus=(focus, *(name for name in names if name != focus)),
        wide=len(top) > len(LIGHT["series"]),
    )


def _heaviest(rounds: Sequence[Round], focus: str) -> list[str]:
    last = [r for r in rounds if r.model == focus][-1].weights
    return sorted(last, key=lambda c: -last[c])[:TOP]


def _lines(rounds: Sequence[Round], top: Sequence[str]) -> Rows:
    return [
        {"model": r.model, "round": r.number, "client": c, "weight": short(r.weights.get(c))}  # a gap where it was away
        for r in rounds
        for c in top
    ]


def _others(rounds: Sequence[Round], top: Sequence[str]) -> Rows:
    """The rest, one by one while they are few; beyond, between which bounds they lie."""
    rows: Rows = []
    for r in rounds:
        start = {"model": r.model, "round": r.number}
        rest = {c: w for c, w in r.weights.items() if c not in top}
        if len(rest) > MANY:
            low, high = min(rest.values()), max(rest.values())
            rows.append({**start, "low": short(low), "high": short(high), "count": len(rest)})
        else:
            rows += [{**start, "client": c, "weight": short(w)} for c, w in rest.items()]
    return rows


def _spec(story: ReportData, focus: str, top: Sequence[str]) -> Spec:
    x, y = across("round", "round", tickMinStep=1), quantity("weight", "weight λ")
    tips = [tip("client", story.word), tip("round", "round", "d"), tip("weight", "weight λ", ".4f")]
    legend = {"title": None, "symbolType": "stroke", "columns": columns(top)}
    client: Spec = {
        "field": "client",
        "type": "ordinal",
        "sort": None,
        "scale": {"domain": list(top)},
        "legend": legend,
    }
    hues = len(LIGHT["series"])
    dashes = [[1, 0] if i < hues else DASHES[(1 + i // hues) % len(DASHES)] for i in range(len(top))]
    dash = {**client, "scale": {"domain": list(top), "range": dashes}}
    ends = {"x": x, "y": y, "color": client}
    layers: list[Spec] = [
        *_rest(story, x, y, tips, len(story.clients) - len(top)),
        {"data": {"name": "weights"}, "mark": {"type": "line"}, "encoding": {**ends, "strokeDash": dash}},
        {"data": {"name": "weights"}, "mark": {"type": "point", "filled": True, "size": 18},
         "encoding": {**ends, "tooltip": tips}},
    ]  # fmt: skip
    for layer in layers:
        layer["transform"] = [{"filter": "datum.model === focus"}]
    even = {"y": {"datum": 1 / max(len(story.clients), 1)}}
    layers.append({"mark": {"type": "rule", "style": "quiet", "strokeDash": [2, 3]}, "encoding": even})
    return specification(story, params=[{"name": "focus", "value": focus}], layer=layers)


def _rest(story: ReportData, x: Spec, y: Spec, tips: list[Spec], others: int) -> list[Spec]:
    """Dim lines while they can be told apart, a band beyond."""
    start: Spec = {"data": {"name": "others"}}
    if others <= 0:
        return []
    if others <= MANY:
        line: Spec = {"x": x, "y": y, "detail": {"field": "client"}, "tooltip": tips}
        return [{**start, "mark": {"type": "line", "style": "rest"}, "encoding": line}]
    band = [tip("count", f"other {plural(story.word)}", ",d"), tip("low", "from", ".4f"), tip("high", "to", ".4f")]
    ends: Spec = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "tooltip": band}
    return [{**start, "mark": {"type": "area", "style": "rest"}, "encoding": ends}]


def _caption(story: ReportData, others: int) -> str:
    words = (
        f"λ is the weight of each {story.word} in the mixture that the model is trained against; the dotted line is "
        f"1/{len(story.clients)}, all alike."
    )
    if others > MANY:
        return f"{words} Lines: the {TOP} that count most at the end; the grey band: the other {others}."
    return f"{words} Grey: the other {others}." if others > 0 else words
