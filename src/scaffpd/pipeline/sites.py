"""`Sites`: all whose rows a run is about, and what they are asked before there is a model.

There are two makers: rows in this process (`SitesHere`), and a session of masked posts
(`scaffpd.deploy.sites`), in which one site is here, or none at an onlooker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.curves import LEAST_CLIENTS, Counting, Limits, Total, plainly
from scaffpd.data.tabular.agree import Schema
from scaffpd.data.tabular.columns import Matrix
from scaffpd.data.tabular.encode import ClientRows
from scaffpd.data.tabular.questions import RowQuestion, added
from scaffpd.federation import ClientScores, Federation
from scaffpd.federation.questions import SPLITS
from scaffpd.models import Linear, Personal
from scaffpd.models.personal import base_of, regulariser
from scaffpd.privacy import Private
from scaffpd.privacy.counts import PrivateCounting
from scaffpd.tasks.base import Task
from scaffpd.training.cohort import Cohort, Pair

Arrays = Mapping[str, NDArray[np.float64]]


class NamedModel(NamedTuple):
    """A model that every site knows by a name, such as a network."""

    name: str


Model = Linear | Personal | Private | NamedModel


class Encoding(NamedTuple):
    """What all sites agree on about columns."""

    schema: Schema
    mean: Matrix  # of encoded columns
    deviation: Matrix  # likewise


class Splits(NamedTuple):
    """All sites' (X, y) to train on, and all held out; empty where there are none."""

    train: list[Pair]
    test: list[Pair]


class Sites(Protocol):
    """Sites that agree on columns, scale and strengths by sums, and train."""

    @property
    def names(self) -> Sequence[str]:
        """All of them."""

    @property
    def room(self) -> float:
        """The most numbers of an exchange."""

    def counting(self, schema: Schema) -> tuple[Total, Limits | None]:
        """Return how rows between edges are counted, and the limits where there is noise."""

    def total(self, question: RowQuestion) -> Matrix:
        """Return the sum of all sites' answers."""

    def agree(self, kind: str, values: Mapping[str, object], arrays: Arrays) -> Arrays:
        """Return the arrays with the first site's last digits; refuse other values."""

    def federation(self, encoding: Encoding, model: Model) -> Federation:
        """Return the encoded sites with a model; strengths that are "auto" stay so."""

    def own(self, federation: Federation, x: Tensor) -> Tensor | None:
        """Return the models near x of the sites that are here; `None` where nobody is."""

    def scores(
        self, encoding: Encoding, model: Model, federation: Federation, x: Matrix
    ) -> Mapping[str, ClientScores]:
        """Return how x serves every site, on rows to "train" and on held-out rows to "test"."""


@dataclass(frozen=True)
class SitesHere:
    """Sites whose rows are in this process.

    Attributes:
        names: all of them.
        task: what is predicted.
        rows: of every site; none where they are arrays.
        counted: how rows between edges are counted.
        unit: what one unit of an encoded target is in units of the data.
        device: where they are trained on.
        encoded: the last encoding, and the rows so encoded: once for all models.
    """

    names: Sequence[str]
    task: Task
    rows: Sequence[ClientRows] = field(default=(), repr=False)
    counted: Counting = plainly
    unit: float = 1.0
    device: str = "cpu"
    encoded: list[tuple[Encoding, Splits]] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        rows: Sequence[ClientRows],
        counted: Counting = plainly,
        unit: float = 1.0,
        device: str = "cpu",
    ) -> Self:
        return cls([own.name for own in rows], rows[0].target.task, rows, counted, unit, device)

    @classmethod
    def of_arrays(
        cls,
        names: Sequence[str],
        train: list[Pair],
        test: list[Pair],
        task: Task,
        unit: float = 1.0,
        device: str = "cpu",
    ) -> tuple[Self, Encoding]:
        """Return the sites of arrays, and how these are encoded, which is as they are."""
        shape = list(train[0][0].shape[1:])
        schema: Schema = {"task": "regression", "labels": [], "columns": [], "shape": shape}
        d = math.prod(shape)
        encoding = Encoding(schema, np.zeros(d), np.ones(d))
        return cls(
            names, task, (), plainly, unit, device, [(encoding, Splits(train, test))]
        ), encoding

    @property
    def room(self) -> float:
        return math.inf

    def counting(self, schema: Schema) -> tuple[Total, Limits | None]:
        total, limits = self.counted(self.names, [own.sorted_numbers(schema) for own in self.rows])
        return total, limits or Limits(clients=min(LEAST_CLIENTS, len(self.rows)))

    def total(self, question: RowQuestion) -> Matrix:
        return added(self.rows, question)

    def agree(self, kind: str, values: Mapping[str, object], arrays: Arrays) -> Arrays:
        return arrays

    def splits(self, encoding: Encoding) -> Splits:
        if not self.encoded or self.encoded[0][0] is not encoding:
            found = [own.encoded(*encoding) for own in self.rows]
            held = [own.test for own in found if own.test is not None]
            self.encoded[:] = [(encoding, Splits([own.train for own in found], held))]
        return self.encoded[0][1]

    def federation(self, encoding: Encoding, model: Model) -> Federation:
        """Return the encoded sites with a model; with noise, charge what counts have cost."""
        assert not isinstance(model, NamedModel)
        train, test = self.splits(encoding)
        made = Cohort(train, model, self.names, device=self.device, test=test or None, settle=False)
        account = made.channel.account
        if account is not None and isinstance(self.counted, PrivateCounting):
            account.charge(self.counted.releases)
        return made

    def own(self, federation: Federation, x: Tensor) -> Tensor | None:
        return federation.own_models(x)

    def scores(
        self, encoding: Encoding, model: Model, federation: Federation, x: Matrix
    ) -> dict[str, ClientScores]:
        """Score x: losses without the regulariser, and the task's measure in the data's units."""
        base = base_of(model)
        base = getattr(base, "model", base)  # noise is none of outputs
        found = {}
        for split, rows in zip(SPLITS, self.splits(encoding), strict=True):
            if not rows:
                continue
            scores = federation.evaluate(x, split)
            scores = replace(scores, loss=scores.loss - regulariser(model, x))

            def answers(rows: list[Pair] = rows) -> list[Pair]:
                models = federation.own_models(x)
                own = [x] * len(rows) if models is None else [u.numpy(force=True) for u in models]
                outputs = base.outputs
                return [(outputs(u, np.asarray(X)), y) for u, (X, y) in zip(own, rows, strict=True)]

            measured = self.task.client_scores(base, scores, self.unit, answers)
            found[split] = replace(scores, score=measured)
        return found
