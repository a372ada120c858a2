"""Certificate and losses over rounds, on logarithmic scales."""

from __future__ import annotations

from collections.abc import Iterator

from scaffpd.report.figures.base import (
    ACROSS,
    DASH,
    ON,
    Figure,
    Rows,
    Spec,
    colour,
    dashes,
    shape,
    short,
    specification,
    thinned,
    tip,
)
from scaffpd.report.story import Round, Story

ROUND: Spec = {
    "field": "round",
    "type": "quantitative",
    "title": "round",
    "axis": {"grid": False, "tickMinStep": 1, "tickCount": ACROSS},
}


def kept(story: Story) -> Iterator[Round]:
    """The rounds that are drawn: not more a model than a line can show."""
    for name in story.names:
        mine = [r for r in story.rounds if r.model == name]
        numbers = thinned([r.number for r in mine])
        yield from (r for r in mine if r.number in numbers)


def certificate(story: Story) -> Figure | None:
    """The proven gap, where there is one."""
    rows: Rows = [
        {"model": r.model, "round": r.number, "certificate": short(r.certificate) if (r.certificate or 0) > 0 else None}
        for r in kept(story)
    ]
    proven = {row["model"] for row in rows if row["certificate"] is not None}
    rows = [row for row in rows if row["model"] in proven]
    if not rows:
        return None
    y: Spec = {"field": "certificate", "type": "quantitative", "scale": {"type": "log"}, "title": "proven gap to the optimum",
               "axis": {"format": "~e", "tickCount": 6}}  # fmt: skip
    tips = [tip("model", "model"), tip("round", "round", "d"), tip("certificate", "proven gap", ".2e")]
    return Figure(
        name="certificate",
        heading="How close to optimal, proven",
        caption="The objective is at most this far above its optimum, by proof and with rounding counted; lower is closer. "
        "Gaps are rounds that prove nothing.",
        alt="The certificate of every model over rounds, on a logarithmic scale.",
        views={
            "": specification(
                story,
                data={"name": "certificates"},
                params=dashes(story),
                transform=[{"filter": ON}],
                layer=_layers(story, y, tips),
            )  # fmt: skip
        },
        data={"certificates": rows},
    )


def _layers(story: Story, y: Spec, tips: list[Spec]) -> list[Spec]:
    ends = {"color": colour(story), "x": ROUND, "y": y}
    return [
        {"mark": {"type": "line", "strokeDash": DASH}, "encoding": ends},
        {
            "mark": {"type": "point", "filled": True, "size": 26},
            "encoding": {**ends, "shape": shape(story), "tooltip": tips},
        },
    ]


def losses(story: Story) -> Figure | None:
    """Mean and worst training loss."""
    rows: Rows = []
    for r in kept(story):
        if not r.losses:
            continue
        worst = max(r.losses, key=lambda c, found=r.losses: found[c])  # type: ignore[misc]
        pairs = (("mean", sum(r.losses.values()) / len(r.losses), ""), ("worst", r.losses[worst], worst))
        rows += [
            {"model": r.model, "round": r.number, "which": which, "loss": short(value), "client": who}
            for which, value, who in pairs
            if value > 0
        ]
    if not rows:
        return None
    y: Spec = {"field": "loss", "type": "quantitative", "scale": {"type": "log", "nice": False}, "title": "training loss",
               "axis": {"format": ".3~g", "tickCount": 6}}  # fmt: skip
    which: Spec = {"field": "which", "type": "nominal", "scale": {"domain": ["mean", "worst"], "range": [[4, 3], [1, 0]]},
                   "legend": {"title": None, "symbolType": "stroke", "symbolStrokeWidth": 2}}  # fmt: skip
    tips = [tip("model", "model"), tip("which", "over clients"), tip("client", f"worst {story.word}"),
            tip("round", "round", "d"), tip("loss", "loss", ".4~g")]  # fmt: skip
    ends = {"x": ROUND, "y": y, "color": colour(story)}
    layers: list[Spec] = [
        {"mark": {"type": "line"}, "encoding": {**ends, "strokeDash": which}},
        {
            "mark": {"type": "point", "filled": True, "size": 26},
            "encoding": {**ends, "shape": shape(story), "tooltip": tips},
        },
    ]
    return Figure(
        name="losses",
        heading="Losses while training",
        caption=f"The {story.word} with the largest loss (solid) and the mean over all (dashed), on training rows, regulariser included.",
        alt="Mean and worst training loss of every model over rounds, on a logarithmic scale.",
        views={"": specification(story, data={"name": "losses"}, transform=[{"filter": ON}], layer=layers)},
        data={"losses": rows},
    )
