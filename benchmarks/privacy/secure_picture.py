"""The picture of what secure sums cost: bytes against plain sums, and a client's seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from scaffpd.experiments.style import BLUE, GREEN, ORANGE, PINK, QUIET, RED, STYLE

COLOURS = {4: BLUE, 10: GREEN, 32: ORANGE, 100: PINK}
BYTES_GOAL, SECONDS_GOAL, GOAL_LENGTH = 2.2, 1.0, 5e6


def draw(rows: Sequence[Any], file: Path) -> None:
    """Two panels, a line for every number of clients."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (n, k), colour, style in lines(rows):
            name = f"N = {n}, {k} neighbours"
            here = [r for r in rows if (r.clients, r.neighbours) == (n, k) and r.numbers == "float64"]
            d = [r.length for r in here]
            left.loglog(d, [r.ratio for r in here], style, color=colour, marker="o", ms=4, label=name)
            right.loglog(d, [r.client_seconds for r in here], style, color=colour, marker="o", ms=4, label=name)
        left.axhline(BYTES_GOAL, color=QUIET, lw=0.8, ls=":")
        left.annotate(f"goal: {BYTES_GOAL} times", (1, BYTES_GOAL), (-4, 4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", fontsize=8.5, color=QUIET)  # fmt: skip
        left.set_title("Bytes of a round over those of plain sums")
        left.set_xlabel("length d of the vectors (float64)")
        left.yaxis.set_major_formatter("{x:g}")
        right.plot([GOAL_LENGTH], [SECONDS_GOAL], "x", color=QUIET)
        right.annotate("goal", (GOAL_LENGTH, SECONDS_GOAL), (-8, -3), textcoords="offset points", ha="right",
                       fontsize=8.5, color=QUIET)  # fmt: skip
        right.set_title("CPU seconds of a client for one sum")
        right.set_xlabel("length d of the vectors")
        right.legend(frameon=False, fontsize=8.5)
        figure.savefig(file, dpi=130, metadata={"Software": None})


def lines(rows: Sequence[Any]) -> list[tuple[tuple[int, int], str, str]]:
    """Which lines there are: dashed where everybody is everybody's neighbour though nobody has to be."""
    seen = dict.fromkeys((r.clients, r.neighbours) for r in rows)
    return [(key, RED if key[1] == 99 else COLOURS[key[0]], "--" if key[1] == 99 else "-") for key in seen]
