"""The pictures: who is where between average and worst, accuracy over rounds, and what a partition
looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colors, ticker
from matplotlib.figure import Figure  # without pyplot: no window, no global state
from numpy.typing import ArrayLike, NDArray

from experiments.images import tables
from experiments.images.curves import BASELINE, Curve
from experiments.images.plans import METHODS, Cut
from experiments.style import (
    BLACK,
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    QUIET,
    RED,
    RULE,
    SKY,
    STYLE,
)
from scaffpd.study.comparison import FINAL, Comparison, MethodRun

COLOURS = dict(zip(METHODS, (BLACK, ORANGE, GREEN, PINK, SKY, QUIET, "#9a6324", RED), strict=True))
MARKS = dict(zip(METHODS, ("o", "s", "v", "^", "D", "P", "X", "*"), strict=True))
FADED = 0.15
DPI = 150


def partition(cut: Cut, path: Path, title: str) -> Path:
    """Clients × classes of the first seed."""
    return _save(partition_picture(cut.parts(0), cut.train, title=title), path)


def tradeoff(comparison: Comparison, path: Path, title: str) -> Path:
    """Worst-20 % accuracy against the average and against the best 20 %, all methods and seeds."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
        for panel, measure, name in zip(
            panels, (tables.AVERAGE, tables.BEST), ("average", "best 20 %"), strict=True
        ):
            for method in METHODS:
                _cloud(panel, comparison, method, measure)
            panel.set_xlabel(f"{name}, test accuracy in %")
            panel.grid(color=RULE, linewidth=0.5)
        panels[0].set_ylabel("worst 20 %, test accuracy in %")
        panels[0].set_title(title)
        panels[1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _save(figure, path)


POINTS = ("method", "seed", "average", "worst_20", "best_20")


def points(comparison: Comparison) -> list[tuple[Any, ...]]:
    """What the picture shows, for a file."""
    return [
        (
            run.method,
            run.seed,
            *(f"{row[name]:.6f}" for name in (tables.AVERAGE, tables.WORST, tables.BEST)),
        )
        for run, row in _finals(comparison)
    ]


def _finals(comparison: Comparison) -> list[tuple[MethodRun, dict[str, Any]]]:
    pairs = zip(comparison.runs, comparison.rows, strict=True)
    return [(run, row) for run, row in pairs if run.phase == FINAL and not run.failed]


def _cloud(panel: Any, comparison: Comparison, method: str, measure: str) -> None:
    """Draw a small mark for every seed and a large one for their mean."""
    rows = [row for run, row in _finals(comparison) if run.method == method]
    if not rows:
        return
    x, y = (
        100 * np.array([row[name] for row in rows], dtype=float) for name in (measure, tables.WORST)
    )
    look = {"color": COLOURS[method], "marker": MARKS[method], "linewidth": 0}
    panel.plot(x, y, **look, markersize=5, alpha=0.35, markeredgewidth=0)
    panel.plot(
        x.mean(), y.mean(), **look, markersize=13 if method == tables.OURS else 9, label=method
    )


def over_rounds(found: Sequence[Curve], path: Path, title: str) -> Path:
    """Average and worst-20 % accuracy after each round, mean and range; SCAFFOLD dashed."""
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(curve.label for curve in found))
    colours = dict(zip(labels, (BLUE, GREEN, PINK, ORANGE), strict=False))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
        for panel, column, name in zip(panels, (0, 1), ("Average", "Worst 20 %"), strict=True):
            for label in labels:
                scores = 100 * np.stack([c.scores[:, column] for c in found if c.label == label])
                # at the start everybody guesses
                rounds = np.arange(1, scores.shape[1])
                scores = scores[:, 1:]
                style = "--" if label == BASELINE else "-"
                panel.plot(
                    rounds, scores.mean(0), style, color=colours[label], label=label, linewidth=1.8
                )
                panel.fill_between(
                    rounds,
                    scores.min(0),
                    scores.max(0),
                    color=colours[label],
                    alpha=FADED,
                    linewidth=0,
                )
            panel.set_xlabel("rounds")
            panel.set_ylabel("test accuracy in %")
            panel.set_title(name)
            panel.grid(color=RULE, linewidth=0.5)
        panels[1].legend(frameon=False, fontsize=9, loc="lower right")
        figure.suptitle(title, fontsize=10, color=QUIET, x=0.01, ha="left")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


