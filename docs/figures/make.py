"""Draws the pictures of docs/objectives.md and prints its table: python docs/figures/make.py
[FOLDER].

Two examples, the same for every objective: the weights that it gives to ten clients with the given
losses, and the losses of four real hospitals (UCI heart disease) at its optimum, certified to 1e-8.

report.png, the README's picture, is the page of `scaffpd demo`: chromium --headless
--hide-scrollbars --virtual-time-budget=5000 --window-size=1100,1195
--screenshot=docs/figures/report.png scaffpd-demo/report.html
tutorial.png is, with --window-size=1000,1000, the page runs/stations/report.html that
docs/tutorial.md makes.
learnt.png is shape-1.png of that run beside newcomers.png of the demo: scaffpd report FOLDER
--format png.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import scaffpd as sp

sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.style import BLUE, GREEN, INK, ORANGE, PINK, QUIET, RULE, STYLE

LOSSES = np.array([0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.0])
CHOICES: dict[str, sp.objectives.Objective] = {
    "average": sp.Average(),
    "agnostic": sp.Agnostic(),
    "chi-square": sp.ChiSquare(rho=0.1),
    "chi-square-ball": sp.ChiSquareBall(delta=0.2),
    "cvar": sp.CVaR(alpha=0.5),
    "tilted": sp.Tilted(rho=0.05),
    "q-fair": sp.QFair(q=5),
    "nash": sp.Nash(b=0.7),
}
LEVEL = {"nash": sp.Nash(b=1.2)}  # the ten clients have larger losses: b must be above them
COLOURS = (BLUE, ORANGE, GREEN, PINK)
SETTINGS: dict[Any, Any] = STYLE | {
    "svg.hashsalt": "scaffpd",
    "svg.fonttype": "path",
    "axes.titleweight": "normal",
}


def hospitals() -> sp.Cohort:
    """All patients of the four hospitals."""
    silos = sp.data.heart_disease(test_fraction=0.0)
    return sp.Cohort(silos.train, sp.Linear("logistic", l2=0.01, intercept=True), names=silos.names)


def solved(cohort: sp.Cohort, objective: Any) -> np.ndarray:
    """The hospitals' losses f_i at the optimum."""
    tol = (
        1e-12 if isinstance(objective, sp.QFair) else 1e-8
    )  # a gap in units of f^(q+1), which are small
    result = sp.train(sp.fair(objective), cohort, tol=tol, progress=False)
    assert result.status == "converged", result
    return cohort.evaluate(result.x).loss


def shares(objective: Any) -> np.ndarray:
    """λ for the ten clients; off the simplex, as shares."""
    weights = objective.maximizer(LOSSES)
    return weights / weights.sum()


def picture(name: str, cohort: sp.Cohort, before: np.ndarray, after: np.ndarray) -> Figure:
    """One objective: whom it looks at, and what comes of it."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7.2, 2.3), width_ratios=(1.1, 1), layout="constrained"
    )
    objective = LEVEL.get(name, CHOICES[name])
    left.bar(range(len(LOSSES)), shares(objective), color=BLUE, width=0.75)
    left.axhline(1 / len(LOSSES), color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)))
    left.set(
        xticks=range(len(LOSSES)),
        xticklabels=[f"{loss:g}" for loss in LOSSES],
        xlabel="loss of ten clients",
    )
    left.set(ylim=(0, 1.05), yticks=(0, 0.5, 1), title="weight λ")
    left.tick_params(axis="x", labelsize=7.5)
    rows = np.arange(len(before))
    right.hlines(rows, before, after, color=RULE, linewidth=3, zorder=1)
    right.scatter(before, rows, s=34, facecolor="white", edgecolor=QUIET, zorder=2, label="average")
    right.scatter(after, rows, s=34, color=BLUE, zorder=3, label=type(CHOICES[name]).__name__)
    right.axvline(after.max(), color=BLUE, linewidth=0.8, linestyle=(0, (1, 2)))
    right.set(
        yticks=rows, yticklabels=cohort.names, ylim=(len(rows) - 0.5, -0.5), xlim=(0.15, 0.55)
    )
    right.set(xlabel="loss at the optimum (○ of the average)", title="four hospitals")
    right.tick_params(axis="y", labelcolor=INK)
    return figure


def ranges(cohort: sp.Cohort, points: int) -> Figure:
    """From average to worst case by ρ, by α and by q (which has a long way to go beyond 10)."""
    grids: list[tuple[str, Any, Any]] = [
        (
            "ChiSquare(rho): ρ",
            np.geomspace(10, 1e-3, points),
            lambda value: sp.ChiSquare(rho=value),
        ),
        ("CVaR(alpha): α", np.linspace(1, 0.25, points), lambda value: sp.CVaR(alpha=value)),
        ("QFair(q): q", np.geomspace(0.05, 10, points), lambda value: sp.QFair(q=value)),
    ]
    ends = solved(cohort, sp.Average()), solved(cohort, sp.Agnostic())
    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.7), sharey=True, layout="constrained")
    for axis, (title, values, make) in zip(axes, grids, strict=True):
        curves = np.array([solved(cohort, make(float(value))) for value in values])
        for name, colour, curve, start, end in zip(
            cohort.names, COLOURS, curves.T, *ends, strict=True
        ):
            axis.plot(values, curve, color=colour, linewidth=1.8, label=name)
            reached = 1 if title.startswith("QFair") else 2
            axis.plot(
                values[[0, -1]][:reached],
                (start, end)[:reached],
                "o",
                color=colour,
                markersize=4,
                clip_on=False,
            )
        if not title.startswith("CVaR"):
            axis.set_xscale("log")
        axis.set_xlim(values[0], values[-1])
        axis.set_xlabel(title)
    axes[0].set_ylabel("loss at the optimum")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    return figure


def table(cohort: sp.Cohort, losses: dict[str, np.ndarray]) -> str:
    """The losses in Markdown."""
    names = " | ".join(cohort.names)
    rule = "---:|" * (len(cohort.names) + 2)
    head = f"| objective | {names} | mean | worst |\n|---|{rule}\n"
    rows = [
        f"| `{CHOICES[name]!r}` | {' | '.join(f'{v:.3f}' for v in (*row, row.mean(), row.max()))} |"
        for name, row in losses.items()
    ]
    return head + "\n".join(rows) + "\n"


def save(figure: Figure, path: Path) -> None:
    """As SVG, the same bytes for the same numbers."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(folder: Path, points: int = 13) -> str:
    """Draw everything into `folder`, and return the table."""
    cohort = hospitals()
    losses = {name: solved(cohort, objective) for name, objective in CHOICES.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(SETTINGS):
        for name, row in losses.items():
            save(picture(name, cohort, losses["average"], row), folder / f"{name}.svg")
        save(ranges(cohort, points), folder / "ranges.svg")
    return table(cohort, losses)


if __name__ == "__main__":
    plt.switch_backend("agg")
    sys.stdout.write(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
