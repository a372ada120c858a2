"""The picture of what secure sums cost: bytes against plain sums, and a client's seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.style import BLUE, GREEN, ORANGE, PINK, QUIET, RED, STYLE

COLOURS = {4: BLUE, 10: GREEN, 32: ORANGE, 100: PINK}
BYTES_GOAL = 2.2
SECONDS_GOAL = 1.0
GOAL_LENGTH = 5e6


def draw(rows: Sequence[Any], file: Path) -> None:
    """Three panels, a line for every number of clients."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13.0, 4.4), layout="constrained")
        *bytes_, seconds = figure.subplots(1, 3)
        for axes, numbers in zip(bytes_, ("float64", "float32"), strict=True):
            curves(axes, [r for r in rows if r.numbers == numbers], "ratio")
            axes.axhline(BYTES_GOAL, color=QUIET, lw=0.8, ls=":")
            axes.annotate(
                f"goal: {BYTES_GOAL}",
                (1, BYTES_GOAL),
                (-4, 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                fontsize=8.5,
                color=QUIET,
            )
            axes.set_ylim(0, 1.05 * max(r.ratio for r in rows))
            axes.set_title(f"Bytes over those of plain sums, {numbers}")
        curves(seconds, [r for r in rows if r.numbers == "float64"], "client_seconds")
        seconds.set_yscale("log")
        seconds.plot([GOAL_LENGTH], [SECONDS_GOAL], "x", color=QUIET)
        seconds.annotate(
            "goal",
            (GOAL_LENGTH, SECONDS_GOAL),
            (-8, -3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=QUIET,
        )
        seconds.set_title("CPU seconds of a client for one sum")
        seconds.legend(frameon=False, fontsize=8.5)
        figure.savefig(file, dpi=130, metadata={"Software": None})


def curves(axes: Any, rows: Sequence[Any], column: str) -> None:
    """A line for every N; dashed where everybody is everybody's neighbour though nobody has to be."""
    for n, k in dict.fromkeys((r.clients, r.neighbours) for r in rows):
        here = [r for r in rows if (r.clients, r.neighbours) == (n, k)]
        whole = k == 99
        axes.plot(
            [r.length for r in here],
            [getattr(r, column) for r in here],
            "--" if whole else "-",
            marker="o",
            ms=4,
            color=RED if whole else COLOURS[n],
            label=f"N = {n}, {k} neighbours",
        )
    axes.set_xscale("log")
    axes.set_xlabel("length d of the vectors")
