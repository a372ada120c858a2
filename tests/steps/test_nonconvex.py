"""Steps for networks: fair to the worst client, and clear about being stuck."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import scaffpd as sp
from scaffpd.algorithms.steps.nonconvex import KAPPA, PATIENCE, Nonconvex, dual_rate
from scaffpd.algorithms.steps.rules import StepProblem, Trial


def cohort(seed=0, **model):
    random = np.random.default_rng(seed)
    truth = random.standard_normal((5, 3))
    X = [random.standard_normal((40 + 5 * i, 5)) + 0.3 * i for i in range(4)]
    data = [(x, (x @ (truth + 0.8 * random.standard_normal((5, 3)))).argmax(1)) for x in X]
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return sp.Cohort(data, sp.Module(network, **model))


def test_the_worst_client_is_served_better():
    federation = cohort()
    settings = {"local_steps": 10, "batch_size": 8}
    average = sp.train(sp.FedAvg(**settings), federation, rounds=10).history.losses[-1]
    fair = sp.train(sp.ScaffPD(sp.Agnostic(), **settings), federation, rounds=10).history.losses[-1]
    assert fair.max() < average.max()
    assert fair.max() - fair.min() < average.max() - average.min()


def test_a_round_of_naive_loops():
    """One client after the other in plain NumPy and autograd, for three rounds."""
    federation = cohort()
    J = 4
    b = 8
    seed = 2
    method = sp.ScaffPD(sp.ChiSquare(0.1), local_steps=J, batch_size=b)
    oracle = federation._oracle
    result = sp.train(method, federation, rounds=3, seed=seed)
    n = 4
    eta = 1 / federation.constants().smoothness.max()
    x = federation.start()
    c = torch.zeros(n, federation.dimension, dtype=torch.float64)
    weights = np.full(n, 1 / n)
    for r in range(1, 4):
        mean = torch.from_numpy(weights) @ c
        ends = []
        for i, name in enumerate(federation.names):
            from scaffpd.models.draws import Draws

            draws = Draws((seed, r, 1), [name])
            u = x
            for _ in range(J):
                rows = (draws.uniform(b)[0] * oracle.rows.sizes[i]).long()
                g = oracle.only([i]).sums(u, [rows])[1][0]
                u = u - eta * (g - c[i] + mean)
            ends.append(u)
        c = torch.stack([c[i] - mean + (x - ends[i]) / (J * eta) for i in range(n)])
        x = torch.from_numpy(weights) @ torch.stack(ends)
        losses = oracle.losses(x).numpy()
        weights = sp.ChiSquare(0.1).prox(losses, weights, dual_rate(losses))
    np.testing.assert_allclose(result.x, x, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(result.weights, weights, rtol=1e-9)


def trial(after, before=(1.0, 1.0), objective=None):
    weights = np.array([0.5, 0.5])
    return Trial(
        objective or sp.Average(),
        np.array(before),
        np.array(after),
        weights,
        1.0,
        np.nan,
        1e-16,
        None,
    )


def started(stochastic=True, local_steps=5):
    constants = cohort().constants()
    losses = np.ones(2)
    problem = StepProblem(sp.Average(), constants, local_steps, stochastic, losses, lambda: losses)
    return Nonconvex().start(problem)


def test_how_rounds_are_judged():
    rule = Nonconvex()
    state = started()
    assert rule.rates(state).correction == "variates"
    assert rule.rates(state).sigma == 0
    assert rule.rates(started(local_steps=1)).correction == "gradients"
    assert rule.rates(started(stochastic=False)).correction == "gradients"
    leapt, accepted = rule.judge(state, trial([1.6, 1.6]))
    assert not accepted
    assert rule.rates(leapt).local_rate == rule.rates(state).local_rate / 2
    blown, accepted = rule.judge(state, trial([np.inf, 1.0]))
    assert not accepted
    assert rule.rates(blown).local_rate < rule.rates(leapt).local_rate
    rough, accepted = rule.judge(
        state, trial([1.2, 1.3])
    )  # a noisy round may be worse, but corrections are to blame
    assert accepted
    assert rule.rates(rough).correction == "none"
    _, accepted = rule.judge(started(stochastic=False), trial([1.2, 1.3]))
    assert not accepted  # without noise it may not
    better, _ = rule.judge(state, trial([0.5, 0.9]))
    assert rule.rates(better).sigma == pytest.approx(KAPPA / (2 * 0.2))
    for _ in range(PATIENCE):
        better, _ = rule.judge(better, trial([0.5, 0.9]))
    assert better.cooling == 0.5
    assert not better.stalled


def test_a_run_that_is_stuck_ends_and_says_what_to_try(monkeypatch):
    judge = Nonconvex.judge

    def nearly_cold(self, state, tried):
        state, accepted = judge(self, state, tried)
        return replace(state, cooling=1 / 128), accepted

    monkeypatch.setattr(Nonconvex, "judge", nearly_cold)
    for method in (
        sp.ScaffPD(sp.ChiSquare(0.1), local_steps=3, batch_size=8),
        sp.fair(sp.ChiSquare(0.1)),
    ):
        result = sp.train(method, cohort(), rounds=50)
        assert result.status is sp.Status.STALLED
        assert result.rounds == 1
        assert "try larger batches" in result.message


def test_losses_that_have_not_moved_are_no_success():
    result = sp.train(sp.FedAvg(local_rate=1e-9), cohort(), rounds=5)
    assert result.status is sp.Status.STALLED
    assert "No client's loss has moved" in result.message
    assert sp.train(sp.FedAvg(local_rate=0.1), cohort(), rounds=5).status is sp.Status.ROUND_LIMIT