NAMED = 30  # classes: more names do not fit side by side
WRITTEN = 15  # classes: more columns are too narrow for numbers
SHOWN = 60  # clients: more rows are not named
SMALL = 8.5


def partition_picture(
    parts: Sequence[ArrayLike],
    y: ArrayLike,
    title: str | None = None,
) -> Any:
    """Draw a map of clients × classes, darker for more samples, with the clients' sizes beside it.

    Colour grows with the square root of the number, so that few samples are visible next to many;
    white is none.

    Args:
        parts: the row numbers of each client.
        y: the labels of all rows.
        title: by default the numbers of samples, clients and classes.

    Returns:
        A matplotlib figure; `.savefig("partition.png")` writes it.
    """
    labels, code = np.unique(np.asarray(y), return_inverse=True)
    names = tuple(map(str, labels))
    counts = np.array([np.bincount(code[np.asarray(p)], minlength=len(names)) for p in parts])
    clients, K = counts.shape
    with matplotlib.rc_context(STYLE):
        columns = min(12.0, max(5.0, 0.5 * K if K <= NAMED else 0.085 * K))
        size = columns + 3.0, 1.4 + min(10.0, max(1.6, 0.3 * clients))
        figure = Figure(size, facecolor="white", layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(columns, 1.1))
        words = title or f"{counts.sum():,} samples of {K} classes at {clients} clients"
        figure.suptitle(words, x=0.02, ha="left", fontsize=13, fontweight="bold")
        _map(left, counts, names)
        _sizes(right, counts)
        for axes in (left, right):
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
    return figure


def _map(axes: Any, counts: NDArray[np.int64], names: Sequence[str]) -> None:
    """Draw the map: with numbers if they fit, or else with a colour bar above it."""
    clients, K = counts.shape
    cells = axes.pcolormesh(
        np.arange(K),
        np.arange(clients),
        np.ma.masked_equal(counts, 0),
        edgecolors=RULE,
        cmap=colors.LinearSegmentedColormap.from_list("ink", ["#d7e8f3", BLUE, "#00263d"]),
        norm=colors.PowerNorm(0.5, 1, max(counts.max(), 2)),
        linewidth=0.6 if K <= NAMED and clients <= SHOWN else 0.0,
    )
    axes.set(xlim=(-0.5, K - 0.5), ylim=(clients - 0.5, -0.5), xlabel="class", ylabel="client")
    if K <= NAMED:
        axes.set_xticks(range(K), names, rotation=90 if any(len(name) > 5 for name in names) else 0)
    if clients <= SHOWN:
        axes.set_yticks(range(clients), range(clients), fontsize=SMALL)
    if K > WRITTEN or clients > SHOWN:
        scale = {
            "location": "top",
            "shrink": 0.4,
            "aspect": 25,
            "anchor": (1.0, 0.0),
            "pad": 0.01,
            "ticks": ticker.MaxNLocator(integer=True),
        }
        axes.figure.colorbar(
            cells, ax=axes, label="samples of a class", **scale
        ).outline.set_visible(False)
        return
    for i, k in zip(*np.nonzero(counts), strict=True):
        dark = cells.norm(counts[i, k]) > 0.4
        look = {
            "ha": "center",
            "va": "center",
            "fontsize": SMALL - 1,
            "color": "white" if dark else INK,
        }
        axes.text(k, i, f"{counts[i, k]:,}", **look)


def _sizes(axes: Any, counts: NDArray[np.int64]) -> None:
    """Draw a bar for every client's size, and write how many samples of how many classes it has."""
    sizes = counts.sum(1)
    held = (counts > 0).sum(1)
    bars = axes.barh(range(len(sizes)), sizes, height=0.62, color=BLUE)
    axes.set_xticks([])
    heading = f"{sizes.min():,} to {sizes.max():,} samples"
    if len(sizes) <= SHOWN:
        axes.bar_label(
            bars,
            [f"{n:,} ({k})" for n, k in zip(sizes, held, strict=True)],
            padding=4,
            fontsize=SMALL,
        )
        heading = "samples (classes)"
    axes.set_title(heading, fontsize=SMALL, fontweight="normal", color=QUIET, pad=5)
