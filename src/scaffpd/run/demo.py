"""A study on real data: twelve air-quality stations, four of them new, with and without the others.

Beijing's stations predict the fine dust of a day from its weather, tested on the following year.
Four of them are new and have thirty days. They train alone, with one average or fair model, and
with personal models; a week of the test year counts as one observation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scaffpd.algorithms import Fair
from scaffpd.data import beijing_air
from scaffpd.models import Linear, Personal
from scaffpd.models.execution import one_thread
from scaffpd.objectives import Average, CVaR, Objective
from scaffpd.run.folder import write_files
from scaffpd.run.prepare import Prepared
from scaffpd.run.recording import exports, record
from scaffpd.run.train import Trained, train_model
from scaffpd.study.gains import AVERAGE, FAIR, PERSONAL, Joining
from scaffpd.study.joining import joining, joint_mode
from scaffpd.tasks.regression import Regression
from scaffpd.training.cohort import Cohort

TOL = 1e-8
MOST_ROUNDS = 2000
NEW = 4
DAYS = 30
WEEK = 7
FAIRLY = CVaR(alpha=0.2)  # the worst fifth of the stations


@dataclass(frozen=True)
class StationStudy:
    """Twelve stations, four of them new, and what joining brings them."""

    problem: Prepared  # stations and model
    models: tuple[Trained, ...] = field(repr=False)  # average, fair, personal
    found: Joining = field(repr=False)


def stations(seed: int = 0, phase: Callable[[str], None] = lambda _: None) -> StationStudy:
    """Train alone, average, fair and personal models; the seed draws new stations and their days.

    It calls `phase` with what is under way.
    """
    problem = _stations(seed)
    with one_thread():
        cohort = Cohort(problem.train, problem.model, problem.names, test=problem.test)
        own = Cohort(problem.train, Personal(problem.model), problem.names, test=problem.test)
        sizes = [len(y) for _, y in problem.train]
        goals: list[tuple[str, str, Objective, Cohort]] = [
            (AVERAGE, "before", Average(), cohort),
            (FAIR, "after", FAIRLY, cohort),
            (PERSONAL, "", joint_mode(sizes), own),
        ]
        models = []
        for name, role, goal, clients in goals:
            phase(f"Training the {name} model")
            models.append(train_model(name, role, Fair(goal), problem, clients, MOST_ROUNDS, TOL))
        known = {one.name: one.result.uninterrupted() for one in models}
        phase("Training every station alone")
        found = joining(
            problem.train,
            problem.test,
            problem.model,
            FAIRLY,
            names=problem.names,
            block=WEEK,
            word=problem.word,
            known=known,
        )
    return StationStudy(problem, tuple(models), found)


def _stations(seed: int) -> Prepared:
    silos = beijing_air(NEW, DAYS, seed)
    # rain by its logarithm alone: one storm would outweigh a month of days
    columns = [j for j, name in enumerate(silos.features) if name != "rain"]
    train, test = ([(X[:, columns], y) for X, y in part] for part in (silos.train, silos.test))
    pairs = zip(silos.names, silos.train, strict=True)
    names = tuple(f"{name} (new)" if len(y) <= DAYS else name for name, (_, y) in pairs)
    rows = sum(len(y) for _, y in [*silos.train, *silos.test])
    about = f"Beijing air quality (Chen 2017, UCI, CC BY 4.0): {rows} days, {len(columns)} columns"
    model = Linear("squared", "auto", intercept=True)
    return Prepared(names, train, test, model, Regression(), (), about, "station")


def write_stations(study: StationStudy, folder: Path, command: str) -> None:
    """Write the record and its tables."""
    title = "Twelve stations, four of them new"
    run = record("demo", title, command, study.problem, study.models, joining=study.found)
    write_files(folder, exports(run))
    run.write(folder)
