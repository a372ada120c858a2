"""What public implementations of these methods get wrong, and where two methods are the same one.

Every trap holds the package against the right loop *and* shows that the wrong one gives other
numbers: a test that could not tell them apart would guard nothing. Every reduction holds exactly,
up to rounding.
"""

from __future__ import annotations

import naive_zoo as naive
import numpy as np
import pytest
import torch
from zoo_cases import agree, case, compare, play

import scaffpd as sp
from cases.reference import reference_optimum
from central import GradientDescentAscent
from naive import relative, unequal_clients
from scaffpd.data import synthetic
from scaffpd.federation import ClientScores
from scaffpd.training.metrics import Summary

ROUNDS = 6
EXACT = 1e-12
DIFFERENT = 1e-4  # a wrong variant is at least this far away, where right ones agree to 1e-10


def differ(seen, wrong):
    """The wrong variant ends somewhere else."""
    assert relative(seen[-1], list(wrong)[len(seen) - 1][0]) > DIFFERENT


def one_row_each(copies):
    """Clients whose rows are all alike, so that a minibatch is as good as all rows."""
    data = unequal_clients("logistic")
    names = ("one sample", "as many", "many", "repeated rows")
    return {
        name: tuple(np.repeat(a[:1], k, axis=0) for a in data[name])
        for name, k in zip(names, copies, strict=True)
    }


# ------------------------------------------------------------------ AFL


def test_afl_lambda_reaches_the_model_step():
    problem = case("logistic")
    rates = {"dual_rate": 3 * problem.dual_rate}
    run = play(sp.AFL(local_rate=problem.rate, **rates), problem, ROUNDS)
    setting = problem.setting(ROUNDS, steps=1, **rates)
    blind = list(naive.fed_avg(setting))
    compare(run, naive.afl(setting))
    agree(run.x[:1], blind[:1])  # the first step is that of λ⁰ = 1/N
    differ(run.x, blind)
    before = run.states[1]
    gradients = naive.gradients_at(problem.clients, before.x.numpy())
    step = before.x.numpy() - run.x[1]
    assert relative(step, problem.rate * (before.weights @ gradients)) < 1e-10
    assert relative(step, problem.rate * np.mean(gradients, axis=0)) > DIFFERENT


def test_afl_lambda_is_a_projection_and_not_a_clipping():
    problem = case("squared")
    rates = {"dual_rate": 10 * problem.dual_rate}
    run = play(sp.AFL(local_rate=problem.rate, **rates), problem, ROUNDS)
    compare(run, naive.afl(problem.setting(ROUNDS, steps=1, **rates)))
    differ(run.x, naive.afl(problem.setting(ROUNDS, steps=1, prox=naive.clipped_prox, **rates)))


# ------------------------------------------------------------------ q-FFL

Q = 2.0


def q_ffl(problem, **changes):
    common = {"q": Q, "local_steps": 3, "local_rate": problem.rate, "weights": "uniform"}
    return sp.QFFL(**common | changes)


@pytest.mark.parametrize("mistake", ["one central loss", "a sum of losses", "scaled twice"])
def test_qffl_scales_by_each_clients_own_mean_loss_once(mistake):
    problem = case("squared")
    setting = problem.setting(ROUNDS, steps=3)
    run = play(q_ffl(problem), problem, ROUNDS)
    compare(run, naive.q_ffl(setting, Q))
    wrong = list(naive.q_ffl(setting, Q, mistake))
    differ(run.x, wrong)
    F = naive.losses_at(problem.clients, run.x[-2])
    assert relative(run.weights[-1], F**Q / np.sum(F**Q)) < 1e-10
    assert np.ptp(run.weights[-1]) > 0.01, "q has an effect"
    if mistake == "scaled twice":  # the first step goes the same way: it is h that is wrong
        one = run.x[0] - problem.x0
        other = wrong[0][0] - problem.x0
        assert one @ other == pytest.approx(np.linalg.norm(one) * np.linalg.norm(other), rel=1e-9)
        assert np.linalg.norm(one) > 1.1 * np.linalg.norm(other)


def test_qffl_takes_means_whatever_the_number_of_rows():
    """Rows written down three times are the same mean; a minibatch of equal rows is all rows."""
    problem = case("squared")
    data = unequal_clients("squared")
    some = ("many", "one sample", "as many")
    copied = data | {k: tuple(np.repeat(a, 3, axis=0) for a in data[k]) for k in some}
    right = play(q_ffl(problem), problem, ROUNDS).x
    agree(play(q_ffl(problem), case("squared", copied), ROUNDS).x, right)
    equal = case("logistic", one_row_each((3, 5, 40, 80)))
    whole = play(q_ffl(equal), equal, ROUNDS).x
    for batch_size in (1, 2, 50):
        agree(play(q_ffl(equal, batch_size=batch_size), equal, ROUNDS).x, whole)


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


