"""`Sites`: all whose rows a run is about, and what they are asked before there is a model.

There are two makers: rows in this process (`SitesHere`), and a session of masked posts
(`scaffpd.deploy.sites`), in which one site is here, or none at an onlooker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.curves import Limits, Total
from scaffpd.data.tabular.agree import Schema
from scaffpd.data.tabular.columns import Matrix
from scaffpd.data.tabular.questions import RowQuestion
from scaffpd.federation import Federation
from scaffpd.models import Linear, Personal

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
