"""Times to an event in periods: against a loop over persons, and beside Cox's model."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.stats import spearmanr

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.models.baseline import concordance

ENDS = [1.0, 2.0, 4.0]


def persons(seed=0, n=300, entry=False):
    random = np.random.default_rng(seed)
    X = random.standard_normal((n, 3))
    own = random.exponential(2 * np.exp(-X @ [1.0, -0.6, 0.0]))
    left = random.uniform(0.5, 6, n)
    time = np.minimum(own, left)
    begin = random.random(n) * time * (random.random(n) < 0.5)
    return X, np.column_stack([time, own <= left, *[begin] * entry])


def naive(X, y):
    """The rows of periods at risk, person by person."""
    rows, labels = [], []
    for a, (time, event, begin) in zip(X, y, strict=True):
        for k, (low, high) in enumerate(zip([0.0, *ENDS], ENDS, strict=False)):
            middle = (low + high) / 2
            dies = bool(event) and low < time <= high
            alive = time > high or (time > middle and not event)
            if begin <= middle and (dies or alive):
                rows.append([*a, *(np.arange(len(ENDS)) == k)])
                labels.append(float(dies))
    return np.array(rows), np.array(labels)


def test_the_fit_is_that_of_a_loop_over_persons():
    pairs = [persons(seed, entry=True) for seed in range(2)]
    made = [sp.data.person_periods(X, y, ENDS) for X, y in pairs]
    assert all(len(rows) == 3 * len(X) for (rows, _), (X, _) in zip(made, pairs, strict=True))
    l2 = 1e-3
    cohort = sp.Cohort(made, sp.Linear("logistic", l2=l2))
    found = sp.train(sp.fair(sp.Average()), cohort, 30, 1e-12, progress=False)
    plain = [naive(X, y) for X, y in pairs]

    def value(x):
        losses = [np.logaddexp(0, A @ x) - b * (A @ x) for A, b in plain]
        return sum(own.sum() / 900 for own in losses) / 2 + l2 / 2 * x @ x

    best = minimize(value, np.zeros(6), method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(found.x, best.x, atol=1e-5)


def test_it_ranks_persons_as_coxs_model_does():
    pairs = [persons(seed, 400) for seed in range(3)]
    made = [sp.data.person_periods(X, y, ENDS) for X, y in pairs]
    periods = sp.train(
        sp.fair(sp.Average()), sp.Cohort(made, sp.Linear("logistic", l2=1e-4)), 30, 1e-9
    ).x
    cox = sp.train(sp.fair(sp.Average()), sp.Cohort(pairs, sp.Linear("cox", l2=1e-4)), 30, 1e-9).x
    X, y = persons(9, 500)
    chance = sp.data.survival_of(X, periods, 3)
    assert (np.diff(chance, axis=1) <= 0).all()
    assert spearmanr(-chance[:, -1], X @ cox)[0] > 0.98
    ours, theirs = (concordance(y[:, 0], y[:, 1], risk) for risk in (-chance[:, -1], X @ cox))
    assert abs(ours - theirs) < 0.01


def test_rows_of_no_risk_move_nothing_and_noise_can_be_added():
    X, y = persons()
    rows, labels = sp.data.person_periods(X, y, ENDS)
    assert (rows[~rows[:, 3:].any(1)] == 0).all()
    assert labels.sum() == ((y[:, 1] > 0) & (y[:, 0] <= 4)).sum()
    private = sp.Private.solved(sp.Linear("logistic", l2=0.01), 3.0, sp.FedAvg(local_rate=0.5), 4)
    found = sp.train(
        sp.FedAvg(local_rate=0.5), sp.Cohort([(rows, labels)] * 2, private), 4, progress=False
    )
    assert np.isfinite(found.x).all()
    with refuses("periods-not-rising"):
        sp.data.person_periods(X, y, [2.0, 1.0])
