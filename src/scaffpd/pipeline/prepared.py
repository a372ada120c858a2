"""`Prepared`: clients' rows as a model takes them, and how its numbers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms.evidence import INTERCEPT
from scaffpd.data.tabular.agree import Schema, encoded_features, features
from scaffpd.errors import unknown
from scaffpd.models import Linear, Personal
from scaffpd.pipeline.sites import Encoding, SitesHere
from scaffpd.privacy.counts import PrivateCounting
from scaffpd.tasks.base import Task
from scaffpd.training.cohort import Pair


@dataclass(frozen=True)
class Prepared:
    """Encoded rows of the clients that are here, and a model.

    All but the rows is public: what predictions, tables and pages need to be read.
    """

    sites: SitesHere
    encoding: Encoding = field(repr=False)
    model: Linear
    labels: tuple[str, ...]  # of the classes, in the order of their numbers
    about: str  # the data in a phrase
    word: str = "client"  # what a client is
    centre: float = 0.0  # what an encoded target of zero is in units of the data
    remarks: tuple[str, ...] = ()  # what was left out, and why
    # of held-out rows, client by client: the values of columns that scores are cut by
    groups: Mapping[str, Sequence[NDArray[np.object_]]] = field(default_factory=dict, repr=False)
    # what stands in for missing values, by client and column
    fills: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict, repr=False)
    # names of columns where the rows are no table; empty where they have none
    features: tuple[str, ...] = ()
    # of counts: the column with the log of their exposures, and the exposure that means are for
    exposure: tuple[str, float] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sites.names)

    @property
    def task(self) -> Task:
        return self.sites.task

    @property
    def unit(self) -> float:
        """What one unit of the encoded target is in units of the data."""
        return self.sites.unit

    @property
    def train(self) -> list[Pair]:
        return self.sites.splits(self.encoding).train

    @property
    def test(self) -> list[Pair]:
        """The same of held-out rows; empty where there are none."""
        return self.sites.splits(self.encoding).test

    @property
    def schema(self) -> Schema | None:
        """What was agreed about columns; `None` where the rows are no table."""
        return self.encoding.schema if self.sites.rows else None

    @property
    def counts(self) -> PrivateCounting | None:
        """Of a private run with curves: what its thresholds have cost."""
        counted = self.sites.counted
        counts = counted if isinstance(counted, PrivateCounting) else None
        return counts if counts is not None and counts.releases else None

    @property
    def numbers(self) -> int:
        """Rows × columns to train on."""
        return sum(X.shape[0] * X.shape[1] for X, _ in self.train)

    @property
    def columns(self) -> tuple[str, ...]:
        if self.schema is not None:
            return features(self.schema)
        return self.features or tuple(map(str, range(self.train[0][0].shape[1])))

    @property
    def split(self) -> Literal["train", "test"]:
        return "test" if self.test else "train"

    def personal(self, kappa: float | str, names: Sequence[str]) -> Personal:
        """Return the model that every client makes its own, or of which it makes these columns."""
        own = self.differing(names)
        if own is None or isinstance(kappa, str):
            return Personal(self.model, kappa, own)
        width = len(self.columns) + len(self.model.beyond)
        each = np.full(width, np.inf)  # a model's file has strengths only
        each[[-1 if j == INTERCEPT else int(j) for j in own]] = kappa
        return Personal(self.model, each.tolist())

    def differing(self, names: Sequence[str]) -> list[int | str] | None:
        """Return the encoded columns of those named, and "intercept"; `None` for all."""
        if not names:
            return None
        owners = list(self.columns)
        if self.schema is not None:
            owners = [one.group.removesuffix(" steps") for one in encoded_features(self.schema)]
        found: list[int | str] = []
        for name in names:
            if name not in (*owners, INTERCEPT):
                known = [owner for owner in dict.fromkeys(owners) if " × " not in owner]
                raise unknown("column", name, [*known, INTERCEPT])
            found += [j for j, owner in enumerate(owners) if owner == name]
        return [*found, INTERCEPT] if INTERCEPT in names else found

    def in_units(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert parameters, of one model or of several, to the units of the target's file."""
        scaled = x * self.unit
        if self.model.intercept:
            scaled[..., -1] += self.centre
        return scaled
