"""The models of a run: which are asked for, and what has become of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.base import Algorithm
from scaffpd.federation import ClientScores, Federation
from scaffpd.objectives import Objective
from scaffpd.pipeline.sites import Encoding, Model
from scaffpd.training.loop import Result, uncertified

TOL = 1e-6


@dataclass(frozen=True)
class Contest:
    """A model to train.

    Attributes:
        name: such as "average" or "fair".
        model: of encoded columns; strengths that are "auto" are set by evidence.
        algorithm: how it is trained.
        role: "before" or "after" where two are compared.
        tol: the proven gap to stop at; "auto" is 1e-6 where one can be proven.
        strength: of its objective, on a fairness path.
        follows: whether it starts from what the model before has learnt.
    """

    name: str
    model: Model
    algorithm: Algorithm
    role: str = ""
    tol: float | str | None = None
    strength: float | None = None
    follows: bool = False

    def gap(self, federation: Federation, seed: int) -> float | None:
        if not isinstance(self.tol, str):
            return self.tol
        return TOL if uncertified(self.algorithm, federation, seed) is None else None


@dataclass(frozen=True)
class Trained:
    """One model."""

    contest: Contest
    model: Model  # with the strengths that it was trained with
    federation: Federation = field(repr=False)
    result: Result = field(repr=False)
    scores: Mapping[str, ClientScores] = field(repr=False)  # on "train" and "test" rows

    @property
    def name(self) -> str:
        return self.contest.name

    @property
    def role(self) -> str:
        return self.contest.role

    @property
    def objective(self) -> Objective | None:
        """What was minimised; `None` where the algorithm has one of its own."""
        return getattr(self.contest.algorithm, "objective", None)

    @property
    def shown(self) -> ClientScores:
        """Scores on held-out rows where there are some."""
        return self.scores.get("test", self.scores["train"])

    def own(self, i: int) -> NDArray[np.float64]:
        """Return the parameters that serve a client."""
        found = self.result.personal
        return self.result.x if found is None else np.asarray(found[i])


Contests = Callable[[Encoding, Sequence[Trained]], Contest | None]


def main_model(models: Sequence[Trained]) -> Trained:
    """Return the model that a run is about: the one after, else the one before, else the last."""
    by_role = {one.role: one for one in models}
    return by_role.get("after") or by_role.get("before") or models[-1]
