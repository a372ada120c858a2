"""λ over rounds: how much every client counts."""

from __future__ import annotations

from collections.abc import Sequence

from scaffpd.report.figures.base import ACROSS, MANY, Figure, Rows, Spec, columns, short, specification, thinned, tip
from scaffpd.report.formats import plural
from scaffpd.report.story import Round, Story
from scaffpd.report.theme import DASHES, LIGHT

TOP = 12


def weights(story: Story) -> Figure | None:
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
    others = len(story.clients) - len(top)
    return Figure(
        name="weights",
        heading=f"How much each {story.word} counts",
        caption=_caption(story, others),
        alt=f"The weight λ of the {len(top)} {plural(story.word)} that count most, over rounds, for one model at a time.",
        views={"": _spec(story, focus, top)},
        data={"weights": _lines(chosen, top), "others": _others(chosen, top)},
        wide=len(top) > 7,
        focus=(focus, *(name for name in names if name != focus)),
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
    first, rows = {*top}, list[dict[str, object]]()
    for r in rounds:
        rest = {c: w for c, w in r.weights.items() if c not in first}
        if len(rest) > MANY:
            low, high = min(rest.values()), max(rest.values())
            rows.append(
                {"model": r.model, "round": r.number, "low": short(low), "high": short(high), "count": len(rest)}
            )
        else:
            rows += [{"model": r.model, "round": r.number, "client": c, "weight": short(w)} for c, w in rest.items()]
    return rows


def _spec(story: Story, focus: str, top: Sequence[str]) -> Spec:
    x: Spec = {
        "field": "round",
        "type": "quantitative",
        "title": "round",
        "axis": {"grid": False, "tickMinStep": 1, "tickCount": ACROSS},
    }
    y: Spec = {"field": "weight", "type": "quantitative", "title": "weight λ", "axis": {"tickCount": 6}}
    colours = len(LIGHT["series"])
    dashes = [DASHES[(1 + i // colours) % len(DASHES)] if i >= colours else [1, 0] for i in range(len(top))]
    legend = {"title": None, "symbolType": "stroke", "columns": columns(top)}
    client: Spec = {
        "field": "client",
        "type": "ordinal",
        "sort": None,
        "scale": {"domain": list(top)},
        "legend": legend,
    }
    rest_tips = [tip("client", story.word), tip("round", "round", "d"), tip("weight", "weight λ", ".4f")]
    band: list[Spec] = [
        {"data": {"name": "others"},
         "mark": {"type": "area", "style": "rest"},
         "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"},
                      "tooltip": [tip("count", f"other {plural(story.word)}", ",d"), tip("low", "from", ".4f"), tip("high", "to", ".4f")]}},
    ]  # fmt: skip
    dim: list[Spec] = [
        {"data": {"name": "others"},
         "mark": {"type": "line", "style": "rest"},
         "encoding": {"x": x, "y": y, "detail": {"field": "client"}, "tooltip": rest_tips}},
    ]  # fmt: skip
    lines: list[Spec] = [
        {"data": {"name": "weights"}, "mark": {"type": "line"},
         "encoding": {"x": x, "y": y, "color": client, "strokeDash": {**client, "scale": {"domain": list(top), "range": dashes}}}},
        {"data": {"name": "weights"}, "mark": {"type": "point", "filled": True, "size": 18},
         "encoding": {"x": x, "y": y, "color": client, "tooltip": rest_tips}},
    ]  # fmt: skip
    rest = len(story.clients) - len(top)
    layers = [*(band if rest > MANY else dim if rest > 0 else []), *lines]
    for layer in layers:
        layer["transform"] = [{"filter": "datum.model === focus"}]
    even = 1 / max(len(story.clients), 1)
    layers.append(
        {"mark": {"type": "rule", "style": "quiet", "strokeDash": [2, 3]}, "encoding": {"y": {"datum": even}}}
    )
    return specification(story, params=[{"name": "focus", "value": focus}], layer=layers)


def _caption(story: Story, others: int) -> str:
    words = f"λ is the mixture of {plural(story.word)} for which the model is worst; the dotted line is 1/{len(story.clients)}, all alike."
    if others > MANY:
        return f"{words} Lines: the {TOP} that count most at the end; the grey band: the other {others}."
    return f"{words} Grey: the other {others}." if others > 0 else words
