"""What the loops of test_zoo.py leave open: draws, powers of no loss, and what clients store."""

import numpy as np
import pytest
import torch
from zoo_cases import agree, case, play

import scaffpd as sp
from experiments.central import GradientDescentAscent
from naive import unequal_clients

ROUNDS = 6
EXACT = 1e-12


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, 2.0])
def test_qffl_of_a_client_without_loss(q):
    """0⁰ = 1: with q = 0 it counts as in FedAvg; otherwise 0^q = 0, and it is left alone."""
    content = {"content": (np.ones((5, 6)), np.zeros(5))}
    problem = case("squared", unequal_clients("squared") | content, l2=0.0)
    others = case("squared", l2=0.0)
    problem.x0[:] = 0.0
    others.x0[:] = 0.0
    common = {"local_steps": 3, "local_rate": problem.rate, "weights": "uniform"}
    assert problem.clients["content"].loss_at(problem.x0) == 0.0
    found = play(sp.QFFL(q=q, **common), problem, 1).x
    same = sp.FedAvg(**common) if q == 0 else sp.QFFL(q=q, **common)
    agree(found, play(same, problem if q == 0 else others, 1).x, EXACT)


def test_drfa_draws_by_lambda_with_replacement_and_asks_uniformly():
    """λ is held still by a tiny dual rate; how often clients are drawn then shows by what.

    Bounds at five standard deviations, or at the 0.9999 quantile of χ² with 7 degrees of freedom.
    """
    problem = case("squared")
    prior = np.array([30, 1, 5, 20, 2, 10, 2, 30]) / 100
    rates = {"local_rate": problem.rate, "dual_rate": 1e-12}
    method = sp.DRFA(sp.Agnostic(prior=prior), local_steps=3, clients_per_round=4, **rates)
    rounds = 150
    run = play(method, problem, rounds)
    # λ has been paid for by the draw: D counts alike.
    often = [np.rint(4 * call.sums[0]) for call in run.local]
    for call, number in zip(run.local, often, strict=True):
        np.testing.assert_allclose(4 * call.sums[0], number, atol=1e-12)
    times = sum(often)
    draws = 4 * rounds
    assert times.sum() == draws
    surprise = lambda p: np.sum((times - draws * p) ** 2 / (draws * p))
    assert surprise(prior) < 29.9
    assert surprise(np.full(8, 1 / 8)) > 200
    repeated = sum(np.max(number) > 1 for number in often)
    assert repeated > rounds / 4, "with replacement: some client is drawn twice"
    # ... but whose losses are asked for does not depend on λ, and nobody is asked twice.
    asked = run.asked_for_losses
    assert all(len(set(names)) == len(names) == 4 for names in asked)
    counted = np.array([sum(name in names for names in asked) for name in problem.names])
    assert np.abs(counted - rounds / 2).max() < 31  # standard deviation 6.1
    snapshots = np.bincount([call.plan.snapshot for call in run.local], minlength=4)
    assert snapshots[0] == 0
    assert np.abs(snapshots[1:] - 50).max() < 29  # uniform, the last step included: 5.8


@pytest.mark.parametrize("method", [sp.Scaffold(), sp.Scaffold(clients_per_round=3), sp.ProxSkip()])
def test_what_clients_store_does_not_survive_into_another_run(method):
    """Nor does a later round change an earlier state."""
    problem = case("logistic")
    first, second, fresh = (
        sp.train(method, one.cohort, rounds=ROUNDS, x0=problem.x0)
        for one in (problem, problem, case("logistic"))
    )
    assert np.array_equal(first.x, second.x)
    assert np.array_equal(first.x, fresh.x)
    assert list(first.history["bytes_up"]) == list(second.history["bytes_up"])
    states = play(method, problem, 2).states
    stored = "shifts" if isinstance(method, sp.ProxSkip) else "variates"
    assert float(getattr(states[0], stored).vectors.abs().max()) == 0
    assert float(getattr(states[2], stored).vectors.abs().max()) > 0
    assert torch.equal(method.round(problem.cohort, states[1]).x, states[2].x)


def test_afl_as_published_is_descent_ascent():
    """With its one local step; η_g η_ℓ is the step of descent."""
    problem = case("softmax")
    goal = sp.ChiSquare(0.3)
    rates = {"server_rate": 2.0, "dual_rate": 0.1}
    afl = play(sp.AFL(goal, local_rate=problem.rate / 2, **rates), problem, 3)
    gda = play(GradientDescentAscent(goal, server_rate=problem.rate, dual_rate=0.1), problem, 3)
    agree(afl.x, gda.x, EXACT)
    agree(afl.weights, gda.weights, EXACT)
