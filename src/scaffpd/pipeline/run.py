"""`run`: from sites to a record, in the same steps wherever the rows are.

agree    on columns, curves, scale and pairs      (`scaffpd.pipeline.columns`)
settle   strengths by evidence                     (likewise)
train    one model after the other, each by its own method
judge    how each of them serves every site, and what joining brings those that are here

A notebook, the command line, an estimator, a silo and a coordinator without rows call it; only
their `Sites` differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scaffpd.data.tabular.agree import Schema
from scaffpd.federation import ClientScores
from scaffpd.pipeline.columns import Plan, Ready, agreed, settle
from scaffpd.pipeline.judging import Judged
from scaffpd.pipeline.models import Contest, Contests, Trained
from scaffpd.pipeline.sites import Encoding, Sites
from scaffpd.study.path import WarmStart
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import RoundInfo, StartPoint, Status


class Watcher(Protocol):
    """Looks on while a run trains, such as a screen."""

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """Begin with a model that is about to be trained."""

    def show(self, info: RoundInfo) -> bool | None:
        """Show a round that is done; `True` ends the training."""


class Nobody:
    """Watches nothing."""

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """Do nothing."""

    def show(self, info: RoundInfo) -> None:
        """Do nothing."""


def start_of(ready: Ready) -> StartPoint:
    """Return where the evidence has found the mode: training starts near its optimum."""
    return None if ready.strengths is None else ready.strengths.x.numpy(force=True)


@dataclass(frozen=True)
class Settings:
    """What a run does.

    Attributes:
        columns: as they are known before anything is agreed, or as they are encoded already.
        contests: the models to train one after the other; or a function that returns the next one,
            given the encoding and those trained, and `None` at the end.
        plan: what is asked of columns and strengths.
        rounds: the most rounds of a training.
        seed: seeds all randomness.
        checkpoint: where the states of a model are stored.
        start: where training starts.
        judge: completes the record with what is measured on rows that are here.
    """

    columns: Schema | Encoding
    contests: Sequence[Contest] | Contests
    plan: Plan = field(default_factory=Plan)
    rounds: int = 1000
    seed: int = 0
    checkpoint: Callable[[Contest], Checkpoint | None] = lambda _: None
    start: Callable[[Ready], StartPoint] = start_of
    judge: Callable[[Record], Record] | None = None

    def following(self, encoding: Encoding, models: Sequence[Trained]) -> Contest | None:
        if callable(self.contests):
            return self.contests(encoding, models)
        return self.contests[len(models)] if len(models) < len(self.contests) else None


@dataclass(frozen=True)
class Record:
    """What a run has found.

    Attributes:
        encoding: what was agreed on about columns.
        models: those trained; the last one may have been interrupted.
        own: what is measured on rows that are here.
    """

    encoding: Encoding
    models: Sequence[Trained]
    own: Judged | None = None

    @property
    def interrupted(self) -> bool:
        """Whether it goes on with the same settings."""
        return self.models[-1].result.status is Status.INTERRUPTED


def run(
    settings: Settings,
    sites: Sites,
    until: Literal["trained", "scored", "judged"] = "judged",
    watcher: Watcher | None = None,
    ready: Ready | None = None,
) -> Record:
    """Agree, settle, train and judge.

        sites, encoding = sp.SitesHere.of_arrays(names, train, test, task)
        fair = sp.Contest("fair", sp.Linear("logistic", "auto", True), sp.fair(sp.ChiSquare(0.1)))
        found = sp.run(sp.Settings(encoding, [fair]), sites)
        found.models[0].shown.score

    Args:
        settings: what to do.
        sites: whose rows it is about.
        until: the last step.
        watcher: is called before every training, and after every round.
        ready: sites whose strengths are settled already, for the first model.
    """
    watching = Nobody() if watcher is None else watcher
    encoding = settings.columns if ready is None else ready.encoding
    if not isinstance(encoding, Encoding):
        encoding = agreed(encoding, sites, settings.plan)
    models: list[Trained] = []
    before = WarmStart()
    while (contest := settings.following(encoding, models)) is not None:
        if ready is None or ready.asked is not contest.model:
            ready = settle(encoding, sites, contest.model)
        if not contest.follows:
            before = WarmStart(settings.start(ready))
        tol = contest.gap(ready.federation, settings.seed)
        watching.begin(contest.name, ready.federation.names, settings.rounds, tol)
        result = before.train(
            contest.algorithm,
            ready.federation,
            settings.rounds,
            tol,
            settings.seed,
            checkpoint=settings.checkpoint(contest),
            callbacks=[watching.show],
        )
        scores: Mapping[str, ClientScores] = {}
        if until != "trained":
            scores = sites.scores(encoding, ready.model, ready.federation, result.x)
        models.append(Trained(contest, ready.model, ready.federation, result, scores))
        if contest.follows:  # its states are not stored
            result.uninterrupted()
        if result.status is Status.INTERRUPTED:
            break
    found = Record(encoding, models)
    return found if settings.judge is None or until != "judged" else settings.judge(found)
