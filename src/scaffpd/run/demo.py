"""A study on real data: twelve air-quality stations, four of them new, with and without the others.

Beijing's stations predict the fine dust of a day from its weather, tested on the following year.
Four of them are new and have forty days. They train alone, with one average or fair model, and with
personal models, on several draws of the new stations and their days.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from scaffpd.algorithms import Fair
from scaffpd.data import beijing_air
from scaffpd.errors import InputError
from scaffpd.federation import Vector
from scaffpd.files import csv_text
from scaffpd.models import Linear, Personal
from scaffpd.models.execution import one_thread
from scaffpd.numbers import plain
from scaffpd.objectives import Average, CVaR, Objective
from scaffpd.run.folder import write_files
from scaffpd.run.prepare import Prepared
from scaffpd.run.recording import exports, record
from scaffpd.run.train import Trained, train_model
from scaffpd.study.gains import ALONE, AVERAGE, CALLED, FAIR, PERSONAL, SIMPLEST, USE, Joining
from scaffpd.study.joining import joining, joint_mode
from scaffpd.training.cohort import Cohort
from scaffpd.training.metrics import NO, YES, RelativeGain, half_interval

TOL = 1e-8
MOST_ROUNDS = 2000
STATIONS = 12
NEW = 4
DAYS = 40
DRAWS = 8
WEEK = 7
FAIRLY = CVaR(alpha=0.2)  # the worst fifth of the stations


@dataclass(frozen=True)
class StationStudy:
    """Twelve stations, four of them new, on several draws of the new stations and their days."""

    problem: Prepared  # stations and model on the first draw
    seeds: tuple[int, ...]  # one per draw
    found: tuple[Joining, ...] = field(repr=False)  # draw by draw
    models: tuple[Trained, ...] = field(repr=False)  # average, fair, personal on the first draw

    def gain(self, model: str, over: str, new: bool) -> RelativeGain:
        """Return how much lower a model's loss is for the new stations, or the others.

        The mean over draws. The interval's half-width is √(r² + s²): r that of Student's t over
        draws, s the root mean square of those over weeks of the test year, which all draws share.
        """
        gains = [one.gain(model, over, partial(_among, one, new)) for one in self.found]
        values = np.array([gain.value for gain in gains])
        weeks = np.mean([((gain.high - gain.low) / 2) ** 2 for gain in gains])
        reach = float(np.sqrt(half_interval(values) ** 2 + weeks))
        mean = float(values.mean())
        return RelativeGain(mean, mean - reach, mean + reach)

    def cost(self, model: str) -> float:
        """Return the largest cost of joining for a station, as a share of its loss alone."""
        k = self.found[0].models.index(model)
        costs = [max((one.loss[k] / one.loss[1]).max() - 1, 0.0) for one in self.found]
        return float(np.mean(costs))

    @property
    def recommendation(self) -> str:
        """Return the recommendation of most draws."""
        return Counter(one.recommendation for one in self.found).most_common(1)[0][0]

    @property
    def shown(self) -> str:
        """The joint model that sentences, table and chart are about: the one recommended."""
        joint = self.recommendation in (AVERAGE, FAIR, PERSONAL)
        return self.recommendation if joint else PERSONAL

    def error(self, model: str, new: bool) -> float:
        """Return the mean error of the new stations, or the others, over draws."""
        k = self.found[0].models.index(model)
        return float(np.mean([one.score[k] @ _among(one, new, one.score[k]) for one in self.found]))

    @property
    def answers(self) -> dict[str, str]:
        """Say who gains and who pays, over all draws."""
        outcomes = {
            f"The {count} {which} stations": self.gain(self.shown, ALONE, new).pays
            for which, count, new in (("new", NEW, True), ("other", STATIONS - NEW, False))
        }
        found = {}
        for key, outcome in (("who", YES), ("cost", NO)):
            names = [name for name, pays in outcomes.items() if pays == outcome]
            group = (
                f"clearly, as a group over {len(self.seeds)} draws (the chart: one by one, of one)"
            )
            found[key] = f"{' and '.join(names)}, {group}." if names else "Nobody clearly."
        return found

    @property
    def verdict(self) -> tuple[str, ...]:
        """Give the advice, the errors, the gains with their intervals, and what a model costs."""
        new, old = (self.gain(self.shown, ALONE, which) for which in (True, False))
        named = dict.fromkeys([self.shown, AVERAGE, PERSONAL, ALONE])
        errors = [f"{CALLED[m]} {plain(self.error(m, True))}" for m in named]
        costs = {model: f"{100 * self.cost(model):.0f} %" for model in (AVERAGE, FAIR, PERSONAL)}
        return (
            f"{USE[self.recommendation].format(word='station')}: {SIMPLEST}.",
            f"Typical error of the {NEW} new stations: {', '.join(errors)}.",
            f"With {CALLED[self.shown]} the loss of the {NEW} new stations is "
            f"{new.than('alone')} ({new.range}); "
            f"that of the {STATIONS - NEW} others is {old.words} ({old.range}).",
            f"The station that pays most for joining loses {costs[AVERAGE]} by one average model, "
            f"{costs[FAIR]} by one fair model, {costs[PERSONAL]} with personal models. "
            f"Means over {len(self.seeds)} draws of new stations; table and chart: the first draw.",
        )


def _among(one: Joining, new: bool, _: Vector) -> Vector:
    """Return weights of the new stations, or of the others."""
    chosen = np.array([(trained <= DAYS) == new for trained, _ in one.rows], dtype=float)
    weights: Vector = chosen / chosen.sum()
    return weights


def stations(
    seed: int = 0,
    draws: int = DRAWS,
    progress: Callable[[int], None] | None = None,
) -> StationStudy:
    """Train alone, average, fair and personal models on `draws` draws of new stations."""
    if draws < 2:
        raise InputError("too-few-draws", f"stations needs at least two draws, got {draws}.")
    seeds = tuple(range(seed * draws, (seed + 1) * draws))
    problems = [_stations(draw) for draw in seeds]
    first = problems[0]
    found: list[Joining] = []
    with one_thread():
        cohort = Cohort(first.train, first.model, first.names, test=first.test)
        own = Cohort(first.train, Personal(first.model), first.names, test=first.test)
        sizes = [len(y) for _, y in first.train]
        goals: list[tuple[str, str, Objective, Cohort]] = [
            (AVERAGE, "before", Average(), cohort),
            (FAIR, "after", FAIRLY, cohort),
            (PERSONAL, "", joint_mode(sizes), own),
        ]
        models = [
            train_model(name, role, Fair(goal), first, clients, MOST_ROUNDS, TOL)
            for name, role, goal, clients in goals
        ]
        known = {one.name: one.result.uninterrupted() for one in models}
        for problem in problems:
            found.append(
                joining(
                    problem.train,
                    problem.test,
                    problem.model,
                    FAIRLY,
                    names=problem.names,
                    block=WEEK,
                    word="station",
                    known=known if problem is first else None,
                )
            )
            if progress is not None:
                progress(len(found))
    return StationStudy(first, seeds, tuple(found), tuple(models))


def _stations(seed: int) -> Prepared:
    silos = beijing_air(NEW, DAYS, seed)
    pairs = zip(silos.names, silos.train, strict=True)
    names = tuple(f"{name} (new)" if len(y) <= DAYS else name for name, (_, y) in pairs)
    rows = sum(len(y) for _, y in [*silos.train, *silos.test])
    about = (
        f"Beijing air quality (Chen 2017, UCI, CC BY 4.0): {rows} days, "
        f"{len(silos.features)} columns"
    )
    model = Linear("squared", "auto", intercept=True)
    return Prepared(names, silos.train, silos.test, model, "regression", (), about, "station")


def write_stations(study: StationStudy, folder: Path, command: str) -> list[Path]:
    """Write the record of the first draw with sentences of all, and the losses of every draw."""
    run = record(
        "demo",
        "Twelve stations, four of them new",
        command,
        study.problem,
        study.models,
        verdict=study.verdict,
        answers=study.answers,  # of all draws, as the verdict is
        joining=study.found[0],
    )
    assert run.joining is not None
    advised = run.joining.model_copy(
        update={"recommendation": study.recommendation, "shown": study.shown}
    )
    run = run.model_copy(update={"joining": advised})
    rows = [
        {"seed": seed, **row}
        for seed, one in zip(study.seeds, study.found, strict=True)
        for row in one.table()
    ]
    files = exports(run) | {"draws.csv": csv_text(rows)}
    write_files(folder, files)
    return [run.write(folder), *(folder / name for name in files)]
