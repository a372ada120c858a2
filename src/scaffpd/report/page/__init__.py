"""The record of a run as one self-contained HTML page, or as pictures of its figures.

The page opens from disk, loads nothing, and runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from scaffpd.errors import InputError, needed
from scaffpd.files import make_folder, write_file
from scaffpd.numbers import plain, plural, small, whole
from scaffpd.report.page import model, tables, vega, verdict
from scaffpd.report.page.figures import figures
from scaffpd.report.page.tables import shown_models
from scaffpd.report.record import ModelRecord, RunRecord

NAME = "report.html"
SCALE = 2  # pixels per point
JINJA = ("jinja2", "Jinja2", "report")
VEGA = ("vl_convert", "vl-convert", "report")


def available() -> str | None:
    """Return the sentence on why no report can be made; `None` where it can."""
    try:
        needed(*JINJA)
        needed(*VEGA)  # draws the figures, and brings the JavaScript that does so on the page
    except InputError as error:
        return str(error)
    return None


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run to FOLDER/report.html or `out`, whole or not at all."""
    target = folder / NAME if out is None else out
    if target.is_dir():
        raise InputError(
            "page-is-folder",
            f"{str(target)!r} is a folder; --out needs a file, such as {str(target / NAME)!r}.",
        )
    write_file(target, page(RunRecord.read(folder), library()))
    return target


def write_figures(folder: Path, form: str, out: Path | None = None) -> tuple[Path, ...]:
    """Write every figure as PNG or SVG to FOLDER/figures or `out`, and return where they are."""
    place = folder / "figures" if out is None else out
    drawn = pictures(RunRecord.read(folder), form)
    if not drawn:
        raise InputError("nothing-to-draw", f"The run in {str(folder)!r} has nothing to plot yet.")
    make_folder(place)
    for name, content in drawn.items():
        write_file(place / name, content)
    return tuple(place / name for name in drawn)


def pictures(run: RunRecord, form: str) -> dict[str, bytes]:
    convert = needed(*VEGA)
    config = {**vega.config(), "background": "#ffffff"}
    style = {"config": config, "allowed_base_urls": []}
    found: dict[str, bytes] = {}
    for figure in figures(run):
        spec = {
            **figure.specification,
            "datasets": figure.data,
            "title": {"text": figure.heading, "anchor": "start"},
            "padding": 16,
        }
        if form == "svg":
            found[f"{figure.name}.svg"] = convert.vegalite_to_svg(spec, **style).encode()
        else:
            found[f"{figure.name}.png"] = convert.vegalite_to_png(spec, scale=SCALE, **style)
    return found


@cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed in one script, from the user's cache.

    Making it takes seconds.
    """
    convert = needed(*VEGA)
    place = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "scaffpd"
    file = place / f"vega-{convert.__version__}.js"
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")
    made = str(convert.javascript_bundle())
    with suppress(OSError, InputError):  # a cache that cannot be written is none
        place.mkdir(parents=True, exist_ok=True)
        write_file(file, made)
    return made


def page(run: RunRecord, library: str) -> str:
    """Make the page's text; `library` is the JavaScript that draws the figures."""
    drawn = figures(run)
    script = vega.packaged("page.js")
    library = harmless(library)
    scripts = {
        "config": vega.config(),
        "data": {name: rows for figure in drawn for name, rows in figure.data.items()},
        "figures": [
            {"name": f.name, "alt": f.alt, "spec": f.specification, "tables": list(f.data)}
            for f in drawn
        ],
    }
    shapes = list(vega.SHAPES.values())
    models = shown_models(run)
    jinja2 = needed(*JINJA)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(vega.packaged),
        autoescape=True,  # names of clients and columns are somebody else's
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {one.__name__: one for one in (whole, emphasised, plain, plural)}
    text: str = environment.get_template("page.html").render(
        run=run,
        colours=vega.css(),
        style=vega.packaged("page.css"),
        words=verdict,
        tables=tables,
        shown=model,
        figures=drawn,
        marks={m.name: (i % len(shapes), shapes[i % len(shapes)]) for i, m in enumerate(models)},
        models=models,
        costs=_costs(run),
        data=embedded(scripts),
        library=library,
        script=script,
        hashes=" ".join(map(_hash, (library, script))),
    )
    return text


def emphasised(text: str) -> str:
    """Return the package's own words as HTML, with emphasis for what stands in stars."""
    return re.sub(r"\*(.+?)\*", r"<em>\1</em>", text)


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def embedded(value: object) -> str:
    """Write JSON that no browser takes for the end of a script."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for bad in "<>&\u2028\u2029":
        text = text.replace(bad, f"\\u{ord(bad):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def harmless(script: str) -> str:
    """Rewrite JavaScript so that nothing in it looks like the end of a script."""
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _costs(run: RunRecord) -> dict[str, list[str]]:
    """Make the table of models: how each ended and what it cost, without empty columns."""

    def total(m: ModelRecord, name: str) -> str:
        return run.measure.written(getattr(m.overall, name, None))

    columns: dict[str, Callable[[ModelRecord], str]] = {
        "status": lambda m: m.status,
        "proven gap": lambda m: small(m.certificate),
        "rounds": lambda m: whole(m.rounds),
        "exchanges": lambda m: whole(m.exchanges),
        "MB": lambda m: plain(m.megabytes),
        "seconds": lambda m: plain(m.seconds),
        "mean": lambda m: total(m, "mean"),
        "worst\u00a020\u00a0%": lambda m: total(m, "worst_20"),
        "worst": lambda m: total(m, "worst"),
    }
    found = {name: [cell(model) for model in run.models] for name, cell in columns.items()}
    return {name: cells for name, cells in found.items() if set(cells) - {"", plain(None)}}
