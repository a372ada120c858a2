"""The four pictures: ‖x − x*‖² against communication rounds, on an axis whose second part is squeezed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from scaffpd.experiments.synthetic import grids, words
from scaffpd.experiments.synthetic.panels import FIGURES, Panel
from scaffpd.experiments.synthetic.settings import TARGET
from scaffpd.experiments.synthetic.study import FAN, Curve, Study, fan, sampled
from scaffpd.experiments.synthetic.tables import cell
from scaffpd.federation import Vector
from scaffpd.figures import BLACK, BLUE, GREEN, INK, ORANGE, PINK, QUIET, RED, RULE, SKY, STYLE

WIDTH, HEIGHT, DPI = 9.6, 5.2, 160
LOWEST, HIGHEST = 1e-32, 1e2
TICKS = (1e0, 1e-6, 1e-12, 1e-18, 1e-24, 1e-30)
SHADE = "#f3f3f3"
DASHES, DOTS = (0, (4, 1.6)), (0, (1, 1.4))
LOOKS: dict[str, dict[str, Any]] = {
    grids.SCAFF_PD: {"color": BLUE, "lw": 2.6, "zorder": 6},
    grids.CONSTANTS: {"color": SKY, "lw": 1.8, "ls": DASHES, "zorder": 5},
    grids.DRFA_: {"color": RED, "lw": 2.6, "zorder": 4},
    grids.AFL_: {"color": INK, "lw": 1.4, "ls": DASHES, "zorder": 5},
    grids.GDA: {"color": ORANGE, "lw": 1.8, "zorder": 3},
    grids.EXTRA: {"color": ORANGE, "lw": 1.8, "ls": DASHES, "zorder": 3},
    grids.APD: {"color": PINK, "lw": 1.8, "zorder": 3},
    grids.APD_CONSTANTS: {"color": PINK, "lw": 1.8, "ls": DASHES, "zorder": 3},
    grids.MINIMAX: {"color": GREEN, "lw": 1.8, "zorder": 3},
    sampled(): {"color": ORANGE, "lw": 0.9, "zorder": 2},
    fan(FAN[0]): {"color": RED, "lw": 1.2, "ls": DOTS, "zorder": 3},
    fan(FAN[1]): {"color": RED, "lw": 1.2, "ls": DASHES, "zorder": 3},
}
STEPS = (ORANGE, PINK, GREEN, BLUE, BLACK, SKY)  # for J, from few to many
NUMBERED = 1.4  # lines at least as wide have their rounds written out
Line = tuple[Curve, str, dict[str, Any]]


def draw(study: Study, folder: Path, command: str) -> list[Path]:
    """Write all four as PNG files."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    written = []
    with matplotlib.rc_context({**STYLE, "axes.titlepad": 6}):
        for name, panels in FIGURES.items():
            figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
            figure.text(0.012, 0.978, words.title(study, name), fontsize=12.5, fontweight="bold", va="top")
            caption = fill(words.caption(study, name), 150)
            figure.text(0.012, 0.925, caption, fontsize=8.5, color=QUIET, va="top", linespacing=1.35)
            figure.text(0.012, 0.012, command, fontsize=7.5, color=QUIET, family="DejaVu Sans Mono")
            _fill(figure, panels(study), by_steps=name == "local_steps")
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=DPI)
    return written


def _named(panel: Panel) -> list[Line]:
    return [(curve, words.label(curve), LOOKS[curve.label]) for curve in panel.curves]


def _steps(panel: Panel) -> list[Line]:
    colours = zip(panel.curves, STEPS, strict=False)
    return [(curve, f"J = {curve.job.local_steps}", {"color": colour, "lw": 2.0}) for curve, colour in colours]


