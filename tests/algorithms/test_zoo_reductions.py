"""What the loops of test_zoo.py leave open: draws, what clients store, and reductions.

Every reduction of one method to another holds exactly, up to rounding.
"""

from __future__ import annotations

import naive_zoo as naive
import numpy as np
import pytest
import torch
from zoo_cases import agree, case, compare, play

import scaffpd as sp
from cases.reference import reference_optimum
from experiments.central import GradientDescentAscent
from naive import relative, unequal_clients
from scaffpd.data import synthetic

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


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_scaffold_c_stays_the_mean_of_all_c_i_when_clients_are_sampled(weights):
    problem = case("logistic")
    p = np.array(list(problem.weights(weights).values()))
    method = sp.Scaffold(
        local_steps=4, local_rate=problem.rate, clients_per_round=3, weights=weights
    )
    for state in play(method, problem, 12).states:
        assert torch.allclose(state.variate, state.variates.sum(p), rtol=1e-9, atol=1e-12)


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


# ------------------------------------------------------------------ reductions

AS_FED_AVG = {
    "FedOpt without momentum": lambda **common: sp.FedOpt(
        optimizer="momentum", momentum=0.0, server_rate=1.0, **common
    ),
    "FedProx without pull": lambda **common: sp.FedProx(mu=0.0, **common),
    "q-FFL with q = 0": lambda **common: sp.QFFL(q=0.0, **common),
    "the whole tail": lambda **common: sp.DeltaFL(tail=1.0, **common),
}


@pytest.mark.parametrize("loss", ["squared", "softmax"])
@pytest.mark.parametrize("name", AS_FED_AVG)
@pytest.mark.parametrize(("batch_size", "chosen"), [(None, None), (3, 3)])
def test_is_fed_avg(loss, name, batch_size, chosen):
    problem = case(loss)
    common = {"local_rate": problem.rate, "batch_size": batch_size, "clients_per_round": chosen}
    run = play(AS_FED_AVG[name](local_steps=5, **common), problem, 3)
    compare(run, naive.fed_avg(problem.setting(3, "samples", run=run)), EXACT)


@pytest.mark.parametrize("method", [sp.AFL, sp.DRFA])
def test_a_fair_method_on_one_mixture_is_fed_avg(method):
    problem = case("softmax")
    p = list(problem.weights("samples").values())
    rates = {"local_rate": problem.rate, "local_steps": 4, "server_rate": 0.9}
    run = play(method(sp.Average(prior=p), dual_rate=0.3, **rates), problem, 3)
    agree(run.x, play(sp.FedAvg(**rates), problem, 3).x, EXACT)
    agree(run.weights, [p] * 3, EXACT)


ALONE = {
    "FedAvg": sp.FedAvg,
    "Scaffold": sp.Scaffold,
    "AFL": lambda **common: sp.AFL(dual_rate=0.1, **common),
    "DRFA": lambda **common: sp.DRFA(dual_rate=0.1, **common),
    "Δ-FL": lambda **common: sp.DeltaFL(tail=0.3, **common),
    "ProxSkip": sp.ProxSkip,
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("clients", [1, 4])
def test_equal_clients_make_gradient_steps(name, steps, loss, clients):
    """A single client, or twins: control variates and weights have nothing to correct."""
    rows = unequal_clients(loss)["many"]
    problem = case(loss, {f"twin {i}": rows for i in range(clients)})
    run = play(ALONE[name](local_steps=steps, local_rate=problem.rate), problem, 3)
    x = problem.x0
    for seen, call in zip(run.x, run.local, strict=True):
        for _ in range(call.plan.steps):
            x = x - problem.rate * problem.clients["twin 0"].fast_gradient(x)
        assert relative(seen, x) < EXACT
    agree(run.weights, [np.full(clients, 1 / clients)] * 3, EXACT)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_one_local_step_is_gradient_descent_on_the_average(weights):
    """With all clients and one step, control variates cancel in the mean: Σ p_i (c − c_i) = 0."""
    problem = case("softmax")
    common = {"local_steps": 1, "local_rate": problem.rate, "weights": weights}
    p = problem.weights(weights)
    objective = sp.Average(prior=list(p.values()))
    rates = {"server_rate": problem.rate, "dual_rate": 0.1}
    expected = list(naive.fed_avg(problem.setting(3, weights, steps=1)))
    fixed = sp.Fixed(problem.rate, 0.1, 1.0, 0.3 * problem.rate)
    for method in (
        *(kind(**common) for kind in (sp.FedAvg, sp.Scaffold, sp.ProxSkip)),
        GradientDescentAscent(objective, **rates),
        sp.ScaffPD(objective, local_steps=1, steps=fixed),
    ):
        agree(play(method, problem, 3).x, expected, 1e-11)
    afl = play(sp.AFL(CHI, local_rate=problem.rate / 2, **rates | {"server_rate": 2.0}), problem, 3)
    gda = play(GradientDescentAscent(CHI, **rates), problem, 3)
    agree(afl.x, gda.x, EXACT)
    agree(afl.weights, gda.weights, EXACT)


CHI = sp.ChiSquare(0.3)


@pytest.mark.parametrize("steps", [1, 5])
def test_scaff_pd_on_the_average_is_scaffold_with_fresh_control_variates(steps):
    """With Λ = {p}, x⁺ = x − τ Σ p_i Δu_i with τ = η_g η_ℓ J is x + η_g Σ p_i (y_i − x)."""
    problem = case("logistic")
    p = problem.weights("samples")
    objective = sp.Average(prior=list(p.values()))
    rule = sp.Fixed(tau=0.9 * problem.rate * steps, sigma=1.0, theta=1.0, local_rate=problem.rate)
    run = play(sp.ScaffPD(objective, local_steps=steps, steps=rule), problem, 3)
    setting = problem.setting(3, "samples", steps=steps, server_rate=0.9)
    x = problem.x0
    for seen in run.x:
        own = {name: f.fast_gradient(x) for name, f in problem.clients.items()}
        c = setting.mean(own)
        ends = {k: setting.descend(0, k, x, shift=c - own[k])[-1] for k in own}
        x = x + 0.9 * (setting.mean(ends) - x)
        assert relative(seen, x) < 1e-11


@pytest.mark.parametrize("q", [0.5, 2.0])
def test_q_ffl_and_the_q_fair_objective_have_one_minimiser(q):
    data = synthetic(d=5, sizes=(20, 40, 60, 30, 25), sigma=1.0)
    problem = case("squared", {str(i): pair for i, pair in enumerate(data)}, l2=0.1)
    p = list(problem.weights("samples").values())
    optimum = reference_optimum(data, "squared", 0.1, sp.QFair(q, prior=p)).x
    method = sp.QFFL(q=q, local_steps=1, local_rate=1.25 * problem.rate)
    found = sp.train(method, problem.cohort, rounds=120, x0=problem.x0).x
    assert relative(found, optimum) < 1e-5
    plain = reference_optimum(data, "squared", 0.1, sp.Average(prior=p)).x
    assert relative(plain, optimum) > 1e-2, "another point than that of the average"
