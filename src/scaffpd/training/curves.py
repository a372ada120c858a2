"""`Curves`: clients' numbers as lines and steps, agreed on by sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.curves import LEAST_CLIENTS, counted, curve, thresholds, with_steps
from scaffpd.data.silos import standardiser
from scaffpd.errors import InputError
from scaffpd.models.arrays import read_features
from scaffpd.training.cohort import Pair, agreed_columns, named_pairs

Matrix = NDArray[np.float64]
Pairs = Sequence[Pair] | Mapping[str, Pair]


@dataclass
class Curves:
    """Encoder of numbers: each column becomes a standardised line and centred steps 1[v > t_k].

    A linear model of the encoded columns is additive in curves, and every theorem about linear
    models holds as before. Thresholds, means and deviations come from sums over clients: see
    `scaffpd.data.curves`. Columns with two values stay as they are.

        curves = sp.Curves().fit(train)
        model = sp.Personal(sp.Linear("logistic", intercept=True, groups=curves.groups))
        cohort = sp.Cohort(curves.transform(train), model, test=curves.transform(test))

    Attributes:
        thresholds: of every column.
        names: of the encoded columns: "age", "age > 37", …
        groups: the group of each of them: "age", "age steps", …
        steps: which of them are steps.
        mean: of the encoded columns, over all clients.
        deviation: likewise.
    """

    thresholds: list[Matrix] = field(init=False, repr=False)
    names: tuple[str, ...] = field(init=False, repr=False)
    groups: tuple[str, ...] = field(init=False, repr=False)
    steps: NDArray[np.bool_] = field(init=False, repr=False)
    mean: Matrix = field(init=False, repr=False)
    deviation: Matrix = field(init=False, repr=False)

    def fit(self, clients: Pairs, names: Sequence[str] | None = None) -> Self:
        """Agree on thresholds and scales of the clients' (X, y), given as to a `Cohort`.

        `names` are those of the columns; a data frame has its own.
        """
        pairs, owners = named_pairs(clients, None)
        width = np.shape(pairs[0][0])[-1]
        parts = [_numbers(name, X, width) for name, (X, _) in zip(owners, pairs, strict=True)]
        known = None if names is None else list(names)
        columns = agreed_columns(owners, [X for X, _ in pairs], known)
        columns = columns or [f"x{j}" for j in range(width)]
        ordered = [list(np.sort(X, axis=0).T) for X in parts]
        agreed = thresholds(
            width,
            lambda edges: np.sum([counted(own, edges) for own in ordered], axis=0),
            clients=min(LEAST_CLIENTS, len(parts)),
        )
        self.thresholds = [own if len(own) > 1 else own[:0] for own in agreed]
        features = [
            feature
            for name, own in zip(columns, self.thresholds, strict=True)
            for feature in curve(name, own)
        ]
        self.names = tuple(feature.name for feature in features)
        self.groups = tuple(feature.group for feature in features)
        self.steps = np.array([feature.step for feature in features])
        self.mean, deviation = standardiser([self.encode(X) for X in parts])
        self.deviation = np.where(self.steps, 1.0, deviation)
        return self

    def encode(self, X: object) -> Matrix:
        """Return lines and steps of rows, not yet standardised."""
        return with_steps(_numbers("new", X, len(self.thresholds)), self.thresholds)

    def transform(self, clients: Pairs) -> Pairs:
        """Return the clients' pairs (X, y) with lines and steps, scaled, for X."""
        if isinstance(clients, Mapping):
            return {name: self._pair(pair) for name, pair in clients.items()}
        return [self._pair(pair) for pair in clients]

    def _pair(self, pair: Pair) -> Pair:
        X, y = pair
        return (self.encode(X) - self.mean) / self.deviation, y


def _numbers(name: str, X: object, width: int) -> Matrix:
    rows = read_features(name, X).astype(np.float64)
    if rows.shape[1:] != (width,):
        raise InputError(
            "features-differ",
            f"Client {name!r} has samples of shape {rows.shape[1:]}, but others have {width} "
            "features.",
        )
    return rows
