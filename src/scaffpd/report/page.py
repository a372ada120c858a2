"""One HTML file with everything in it: opens from disk, asks for nothing, runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from scaffpd.report import tables
from scaffpd.report.data import ReportData
from scaffpd.report.figures import Figure, figures
from scaffpd.report.figures.base import MARGIN, PAPER
from scaffpd.report.formats import plural
from scaffpd.report.theme import THEMES, config, css, places
from scaffpd.report.top import chips, top

KINDS = {
    "train": "fairness report of a training run", "path": "fairness report of a path from average to worst case",
    "demo": "fairness report of the demo", "compare": "report of a comparison", "deploy": "report of a deployed run",
}  # fmt: skip
FOOTER = (
    "The average counts every {word} alike. The worst 20 % are the ⌈N/5⌉ {words} that fare worst under the model in "
    "question, so they may be others before and after."
)


def page(story: ReportData, library: str) -> str:
    """The page's text; `library` is the JavaScript that draws."""
    drawn = figures(story)
    parts = {
        "title": escape(story.title),
        "eyebrow": escape(KINDS.get(story.kind, "fairness report")),
        "colours": css(),
        "style": _packaged("page.css"),
        "chips": chips(story),
        "figures": "\n".join(_figure(figure) for figure in drawn),
        "tables": _tables(story),
        "made": _made(story),
        "footer": escape(FOOTER.format(word=story.word, words=plural(story.word))),
        "data": embedded(_data(story, drawn)),
        "library": harmless(library),
        "script": _packaged("page.js"),
        **top(story),
    }
    parts["hashes"] = " ".join(f"'sha256-{_hash(parts[name])}'" for name in ("library", "script"))
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], _packaged("page.html"))


def embedded(value: Any) -> str:
    """JSON that no browser takes for the end of a script, and no parser for anything but JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for bad in "<>&\u2028\u2029":
        text = text.replace(bad, f"\\u{ord(bad):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def harmless(script: str) -> str:
    """JavaScript in which nothing looks like the end of a script."""
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _packaged(name: str) -> str:
    return files("scaffpd.report").joinpath(name).read_text(encoding="utf-8")


def _data(story: ReportData, drawn: tuple[Figure, ...]) -> dict[str, Any]:
    found = places([model.role for model in story.models])
    return {
        "models": list(story.names),
        "shown": list(story.shown),
        "margin": MARGIN,
        "paper": PAPER,
        "main": [m.name for m in story.models if m.role] or list(story.names[:1]),
        "themes": {name: config(palette, found) for name, palette in THEMES.items()},
        "data": {name: rows for figure in drawn for name, rows in figure.data.items()},
        "figures": [
            {
                "name": f.name,
                "alt": f.alt,
                "views": f.views,
                "tables": list(f.data),
                "focus": list(f.focus),
                "heavy": f.heavy,
            }
            for f in drawn
        ],
    }


def _figure(figure: Figure) -> str:
    wide = ' class="full"' if figure.wide else ""
    name = f"h-{figure.name}"
    return (
        f'<figure id="figure-{figure.name}"{wide} aria-labelledby="{name}"><div class="top">'
        f'<h2 id="{name}">{escape(figure.heading)}</h2>{_controls(figure)}</div>'
        f'<figcaption>{escape(figure.caption)}</figcaption><div class="chart"></div></figure>'
    )


def _controls(figure: Figure) -> str:
    if len(figure.focus) > 1:
        options = "".join(f"<option>{escape(name)}</option>" for name in figure.focus)
        return f"<label>of <select>{options}</select></label>"
    if len(figure.views) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" data-view="{escape(view)}" aria-pressed="{str(i == 0).lower()}">{escape(view)}</button>'
        for i, view in enumerate(figure.views)
    )
    return f'<div class="views" role="group" aria-label="Cost">{buttons}</div>'


def _tables(story: ReportData) -> str:
    parts = [
        ("clients", f"Every {story.word}", tables.clients(story)),
        ("events", "What happened to silos", tables.events(story)),
        ("runs", "Every run" if len(story.models) > 1 else "The run", tables.runs(story)),
    ]
    return "\n".join(
        f'<section aria-labelledby="h-table-{name}"><h2 id="h-table-{name}">{escape(heading)}</h2>{table}</section>'
        for name, heading, table in parts
        if table
    )


def _made(story: ReportData) -> str:
    words = "".join(f"<p>{escape(remark)}</p>" for remark in story.remarks)
    if story.command:
        words += (
            '<p>The same once more:</p><div class="command"><pre id="command">'
            f'{escape(story.command)}</pre><button type="button" class="plain" id="copy">Copy</button></div>'
        )
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in story.settings)
    words += f'<dl class="settings">{pairs}</dl>' if pairs else ""
    for name, text in story.files:
        words += f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
    return words
