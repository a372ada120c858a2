"""`Curves`: clients' numbers as lines, steps and products of steps, agreed on by sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.data.curves import Counting, Feature, plainly
from scaffpd.data.tabular.agree import NumberColumn, Schema, encoded_features
from scaffpd.data.tabular.columns import NUMBER, DataColumn, FeatureTable
from scaffpd.data.tabular.encode import ClientRows
from scaffpd.errors import InputError, count
from scaffpd.models import Linear
from scaffpd.models.arrays import read_features
from scaffpd.models.linear import AUTO
from scaffpd.pipeline.columns import Plan, agreed
from scaffpd.pipeline.sites import Encoding, SitesHere
from scaffpd.tasks.base import Target
from scaffpd.tasks.regression import Regression
from scaffpd.training.cohort import Pair, agreed_columns, named_pairs

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
        encoding: what the clients have agreed on: names of encoded columns are "age", "age > 37",
            …, "age > 37 × dose > 2", …, their groups "age", "age steps", …, "age × dose", …
    """

    pairs: int = 0
    encoding: Encoding = field(init=False, repr=False)

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
        known = None if names is None else list(names)
        columns = agreed_columns(owners, [X for X, _ in pairs], known)
        if columns is None or len(set(columns)) < width:
            columns = [f"x{j}" for j in range(width)]
        most = count("Curves", "pairs", self.pairs) if self.pairs else 0
        if most and model is None:
            raise InputError(
                "pairs-without-model",
                "Curves look for pairs beside a model: Curves(pairs=8).fit(clients, model=...).",
            )

        def additive(schema: Schema) -> Linear:
            assert model is not None
            groups = tuple(feature.group for feature in encoded_features(schema))
            return replace(model, l2=AUTO, groups=groups)

        numbers: list[NumberColumn] = [{"name": name, "kind": "number"} for name in columns]
        schema: Schema = {"task": "regression", "labels": [], "columns": [*numbers], "shape": None}
        rows = [_rows(name, columns, *pair) for name, pair in zip(owners, pairs, strict=True)]
        self.encoding = agreed(schema, SitesHere.of(rows, counting), Plan(additive, True, most))
        return self

    @property
    def _features(self) -> list[Feature]:
        return encoded_features(self.encoding.schema)

    @property
    def _columns(self) -> list[str]:
        return [column["name"] for column in self.encoding.schema["columns"]]

    @property
    def thresholds(self) -> list[Matrix]:
        """Thresholds of every column."""
        return [np.array(column.get("steps", ())) for column in self.encoding.schema["columns"]]

    @property
    def products(self) -> list[Product]:
        """Two columns and the thresholds that cut them, of every pair."""
        found = []
        for pair in self.encoding.schema.get("pairs", ()):
            left, right = pair["left"], pair["right"]
            assert left["kind"] == NUMBER
            assert right["kind"] == NUMBER
            places = [self._columns.index(side["name"]) for side in (left, right)]
            cuts = [np.array(side["steps"]) for side in (left, right)]
            found.append(Product(places[0], cuts[0], places[1], cuts[1]))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(feature.name for feature in self._features)

    @property
    def groups(self) -> tuple[str, ...]:
        """Group of each of them."""
        return tuple(feature.group for feature in self._features)

    @property
    def steps(self) -> NDArray[np.bool_]:
        """Which of them are steps, or products of steps."""
        return np.array([feature.step for feature in self._features])

    @property
    def mean(self) -> Matrix:
        """Means of the encoded columns, over all clients."""
        return self.encoding.mean

    @property
    def deviation(self) -> Matrix:
        """Their deviations; 1 of steps."""
        return self.encoding.deviation

    def encode(self, X: object) -> Matrix:
        """Return lines, steps and products of rows, not yet standardised."""
        nothing = np.zeros(len(self.mean))
        rows = _rows("new", self._columns, X)
        return rows.matrix(self.encoding.schema, nothing, nothing + 1, ~rows.held, separate=True)

    def transform(self, clients: Pairs) -> Pairs:
        """Return the clients' pairs (X, y) with lines and steps, scaled, for X."""
        if isinstance(clients, Mapping):
            return {name: self._pair(pair) for name, pair in clients.items()}
        return [self._pair(pair) for pair in clients]

    def _pair(self, pair: Pair) -> Pair:
        X, y = pair
        return (self.encode(X) - self.mean) / self.deviation, y


def _rows(name: str, columns: Sequence[str], X: object, y: ArrayLike | None = None) -> ClientRows:
    """Return the rows of a client as those of a table are, all of them to train on."""
    numbers = read_features(name, X).astype(np.float64)
    if numbers.shape[1:] != (len(columns),):
        raise InputError(
            "features-differ",
            f"Client {name!r} has samples of shape {numbers.shape[1:]}, but others have "
            f"{len(columns)} features.",
        )
    found = [DataColumn(own, NUMBER, v) for own, v in zip(columns, numbers.T, strict=True)]
    goal: NDArray[np.float64] = np.zeros(len(numbers)) if y is None else np.asarray(y)
    first, *more = np.atleast_2d(goal.T)
    held = np.zeros(len(numbers), dtype=bool)
    table = FeatureTable(len(numbers), tuple(found))
    return ClientRows(name, table, Target(Regression(), first), held, extra=tuple(more))
