"""Times to an event: Cox's model, or a logistic hazard in each of some periods.

Cox's baselines are Breslow's, of a client's own training rows; those of periods are the model's.
Expected is the mean chance of an event until the horizon: the median of all training rows' event
times, or the end of the period in the middle. True is Kaplan and Meier's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc

from scaffpd.models import Linear
from scaffpd.models.baseline import Steps, breslow, brier, concordance, kaplan_meier, log_rank
from scaffpd.models.concordance import interval
from scaffpd.models.periods import survival_at
from scaffpd.tasks.base import (
    EVERYONE,
    Cells,
    HeldOutRows,
    HeldOutScores,
    Measure,
    ScoreColumn,
    ScoreRow,
    Scores,
    Task,
)

Array = NDArray[np.float64]
POINTS = 40  # of a curve
MOST = 6  # clients with a curve
THIRDS = ("low risk", "middle risk", "high risk")
CONCORDANCE = Measure(
    "concordance",
    "decimal",
    name="concordance",
    upwards=True,
    subject="the concordance of ",
    mean="Concordance",
)
COX = (
    "Cox's model: risk sets and baselines within a client, Efron's ties. Losses count from that of "
    "a model that knows nothing, as partial likelihoods of clients cannot be compared."
)
PERIODS = (
    "Discrete time: a logistic hazard in each of the periods until {}, with levels that all "
    "clients share. Losses are means over persons and periods at risk, and ratios of hazards are "
    "those of odds."
)
COLUMNS = {
    "concordance": CONCORDANCE,
    "concordance_low": ScoreColumn("95 % from", "decimal"),
    "concordance_high": ScoreColumn("to", "decimal"),
    "brier": ScoreColumn("Brier score", "decimal"),
    "mean_probability": ScoreColumn("expected"),
    "base_rate": ScoreColumn("true"),
}


class Survival(Task):
    """A time, and whether the event was seen; concordance is of risks within clients."""

    name = "survival"
    measure = CONCORDANCE
    losses = ("cox", "hazard")
    counted = True
    roles = ("time", "event", "entry")
    columns = COLUMNS
    goal = "time"
    adds_to = "the logarithm of the hazard"
    ratios = "hazard"
    lost = lower = "share of wrong pairs"
    serving = ("concordance", "more")
    explained = (
        "*Concordance*: the share of pairs of rows of which the one with the higher risk had its "
        "event first. *Brier score*: the mean squared error of predicted survival, over time. "
        "*Expected* is the mean predicted chance of an event until the time beside it (half of the "
        "training rows’ events are earlier), *true* the share that had one, by Kaplan and Meier."
    )
    unscored = "No two test rows of {} can be compared: left out of means and counts."

    def loss(self, classes: int = 0, periods: Sequence[float] = ()) -> str:
        return "hazard" if periods else "cox"

    def said(self, periods: Sequence[float]) -> list[str]:
        ends = " and ".join(", ".join(f"{end:g}" for end in periods).rsplit(", ", 1))
        return [PERIODS.format(ends) if periods else COX]

    def client_score(self, model: Linear, z: Array, y: Cells, unit: float) -> float:
        rows = np.asarray(y, dtype=np.float64)
        return concordance(rows[:, 0], rows[:, 1], z[:, 0], rows[:, 2] if model.entry else None)

    def judged(self, model: Linear, own: Sequence[Array], rows: HeldOutRows) -> HeldOutScores:
        """Return scores of every client, and of all rows; and curves."""
        train, test = (
            # without weights of rows
            [(np.asarray(X, float), np.asarray(y, float)[:, : 2 + model.entry]) for X, y in pairs]
            for pairs in (rows.train, rows.test)
        )
        horizon = _horizon(model, [y for _, y in train])
        sizes = [len(y) for _, y in test]
        largest = sorted(range(len(test)), key=lambda i: -sizes[i])[:MOST]
        found: list[Scores] = []
        curves: list[ScoreRow] = []
        risks = []
        for i, client in enumerate(rows.names):
            fitted = _Fitted.of(model, own[i], *train[i])
            X, y = test[i]
            risks.append(fitted.risk(X))
            found.append(fitted.scores(X, y, horizon))
            if i in largest:
                times = np.linspace(0, min(y[:, 0].max(), fitted.last), POINTS)
                curves += _points(client, times, y, fitted.survival(X, times).mean(0))
        whole = _mean(found, sizes)
        curves += _thirds(np.concatenate(risks), [y for _, y in test], whole)
        parts = zip((*rows.names, EVERYONE), (*sizes, sum(sizes)), (*found, whole), strict=True)
        return HeldOutScores([ScoreRow("client", *part) for part in parts], curves=curves)

    def chances(
        self,
        model: Linear,
        own: Sequence[Array],
        risks: Array,
        hazards: Sequence[tuple[float, float] | None],
    ) -> dict[float, Array]:
        """Return a time, or the end of every period, and every row's chance to survive it."""
        if ends := model.periods:
            levels = np.stack([x[-len(ends) :] for x in own])
            chances = survival_at(np.array(ends), risks, levels, ends)
            return dict(zip(ends, chances.T, strict=True))
        known = [one for one in hazards if one is not None]
        if not known:
            return {}
        until = [np.nan if one is None else one[0] for one in hazards]
        with np.errstate(over="ignore"):
            return {known[0][1]: np.exp(-np.array(until) * np.exp(risks))}

    def served(self, loss: float, score: float | None) -> float:
        return score or 0.0


def _horizon(model: Linear, targets: Sequence[Array]) -> float:
    """Return the time until which events are expected and counted."""
    if model.periods:
        return model.periods[len(model.periods) // 2]
    events = np.concatenate([y[y[:, 1] > 0, 0] for y in targets])
    return float(np.median(events)) if len(events) else np.inf


def _mean(found: Sequence[Scores], sizes: Sequence[int]) -> Scores:
    """Return means over rows; of concordances, over clients."""
    names = dict.fromkeys(
        name for one in found for name in one if not name.endswith(("low", "high", "hazard"))
    )
    means: Scores = {}
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

    def scores(self, X: Array, y: Array, horizon: float) -> Scores:
        """Return concordance with its interval, Brier score, expected and true share of events."""
        found: Scores = {}
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
    group: str, times: Array, y: Array, predicted: Array | None = None
) -> Iterator[ScoreRow]:
    observed = kaplan_meier(y)
    for k, t in enumerate(times.tolist()):
        values: Scores = {"time": t, "observed": float(observed(t))}
        if predicted is not None:
            values["predicted"] = float(predicted[k])
        yield ScoreRow("curve", group, len(y), values)


def _thirds(risk: Array, targets: Sequence[Array], everyone: Scores) -> Iterator[ScoreRow]:
    """Cut all rows into thirds by risk, and test whether these differ within clients."""
    y = np.concatenate(targets)[:, :2]
    owner = np.repeat(np.arange(len(targets)), [len(one) for one in targets])
    third = np.searchsorted(np.quantile(risk, (1 / 3, 2 / 3)), risk, "left")
    everyone["log_rank_p"] = float(chdtrc(2, log_rank(third, owner, y)))
    times = np.linspace(0, y[:, 0].max(), POINTS)
    for k, group in enumerate(THIRDS):
        if (third == k).any():
            yield from _points(group, times, y[third == k])
