"""`Curves`: clients' numbers as lines, steps and products of steps, agreed on by sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.curves import (
    LEAST_CLIENTS,
    Counting,
    Feature,
    Limits,
    curve,
    plainly,
    thresholds,
    with_steps,
)
from scaffpd.data.pairs import Indicators
from scaffpd.data.silos import standardiser
from scaffpd.errors import InputError, count
from scaffpd.models import Linear
from scaffpd.models.arrays import read_features
from scaffpd.models.linear import AUTO
from scaffpd.training.cohort import Pair, agreed_columns, named_pairs
from scaffpd.training.pairs import search

Matrix = NDArray[np.float64]
Pairs = Sequence[Pair] | Mapping[str, Pair]


class Product(NamedTuple):
    """Two columns, and the thresholds that cut them."""

    left: int
    above_left: Matrix
    right: int
    above_right: Matrix


@dataclass
class Curves:
    """Encoder of numbers: each column becomes a standardised line and centred steps 1[v > t_k].

    A linear model of the encoded columns is additive in curves, and every theorem about linear
    models holds as before. Thresholds, means and deviations come from sums over clients: see
    `scaffpd.data.curves`. Columns with two values stay as they are. Pairs of columns that act
    together get products of steps, at most `pairs` of them, where that pays beside the clients' own
    additive models: see `scaffpd.data.pairs`.

        curves = sp.Curves().fit(train)
        model = sp.Personal(sp.Linear("logistic", intercept=True, groups=curves.groups))
        cohort = sp.Cohort(curves.transform(train), model, test=curves.transform(test))

    Args:
        pairs: the most pairs of columns to look for; `fit` then needs the model.

    Attributes:
        thresholds: of every column.
        products: two columns and the thresholds that cut them, of every pair.
        names: of the encoded columns: "age", "age > 37", …, "age > 37 × dose > 2", …
        groups: the group of each of them: "age", "age steps", …, "age × dose", …
        steps: which of them are steps, or products of steps.
        mean: of the encoded columns, over all clients.
        deviation: likewise.
    """

    pairs: int = 0
    thresholds: list[Matrix] = field(init=False, repr=False)
    products: list[Product] = field(init=False, repr=False)
    names: tuple[str, ...] = field(init=False, repr=False)
    groups: tuple[str, ...] = field(init=False, repr=False)
    steps: NDArray[np.bool_] = field(init=False, repr=False)
    mean: Matrix = field(init=False, repr=False)
    deviation: Matrix = field(init=False, repr=False)

    def fit(
        self,
        clients: Pairs,
        names: Sequence[str] | None = None,
        model: Linear | None = None,
        counting: Counting = plainly,
    ) -> Self:
        """Agree on thresholds and scales of the clients' (X, y), given as to a `Cohort`.

        Args:
            clients: their (X, y).
            names: of the columns; a data frame has its own.
            model: what pairs are looked for beside.
            counting: how rows between edges are counted.
        """
        pairs, owners = named_pairs(clients, None)
        width = np.shape(pairs[0][0])[-1]
        parts = [_numbers(name, X, width) for name, (X, _) in zip(owners, pairs, strict=True)]
        known = None if names is None else list(names)
        columns = agreed_columns(owners, [X for X, _ in pairs], known)
        columns = columns or [f"x{j}" for j in range(width)]
        ordered = [list(np.sort(X, axis=0).T) for X in parts]
        total, limits = counting(owners, ordered)
        limits = limits or Limits(clients=min(LEAST_CLIENTS, len(parts)))
        agreed = thresholds(width, total, limits)
        self.thresholds = [own if len(own) > 1 else own[:0] for own in agreed]
        self._describe(columns, parts, [])
        if self.pairs:
            self._describe(columns, parts, self._searched(pairs, parts, agreed, model))
        return self

    def _describe(
        self, columns: Sequence[str], parts: Sequence[Matrix], products: list[Product]
    ) -> None:
        """Name, group and scale the encoded columns."""
        self.products = products
        features = [
            feature
            for name, own in zip(columns, self.thresholds, strict=True)
            for feature in curve(name, own)
        ]
        for a, left, b, right in products:
            features += [
                Feature(f"{one.name} × {other.name}", f"{columns[a]} × {columns[b]}", True)
                for one in curve(columns[a], left)[1:]
                for other in curve(columns[b], right)[1:]
            ]
        self.names = tuple(feature.name for feature in features)
        self.groups = tuple(feature.group for feature in features)
        self.steps = np.array([feature.step for feature in features])
        self.mean, deviation = standardiser([self.encode(X) for X in parts])
        self.deviation = np.where(self.steps, 1.0, deviation)

    def _searched(
        self,
        pairs: Sequence[Pair],
        parts: Sequence[Matrix],
        agreed: Sequence[Matrix],
        model: Linear | None,
    ) -> list[Product]:
        """Search for pairs beside the clients' additive models."""
        if model is None:
            raise InputError(
                "pairs-without-model",
                "Curves look for pairs beside a model: Curves(pairs=8).fit(clients, model=...).",
            )
        additive = replace(model, l2=AUTO, groups=self.groups)
        ends = np.cumsum([1, *map(len, agreed)]).tolist()
        columns = [Indicators(tuple(range(*two)), True) for two in pairwise(ends)]
        cut = [k for k, own in enumerate(agreed) if len(own)]
        chosen = search(
            [self._pair(pair) for pair in pairs],
            additive,
            [np.concatenate([_above(X, k, own) for k, own in enumerate(agreed)], 1) for X in parts],
            [columns[k] for k in cut],
            count("Curves", "pairs", self.pairs),
        )
        found = []
        for (a, b), cuts, _ in chosen:
            left, right = (
                agreed[cut[k]][np.array(own) - ends[cut[k]]]
                for k, own in zip((a, b), cuts, strict=True)
            )
            found.append(Product(cut[a], left, cut[b], right))
        return found

    def encode(self, X: object) -> Matrix:
        """Return lines, steps and products of rows, not yet standardised."""
        rows = _numbers("new", X, len(self.thresholds))
        products = [
            (_above(rows, a, left)[:, :, None] * _above(rows, b, right)[:, None]).reshape(
                len(rows), -1
            )
            for a, left, b, right in self.products
        ]
        return np.concatenate([with_steps(rows, self.thresholds), *products], 1)

    def transform(self, clients: Pairs) -> Pairs:
        """Return the clients' pairs (X, y) with lines and steps, scaled, for X."""
        if isinstance(clients, Mapping):
            return {name: self._pair(pair) for name, pair in clients.items()}
        return [self._pair(pair) for pair in clients]

    def _pair(self, pair: Pair) -> Pair:
        X, y = pair
        return (self.encode(X) - self.mean) / self.deviation, y


def _above(rows: Matrix, column: int, steps: Matrix) -> Matrix:
    """Return the steps of a column."""
    return with_steps(rows[:, [column]], [steps])[:, 1:]


def _numbers(name: str, X: object, width: int) -> Matrix:
    rows = read_features(name, X).astype(np.float64)
    if rows.shape[1:] != (width,):
        raise InputError(
            "features-differ",
            f"Client {name!r} has samples of shape {rows.shape[1:]}, but others have {width} "
            "features.",
        )
    return rows
