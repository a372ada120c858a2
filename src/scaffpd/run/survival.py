"""Scores and curves of times to an event, on held-out rows of clients in this process.

A client's baseline is Breslow's on its own training rows. Expected is the mean chance of an event
until the horizon, the median of all training rows' event times; true is Kaplan and Meier's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc

from scaffpd.models import Linear
from scaffpd.models.baseline import breslow, brier, kaplan_meier, log_rank
from scaffpd.run.prepare import Prepared
from scaffpd.run.record import EVERYONE, THIRDS, ScoreRow
from scaffpd.study.concordance import interval

Array = NDArray[np.float64]
POINTS = 40  # of a curve
MOST = 6  # clients with a curve


def survival_rows(
    prepared: Prepared, parameters: Mapping[str, Sequence[Array]]
) -> tuple[list[ScoreRow], list[ScoreRow]]:
    """Return scores of every model and client, and of all rows; and curves."""
    train = [(np.asarray(X, float), np.asarray(y, float)) for X, y in prepared.train]
    test = [(np.asarray(X, float), np.asarray(y, float)) for X, y in prepared.test]
    events = np.concatenate([y[y[:, 1] > 0, 0] for _, y in train])
    horizon = float(np.median(events)) if len(events) else np.inf
    scores: list[ScoreRow] = []
    curves: list[ScoreRow] = []
    largest = sorted(range(len(test)), key=lambda i: -len(test[i][1]))[:MOST]
    for name, own in parameters.items():
        found = []
        risks = []
        for i, client in enumerate(prepared.names):
            model = _Fitted(prepared.model, own[i], train[i])
            found.append(model.scores(*test[i], horizon))
            risks.append(model.risk(test[i][0]))
            scores.append(_row(name, client, len(test[i][1]), found[-1]))
            if i in largest:
                curves += model.curve(*test[i], name, client)
        sizes = [len(y) for _, y in test]
        scores.append(_row(name, EVERYONE, sum(sizes), _mean(found, sizes)))
        curves += list(_thirds(name, np.concatenate(risks), [y for _, y in test], scores[-1]))
    return scores, curves


def _row(model: str, group: str, rows: int, values: Mapping[str, float]) -> ScoreRow:
    return ScoreRow(model=model, by="client", group=group, rows=rows, values=dict(values))


def _mean(found: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Return means over rows; of concordances, over clients."""
    names = dict.fromkeys(
        name for one in found for name in one if not name.endswith(("low", "high", "hazard"))
    )
    means = {}
    for name in names:
        known = [(n, one[name]) for n, one in zip(sizes, found, strict=True) if name in one]
        weights = [1 if name == "concordance" else n for n, _ in known]
        means[name] = float(np.average([value for _, value in known], weights=weights))
    return means


class _Fitted:
    """A client's model with the baseline of its training rows."""

    def __init__(self, model: Linear, x: Array, train: tuple[Array, Array]) -> None:
        self.model = model
        self.x = x
        self.y = train[1][:, : 3 if model.entry else 2]
        self.centre = train[0].mean(0)
        self.baseline = breslow(self.y, self.risk(train[0]))

    def risk(self, X: Array) -> Array:
        """Return z of every row, 0 of a mean one."""
        return np.asarray((X - self.centre) @ self.x)

    def survival(self, X: Array, times: Array) -> Array:
        """Return the chance to survive each time, (rows × times)."""
        with np.errstate(over="ignore"):
            return np.exp(-self.baseline(times) * np.exp(self.risk(X))[:, None])

    def scores(self, X: Array, y: Array, horizon: float) -> dict[str, float]:
        """Return concordance with its interval, Brier score, expected and true share of events."""
        found: dict[str, float] = {}
        ends = interval(y, self.risk(X), self.model)
        if ends is not None:
            names = ("concordance", "concordance_low", "concordance_high")
            found |= dict(zip(names, ends, strict=True))
        if np.isfinite(horizon):  # and the hazard until then where Xx = 0
            size = float(np.exp(np.clip(-self.centre @ self.x, -700, 700)))
            found |= {"horizon": horizon, "hazard": float(self.baseline(horizon)) * size}
        if self.model.entry or not len(self.baseline.times):
            return found
        until = min(y[:, 0].max(), self.y[:, 0].max())
        times = np.linspace(self.baseline.times[0], until, POINTS + 2)[1:-1]
        if until > self.baseline.times[0]:
            found["brier"] = float(brier(self.y, y, times, self.survival(X, times)).mean())
        if horizon < until:
            found["mean_probability"] = float(1 - self.survival(X, np.array([horizon])).mean())
            found["base_rate"] = float(1 - kaplan_meier(y[:, :2])(horizon))
        return found

    def curve(self, X: Array, y: Array, name: str, client: str) -> Iterator[ScoreRow]:
        """Yield what was observed at a client beside the mean of what was predicted."""
        times = np.linspace(0, y[:, 0].max(), POINTS)
        yield from _points(name, client, times, y, self.survival(X, times).mean(0))


def _points(
    name: str, group: str, times: Array, y: Array, predicted: Array | None = None
) -> Iterator[ScoreRow]:
    observed = kaplan_meier(y)
    for k, t in enumerate(times.tolist()):
        values = {"time": t, "observed": float(observed(t))}
        if predicted is not None:
            values["predicted"] = float(predicted[k])
        yield ScoreRow(model=name, by="curve", group=group, rows=len(y), values=values)


def _thirds(
    name: str, risk: Array, targets: Sequence[Array], everyone: ScoreRow
) -> Iterator[ScoreRow]:
    """Cut all rows into thirds by risk, and test whether these differ within clients."""
    y = np.concatenate(targets)[:, :2]
    owner = np.repeat(np.arange(len(targets)), [len(one) for one in targets])
    third = np.searchsorted(np.quantile(risk, (1 / 3, 2 / 3)), risk, "left")
    everyone.values["log_rank_p"] = float(chdtrc(2, log_rank(third, owner, y)))
    times = np.linspace(0, y[:, 0].max(), POINTS)
    for k, group in enumerate(THIRDS):
        if (third == k).any():
            yield from _points(name, group, times, y[third == k])
