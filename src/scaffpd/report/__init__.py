"""The folder of a run as one self-contained HTML page, or as pictures of its figures."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError, not_installed

NAME = "report.html"
SCALE = 2  # pixels per point
NEEDED = {"jinja2": "Jinja2", "vl_convert": "vl-convert"}


def available() -> str | None:
    """`None`, or the sentence on why no report can be made."""
    for module, name in NEEDED.items():
        try:
            __import__(module)
        except ImportError:
            return str(not_installed(name, "report"))
    return None


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run to FOLDER/report.html or `out`, all of it or nothing, and return where it is."""
    from scaffpd.report.page import page
    from scaffpd.report.read import read

    run = read(Path(folder))
    target = Path(folder) / NAME if out is None else Path(out)
    if target.is_dir():
        raise InputError(f"{str(target)!r} is a folder; --out needs a file, such as {str(target / NAME)!r}.")
    _put(target, page(run, library()).encode("utf-8"))
    return target


def write_figures(folder: Path, form: str, out: Path | None = None) -> tuple[Path, ...]:
    """Write every figure as PNG or SVG to FOLDER/figures or `out`, and return where they are."""
    from scaffpd.report.read import read

    place = Path(folder) / "figures" if out is None else Path(out)
    drawn = pictures(read(Path(folder)), form)
    if not drawn:
        raise InputError(f"The run in {str(folder)!r} has nothing to draw yet.")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if place.is_file() else error.strerror
        raise InputError(f"Cannot make the folder {str(place)!r}: {why}.") from None
    for name, content in drawn.items():
        _put(place / name, content)
    return tuple(place / name for name in drawn)


def write_picture(folder: Path, figure: str, out: Path) -> Path:
    """Write one figure of a run as PNG."""
    from scaffpd.report.read import read

    _put(out, pictures(read(Path(folder)), "png", figure)[f"{figure}.png"])
    return out


def pictures(run: Any, form: str, only: str | None = None) -> dict[str, bytes]:
    """Draw the figures of a `ReportData` (or `only` one) in the light theme; contents by file name."""
    from scaffpd.report.figures import figures
    from scaffpd.report.vega import LIGHT, WIDTH, config, places, settled

    convert = _vl_convert()
    look = {**config(LIGHT, places([model.role for model in run.models])), "background": "#ffffff"}
    found: dict[str, bytes] = {}
    for figure in figures(run):
        for view, spec in figure.views.items() if only in (None, figure.name) else ():
            name = f"{figure.name}-{view.lower()}" if view and len(figure.views) > 1 else figure.name
            title = {"text": figure.heading, "anchor": "start"}
            whole = {**settled(spec, WIDTH), "datasets": figure.data, "title": title, "padding": 16}
            if form == "svg":
                found[f"{name}.svg"] = convert.vegalite_to_svg(whole, config=look, allowed_base_urls=[]).encode("utf-8")
            else:
                found[f"{name}.png"] = convert.vegalite_to_png(whole, config=look, scale=SCALE, allowed_base_urls=[])
    return found


def _vl_convert() -> Any:
    """vl-convert, which draws the figures and brings the JavaScript that does so on the page."""
    try:
        import vl_convert
    except ImportError:
        raise not_installed("vl-convert", "report") from None
    return vl_convert


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script; making it takes seconds, so once per process."""
    return str(_vl_convert().javascript_bundle())


def _put(target: Path, content: bytes) -> None:
    from scaffpd.system import atomic_write

    try:
        with atomic_write(target) as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"Cannot write {str(target)!r}: {error.strerror}.") from None


__all__ = ["available", "write", "write_figures", "write_picture"]
