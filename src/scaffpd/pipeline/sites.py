"""`Sites`: all whose rows a run is about, and what they are asked before there is a model.

There are two makers: rows in this process (`SitesHere`), and a session of masked posts
(`scaffpd.deploy.sites`), in which one site is here, or none at an onlooker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.curves import LEAST_CLIENTS, Counting, Limits, Total, plainly
from scaffpd.data.tabular.agree import Schema
from scaffpd.data.tabular.columns import Matrix
from scaffpd.data.tabular.encode import ClientRows
from scaffpd.data.tabular.questions import RowQuestion, added
from scaffpd.federation import Federation
from scaffpd.models import Linear, Personal
from scaffpd.training.cohort import Cohort

Arrays = Mapping[str, NDArray[np.float64]]


class NamedModel(NamedTuple):
    """A model that every site knows by a name, such as a network."""

    name: str


Model = Linear | Personal | NamedModel


class Encoding(NamedTuple):
    """What all sites agree on about columns."""

    schema: Schema
    mean: Matrix  # of encoded columns
    deviation: Matrix  # likewise


class Sites(Protocol):
    """Sites that agree on columns, scale and strengths by sums."""

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


@dataclass(frozen=True)
class SitesHere:
    """Sites whose rows are in this process.

    Attributes:
        rows: of every site.
        counted: how rows between edges are counted.
    """

    rows: Sequence[ClientRows]
    counted: Counting = plainly

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [own.name for own in self.rows]

    @property
    def room(self) -> float:
        """No bound: nothing is sent."""
        return math.inf

    def counting(self, schema: Schema) -> tuple[Total, Limits | None]:
        """Count rows as they are, or with noise."""
        total, limits = self.counted(self.names, [own.sorted_numbers(schema) for own in self.rows])
        return total, limits or Limits(clients=min(LEAST_CLIENTS, len(self.rows)))

    def total(self, question: RowQuestion) -> Matrix:
        """Add up all answers."""
        return added(self.rows, question)

    def agree(self, kind: str, values: Mapping[str, object], arrays: Arrays) -> Arrays:
        """Return the arrays: nobody else has others."""
        return arrays

    def federation(self, encoding: Encoding, model: Model) -> Federation:
        """Return the encoded sites with a model."""
        assert not isinstance(model, NamedModel)
        pairs = [own.encoded(*encoding).train for own in self.rows]
        return Cohort(pairs, model, self.names, settle=False)

    def own(self, federation: Federation, x: Tensor) -> Tensor | None:
        """Return all models near x."""
        return federation.own_models(x)
