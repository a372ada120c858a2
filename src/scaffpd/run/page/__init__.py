"""The folder of a run as one self-contained HTML page, or as pictures of its figures.

The page opens from disk, loads nothing, and runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError, needed
from scaffpd.files import make_folder, write_file
from scaffpd.numbers import change, measured, plain, plural, small, whole
from scaffpd.run.page import figures, predictions, read, several, vega, verdict
from scaffpd.run.page.data import FEW, ModelSummary, ReportData, Score

NAME = "report.html"
SEVERAL = "comparison.html"
SCALE = 2  # pixels per point
JINJA = ("jinja2", "Jinja2", "report")
VEGA = ("vl_convert", "vl-convert", "report")
KINDS = {
    "train": "fairness report of a training run",
    "path": "fairness report of a path from average to worst case",
    "runs": "several runs side by side",
    "demo": "fairness report of the demo",
    "compare": "report of a comparison",
    "deploy": "report of a deployed run",
}
FILTER_FROM = 12  # clients: a shorter table needs no filter


def available() -> str | None:
    """Return the sentence on why no report can be made; `None` where it can."""
    try:
        needed(*JINJA)
        needed(*VEGA)  # draws the figures, and brings the JavaScript that does so on the page
    except InputError as error:
        return str(error)
    return None


def opened(folders: Sequence[Path]) -> ReportData:
    """Read a run, or several as one: those that are named, or those in a folder that is itself no run."""
    if (
        len(folders) == 1
        and not read.is_run(folders[0])
        and len(below := read.runs_below(folders[0])) > 1
    ):
        folders = below
    return read.read(folders[0]) if len(folders) == 1 else several.read_several(folders)


def write(folder: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a run (or of several) to FOLDER/report.html or `out`, whole or not at all; return where it is.

    Several runs are compared on one page, comparison.html in the folder that they share.
    """
    folders = [Path(folder)] if isinstance(folder, str | Path) else list(map(Path, folder))
    run = opened(folders)
    together = Path(os.path.commonpath([one.resolve().parent for one in folders]))
    usual = folders[0] / NAME if len(folders) == 1 else together / SEVERAL
    target = usual if out is None else Path(out)
    if target.is_dir():
        raise InputError(
            "folder-file-such",
            f"{str(target)!r} is a folder; --out needs a file, such as {str(target / NAME)!r}.",
        )
    write_file(target, page(run, library()))
    return target


def write_figures(
    folder: Path | Sequence[Path], form: str, out: Path | None = None
) -> tuple[Path, ...]:
    """Write every figure as PNG or SVG to FOLDER/figures or `out`, and return where they are."""
    folders = [Path(folder)] if isinstance(folder, str | Path) else list(map(Path, folder))
    place = folders[0] / "figures" if out is None else Path(out)
    drawn = pictures(opened(folders), form)
    if not drawn:
        raise InputError("run-nothing-draw", f"The run in {str(folder)!r} has nothing to draw yet.")
    make_folder(place)
    for name, content in drawn.items():
        write_file(place / name, content)
    return tuple(place / name for name in drawn)


def write_picture(folder: Path, figure: str, out: Path) -> Path:
    """Write one figure of a run as PNG."""
    write_file(out, pictures(read.read(Path(folder)), "png", figure)[f"{figure}.png"])
    return out


def pictures(run: Any, form: str, only: str | None = None) -> dict[str, bytes]:
    """Draw the figures of a `ReportData` (or `only` one) in the light theme; contents by file name."""
    convert = needed(*VEGA)
    style = {
        "config": {**vega.config(vega.LIGHT, _places(run)), "background": "#ffffff"},
        "allowed_base_urls": [],
    }
    found: dict[str, bytes] = {}
    for figure in figures.figures(run):
        for view, spec in figure.views.items() if only in (None, figure.name) else ():
            name = (
                f"{figure.name}-{view.lower()}" if view and len(figure.views) > 1 else figure.name
            )
            title = {"text": figure.heading, "anchor": "start"}
            whole = {
                **vega.settled(spec, vega.WIDTH),
                "datasets": figure.data,
                "title": title,
                "padding": 16,
            }
            svg = form == "svg"
            drawn = (
                convert.vegalite_to_svg(whole, **style)
                if svg
                else convert.vegalite_to_png(whole, scale=SCALE, **style)
            )
            found[f"{name}.{form}"] = drawn.encode() if svg else drawn
    return found


@cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed in one script, from the user's cache: making it takes seconds."""
    convert = needed(*VEGA)
    place = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "scaffpd"
    kept = place / f"vega-{convert.__version__}.js"
    with suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    made = str(convert.javascript_bundle())
    with suppress(OSError, InputError):  # a cache that cannot be written is none
        place.mkdir(parents=True, exist_ok=True)
        write_file(kept, made)
    return made


def page(run: ReportData, library: str) -> str:
    """Make the page's text; `library` is the JavaScript that draws the figures."""
    drawn = figures.figures(run)
    script = packaged("page.js")
    library = harmless(library)
    looks = {
        model.name: vega.look(place) for model, place in zip(run.models, _places(run), strict=True)
    }
    text: str = _template().render(
        run=run,
        kind=KINDS.get(run.kind, "fairness report"),
        colours=vega.css(),
        style=packaged("page.css"),
        verdict=verdict.verdict(run),
        answers=verdict.answers(run),
        meanings=verdict.meanings(run),
        tiles=_tiles(run),
        cautions=verdict.cautions(run),
        figures=drawn,
        marks={name: (colour, vega.PATHS[shape]) for name, (colour, shape, _) in looks.items()},
        clients=client_rows(run) if run.scores else (),
        predicted=predictions.tables(run),
        said=(*predictions.sentences(run), predictions.shifted(run)),
        runs=_runs(run),
        FEW=FEW,
        FILTER_FROM=FILTER_FROM,
        data=embedded(_data(run, drawn)),
        library=library,
        script=script,
        hashes=" ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in (library, script)
        ),
    )
    return text


def _template() -> Any:
    """Load the page's template; values are escaped unless the template says otherwise."""
    jinja2 = needed(*JINJA)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(packaged),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        written.__name__: written for written in (measured, plain, plural, small, whole)
    }
    return environment.get_template("page.html")


