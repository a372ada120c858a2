"""`FairFederatedSurvival`: Cox's model after scikit-survival's conventions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError
from scaffpd.estimators.base import FairFederated
from scaffpd.estimators.rows import Array, Data, Grouping, grouping
from scaffpd.models.baseline import Steps, breslow, concordance, order_of_pairs
from scaffpd.tasks import timed


@dataclass(eq=False, repr=False, kw_only=True)
class FairFederatedSurvival(FairFederated):
    """Cox's model whose optimum is fair to the clients that own the rows; risk sets within clients.

    y is structured as scikit-survival has it, a boolean field (whether the event was seen) and a
    field of times, or an array with the columns time and event. Parameters and attributes are those
    of `FairFederatedRegressor`, without an intercept, and with these:

    Attributes:
        baselines_: client → its cumulative baseline hazard (Breslow), a function of time.
        client_scores_: client → concordance on its training rows.
    """

    fit_intercept: bool = False

    def fit(self, X: Data, y: Data, clients: Data = None, sample_weight: Data = None) -> Self:
        """Train on rows X with times and events y; `clients` says who owns each row."""
        table = times_and_events(y)
        X, rows, group, shares = self._rows(X, np.arange(len(table)), clients, sample_weight)
        table = table[rows]
        weights, _ = self._train(X, table, group, timed(), 0, shares)
        self.coef_ = np.ascontiguousarray(weights[:, 0])
        self.intercept_ = 0.0
        risk = self._outputs(X, group)
        parts = list(zip(group.split(table), group.split(risk), strict=True))
        names = group.clients.tolist()
        self.baselines_ = {k: breslow(*own) for k, own in zip(names, parts, strict=True)}
        self._baseline = breslow(table, risk)
        found = [concordance(own[:, 0], own[:, 1], z) for own, z in parts]
        self.client_scores_ = group.mapping(found)
        return self._finish()

    def predict(self, X: Data, clients: Data = None) -> Array:
        """Return the risk of every row, a logarithm of hazard ratios; `clients` says whose."""
        return self._linear(X, clients)

    def predict_cumulative_hazard_function(
        self, X: Data, clients: Data = None
    ) -> NDArray[np.object_]:
        """Return a function of time for every row, with its client's baseline."""
        risk = self.predict(X, clients)
        owners: list[object] = [None] * len(risk)
        if clients is not None:
            group: Grouping = grouping(clients, len(risk))
            owners = group.clients[group.owner].tolist()
        found = np.empty(len(risk), dtype=object)
        for j, (z, owner) in enumerate(zip(risk, owners, strict=True)):
            base = self.baselines_.get(owner, self._baseline)
            found[j] = Steps(base.times, base.values * np.exp(z), 0.0)
        return found

    def predict_survival_function(self, X: Data, clients: Data = None) -> NDArray[np.object_]:
        """Return the chance of no event until a time, as a function for every row."""
        found = self.predict_cumulative_hazard_function(X, clients)
        for j, own in enumerate(found):
            found[j] = Steps(own.times, np.exp(-own.values), 1.0)
        return found

    def score(
        self, X: Data, y: ArrayLike, sample_weight: Data = None, clients: Data = None
    ) -> float:
        """Return the concordance, given `clients` of pairs within them; every row counts alike."""
        table = times_and_events(y)
        risk = self.predict(X, clients)
        if clients is None:
            return concordance(table[:, 0], table[:, 1], risk)
        group = grouping(clients, len(risk))
        parts = zip(group.split(table), group.split(risk), strict=True)
        counts = [order_of_pairs(own[:, 0], own[:, 1], z) for own, z in parts]
        wrong, pairs = (sum(float(one[k].sum()) for one in counts) for k in (0, 1))
        return 1 - wrong / pairs if pairs else float("nan")


def times_and_events(y: Data) -> Array:
    """Return the columns time and event of a structured array, or of two columns."""
    array = np.asarray(y)
    if array.dtype.names is not None and len(array.dtype.names) == 2:
        kinds = {array.dtype[name].kind: name for name in array.dtype.names}
        if "b" in kinds and len(kinds) == 2:
            time = next(name for kind, name in kinds.items() if kind != "b")
            return np.column_stack([array[time], array[kinds["b"]]]).astype(np.float64)
    elif array.ndim == 2 and array.shape[1] == 2 and array.dtype.kind in "fiub":
        return array.astype(np.float64)
    raise InputError(
        "survival-target",
        "Survival needs y as a structured array of a boolean field (event) and times, or as the "
        "columns time and event.",
    )
