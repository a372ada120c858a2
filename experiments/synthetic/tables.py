"""Rounds to 1e-6 as a table, in words what holds and what does not, and the files that a study
leaves in its folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.synthetic import problem as synthetic_problem
from experiments.synthetic import tuning as synthetic_tuning
from experiments.synthetic.figures import FIGURES, cell, text
from experiments.synthetic.problem import DEEP, TARGET, J, Setting
from experiments.synthetic.study import SHORT_RATE, Curve, Study
from experiments.synthetic.tuning import (
    AFL_,
    APD,
    DRFA_,
    FREE,
    GDA,
    METHODS,
    SCAFF_PD,
    SIZE,
)
from experiments.tables import markdown_table, versions, write_csv

DRIFTING = (DRFA_, AFL_)
FEWER = 10  # Scaff-PD is to need at most a tenth of DRFA's rounds
# of a run that has come to rest
LAST = 50
LEAST = 0.99
PROBLEM = ("sigma", "rho", "badly_scaled", "method", "local_steps")
CURVE = (*PROBLEM, "round", "exchanges", "squared_distance")
ROUNDS = (
    *(*PROBLEM, "configurations", "rounds_to_1e-6", "exchanges_to_1e-6", "rounds_to_1e-20"),
    *("rounds", "last_squared_distance", "least_squared_distance", "chosen", "at_edge"),
)
TUNING = (*PROBLEM, "configuration", "rounds", "squared_distance", "reached", "chosen")


def heading(setting: Setting) -> tuple[str, str]:
    """Two lines above a column."""
    return ("badly scaled" if setting.scaled else f"σ = {setting.sigma:g}", f"ρ = {setting.rho:g}")


def rows(study: Study) -> Iterator[tuple[str, list[str]]]:
    """A method and its rounds on every problem; last, how many times as many as Scaff-PD tuned DRFA
    needs.
    """
    for name in METHODS:
        yield name, [cell(study.find(setting, name)) for setting in study.plan.settings]
    yield "DRFA : Scaff-PD", [ratio_text(study, setting) for setting in study.plan.settings]


def ratio(study: Study, setting: Setting) -> float:
    """Rounds of tuned DRFA per round of Scaff-PD; where DRFA does not get there, those that it
    made.
    """
    ours = study.find(setting, SCAFF_PD).trace.rounds_to(TARGET)
    trace = study.find(setting, DRFA_).trace
    theirs = trace.rounds_to(TARGET)
    return (
        np.nan
        if ours is None
        else (len(trace.errors) - 1 if theirs is None else theirs) / max(ours, 1)
    )


def ratio_text(study: Study, setting: Setting) -> str:
    """The ratio, or a bound on it."""
    missed = study.find(setting, DRFA_).trace.rounds_to(TARGET) is None
    value = ratio(study, setting)
    return "–" if np.isnan(value) else f"{'> ' if missed else ''}{value:.0f}"


def is_flat(curve: Curve) -> bool:
    """Whether the run ends at a floor: its best error has improved by less than 1 % in the last 50
    rounds.
    """
    errors = curve.trace.errors
    return len(errors) > LAST and float(errors.min()) > LEAST * float(errors[:-LAST].min())


def verdict(study: Study) -> Iterator[str]:
    """What holds and what does not, one sentence each."""
    if study.plan.stride > 1:
        yield "This was a quick run: its numbers mean nothing."
    yield _tenth(study)
    yield _linear(study)
    yield _floors(study)
    yield _given_up(study)
    yield from _local_steps(study)
    yield _easy(study)


def _tenth(study: Study) -> str:
    settings = study.plan.settings
    good = [s for s in settings if ratio(study, s) >= FEWER]
    others = ", ".join(f"{s.name}: {ratio_text(study, s)} times" for s in settings if s not in good)
    return (
        f"{_holds(good, settings)}: Scaff-PD, untuned, gets to {text(TARGET)} in at most a tenth "
        "of the rounds of "
        f"tuned DRFA ({len(good)} of {len(settings)} problems{'; ' + others if others else ''})."
    )


def _holds(good: list[Any], everything: Any) -> str:
    return "Holds" if len(good) == len(everything) else "Does not hold everywhere"


def _linear(study: Study) -> str:
    curves = [study.find(setting, SCAFF_PD) for setting in study.plan.settings]
    reached = [rounds for curve in curves if (rounds := curve.trace.rounds_to(DEEP)) is not None]
    if len(reached) < len(curves):
        share = f"{len(reached)} of {len(curves)} problems"
        return f"Does not hold: Scaff-PD is below {text(DEEP)} on {share} only."
    lowest = max(float(curve.trace.errors.min()) for curve in curves)
    return (
        f"Holds: Scaff-PD converges linearly to below {text(DEEP)}, in {min(reached)} to "
        f"{max(reached)} rounds, "
        f"and down to rounding ({text(lowest)} or less)."
    )


def _floors(study: Study) -> str:
    curves = [study.find(setting, name) for setting in study.plan.settings for name in DRIFTING]
    flat = [curve for curve in curves if is_flat(curve)]
    lowest = min(float(curve.trace.errors.min()) for curve in curves)
    return (
        f"{_holds(flat, curves)}: DRFA and AFL end at a floor of drift "
        f"({len(flat)} of {len(curves)} tuned runs are flat at the end); none gets below "
        f"{text(lowest)}."
    )


def _given_up(study: Study) -> str:
    easy = [setting for setting in study.plan.settings if not setting.scaled]
    reach = [J * study.find(setting, DRFA_).knobs["local_rate"] for setting in easy]
    free = [cell(study.find(setting, FREE)) for setting in study.plan.settings]
    return (
        f"Tuning makes DRFA give up its local work: all {J} local steps together are "
        f"{min(reach):.2g} to "
        f"{max(reach):.2g} of one step 1/max L_i (isotropic problems). With its server rate tuned "
        "too, which is not "
        f"DRFA as published but nearly GDA, it needs {', '.join(free)} rounds on the problems of "
        "the table."
    )


def _local_steps(study: Study) -> Iterator[str]:
    few = min(study.plan.local_steps)
    for words, setting, name in (
        ("on the paper's problem", study.plan.paper, SCAFF_PD),
        (
            "on the paper's problem with one short local rate for all J",
            study.plan.paper,
            SHORT_RATE,
        ),
        ("on badly scaled data", study.plan.hard, SCAFF_PD),
    ):
        cells = [cell(study.find(setting, name, steps)) for steps in (few, J)]
        yield f"Local steps {words}: J = {few} needs {cells[0]} rounds, J = {J} needs {cells[1]}."


def _easy(study: Study) -> str:
    cells = [f"{name} {cell(study.find(study.plan.paper, name))}" for name in (GDA, APD)]
    return (
        "The paper's problem is easy: its features are isotropic, and methods without any local "
        "steps are fast too "
        f"({', '.join(cells)} rounds at {study.plan.paper.name})."
    )


def edges(study: Study) -> Iterator[str]:
    """Where the best configuration is at the edge of its grid, and on how many problems."""
    ours = [curve for curve in study.curves if curve.label in METHODS]
    found = Counter(
        (curve.label, name, f"{curve.knobs[name]:.3g}") for curve in ours for name in curve.edge
    )
    for (label, name, value), times in found.items():
        yield f"{label}: {name} {value} ({times} of {len(study.plan.settings)} problems)"


def save(study: Study, folder: Path, command: str) -> list[Path]:
    """Write a CSV for each figure, the table of rounds, all tuning runs, and a README."""
    written = []
    for name, figure in FIGURES.items():
        curves = [curve for panel in figure.panels(study) for curve in panel.curves]
        written.append(
            write_csv(
                folder / f"{name}.csv", CURVE, (row for curve in curves for row in _points(curve))
            )
        )
    written.append(write_csv(folder / "rounds.csv", ROUNDS, map(_summary, study.curves)))
    attempts = (row for curve in study.curves for row in _attempts(curve))
    written.append(write_csv(folder / "tuning.csv", TUNING, attempts))
    about = folder / "about.json"
    readme = folder / "README.md"
    about.write_text(
        json.dumps(facts(study, command), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    readme.write_text(markdown(study, command), encoding="utf-8")
    return [*written, about, readme]


def _problem(curve: Curve) -> tuple[Any, ...]:
    setting = curve.job.setting
    return setting.sigma, setting.rho, setting.scaled, curve.label, curve.job.local_steps


def _points(curve: Curve) -> Iterator[tuple[Any, ...]]:
    for r, (error, exchanges) in enumerate(
        zip(curve.trace.errors, curve.trace.exchanges, strict=True)
    ):
        yield (*_problem(curve), r, int(exchanges), f"{error:.6e}")


def _knobs(knobs: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in knobs.items())


def _summary(curve: Curve) -> tuple[Any, ...]:
    trace = curve.trace
    reached = (trace.rounds_to(TARGET), trace.exchanges_to(TARGET), trace.rounds_to(DEEP))
    ends = (len(trace.errors) - 1, f"{trace.errors[-1]:.3e}", f"{np.nanmin(trace.errors):.3e}")
    return (
        *_problem(curve),
        max(len(curve.attempts), 1),
        *reached,
        *ends,
        _knobs(curve.knobs),
        " ".join(curve.edge),
    )


def _attempts(curve: Curve) -> Iterator[tuple[Any, ...]]:
    for (_, knobs), trace in curve.attempts:
        reached = trace.rounds_to(TARGET) is not None
        ends = (len(trace.errors) - 1, f"{trace.errors[-1]:.3e}", reached, knobs == curve.knobs)
        yield (*_problem(curve), _knobs(knobs), *ends)


def facts(study: Study, command: str) -> dict[str, Any]:
    """How the numbers came about."""
    plan = study.plan
    here = synthetic_problem
    return {
        "command": command,
        "seed": plan.seed,
        "problem": {"N": here.N, "d": here.D, "m": here.M, "l2": here.L2, "local_steps": J},
        "rounds": {"isotropic": plan.rounds, "badly scaled": plan.scaled_rounds},
        "configurations": len(range(0, SIZE, plan.stride)),
        "versions": versions(),
    }


def markdown(study: Study, command: str) -> str:
    """The README of the folder."""
    columns = [" ".join(heading(setting)) for setting in study.plan.settings]
    about = facts(study, command)
    grids = (synthetic_tuning.__doc__ or "").strip()
    listed = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return "\n".join(
        [
            "# The paper's synthetic experiments",
            "",
            f"Written by `{command}` (seed {study.plan.seed}; {listed}).",
            "",
            f"Rounds until ‖x − x*‖² ≤ {text(TARGET)}, J = {J} local steps where a method has any. "
            "Scaff-PD and APD run as they are; everybody else has the best of "
            f"{about['configurations']} configurations, chosen for each problem with x* known. `> "
            "n`: not within n rounds.",
            "",
            *markdown_table(["method", *columns], ([name, *cells] for name, cells in rows(study))),
            "",
            *(f"- {sentence}" for sentence in verdict(study)),
            "",
            "![ρ](rho.png)",
            "![heterogeneity](heterogeneity.png)",
            "![local steps](local_steps.png)",
            "![badly scaled](badly_scaled.png)",
            "",
            "## How",
            "",
            *(synthetic_problem.__doc__ or "").strip().splitlines()[2:],
            "",
            "The grids:",
            "",
            *grids[: grids.index("\nA configuration is better")].rstrip().splitlines()[2:],
            "",
            "Best configurations at the edge of a grid: "
            + "; ".join(list(edges(study)) or ["nowhere"])
            + ".",
            "",
            "`rho.csv`, `heterogeneity.csv`, `local_steps.csv` and `badly_scaled.csv` have every "
            "point of every curve, "
            "`rounds.csv` one line per curve with the chosen rates, `tuning.csv` every "
            "configuration tried, and "
            "`about.json` the command, the seed and the versions.",
            "",
        ]
    )
