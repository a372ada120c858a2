"""What a study leaves in its folder, besides the pictures: every number of every curve, and how it came about."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scaffpd
from scaffpd.experiments.synthetic import grids, settings, tables
from scaffpd.experiments.synthetic.panels import FIGURES
from scaffpd.experiments.synthetic.settings import DEEP, TARGET
from scaffpd.experiments.synthetic.study import Curve, Study
from scaffpd.experiments.writing import csv_file, markdown_table

PROBLEM = ("sigma", "rho", "badly_scaled")
CURVE = (*PROBLEM, "method", "local_steps", "round", "exchanges", "squared_distance")
ROUNDS = (
    *(*PROBLEM, "method", "local_steps", "configurations", "rounds_to_1e-6", "exchanges_to_1e-6", "rounds_to_1e-20"),
    *("rounds", "last_squared_distance", "least_squared_distance", "chosen", "at_edge"),
)
TUNING = (*PROBLEM, "method", "local_steps", "configuration", "rounds", "squared_distance", "reached", "chosen")


def save(study: Study, folder: Path, command: str) -> list[Path]:
    """Write a CSV for each figure, the table of rounds, all tuning runs, and a README."""
    written = []
    for name, panels in FIGURES.items():
        curves = [curve for panel in panels(study) for curve in panel.curves]
        written.append(csv_file(folder / f"{name}.csv", CURVE, (row for curve in curves for row in _points(curve))))
    written.append(csv_file(folder / "rounds.csv", ROUNDS, map(_summary, study.curves)))
    written.append(csv_file(folder / "tuning.csv", TUNING, (row for curve in study.curves for row in _attempts(curve))))
    about, readme = folder / "about.json", folder / "README.md"
    about.write_text(json.dumps(facts(study, command), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    readme.write_text(markdown(study, command), encoding="utf-8")
    return [*written, about, readme]


def _problem(curve: Curve) -> tuple[Any, ...]:
    setting = curve.job.setting
    return setting.sigma, setting.rho, setting.scaled, curve.label, curve.job.local_steps


def _points(curve: Curve) -> Iterator[tuple[Any, ...]]:
    for r, (error, exchanges) in enumerate(zip(curve.trace.errors, curve.trace.exchanges, strict=True)):
        yield (*_problem(curve), r, int(exchanges), f"{error:.6e}")


def _knobs(knobs: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in knobs.items())


def _summary(curve: Curve) -> tuple[Any, ...]:
    trace = curve.trace
    reached = (trace.rounds_to(TARGET), trace.exchanges_to(TARGET), trace.rounds_to(DEEP))
    ends = (len(trace.errors) - 1, f"{trace.errors[-1]:.3e}", f"{np.nanmin(trace.errors):.3e}")
    return (*_problem(curve), max(len(curve.attempts), 1), *reached, *ends, _knobs(curve.knobs), " ".join(curve.edge))


def _attempts(curve: Curve) -> Iterator[tuple[Any, ...]]:
    for attempt in curve.attempts:
        trace, knobs = attempt.trace, attempt.candidate.knobs
        reached = trace.rounds_to(TARGET) is not None
        ends = (len(trace.errors) - 1, f"{trace.errors[-1]:.3e}", reached, knobs == curve.knobs)
        yield (*_problem(curve), _knobs(knobs), *ends)


def facts(study: Study, command: str) -> dict[str, Any]:
    """How the numbers came about."""
    plan = study.plan
    return {
        "command": command,
        "seed": plan.seed,
        "problem": {"N": settings.N, "d": settings.D, "m": settings.M, "l2": settings.L2, "local_steps": settings.J},
        "rounds": {"isotropic": plan.rounds, "badly scaled": plan.scaled_rounds},
        "configurations": len(range(0, grids.SIZE, plan.stride)),
        "versions": {
            "scaffpd": scaffpd.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def markdown(study: Study, command: str) -> str:
    """The README of the folder."""
    columns = [" ".join(heading) for heading in map(tables.heading, study.plan.settings)]
    edges = list(tables.edges(study)) or ["nowhere"]
    about = facts(study, command)
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return "\n".join([
        "# The paper's synthetic experiments",
        "",
        f"Written by `{command}` (seed {study.plan.seed}; {versions}).",
        "",
        f"Rounds until ‖x − x*‖² ≤ {tables.text(TARGET)}, J = {settings.J} local steps where a method has any. "
        "Scaff-PD, APD and minimax gradient run as they are; everybody else has the best of "
        f"{about['configurations']} configurations, chosen for each problem with x* known. `> n`: not within n rounds.",
        "",
        *markdown_table(["method", *columns], ([name, *cells] for name, cells in tables.rows(study))),
        "",
        *(f"- {sentence}" for sentence in tables.verdict(study)),
        "",
        "![ρ](rho.png)",
        "![heterogeneity](heterogeneity.png)",
        "![local steps](local_steps.png)",
        "![badly scaled](badly_scaled.png)",
        "",
        "## How",
        "",
        *(line for line in (settings.__doc__ or "").strip().splitlines()[2:]),
        "",
        "The grids:",
        "",
        *(line for line in (grids.__doc__ or "").strip().splitlines()[2:]),
        "",
        "Best configurations at the edge of a grid: " + "; ".join(edges) + ".",
        "",
        "`rho.csv`, `heterogeneity.csv`, `local_steps.csv` and `badly_scaled.csv` have every point of every curve, "
        "`rounds.csv` one line per curve with the chosen rates, `tuning.csv` every configuration tried, and "
        "`about.json` the command, the seed and the versions.",
        "",
    ])  # fmt: skip
