"""Who has what: rows of every label at every client."""

from __future__ import annotations

from scaffpd.report.figures.base import HEIGHT, MANY, Figure, Rows, Spec, specification, tip
from scaffpd.report.formats import plural
from scaffpd.report.story import Story

MOST_CELLS = 20_000
STEP = 24


def partition(story: Story) -> Figure | None:
    """Bubbles for a few clients, a heat map for many, bars without labels."""
    if not story.partition:
        return None
    labels = list(dict.fromkeys(share.label for share in story.partition))
    clients = list(dict.fromkeys(share.client for share in story.partition))
    cells = sum(share.train_rows + share.test_rows > 0 for share in story.partition)
    if labels == [""] or cells > MOST_CELLS:
        return _bars(story, clients)
    return _heat(story, clients, labels) if len(clients) > MANY else _bubbles(story, clients, labels)


def _figure(
    story: Story, caption: str, alt: str, spec: Spec, rows: Rows, heavy: bool = False, wide: bool = True
) -> Figure:
    return Figure("partition", "Who has what", caption, alt, {"": spec}, {"partition": rows}, heavy=heavy, wide=wide)


def _rows(story: Story, clients: list[str]) -> Rows:
    total: dict[str, int] = dict.fromkeys(clients, 0)
    for share in story.partition:
        total[share.client] += share.train_rows + share.test_rows
    place = {client: i + 1 for i, client in enumerate(sorted(clients, key=lambda c: -total[c]))}
    return [
        {
            "client": s.client, "label": s.label, "train": s.train_rows, "test": s.test_rows, "rank": place[s.client],
            "rows": s.train_rows + s.test_rows, "share": round((s.train_rows + s.test_rows) / max(total[s.client], 1), 4),
        }
        for s in story.partition
        if s.train_rows + s.test_rows > 0
    ]  # fmt: skip


def _tips(story: Story) -> list[Spec]:
    return [
        tip("client", story.word), tip("label", "label"), tip("train", "rows trained on", ",d"),
        tip("test", "test rows", ",d"), tip("share", f"of the {story.word}'s rows", ".0%"),
    ]  # fmt: skip


def _named(clients: list[str]) -> Spec:
    axis = {"labelLimit": {"expr": "clamp(width / 3, 90, 220)"}, "grid": True, "gridDash": [1, 3], "labelFontSize": 13}
    return {
        "field": "client",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": clients},
        "title": None,
        "axis": axis,
    }


def _bubbles(story: Story, clients: list[str], labels: list[str]) -> Figure:
    x: Spec = {"field": "label", "type": "nominal", "sort": None, "title": "label",
               "axis": {"labelAngle": 0, "labelOverlap": True, "labelLimit": 90}, "scale": {"padding": 0.5, "domain": labels}}  # fmt: skip
    size: Spec = {"field": "rows", "type": "quantitative", "scale": {"range": [4, 420]},
                  "legend": {"title": "rows", "tickCount": 3, "symbolType": "circle"}}  # fmt: skip
    spec = specification(
        story, data={"name": "partition"}, height=STEP * max(len(clients), 2), mark={"type": "circle", "style": "bubble"},
        encoding={"y": _named(clients), "x": x, "size": size, "tooltip": _tips(story)},
    )  # fmt: skip
    return _figure(
        story,
        f"The area of a bubble is the number of rows of that label at that {story.word}.",
        f"Rows of {len(labels)} labels at {len(clients)} {plural(story.word)}, as bubbles.",
        spec,
        _rows(story, clients),
        wide=len(labels) > 12,
    )


def _heat(story: Story, clients: list[str], labels: list[str]) -> Figure:
    x: Spec = {"field": "rank", "type": "ordinal", "title": f"{plural(story.word)}, the largest first",
               "axis": {"labels": False, "grid": False}, "scale": {"paddingInner": 0}}  # fmt: skip
    y: Spec = {"field": "label", "type": "nominal", "sort": None, "scale": {"domain": labels}, "title": "label",
               "axis": {"labelOverlap": True}}  # fmt: skip
    tone: Spec = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1]},
                  "legend": {"title": f"share of the {story.word}'s rows", "format": ".0%", "orient": "top"}}  # fmt: skip
    height = max(160, min(560, 20 * len(labels)))
    spec = specification(
        story, data={"name": "partition"}, height=height, mark={"type": "rect"},
        encoding={"x": x, "y": y, "color": tone, "tooltip": _tips(story)},
    )  # fmt: skip
    return _figure(
        story,
        f"Each column is one {story.word}; the stronger the colour, the more of its rows have that label.",
        f"The share of {len(labels)} labels at each of {len(clients)} {plural(story.word)}, as a heat map.",
        spec,
        _rows(story, clients),
        heavy=True,
    )


def _bars(story: Story, clients: list[str]) -> Figure:
    totals: dict[str, list[int]] = {client: [0, 0] for client in clients}
    for share in story.partition:
        totals[share.client][0] += share.train_rows
        totals[share.client][1] += share.test_rows
    order = sorted(clients, key=lambda c: -sum(totals[c]))
    rows: Rows = [
        {"client": c, "rank": i + 1, "kind": kind, "rows": totals[c][k]}
        for i, c in enumerate(order)
        for k, kind in enumerate(("trained on", "test"))
        if totals[c][k]
    ]
    many = len(clients) > MANY
    length: Spec = {"field": "rows", "type": "quantitative", "title": "rows"}
    kind: Spec = {
        "field": "kind",
        "type": "ordinal",
        "scale": {"domain": ["trained on", "test"]},
        "legend": {"title": None},
    }
    tips = [tip("client", story.word), tip("kind", "rows"), tip("rows", "how many", ",d")]
    rank: Spec = {"field": "rank", "type": "ordinal", "title": f"{plural(story.word)}, the largest first",
                  "axis": {"labels": False, "grid": False}, "scale": {"paddingInner": 0}}  # fmt: skip
    place: Spec = {"x": rank, "y": length} if many else {"y": _named(order), "x": length}
    spec = specification(
        story, data={"name": "partition"}, mark={"type": "bar", "opacity": 0.85, **({} if many else {"height": 10})},
        height=HEIGHT if many else STEP * max(len(clients), 2), encoding={**place, "color": kind, "tooltip": tips},
    )  # fmt: skip
    return _figure(
        story,
        f"Rows of every {story.word}.",
        f"Rows trained on and test rows of {len(clients)} {plural(story.word)}.",
        spec,
        rows,
        heavy=many,
    )
