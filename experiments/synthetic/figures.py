"""The four synthetic figures: ‖x − x*‖² against communication rounds, on an axis whose second part
is squeezed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from experiments.style import BLACK, BLUE, GREEN, INK, ORANGE, PINK, QUIET, RED, RULE, SKY, STYLE
from experiments.synthetic import tuning
from experiments.synthetic.problem import L2, RHO, SIGMA, TARGET, D, J, M, N, Setting
from experiments.synthetic.study import DRAWN, FAN, SHORT, SHORT_RATE, Curve, Study
from experiments.synthetic.tuning import DRFA_, SCAFF_PD
from scaffpd.federation import Vector

WIDTH = 9.6
HEIGHT = 5.2
DPI = 160
LOWEST = 1e-32
HIGHEST = 1e2
TICKS = (1e0, 1e-6, 1e-12, 1e-18, 1e-24, 1e-30)
SHADE = "#f3f3f3"
DASHES = (0, (4, 1.6))
DOTS = (0, (1, 1.4))
LOOKS: dict[
    str, tuple[str, dict[str, Any]]
] = {  # name in the legend, and line; what matters most last
    FAN[0]: (FAN[0], {"color": RED, "lw": 1.2, "ls": DOTS, "zorder": 3}),
    FAN[5]: (FAN[5], {"color": RED, "lw": 1.2, "ls": DASHES, "zorder": 3}),
    DRAWN: (DRAWN, {"color": ORANGE, "lw": 0.9, "zorder": 2}),
    tuning.EXTRA: ("extragradient, tuned", {"color": ORANGE, "lw": 1.8, "ls": DASHES, "zorder": 3}),
    tuning.GDA: ("GDA, tuned", {"color": ORANGE, "lw": 1.8, "zorder": 3}),
    DRFA_: ("DRFA, tuned", {"color": RED, "lw": 2.6, "zorder": 4}),
    tuning.AFL_: ("AFL, tuned", {"color": INK, "lw": 1.4, "ls": DASHES, "zorder": 5}),
    tuning.APD_CONSTANTS: (
        "APD, best constants",
        {"color": PINK, "lw": 1.8, "ls": DASHES, "zorder": 3},
    ),
    tuning.APD: ("APD, untuned", {"color": PINK, "lw": 1.8, "zorder": 3}),
    tuning.CONSTANTS: (
        "Scaff-PD, best constants",
        {"color": SKY, "lw": 1.8, "ls": DASHES, "zorder": 5},
    ),
    SCAFF_PD: ("Scaff-PD, untuned", {"color": BLUE, "lw": 2.6, "zorder": 6}),
}
STEPS = (ORANGE, PINK, GREEN, BLUE, BLACK, SKY)  # for J, from few to many
NUMBERED = 1.4  # lines at least as wide have their rounds written out
Line = tuple[Curve, str, dict[str, Any]]


def text(value: float) -> str:
    """1e-6 rather than 1e-06."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def cell(curve: Curve, level: float = TARGET) -> str:
    """Rounds to a level, or how many were not enough."""
    rounds = curve.trace.rounds_to(level)
    return f"> {len(curve.trace.errors) - 1}" if rounds is None else str(rounds)


PROBLEM = f"Regression, χ² penalty, N = {N}, d = {D}, m = {M}, l2 = {L2:g}"
ENDS = f"Numbers: rounds to {text(TARGET)}. Runs end at rounding error; shaded: squeezed axis."