# ------------------------------------------------------------------ DRFA


def test_drfa_snapshot_index_is_shared():
    problem = case("logistic")
    rates = {"dual_rate": 3 * problem.dual_rate / 5}
    run = play(sp.DRFA(local_steps=5, local_rate=problem.rate, **rates), problem, ROUNDS)
    snapshots = [call.plan.snapshot for call in run.local]
    assert all(isinstance(t, int) and 1 <= t <= 5 for t in snapshots)
    setting = problem.setting(ROUNDS, **rates)
    compare(run, naive.drfa(setting, snapshots))
    # Per client: λ after the first round is another one for nearly every way to draw them.
    random = np.random.default_rng(0)
    paths = [setting.descend(0, name, problem.x0) for name in problem.names]
    for _ in range(5):
        drawn = random.integers(1, 6, len(paths))
        mixed = np.mean([path[t] for path, t in zip(paths, drawn, strict=True)], axis=0)
        losses = naive.losses_at(problem.clients, mixed)
        wrong = naive.agnostic_prox(losses, setting.first, 5 * setting.dual_rate)
        assert relative(run.weights[0], wrong) > 1e-7


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


# ------------------------------------------------------------------ SCAFFOLD


def scaffold(problem, **changes):
    return sp.Scaffold(**{"local_steps": 4, "local_rate": problem.rate} | changes)


@pytest.mark.parametrize("mistake", ["starts at the model", "adds c_i"])
def test_scaffold_variates_start_at_zero_and_the_server_adds_their_change(mistake):
    problem = case("logistic")
    run = play(scaffold(problem), problem, ROUNDS)
    setting = problem.setting(ROUNDS, steps=4)
    compare(run, naive.scaffold(setting))
    differ(run.x, naive.scaffold(setting, mistake))
    agree(run.x[:1], list(naive.fed_avg(setting))[:1])  # nothing to correct at first


@pytest.mark.parametrize("mistake", ["no K", "one step too few", "the samples"])
def test_scaffold_divides_by_eta_k(mistake):
    problem = case("squared")
    run = play(scaffold(problem), problem, ROUNDS)
    differ(run.x[:2], naive.scaffold(problem.setting(ROUNDS, steps=4), mistake))
    # c_i is a mean of gradients along the way: with tiny steps the gradient at x itself.
    still = play(scaffold(problem, local_rate=1e-9), problem, 1).states[-1]
    for i, f in enumerate(problem.clients.values()):
        c = still.variates.sum(np.eye(len(problem.names))[i])
        assert relative(c, f.fast_gradient(problem.x0)) < 1e-4


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_scaffold_c_stays_the_mean_of_all_c_i_when_clients_are_sampled(weights):
    problem = case("logistic")
    p = np.array(list(problem.weights(weights).values()))
    method = scaffold(problem, clients_per_round=3, weights=weights)
    for state in play(method, problem, 12).states:
        assert torch.allclose(state.variate, state.variates.sum(p), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_scaffold_local_steps_are_equal_whatever_a_client_has(batch_size):
    """Rows that are all alike, 3 or 300 of them: an epoch is longer, four local steps are not."""
    few, many = (case("logistic", one_row_each(k)) for k in ((3, 3, 3, 3), (3, 30, 100, 300)))
    a, b = (play(scaffold(one, batch_size=batch_size), one, ROUNDS) for one in (few, many))
    agree(a.x, b.x)
    differ(b.x, naive.scaffold(many.setting(ROUNDS, steps=4), "an epoch each"))


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


# ------------------------------------------------------------------ metrics


def test_worst_accuracy_always_comes_with_what_it_is_over():
    """The worst comes with whose it is, worst and best fifth, both means and the spread."""
    accuracy = np.array([0.9, 0.5, 0.8, 0.7, 0.6, 1.0])
    counts = np.array([10, 1000, 10, 10, 10, 10])
    scores = ClientScores(tuple("abcdef"), 1 - accuracy, accuracy, counts)
    spread = Summary.of(scores).accuracy
    assert (spread.worst, spread.worst_client) == (0.5, "b")
    assert (spread.best, spread.best_client) == (1.0, "f")
    assert spread.worst_20 == pytest.approx((0.5 + 0.6) / 2)  # ⌈6/5⌉ = 2 clients
    assert spread.best_20 == pytest.approx((1.0 + 0.9) / 2)
    assert spread.mean == pytest.approx(0.75)
    assert spread.weighted_mean == pytest.approx((0.5 * 1000 + 40.0 * 1) / 1050, abs=1e-12)
    assert spread.deviation == pytest.approx(np.std(accuracy))
