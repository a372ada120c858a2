"""The pictures: who is where between average and worst, accuracy over rounds, and what a partition looks like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import image_tables as tables
from experiments.image_curves import BASELINE, Curve
from experiments.image_plans import METHODS, Cut
from scaffpd.figures import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    QUIET,
    RED,
    RULE,
    SKY,
    STYLE,
    partition_picture,
)
from scaffpd.study.comparison import Comparison
from scaffpd.study.comparison.runs import Run

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
            run.job.method,
            run.job.seed,
            *(f"{row[name]:.6f}" for name in (tables.AVERAGE, tables.WORST, tables.BEST)),
        )
        for run, row in _finals(comparison)
    ]


def _finals(comparison: Comparison) -> list[tuple[Run, dict[str, Any]]]:
    pairs = zip(comparison.runs, comparison.rows, strict=True)
    return [(run, row) for run, row in pairs if run.job.phase == "final" and not run.failed]


def _cloud(panel: Any, comparison: Comparison, method: str, measure: str) -> None:
    """Draw a small mark for every seed and a large one for their mean."""
    rows = [row for run, row in _finals(comparison) if run.job.method == method]
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
    """Average and worst-20 % accuracy after each round, mean and range over seeds; SCAFFOLD dashed."""
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
