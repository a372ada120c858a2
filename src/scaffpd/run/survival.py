"""Scores and curves of times to an event, on held-out rows of clients in this process.

Cox's baselines are Breslow's, of a client's own training rows; those of periods are the model's.
Expected is the mean chance of an event until the horizon: the median of all training rows' event
times, or the end of the period in the middle. True is Kaplan and Meier's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc

from scaffpd.models import Linear
from scaffpd.models.baseline import Steps, breslow, brier, kaplan_meier, log_rank
from scaffpd.models.periods import survival_at
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
    model = prepared.model
    train, test = (
        # without weights of rows
        [(np.asarray(X, float), np.asarray(y, float)[:, : 2 + model.entry]) for X, y in pairs]
        for pairs in (prepared.train, prepared.test)
    )
    horizon = _horizon(model, [y for _, y in train])
    sizes = [len(y) for _, y in test]
    largest = sorted(range(len(test)), key=lambda i: -sizes[i])[:MOST]
    scores: list[ScoreRow] = []
    curves: list[ScoreRow] = []
    for name, own in parameters.items():
        found = []
        risks = []
        for i, client in enumerate(prepared.names):
            fitted = _Fitted.of(model, own[i], *train[i])
            risks.append(fitted.risk(test[i][0]))
            found.append(fitted.scores(*test[i], horizon))
            scores.append(_row(name, client, sizes[i], found[-1]))
            if i in largest:
                X, y = test[i]
                times = np.linspace(0, min(y[:, 0].max(), fitted.last), POINTS)
                curves += _points(name, client, times, y, fitted.survival(X, times).mean(0))
        scores.append(_row(name, EVERYONE, sum(sizes), _mean(found, sizes)))
        curves += list(_thirds(name, np.concatenate(risks), [y for _, y in test], scores[-1]))
    return scores, curves


def _horizon(model: Linear, targets: Sequence[Array]) -> float:
    """Return the time until which events are expected and counted."""
    if model.periods:
        return model.periods[len(model.periods) // 2]
    events = np.concatenate([y[y[:, 1] > 0, 0] for y in targets])
    return float(np.median(events)) if len(events) else np.inf


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


@dataclass(frozen=True)
class _Fitted:
    """A client's model: of Cox's, with the baseline of its training rows."""

    model: Linear
    x: Array
    centre: Array
    baseline: Steps | None
    last: float  # the time until which chances are known

    @classmethod
    def of(cls, model: Linear, x: Array, X: Array, y: Array) -> _Fitted:
        """Take a client's parameters and training rows."""
        if model.periods:
            return cls(model, x, np.zeros(X.shape[1]), None, model.periods[-1])
        centre = X.mean(0)
        baseline = breslow(y, (X - centre) @ x)
        return cls(model, x, centre, baseline, float(y[:, 0].max()))

    def risk(self, X: Array) -> Array:
        """Return z of every row; of Cox's model, 0 of a mean one."""
        return self.model.predict(self.x, X - self.centre)

    def survival(self, X: Array, times: Array) -> Array:
        """Return the chance to survive each time, (rows × times)."""
        risk = self.risk(X)
        if self.baseline is None:
            levels = self.x[X.shape[1] :]
            return survival_at(times, risk, levels, self.model.periods)
        with np.errstate(over="ignore"):
            return np.exp(-self.baseline(times) * np.exp(risk)[:, None])

    def scores(self, X: Array, y: Array, horizon: float) -> dict[str, float]:
        """Return concordance with its interval, Brier score, expected and true share of events."""
        found: dict[str, float] = {}
        ends = interval(y, self.risk(X), self.model)
        if ends is not None:
            names = ("concordance", "concordance_low", "concordance_high")
            found |= dict(zip(names, ends, strict=True))
        begin = 0.0
        if np.isfinite(horizon):
            found["horizon"] = horizon
        if self.baseline is not None:
            if not len(self.baseline.times):
                return found
            begin = float(self.baseline.times[0])
            # the hazard until then where Xx = 0
            size = float(np.exp(np.clip(-self.centre @ self.x, -700, 700)))
            found["hazard"] = float(self.baseline(horizon)) * size
        if self.model.entry:
            return found
        until = min(float(y[:, 0].max()), self.last)
        times = np.linspace(begin, until, POINTS + 2)[1:-1]
        if until > begin:
            found["brier"] = float(brier(y, times, self.survival(X, times)).mean())
        if horizon <= until:
            found["mean_probability"] = float(1 - self.survival(X, np.array([horizon])).mean())
            found["base_rate"] = float(1 - kaplan_meier(y)(horizon))
        return found


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
