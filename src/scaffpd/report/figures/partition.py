"""Who has what: rows of every label at every client."""

from __future__ import annotations

from scaffpd.report.data import ReportData
from scaffpd.report.figures.base import HEIGHT, MANY, Figure, Rows, Spec, named, quantity, specification, tip
from scaffpd.report.formats import plural

MOST_CELLS = 20_000
STEP = 24


def partition(story: ReportData) -> Figure | None:
    """Bubbles for a few clients, a heat map for many, bars without labels."""
    if not story.partition:
        return None
    labels = list(dict.fromkeys(share.label for share in story.partition))
    clients = list(dict.fromkeys(share.client for share in story.partition))
    cells = sum(share.train_rows + share.test_rows > 0 for share in story.partition)
    if labels == [""] or cells > MOST_CELLS:
        return _bars(story, clients)
    return _heat(story, clients, labels) if len(clients) > MANY else _bubbles(story, clients, labels)


def _figure(caption: str, alt: str, spec: Spec, rows: Rows, heavy: bool = False, wide: bool = True) -> Figure:
    return Figure("partition", "Who has what", caption, alt, {"": spec}, {"partition": rows}, heavy=heavy, wide=wide)


def _rows(story: ReportData, clients: list[str]) -> Rows:
    total: dict[str, int] = dict.fromkeys(clients, 0)
    for share in story.partition:
        total[share.client] += share.train_rows + share.test_rows
    place = {client: i + 1 for i, client in enumerate(sorted(clients, key=lambda c: -total[c]))}
    return [
        {
            "client": s.client, "label": s.label, "train": s.train_rows, "test": s.test_rows, "rank": place[s.client],
            "rows": rows, "share": round(rows / total[s.client], 4),
        }
        for s in story.partition
        if (rows := s.train_rows + s.test_rows) > 0
    ]  # fmt: skip


def _tips(story: ReportData) -> list[Spec]:
    return [
        tip("client", story.word), tip("label", "label"), tip("train", "rows trained on", ",d"),
        tip("test", "test rows", ",d"), tip("share", f"of the {story.word}'s rows", ".0%"),
    ]  # fmt: skip


def _bubbles(story: ReportData, clients: list[str], labels: list[str]) -> Figure:
    axis = {"labelAngle": 0, "labelOverlap": True, "labelLimit": 90}
    x = {**_label(labels), "axis": axis, "scale": {"padding": 0.5, "domain": labels}}
    legend = {"title": "rows", "tickCount": 3, "symbolType": "circle"}
    size: Spec = {"field": "rows", "type": "quantitative", "scale": {"range": [4, 420]}, "legend": legend}
    return _figure(
        f"The area of a bubble is the number of rows of that label at that {story.word}.",
        f"Rows of {len(labels)} labels at {len(clients)} {plural(story.word)}, as bubbles.",
        specification(
            story, data={"name": "partition"}, height=STEP * max(len(clients), 2),
            mark={"type": "circle", "style": "bubble"},
            encoding={"y": named(clients), "x": x, "size": size, "tooltip": _tips(story)},
        ),
        _rows(story, clients),
        wide=len(labels) > 12,
    )  # fmt: skip


def _label(labels: list[str]) -> Spec:
    return {"field": "label", "type": "nominal", "sort": None, "scale": {"domain": labels}, "title": "label"}


def _rank(story: ReportData) -> Spec:
    title, axis = f"{plural(story.word)}, the largest first", {"labels": False, "grid": False}
    return {"field": "rank", "type": "ordinal", "title": title, "axis": axis, "scale": {"paddingInner": 0}}


def _heat(story: ReportData, clients: list[str], labels: list[str]) -> Figure:
    y = {**_label(labels), "axis": {"labelOverlap": True}}
    legend = {"title": f"share of the {story.word}'s rows", "format": ".0%"}
    tone: Spec = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1]}, "legend": legend}
    return _figure(
        f"Each column is one {story.word}; the stronger the colour, the more of its rows have that label.",
        f"The share of {len(labels)} labels at each of {len(clients)} {plural(story.word)}, as a heat map.",
        specification(
            story, data={"name": "partition"}, height=max(160, min(560, 20 * len(labels))), mark={"type": "rect"},
            encoding={"x": _rank(story), "y": y, "color": tone, "tooltip": _tips(story)},
        ),
        _rows(story, clients),
        heavy=True,
    )  # fmt: skip


def _bars(story: ReportData, clients: list[str]) -> Figure:
    totals: dict[str, list[int]] = {client: [0, 0] for client in clients}
    for share in story.partition:
        totals[share.client][0] += share.train_rows
        totals[share.client][1] += share.test_rows
    order = sorted(clients, key=lambda c: -sum(totals[c]))
    rows: Rows = [
        {"client": c, "rank": i + 1, "kind": kind, "place": k, "rows": totals[c][k]}
        for i, c in enumerate(order)
        for k, kind in enumerate(("trained on", "test"))
        if totals[c][k]
    ]
    many, length = len(clients) > MANY, quantity("rows", "rows")
    kind = {"field": "kind", "type": "ordinal", "scale": {"domain": ["trained on", "test"]}, "legend": {"title": None}}
    place: Spec = {"x": _rank(story), "y": length} if many else {"y": named(order), "x": length}
    tips = [tip("client", story.word), tip("kind", "rows"), tip("rows", "how many", ",d")]
    return _figure(
        f"Rows of every {story.word}.",
        f"Rows trained on and test rows of {len(clients)} {plural(story.word)}.",
        specification(
            story, data={"name": "partition"}, mark={"type": "bar", "opacity": 0.85} | ({} if many else {"height": 10}),
            height=HEIGHT if many else STEP * max(len(clients), 2),
            encoding={**place, "color": kind, "order": {"field": "place"}, "tooltip": tips},
        ),
        rows,
        heavy=many,
    )  # fmt: skip