def _fill(figure: Any, panels: Sequence[Panel], by_steps: bool) -> None:
    grid = figure.add_gridspec(1, len(panels), left=0.075, right=0.975, top=0.715, bottom=0.235, wspace=0.1)
    for i, panel in enumerate(panels):
        near, far = grid[i].subgridspec(1, 2, width_ratios=(3, 2), wspace=0.018 * len(panels)).subplots(sharey=True)
        lines = _steps(panel) if by_steps else _named(panel)
        for axes, ends in ((near, (0, panel.near)), (far, (panel.near, panel.far))):
            _axes(axes, *ends)
            for curve, label, style in lines:
                axes.plot(_visible(curve), label=label, solid_capstyle="round", **style)
            _crossings(axes, lines, ends, numbers=len(panels) == 1)
        near.tick_params(labelleft=i == 0)
        near.set_ylabel("‖x − x*‖²" if i == 0 else "")
        near.set_title(panel.title, pad=22)
        _cut(near, far)
        if len(panels) > 1:
            _row(near, lines if by_steps else lines[::-1])
    figure.text(0.53, 0.158, "communication rounds", color=QUIET, fontsize=9, ha="center")
    handles, labels = (entries[:: 1 if by_steps else -1] for entries in near.get_legend_handles_labels())
    columns = len(labels) if len(labels) < 6 else (len(labels) + 1) // 2
    place = {"loc": "center", "bbox_to_anchor": (0.53, 0.09), "ncols": columns, "columnspacing": 1.4}
    figure.legend(handles, labels, frameon=False, fontsize=8.5, handlelength=2.4, **place)


def _visible(curve: Curve) -> Vector:
    """The errors that fit on the axes; zero has no logarithm."""
    errors = curve.trace.errors
    return np.where(np.isfinite(errors) & (errors < HIGHEST), np.maximum(errors, LOWEST), np.nan)


def _axes(axes: Any, start: int, end: int) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_yscale("log")
    axes.set_xlim(start, end)
    axes.set_ylim(LOWEST, HIGHEST)
    axes.set_yticks(TICKS)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks([start, (start + end) // 2, end] if start == 0 else [end // 2, end])
    axes.axhline(TARGET, color=INK, lw=0.8, ls=(0, (2, 2)), zorder=1)
    axes.grid(axis="y", color=RULE, lw=0.5)
    axes.tick_params(length=3, pad=6)


def _cut(near: Any, far: Any) -> None:
    """The scale changes here: a gap, a shade and two strokes."""
    far.set_facecolor(SHADE)
    far.spines["left"].set_visible(False)
    far.tick_params(axis="y", length=0, labelleft=False)
    stroke = {"marker": [(-1, -2), (1, 2)], "ms": 6, "ls": "none", "color": QUIET, "mew": 1, "clip_on": False}
    near.plot([1], [0], transform=near.transAxes, **stroke)
    far.plot([0], [0], transform=far.transAxes, **stroke)


def _row(axes: Any, lines: Sequence[Line]) -> None:
    """Rounds to the target above a panel, in the colours of the curves."""
    for k, (curve, _, style) in enumerate(line for line in lines if line[2]["lw"] >= NUMBERED):
        place = {"transform": axes.transAxes, "va": "bottom"}
        axes.text(0.35 * k, 1.03, cell(curve), color=style["color"], weight="bold", size=9, **place)


def _crossings(axes: Any, lines: Sequence[Line], ends: tuple[int, int], numbers: bool) -> None:
    """A dot where a curve gets to the target, and the rounds that it took."""
    left = True
    for curve, _, style in sorted(lines, key=lambda line: line[0].trace.rounds_to(TARGET) or 0):
        rounds = curve.trace.rounds_to(TARGET)
        if rounds is None or style["lw"] < NUMBERED or not ends[0] < rounds <= ends[1]:
            continue
        colour, error = style["color"], curve.trace.errors[rounds]
        axes.plot(rounds, error, "o", ms=5.5, color=colour, zorder=7, mec="white", mew=0.6)
        if numbers:
            left &= (rounds - ends[0]) > 0.1 * (ends[1] - ends[0])
            place = {"xytext": (-6, -8) if left else (6, 5), "ha": "right" if left else "left", "va": "center"}
            look = {"textcoords": "offset points", "color": colour, "weight": "bold", "size": 9, "zorder": 8}
            axes.annotate(str(rounds), (rounds, error), **place, **look)
            left = not left
