"""The same figures as files: PNG or SVG, in the light theme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaffpd.report.data import ReportData
from scaffpd.report.engine import engine
from scaffpd.report.figures import Figure, figures
from scaffpd.report.figures.base import WIDTH, settled
from scaffpd.report.theme import LIGHT, config, places

FORMATS = ("png", "svg")
SCALE = 2  # pixels a point


def pictures(story: ReportData, form: str) -> dict[str, bytes]:
    """Every figure by its file's name."""
    found: dict[str, bytes] = {}
    look = {**config(LIGHT, places([m.role for m in story.models])), "background": "#ffffff"}
    for figure in figures(story):
        for view, spec in figure.views.items():
            name = f"{figure.name}-{view.lower()}" if view and len(figure.views) > 1 else figure.name
            found[f"{name}.{form}"] = _drawn(_whole(figure, spec), look, form)
    return found


def _whole(figure: Figure, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        **settled(spec, WIDTH),
        "datasets": figure.data,
        "title": {"text": figure.heading, "anchor": "start"},
        "padding": 16,
    }


def _drawn(spec: dict[str, Any], look: dict[str, Any], form: str) -> bytes:
    convert = engine()
    if form == "svg":
        return str(convert.vegalite_to_svg(spec, config=look, allowed_base_urls=[])).encode("utf-8")
    return bytes(convert.vegalite_to_png(spec, config=look, scale=SCALE, allowed_base_urls=[]))


def directory(folder: Path, out: Path | None) -> Path:
    """Where the files go: FOLDER/figures, unless told."""
    return folder / "figures" if out is None else out