class Panel(NamedTuple):
    """One pair of axes: a title, curves with what matters most last, and where the axis ends."""

    title: str
    curves: tuple[Curve, ...]
    far: int

    @property
    def near(self) -> int:
        """Where the axis is cut: at a tenth."""
        return max(2, self.far // 10)


class FigureSpec(NamedTuple):
    """What a figure shows and says; pictures and CSV files are both made from this."""

    panels: Callable[[Study], list[Panel]]
    title: Callable[[Study], str]
    caption: Callable[[Study], str]


def _panels(
    study: Study, settings: Iterable[Setting], title: str, without: Sequence[str]
) -> list[Panel]:
    """Methods by the order of `LOOKS` on several problems; `title` takes the problem."""
    labels = [label for label in LOOKS if label not in without]
    return [
        Panel(title.format(s), tuple(study.find(s, label) for label in labels), study.plan.limit(s))
        for s in settings
    ]


def _steps_panels(study: Study) -> list[Panel]:
    plan = study.plan
    return [
        Panel(
            title,
            tuple(study.find(setting, name, steps) for steps in plan.local_steps),
            plan.limit(setting),
        )
        for title, setting, name in (
            ("One short local rate", plan.paper, SHORT_RATE),
            ("Automatic steps", plan.paper, SCAFF_PD),
            ("Badly scaled, automatic steps", plan.hard, SCAFF_PD),
        )
    ]


def span(curves: Iterable[Curve]) -> str:
    """Rounds to the target, from the fewest to the most."""
    cells = sorted(
        {cell(curve) for curve in curves}, key=lambda c: (c.startswith(">"), int(c.lstrip("> ")))
    )
    return cells[0] if len(cells) == 1 else f"{cells[0]} to {cells[-1]}"


def _versus(study: Study, settings: Sequence[Setting]) -> str:
    ours, theirs = (span(study.find(s, name) for s in settings) for name in (SCAFF_PD, DRFA_))
    return (
        f"Scaff-PD is at ‖x − x*‖² ≤ {text(TARGET)} after {ours} rounds, tuned DRFA after {theirs}"
    )


def _steps_title(study: Study) -> str:
    few = study.plan.local_steps[0]
    plan = study.plan
    (a, b), (c, d) = (
        [cell(study.find(s, SCAFF_PD, k)) for k in (few, J)] for s in (plan.hard, plan.paper)
    )
    rounds = f"{a} → {b} rounds for J = {few} → {J}; {c} → {d} on the paper's"
    return f"Local steps pay on badly scaled data: {rounds}"


def _scaled_title(study: Study) -> str:
    ours = cell(study.find(study.plan.hard, SCAFF_PD))
    goal = f"‖x − x*‖² ≤ {text(TARGET)}"
    return f"Badly scaled features: Scaff-PD is at {goal} after {ours} rounds, without tuning"


def _size(study: Study) -> int:
    return len(range(0, tuning.SIZE, study.plan.stride))


CENTRAL = (tuning.EXTRA, tuning.GDA, tuning.APD_CONSTANTS, tuning.APD)
DRAWS = (*FAN.values(), DRAWN)
FIGURES = {
    "rho": FigureSpec(
        lambda study: _panels(
            study, study.plan.rho_settings, "ρ = {0.rho:g}", (*CENTRAL, tuning.AFL_)
        ),
        lambda study: _versus(study, study.plan.rho_settings),
        lambda study: (
            f"{PROBLEM}, σ = {SIGMA:g}, J = {J} local steps. DRFA, tuned: the best of "
            f"{_size(study)} pairs of rates, "
            "all clients in every round, full gradients; with longer local steps it is faster at "
            "first and stops "
            "farther from x*."
        ),
    ),
    "heterogeneity": FigureSpec(
        lambda study: _panels(
            study, study.plan.sigma_settings, "σ = {0.sigma:g}", (*CENTRAL, *DRAWS)
        ),
        lambda study: _versus(study, study.plan.sigma_settings),
        lambda study: (
            f"{PROBLEM}, ρ = {RHO:g}, J = {J} local steps. DRFA and AFL (with local steps): the "
            f"best of {_size(study)} "
            "pairs of rates for each σ, all clients in every round, full gradients. σ is how much "
            "clients differ."
        ),
    ),
    "local_steps": FigureSpec(
        _steps_panels,
        _steps_title,
        lambda study: (
            f"Scaff-PD. {PROBLEM}, σ = {SIGMA:g}, ρ = {RHO:g}. Left: one η_ℓ = {SHORT:g}/max L_i "
            "and η_g = 1 for all J "
            "(dual step tuned). Middle, right: nothing tuned."
        ),
    ),
    "badly_scaled": FigureSpec(
        lambda study: _panels(study, [study.plan.hard], "", DRAWS),
        _scaled_title,
        lambda study: (
            f"{PROBLEM}, columns times 10^U(−1, 1), σ = {SIGMA:g}, ρ = {RHO:g}; J = {J} for "
            "Scaff-PD, DRFA and AFL, no "
            f"local steps for others. Tuned, or best constants: of {_size(study)} configurations. "
            "FedAvg, SCAFFOLD, "
            "q-FFL and others solve another problem, whose optimum is not x*: left out."
        ),
    ),
}


def draw(study: Study, folder: Path, command: str) -> list[Path]:
    """Write all four as PNG files."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    written = []
    with matplotlib.rc_context({**STYLE, "axes.titlepad": 6}):
        for name, about in FIGURES.items():
            figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
            figure.text(
                0.012, 0.978, about.title(study), fontsize=12.5, fontweight="bold", va="top"
            )
            caption = fill(f"{about.caption(study)} {ENDS}", 150)
            figure.text(
                0.012, 0.925, caption, fontsize=8.5, color=QUIET, va="top", linespacing=1.35
            )
            figure.text(0.012, 0.012, command, fontsize=7.5, color=QUIET, family="DejaVu Sans Mono")
            _fill(figure, about.panels(study), by_steps=name == "local_steps")
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=DPI)
    return written


def _lines(panel: Panel, by_steps: bool) -> list[Line]:
    if by_steps:
        colours = zip(panel.curves, STEPS, strict=False)
        return [
            (curve, f"J = {curve.job.local_steps}", {"color": colour, "lw": 2.0})
            for curve, colour in colours
        ]
    return [(curve, *LOOKS[curve.label]) for curve in panel.curves]


def _fill(figure: Any, panels: Sequence[Panel], by_steps: bool) -> None:
    grid = figure.add_gridspec(
        1, len(panels), left=0.075, right=0.975, top=0.715, bottom=0.235, wspace=0.1
    )
    for i, panel in enumerate(panels):
        near, far = (
            grid[i]
            .subgridspec(1, 2, width_ratios=(3, 2), wspace=0.018 * len(panels))
            .subplots(sharey=True)
        )
        lines = _lines(panel, by_steps)
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
    handles, labels = (
        entries[:: 1 if by_steps else -1] for entries in near.get_legend_handles_labels()
    )
    columns = len(labels) if len(labels) < 6 else (len(labels) + 1) // 2
    place = {
        "loc": "center",
        "bbox_to_anchor": (0.53, 0.09),
        "ncols": columns,
        "columnspacing": 1.4,
    }
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
    stroke = {
        "marker": [(-1, -2), (1, 2)],
        "ms": 6,
        "ls": "none",
        "color": QUIET,
        "mew": 1,
        "clip_on": False,
    }
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
        colour = style["color"]
        error = curve.trace.errors[rounds]
        axes.plot(rounds, error, "o", ms=5.5, color=colour, zorder=7, mec="white", mew=0.6)
        if numbers:
            left &= (rounds - ends[0]) > 0.1 * (ends[1] - ends[0])
            place = {
                "xytext": (-6, -8) if left else (6, 5),
                "ha": "right" if left else "left",
                "va": "center",
            }
            look = {
                "textcoords": "offset points",
                "color": colour,
                "weight": "bold",
                "size": 9,
                "zorder": 8,
            }
            axes.annotate(str(rounds), (rounds, error), **place, **look)
            left = not left
