"""Times to an event in periods: against a loop over persons, and beside Cox's model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import spearmanr

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.models.baseline import concordance
from scaffpd.models.periods import survival_at

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


def hazard(l2=1e-3, **more):
    return sp.Linear("hazard", l2=l2, periods=ENDS, **more)


def trained(pairs, model, tol=1e-9):
    return sp.train(sp.fair(sp.Average()), sp.Cohort(pairs, model), 30, tol).x


def test_the_fit_is_that_of_a_loop_over_persons():
    pairs = [persons(seed, entry=True) for seed in range(2)]
    found = trained(pairs, hazard(entry=True), 1e-12)
    plain = [naive(X, y) for X, y in pairs]

    def value(x):
        losses = [np.logaddexp(0, A @ x) - b * (A @ x) for A, b in plain]
        return sum(own.mean() for own in losses) / 2 + 1e-3 / 2 * x @ x

    best = minimize(value, np.zeros(6), method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(found, best.x, atol=1e-5)


def test_it_ranks_persons_as_coxs_model_does():
    pairs = [persons(seed, 400) for seed in range(3)]
    periods = trained(pairs, hazard(1e-4))
    cox = trained(pairs, sp.Linear("cox", l2=1e-4))
    X, y = persons(9, 500)
    risk = hazard().predict(periods, X)
    chance = survival_at(np.array([0.0, 0.5, 1, 3, 4, 9]), risk, periods[3:], ENDS)
    assert (np.diff(chance, axis=1) <= 0).all()
    np.testing.assert_array_equal(chance[:, 0], 1)  # and beyond the last end nothing is known
    np.testing.assert_array_equal(chance[:, -1], chance[:, -2])
    middle = survival_at(np.array([1.0, 2.0]), risk, periods[3:], ENDS)
    hazards = 1 / (1 + np.exp(-risk[:, None] - periods[3:]))
    np.testing.assert_allclose(middle, np.cumprod(1 - hazards, axis=1)[:, :2])
    assert spearmanr(risk, X @ cox)[0] > 0.98
    ours, theirs = (concordance(y[:, 0], y[:, 1], own) for own in (risk, X @ cox))
    assert abs(ours - theirs) < 0.01


def test_weights_count_persons_and_strengths_come_by_evidence():
    X, y = persons(3, 200)
    twice = np.repeat(X, 2, axis=0), np.repeat(y, 2, axis=0)
    weighted = X, np.column_stack([y, np.full(len(y), 2.0)])
    one = trained([twice], hazard())
    np.testing.assert_allclose(trained([weighted], hazard(weighted=True)), one, atol=1e-6)
    pairs = [persons(seed, 100) for seed in range(4)]
    strengths = sp.Cohort(pairs, sp.Personal(hazard("auto"))).strengths
    assert strengths.groups == ("0", "1", "2", *["levels of periods"] * 3)


def test_noise_protects_persons():
    """A person's gradients are added up before they are clipped, whatever its periods."""
    clients = [persons(seed, 40, entry=True) for seed in range(2)]
    model = hazard(entry=True)
    private = sp.Private(model, clip=0.7, loss_clip=1.5, secret=0)
    oracle = sp.Cohort(clients, private).channel.train.oracle
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(6))
    losses, gradients = oracle.sums.losses(x), oracle.sums.gradients(x)
    for i, (X, y) in enumerate(clients):
        value, total = 0.0, np.zeros(6)
        for k in range(len(X)):
            A, b = naive(X[k : k + 1], y[k : k + 1])
            if not len(A):
                continue
            z = A @ x.numpy()
            value += min(float(np.sum(np.logaddexp(0, z) - b * z)), 1.5)
            g = A.T @ (1 / (1 + np.exp(-z)) - b)
            total += g * min(1, 0.7 / np.linalg.norm(g))
        assert float(losses[i]) * oracle.clips[1].unit == pytest.approx(value, rel=1e-9)
        np.testing.assert_allclose(gradients[i] * oracle.clips[0].unit, total, atol=1e-9)
    # one person more or less moves a sum by no more than the clip, in whole units
    fewer = [(X[1:], y[1:]) for X, y in clients]
    other = sp.Cohort(fewer, private).channel.train.oracle.sums.gradients(x)
    assert ((gradients - other).norm(dim=1) <= 2.0 ** oracle.clips[0].bits).all()
    known = sp.Cohort(clients, replace(private, radius=2.0)).constants()
    np.testing.assert_allclose(known.smoothness, 3 * 0.25 * 4 + 1e-3)


def test_a_private_run_spends_what_it_was_given():
    clients = [persons(seed, 200) for seed in range(3)]
    method = sp.FedAvg(local_rate=0.5)
    private = sp.Private.solved(hazard(0.01), 6.0, method, 8, secret=0)
    found = sp.train(method, sp.Cohort(clients, private), 8)
    assert found.privacy.epsilon.max() <= 6.0 + 1e-6
    plain, noisy = (sp.Cohort(clients, one).evaluate(found.x) for one in (hazard(0.01), private))
    np.testing.assert_allclose(noisy.loss, plain.loss)  # periods without risk do not count
    np.testing.assert_array_equal(noisy.score, plain.score)
    X, y = persons(9, 500)
    assert concordance(y[:, 0], y[:, 1], X @ found.x[:3]) > 0.6


def test_what_does_not_fit_is_refused():
    X, _ = persons()
    for ends in ([2.0, 1.0], [], [0.0], [np.inf]):
        with refuses("periods-not-rising"):
            sp.Linear("hazard", periods=ends)
    with refuses("periods-not-rising"):
        sp.Linear("cox", periods=[1.0])
    with refuses("nobody-at-risk"):
        sp.Cohort([(X, np.column_stack([np.full(len(X), 0.1), np.zeros(len(X))]))], hazard())
    with refuses("cox-intercept"):
        hazard(intercept=True)
