"""A model that was trained, with how its clients fared on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scaffpd.cohort import Cohort
from scaffpd.federation import ClientScores
from scaffpd.metrics import Spread, spread
from scaffpd.objectives import Objective
from scaffpd.privacy import Private
from scaffpd.runs.prepared import Prepared
from scaffpd.runs.significance import clear
from scaffpd.training import Moment, Result

SPREAD = ("mean", "worst_20", "worst")
Scored = dict[str, float]  # what SPREAD names, after a round
ALL = 50  # rounds that are all scored; later ones ever more rarely
PACE = 1.05


@dataclass(frozen=True)
class Trained:
    """One model.

    Attributes:
        name: such as "average" or "fair".
        role: "before", "after" or nothing, for whoever compares.
        algorithm: its name.
        objective: what was minimised; `None` where the algorithm has one of its own.
        result: of the run.
        scores: by round, of the rounds that were scored.
        train: every client's scores on training rows.
        test: on held-out rows, where there are some.
        strength: of the objective, on a fairness path.
        private: the model with its noise; `None` where there is none.
        clear: whether each client's change against the model before is more than chance; `None` where it is not known.
    """

    name: str
    role: str
    algorithm: str
    objective: Objective | None
    result: Result = field(repr=False)
    scores: dict[int, Scored] = field(repr=False)
    train: ClientScores = field(repr=False)
    test: ClientScores | None = field(repr=False)
    strength: float | None = None
    private: Private | None = field(default=None, repr=False)
    clear: tuple[bool, ...] | None = None

    @property
    def shown(self) -> ClientScores:
        """On held-out rows, or on training rows where nothing is held out."""
        return self.train if self.test is None else self.test

    def spread(self, prepared: Prepared) -> Spread:
        """The clients' scores in a few numbers."""
        return spread(self.shown, self.shown.accuracy, upwards=prepared.measure == "accuracy")


class Scorer:
    """A callback that scores the model after rounds: all of the first, then ever fewer; `known` are scored already."""

    def __init__(self, prepared: Prepared, cohort: Cohort, known: Mapping[int, Scored] | None = None) -> None:
        self.prepared, self.cohort = prepared, cohort
        self.found = dict(known or {})
        self.next = 0

    def __call__(self, moment: Moment) -> None:
        """Look at the round, if it is its turn."""
        if moment.rounds >= self.next:
            self.score(moment.rounds, moment.state.x)
            self.next = moment.rounds + 1 if moment.rounds < ALL else math.ceil(moment.rounds * PACE)

    def score(self, rounds: int, x: Any) -> None:
        """Score x as the model after so many rounds."""
        scores = self.prepared.scores(self.cohort, x, self.prepared.split)
        found = spread(scores, scores.accuracy, upwards=self.prepared.measure == "accuracy")
        self.found[rounds] = {name: getattr(found, name) for name in SPREAD}


def trained(
    name: str, role: str, algorithm: Any, result: Result, prepared: Prepared, cohort: Cohort, scorer: Scorer,
    strength: float | None = None,
) -> Trained:  # fmt: skip
    """Put together what a run has found."""
    scorer.score(result.rounds, result.x)
    train = prepared.scores(cohort, result.x, "train")
    test = prepared.scores(cohort, result.x, "test") if prepared.test else None
    objective = getattr(algorithm, "objective", None)
    kind, guard = type(algorithm).__name__, cohort.model if isinstance(cohort.model, Private) else None
    return Trained(name, role, kind, objective, result, dict(scorer.found), train, test, strength, guard)


def judged(models: Sequence[Trained], prepared: Prepared) -> list[Trained]:
    """The same, the model after with a word on which of its changes are more than chance."""
    before = next((one for one in models if one.role == "before"), None)
    if before is None:
        return list(models)
    first = before.result.x
    return [replace(m, clear=clear(prepared, first, m.result.x)) if m.role == "after" else m for m in models]


def kept(models: Sequence[Trained]) -> Trained:
    """The model that a run is about: the one after; where there is none, the one before, or the only one."""
    by_role = {one.role: one for one in models}
    return by_role.get("after") or by_role.get("before") or models[-1]
