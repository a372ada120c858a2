"""Certificate and losses over rounds, on logarithmic scales."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaffpd.report.data import ReportData, Round
from scaffpd.report.figures.base import (
    DASH,
    ON,
    Figure,
    Rows,
    Spec,
    across,
    colour,
    dashes,
    quantity,
    shape,
    short,
    specification,
    thinned,
    tip,
    which,
)

NOISY = " Losses that clients have sent carry their noise."


def kept(story: ReportData) -> Iterator[Round]:
    """The rounds that are drawn: not more a model than a line can show."""
    for name in story.names:
        mine = [r for r in story.rounds if r.model == name]
        numbers = thinned([r.number for r in mine])
        yield from (r for r in mine if r.number in numbers)


def certificate(story: ReportData) -> Figure | None:
    """The proven gap, where there is one."""
    rows: Rows = [
        {"model": r.model, "round": r.number, "certificate": short(r.certificate) if (r.certificate or 0) > 0 else None}
        for r in kept(story)
    ]
    proven = {row["model"] for row in rows if row["certificate"] is not None}
    rows = [row for row in rows if row["model"] in proven]
    if not rows:
        return None
    powers = _powers([row["certificate"] for row in rows if row["certificate"] is not None])
    scale = {"type": "log", "domain": [powers[0], powers[-1]], "nice": False}
    y = quantity("certificate", "proven gap to the optimum", scale, format="~e", values=powers)
    tips = [tip("model", "model"), tip("round", "round", "d"), tip("certificate", "proven gap", ".2e")]
    line: Spec = {"mark": {"type": "line", "strokeDash": DASH}, "encoding": _ends(story, y)}
    return Figure(
        name="certificate",
        heading="How close to optimal, proven",
        caption="The objective is at most this far above its optimum, by proof and with rounding counted; lower is "
        "closer. Gaps in a line are rounds that prove nothing.",
        alt="The certificate of every model over rounds, on a logarithmic scale.",
        views={"": _spec(story, "certificates", [line, _dots(story, y, tips)], dashes(story))},
        data={"certificates": rows},
    )


def losses(story: ReportData) -> Figure | None:
    """Mean and worst training loss."""
    rows = [row for r in kept(story) if r.losses for row in _two(r)]
    if not rows:
        return None
    found = [row["loss"] for row in rows]
    scale = {"type": "log", "domain": [0.97 * min(found), 1.03 * max(found)], "nice": False}  # whatever models are on
    y = quantity("loss", "training loss", scale, format=",.3~r")
    tips = [
        tip("model", "model"), tip("which", "over clients"), tip("client", f"worst {story.word}"),
        tip("round", "round", "d"), tip("loss", "loss", ",.4~r"),
    ]  # fmt: skip
    line: Spec = {"mark": {"type": "line"}, "encoding": {**_ends(story, y), "strokeDash": which(("mean", "worst"))}}
    return Figure(
        name="losses",
        heading="Losses while training",
        caption=f"The {story.word} with the largest loss (solid) and the mean over all (dashed), on training rows, "
        f"regulariser included.{NOISY if story.privacy else ''}",
        alt="Mean and worst training loss of every model over rounds, on a logarithmic scale.",
        views={"": _spec(story, "losses", [line, _dots(story, y, tips)], [])},
        data={"losses": rows},
    )


def _powers(values: list[float]) -> list[float]:
    """The powers of ten around some numbers, seven at most: whole decades are all the grid that a line needs."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    step = max(1, math.ceil((high - low) / 6))
    return [float(f"1e{power}") for power in range(low, max(high, low + 1) + step, step)]


def _two(r: Round) -> Rows:
    worst = max(r.losses, key=r.losses.__getitem__)
    pairs = (("mean", sum(r.losses.values()) / len(r.losses), ""), ("worst", r.losses[worst], worst))
    return [
        {"model": r.model, "round": r.number, "which": name, "loss": short(value), "client": who}
        for name, value, who in pairs
        if value > 0
    ]


def _ends(story: ReportData, y: Spec) -> Spec:
    return {"x": across("round", "round", tickMinStep=1), "y": y, "color": colour(story)}


def _dots(story: ReportData, y: Spec, tips: list[Spec]) -> Spec:
    mark = {"type": "point", "filled": True, "size": 26}
    return {"mark": mark, "encoding": {**_ends(story, y), "shape": shape(story), "tooltip": tips}}


def _spec(story: ReportData, data: str, layers: list[Spec], params: list[Spec]) -> Spec:
    return specification(story, data={"name": data}, params=params, transform=[{"filter": ON}], layer=layers)
