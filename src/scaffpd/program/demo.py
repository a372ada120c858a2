"""A study on real data: twelve air-quality stations, four of them new, with and without the others.

Beijing's stations predict the fine dust of a day from its weather, tested on the following year.
Four of them are new and have thirty days. They train alone, with one average or fair model, and
with personal models; a week of the test year counts as one observation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scaffpd.algorithms import Fair
from scaffpd.data import beijing_air
from scaffpd.models import Linear, Personal
from scaffpd.models.execution import one_thread
from scaffpd.objectives import Average, CVaR
from scaffpd.pipeline.judging import Judged, held_out_scores
from scaffpd.pipeline.models import Contest
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.run import Nobody, Record, Settings, run
from scaffpd.pipeline.sites import SitesHere
from scaffpd.report.folder import write_files
from scaffpd.report.recording import exports, record
from scaffpd.study.joining import joining, joint_mode
from scaffpd.study.newcomers import newcomers
from scaffpd.study.verdict import AVERAGE, FAIR, PERSONAL
from scaffpd.tasks.regression import Regression
from scaffpd.training.cohort import Cohort

TOL = 1e-8
MOST_ROUNDS = 2000
NEW = 4
DAYS = 30
WEEK = 7
FAIRLY = CVaR(alpha=0.2)  # the worst fifth of the stations


def stations(seed: int = 0, phase: Callable[[str, float], None] = lambda *_: None) -> Record:
    """Train alone, average, fair and personal models; the seed draws new stations and their days.

    It calls `phase` with what is under way, and which share of it is done.
    """
    problem = _stations(seed)
    joint = joint_mode([len(y) for _, y in problem.train])

    def judge(found: Record) -> Record:
        phase("Training every station alone", 0.0)
        known = {one.name: one.result.uninterrupted() for one in found.models}
        brings = joining(
            problem.train,
            problem.test,
            problem.model,
            FAIRLY,
            names=problem.names,
            block=WEEK,
            word=problem.word,
            known=known,
        )
        scores = held_out_scores(problem, found.models, brings)
        late = newcomers(
            Cohort(problem.train, problem.model, problem.names),
            {AVERAGE: Average(), FAIR: FAIRLY},
            seed=seed,
            phase=lambda share: phase("Leaving every station out", share),
        )
        return replace(found, own=Judged(problem, brings, scores, newcomers=late))

    contests = [
        Contest(AVERAGE, problem.model, Fair(Average()), "before", TOL),
        Contest(FAIR, problem.model, Fair(FAIRLY), "after", TOL),
        Contest(PERSONAL, Personal(problem.model), Fair(joint), "", TOL),
    ]
    settings = Settings(problem.encoding, contests, rounds=MOST_ROUNDS, judge=judge)
    with one_thread():
        return run(settings, problem.sites, watcher=_Phases(phase))


class _Phases(Nobody):
    """Says which model is trained."""

    def __init__(self, phase: Callable[[str, float], None]) -> None:
        self.phase = phase

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        self.phase(f"Training the {model} model", 0.0)


def _stations(seed: int) -> Prepared:
    silos = beijing_air(NEW, DAYS, seed)
    # rain by its logarithm alone: one storm would outweigh a month of days
    features = tuple(name for name in silos.features if name != "rain")
    columns = [j for j, name in enumerate(silos.features) if name != "rain"]
    train, test = ([(X[:, columns], y) for X, y in part] for part in (silos.train, silos.test))
    pairs = zip(silos.names, silos.train, strict=True)
    names = tuple(f"{name} (new)" if len(y) <= DAYS else name for name, (_, y) in pairs)
    rows = sum(len(y) for _, y in [*silos.train, *silos.test])
    about = f"Beijing air quality (Chen 2017, UCI, CC BY 4.0): {rows} days, {len(columns)} columns"
    sites, encoding = SitesHere.of_arrays(names, train, test, Regression())
    model = Linear("squared", "auto", intercept=True)
    return Prepared(sites, encoding, model, (), about, "station", features=features)


def write_stations(found: Record, folder: Path, command: str) -> None:
    made = record("demo", "Twelve stations, four of them new", command, found)
    write_files(folder, exports(made))
    made.write(folder)