def packaged(name: str) -> str:
    """Read a file of this package."""
    return files("scaffpd.run.page").joinpath(name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """Write JSON that no browser takes for the end of a script."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for bad in "<>&\u2028\u2029":
        text = text.replace(bad, f"\\u{ord(bad):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def harmless(script: str) -> str:
    """Rewrite JavaScript so that nothing in it looks like the end of a script."""
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _places(run: ReportData) -> list[int]:
    return vega.places([model.role for model in run.models])


def _data(run: ReportData, drawn: tuple[vega.Figure, ...]) -> dict[str, Any]:
    """Collect what the page's script needs."""
    found = _places(run)
    kept = ("name", "alt", "views", "focus", "heavy")
    return {
        "models": run.names,
        "shown": run.shown,
        "margin": vega.MARGIN,
        "paper": vega.PAPER,
        "main": [m.name for m in run.models if m.role] or run.names[:1],
        "themes": {name: vega.config(palette, found) for name, palette in vega.THEMES.items()},
        "data": {name: rows for figure in drawn for name, rows in figure.data.items()},
        "figures": [
            {name: getattr(f, name) for name in kept} | {"tables": list(f.data)} for f in drawn
        ],
    }


def _tiles(run: ReportData) -> list[dict[str, str]]:
    """List the numbers beneath the verdict: name, value, perhaps an older one and a change, and what it is about."""
    if not run.overall:
        return []
    tiles: list[dict[str, str]] = []
    if run.pair:
        old, new = (run.overall[name] for name in run.pair)
        for name, which in ((f"The {run.bottom}", "worst_20"), ("The average", "mean")):
            was = getattr(old, which)
            now = getattr(new, which)
            moved = change(now - was, run.measure) + (" points" if run.upwards else "")
            old_value = measured(was, run.measure)
            value = measured(now, run.measure)
            more = " → ".join(run.pair)
            tone = "" if run.tested else _tone(run, now - was, moved)  # tests are of single clients
            tiles.append(
                {
                    "name": name,
                    "old": old_value,
                    "value": value,
                    "moved": moved,
                    "tone": tone,
                    "more": more,
                }
            )
        if (loss := verdict.optimised(run)) is not None:
            more = "on training rows, of the worst-served: what was optimised"
            tiles.append(
                {
                    "name": "Loss",
                    "old": f"{loss.before:.3f}",
                    "value": f"{loss.after:.3f}",
                    "more": more,
                }
            )
    else:
        one = next(iter(run.overall.values()))
        fifth, mean = (measured(value, run.measure) for value in (one.worst_20, one.mean))
        tiles.append({"name": f"The {run.bottom}", "value": fifth, "more": one.worst_client})
        tiles.append({"name": "The average", "value": mean, "more": f"over {len(run.clients)}"})
    if run.privacy is not None:
        pair = run.privacy.pair.replace(", ", ",\u00a0")
        tiles.append({"name": "Differential privacy", "value": pair, "more": run.privacy.scope})
    return tiles


def _tone(run: ReportData, moved: float, written: str) -> str:
    """Return the colour of a change: none where it is written as zero."""
    if not written.startswith(("+", "−")):
        return ""
    return "gain" if run.sign * moved > 0 else "loss"


def client_rows(run: ReportData) -> list[dict[str, Any]]:
    """Make the rows of the table of clients: values, changes (with * where clear of noise) and their colours."""
    named = {
        name: {s.client: s for s in run.scores[name]} for name in run.names if name in run.scores
    }
    gains = run.gains(*run.pair) if run.pair else {}
    weigher = named[run.role("after") or next(iter(run.scores))]
    rows = []
    for client in run.clients:
        own = weigher.get(client) or Score(client, None)
        gain = gains.get(client)
        clear = run.tested.get(client)
        values = [
            (run.names.index(name), _value(run, scores.get(client)))
            for name, scores in named.items()
        ]
        moved = None if gain is None else run.sign * gain
        shown = change(moved, run.measure)
        tone = "" if moved is None or clear is False else _tone(run, moved, shown)
        told = (moved, f"{shown}*" if clear else shown, tone)
        rows.append(
            {"score": own, "values": values, "few": verdict.uncertain(run, own), "gain": told}
        )
    return rows


def _value(run: ReportData, score: Score | None) -> tuple[float | None, str]:
    """Return a value to sort by, and how it is shown: with its standard deviation where there is one."""
    value = score.value if score else None
    shown = measured(value, run.measure)
    if score is None or score.deviation is None:
        return value, shown
    if run.upwards:
        return (
            value,
            f"{shown.removesuffix(chr(0xA0) + '%')}\u202f±\u202f{100 * score.deviation:.1f}",
        )
    return value, f"{shown} ± {plain(score.deviation)}"


def _runs(run: ReportData) -> dict[str, Any]:
    """Make the table of models: how each run ended and what it cost, without empty columns."""

    def total(which: str) -> Callable[[ModelSummary], str]:
        return lambda m: measured(getattr(run.overall.get(m.name), which, None), run.measure)

    columns: dict[str, Callable[[ModelSummary], str]] = {
        "status": lambda m: m.status,
        "proven gap": lambda m: small(m.certificate),
        "rounds": lambda m: whole(m.rounds),
        "exchanges": lambda m: whole(m.exchanges),
        "MB": lambda m: plain(m.megabytes),
        "seconds": lambda m: plain(m.seconds),
        "mean": total("mean"),
        "worst\u00a020\u00a0%": total("worst_20"),
        "worst": total("worst"),
    }
    found = {name: [cell(m) for m in run.models] for name, cell in columns.items()}
    kept = {name: cells for name, cells in found.items() if set(cells) - {"", plain(None)}}
    messages = {m.message for m in run.models}
    return {
        "columns": kept,
        "message": messages.pop() if len(messages) == 1 < len(run.models) else "",
    }


__all__ = ["available", "client_rows", "write", "write_figures", "write_picture"]
