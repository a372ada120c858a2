"""Rounds to 1e-6 as a table, and in words what holds and what does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from scaffpd.experiments.synthetic import grids
from scaffpd.experiments.synthetic.settings import DEEP, TARGET, J, Setting
from scaffpd.experiments.synthetic.study import SHORT_RATE, Curve, Study

ROWS = tuple(grids.METHODS)
DRIFTING = (grids.DRFA_, grids.AFL_)
FEWER = 10  # Scaff-PD is to need at most a tenth of DRFA's rounds
LAST, LEAST = 50, 0.99  # of a run that has come to rest


def heading(setting: Setting) -> tuple[str, str]:
    """Two lines above a column."""
    return ("badly scaled" if setting.scaled else f"σ = {setting.sigma:g}", f"ρ = {setting.rho:g}")


def cell(curve: Curve, level: float = TARGET) -> str:
    """Rounds to a level, or how many were not enough."""
    rounds = curve.trace.rounds_to(level)
    return f"> {len(curve.trace.errors) - 1}" if rounds is None else str(rounds)


def rows(study: Study) -> Iterator[tuple[str, list[str]]]:
    """A method and its rounds on every problem; last, how many times as many as Scaff-PD tuned DRFA needs."""
    for name in ROWS:
        yield name, [cell(study.find(setting, name)) for setting in study.plan.settings]
    yield "DRFA : Scaff-PD", [ratio_text(study, setting) for setting in study.plan.settings]


def ratio(study: Study, setting: Setting) -> float:
    """Rounds of tuned DRFA per round of Scaff-PD; where DRFA does not get there, those that it made."""
    ours = study.find(setting, grids.SCAFF_PD).trace.rounds_to(TARGET)
    trace = study.find(setting, grids.DRFA_).trace
    theirs = trace.rounds_to(TARGET)
    return np.nan if ours is None else (len(trace.errors) - 1 if theirs is None else theirs) / max(ours, 1)


def ratio_text(study: Study, setting: Setting) -> str:
    """The same as text."""
    missed = study.find(setting, grids.DRFA_).trace.rounds_to(TARGET) is None
    value = ratio(study, setting)
    return "–" if np.isnan(value) else f"{'> ' if missed else ''}{value:.0f}"


def is_flat(curve: Curve) -> bool:
    """Whether the run ends at a floor: its best error has improved by less than 1 % in the last 50 rounds."""
    errors = curve.trace.errors
    return len(errors) > LAST and float(errors.min()) > LEAST * float(errors[:-LAST].min())


def verdict(study: Study) -> Iterator[str]:
    """What holds and what does not, one sentence each."""
    if study.plan.stride > 1:
        yield "This was a quick run: its numbers mean nothing."
    yield from _tenth(study)
    yield from _linear(study)
    yield from _floors(study)
    yield from _given_up(study)
    yield from _local_steps(study)
    yield from _easy(study)


def _tenth(study: Study) -> Iterator[str]:
    settings = study.plan.settings
    good = [s for s in settings if ratio(study, s) >= FEWER]
    holds = "Holds" if len(good) == len(settings) else "Does not hold everywhere"
    others = ", ".join(f"{s.name}: {ratio_text(study, s)} times" for s in settings if s not in good)
    yield (
        f"{holds}: Scaff-PD, untuned, gets to {text(TARGET)} in at most a tenth of the rounds of tuned DRFA "
        f"({len(good)} of {len(settings)} problems{'; ' + others if others else ''})."
    )


def _linear(study: Study) -> Iterator[str]:
    curves = [study.find(setting, grids.SCAFF_PD) for setting in study.plan.settings]
    reached = [rounds for curve in curves if (rounds := curve.trace.rounds_to(DEEP)) is not None]
    if len(reached) == len(curves):
        lowest = max(float(curve.trace.errors.min()) for curve in curves)
        yield (
            f"Holds: Scaff-PD converges linearly to below {text(DEEP)}, in {min(reached)} to {max(reached)} rounds, "
            f"and down to rounding ({text(lowest)} or less)."
        )
    else:
        yield f"Does not hold: Scaff-PD is below {text(DEEP)} on {len(reached)} of {len(curves)} problems only."


def _floors(study: Study) -> Iterator[str]:
    curves = [study.find(setting, name) for setting in study.plan.settings for name in DRIFTING]
    flat = [curve for curve in curves if is_flat(curve)]
    lowest = min(float(curve.trace.errors.min()) for curve in curves)
    yield (
        f"{'Holds' if len(flat) == len(curves) else 'Does not hold everywhere'}: DRFA and AFL end at a floor of drift "
        f"({len(flat)} of {len(curves)} tuned runs are flat at the end); none gets below {text(lowest)}."
    )


def _given_up(study: Study) -> Iterator[str]:
    easy = [setting for setting in study.plan.settings if not setting.scaled]
    reach = [J * study.find(setting, grids.DRFA_).knobs["local_rate"] for setting in easy]
    free = [cell(study.find(setting, grids.FREE)) for setting in study.plan.settings]
    yield (
        f"Tuning makes DRFA give up its local work: all {J} local steps together are {min(reach):.2g} to "
        f"{max(reach):.2g} of one step 1/max L_i (isotropic problems). With its server rate tuned too, which is not "
        f"DRFA as published but nearly GDA, it needs {', '.join(free)} rounds on the problems of the table."
    )


def _local_steps(study: Study) -> Iterator[str]:
    few = min(study.plan.local_steps)
    for words, setting, name in (
        ("on the paper's problem", study.plan.paper, grids.SCAFF_PD),
        ("on the paper's problem with one short local rate for all J", study.plan.paper, SHORT_RATE),
        ("on badly scaled data", study.plan.hard, grids.SCAFF_PD),
    ):
        cells = [cell(study.find(setting, name, steps)) for steps in (few, J)]
        yield f"Local steps {words}: J = {few} needs {cells[0]} rounds, J = {J} needs {cells[1]}."


def _easy(study: Study) -> Iterator[str]:
    names = (grids.GDA, grids.APD, grids.MINIMAX)
    cells = [f"{name} {cell(study.find(study.plan.paper, name))}" for name in names]
    yield (
        "The paper's problem is easy: its features are isotropic, and methods without any local steps are fast too "
        f"({', '.join(cells)} rounds at {study.plan.paper.name})."
    )


def edges(study: Study) -> Iterator[str]:
    """Where the best configuration is at the edge of its grid, and on how many problems."""
    found = Counter(
        (curve.label, name, f"{curve.knobs[name]:.3g}")
        for curve in study.curves
        for name in curve.edge
        if curve.label in ROWS
    )
    for (label, name, value), times in found.items():
        yield f"{label}: {name} {value} ({times} of {len(study.plan.settings)} problems)"


def text(value: float) -> str:
    """1e-6 rather than 1e-06."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
