"""The demo as one picture."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from scaffpd.demo import HospitalStudy, PairedChange
from scaffpd.demo.findings import caveat, change, headline
from scaffpd.federation import Vector
from scaffpd.figures import BLUE, GREEN, INK, ORANGE, PINK, QUIET, RED, STYLE

AVERAGE, FAIR = "#8c8c8c", BLUE
HOSPITALS = (ORANGE, GREEN, PINK, RED)
PANELS = ((0.115, 0.13, 0.19, 0.6), (0.51, 0.13, 0.165, 0.6), (0.765, 0.13, 0.165, 0.6))
DASHES = {"color": INK, "lw": 1, "ls": (0, (2, 2)), "zorder": 0}
SMALL = 8.5


def draw(study: HospitalStudy, path: Path) -> None:
    """Write the picture as a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 5.6), facecolor="white")
        left, middle, right = (figure.add_axes(place) for place in PANELS)
        figure.text(0.02, 0.92, headline(study), fontsize=18, fontweight="bold")
        figure.text(0.02, 0.897, fill(caveat(study), 190), fontsize=11, color=QUIET, va="top", linespacing=1.4)
        _accuracies(left, study)
        _certificates(middle, study)
        _weights(right, study)
        figure.savefig(path, dpi=150)


def _accuracies(axes: Any, study: HospitalStudy) -> None:
    """Paired dots with standard deviations, the hospital served worst on top, and the changes as numbers."""
    models = ((study.accuracy.average, "average", AVERAGE, -0.13), (study.accuracy.fair, "fair", FAIR, 0.13))
    for table, name, colour, shift in models:
        mean, deviation = 100 * table.mean(0)[study.order], 100 * table.std(0, ddof=1)[study.order]
        rows = np.arange(len(mean)) + shift
        axes.errorbar(mean, rows, xerr=deviation, fmt="o", ms=8, color=colour, elinewidth=1.8)
        end = mean[0] + deviation[0] + 0.7
        axes.text(end, shift, name, color=colour, fontweight="bold", va="center")
    axes.set_xlim(5 * np.floor(axes.dataLim.x0 / 5), 100)
    axes.set_ylim(len(study.names) - 0.5, -0.75)
    _same_answer(axes, study)
    _changes(axes, study, study.accuracy, 1.29, "change\nin points", points=True)
    _changes(axes, study, study.log_loss, 1.73, "in log-loss\n(+ is worse)", points=False)
    about = zip(study.names, study.patients, study.ill, strict=True)
    labels = [f"{name}\n{patients} patients, {100 * ill:.0f} % ill" for name, patients, ill in about]
    axes.set_yticks(range(len(labels)), [labels[i] for i in study.order], color=INK, fontsize=10)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("%, mean ± standard deviation over splits")
    axes.set_title("Right diagnoses of held-out patients")


def _same_answer(axes: Any, study: HospitalStudy) -> None:
    """Where the same answer for every patient would be; left out where that is off the scale."""
    for row, i in enumerate(study.order):
        axes.plot([100 * study.majority[i]] * 2, [row - 0.3, row + 0.3], scalex=False, **DASHES)
    first = study.order[0]
    if 100 * study.majority[first] >= axes.get_xlim()[0]:
        text = f"“{'ill' if study.ill[first] > 0.5 else 'well'}” for everyone"
        axes.text(100 * study.majority[first], -0.34, text, fontsize=SMALL, ha="center", va="bottom")


def _changes(axes: Any, study: HospitalStudy, of: PairedChange, x: float, heading: str, points: bool) -> None:
    """A column of numbers to the right of the dots; those clear of noise are bold."""
    place = {"transform": axes.get_yaxis_transform(), "ha": "right"}
    axes.text(x, -0.34, heading, fontsize=SMALL, color=QUIET, va="bottom", **place)
    for row, i in enumerate(study.order):
        look = {"color": INK, "weight": "bold"} if of.clear[i] else {"color": QUIET}
        axes.text(x, row, change(of, i, points), va="center", **look, **place)


def _certificates(axes: Any, study: HospitalStudy) -> None:
    """The proven gap of both models on the first split; falling curves leave the top right to their names."""
    runs = (("average", study.average[0].result, AVERAGE), ("fair", study.fair[0].result, FAIR))
    for row, (name, result, colour) in enumerate(runs):
        rounds, gaps = result.history["round"], result.history["certificate"]
        axes.semilogy(rounds, gaps, color=colour, lw=2, marker="o", markevery=[-1], ms=7)
        place = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        axes.text(1.0, 1.0 - 0.07 * row, f"{name}: {result.rounds} rounds", color=colour, weight="bold", **place)
    axes.axhline(study.tol, **DASHES)
    asked = f"asked for: {study.tol:.0e}".replace("e-0", "e-")
    axes.annotate(asked, (0, study.tol), (4, -4), textcoords="offset points", size=SMALL, va="top")
    axes.set_xlim(left=0)
    axes.set_title("Proven optimality gap")
    _rounds(axes)


def _weights(axes: Any, study: HospitalStudy) -> None:
    """λ of the fair model on the first split."""
    history = study.fair[0].result.history
    rounds, weights = history["round"], history.weights
    top = max(0.6, 1.05 * float(weights.max()))
    heights = _apart(weights[-1], gap=0.045 * top)
    for i, (name, colour) in enumerate(zip(study.names, HOSPITALS, strict=True)):
        axes.plot(rounds, weights[:, i], color=colour, lw=2, clip_on=False)
        look = {"color": colour, "weight": "bold", "va": "center", "annotation_clip": False}
        axes.annotate(name, (rounds[-1], heights[i]), (7, 0), textcoords="offset points", **look)
    axes.set_xlim(0, rounds[-1])
    axes.set_ylim(0, top)
    axes.set_title("Weight λ of each hospital, fair model")
    _rounds(axes)


def _rounds(axes: Any) -> None:
    axes.set_xlabel("communication round, first split")
    axes.locator_params(axis="x", integer=True)


def _apart(values: Vector, gap: float) -> Vector:
    """Heights for labels near `values`, each at least `gap` above the next lower one."""
    heights, lowest = values.copy(), -np.inf
    for i in np.argsort(values, kind="stable"):
        heights[i] = lowest = max(values[i], lowest + gap)
    return heights
