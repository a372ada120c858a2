"""Where two methods are the same method: each statement here holds exactly, up to rounding."""

from __future__ import annotations

import naive_zoo as naive
import numpy as np
import pytest
from zoo_cases import agree, case, moved, play

import scaffpd as sp
from cases.reference import reference_optimum
from naive import relative, unequal_clients
from scaffpd.data import synthetic

ROUNDS = 3
EXACT = 1e-12


def gradient_descent(gradient, x, rate, rounds, steps=1):
    """x after every `steps` plain gradient steps."""
    iterates = []
    for _ in range(rounds):
        for _ in range(steps):
            x = x - rate * gradient(x)
        iterates.append(x)
    return iterates


def average_gradient(problem, weights):
    p = problem.weights(weights)
    return lambda x: sum(p[name] * f.fast_gradient(x) for name, f in problem.clients.items())


def alone(loss="logistic"):
    """One client."""
    return case(loss, {"many": unequal_clients(loss)["many"]})


def twins(loss="logistic", n=4):
    """Clients with the same data."""
    return case(loss, {f"twin {i}": unequal_clients(loss)["many"] for i in range(n)})


def numbered(pairs):
    return {f"client {i}": pair for i, pair in enumerate(pairs)}


# ------------------------------------------------------------------ methods that become FedAvg

AS_FED_AVG = {
    "FedProx without pull": lambda p, **common: sp.FedProx(mu=0.0, **common),
    "q-FFL with q = 0": lambda p, **common: sp.QFFL(q=0.0, **common),
    "the whole tail": lambda p, **common: sp.DeltaFL(tail=1.0, **common),
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("name", AS_FED_AVG)
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize(("batch_size", "chosen"), [(None, None), (3, 3)])
def test_is_fed_avg(loss, name, weights, batch_size, chosen):
    problem = case(loss)
    common = {
        "local_steps": 5,
        "local_rate": problem.rate,
        "batch_size": batch_size,
        "clients_per_round": chosen,
        "weights": weights,
    }
    run = play(AS_FED_AVG[name](problem, **common), problem, ROUNDS)
    expected = naive.fed_avg(
        problem.clients,
        problem.x0,
        ROUNDS,
        5,
        problem.rate,
        problem.weights(weights),
        run.participants,
        run.batches(problem),
    )
    moved(problem, expected)
    agree(run.x, expected, EXACT)
    if chosen is None:
        agree(run.x, play(sp.FedAvg(**common), problem, ROUNDS).x, EXACT)


def test_q_zero_is_fed_avg_where_a_client_has_no_loss_at_all():
    """0⁰ = 1 and 0·0⁻¹ = 0: a client that is served perfectly counts as in FedAvg."""
    data = unequal_clients("squared") | {"content": (np.ones((5, 6)), np.zeros(5))}
    problem = case("squared", data, l2=0.0)
    problem.x0[:] = 0.0
    common = {"local_steps": 3, "local_rate": problem.rate, "weights": "uniform"}
    assert problem.clients["content"].loss_at(problem.x0) == 0.0
    agree(
        play(sp.QFFL(q=0.0, **common), problem, 2).x, play(sp.FedAvg(**common), problem, 2).x, EXACT
    )


@pytest.mark.parametrize("q", [0.3, 1.0, 2.0])
def test_q_ffl_leaves_a_client_without_loss_alone(q):
    data = unequal_clients("squared") | {"content": (np.ones((5, 6)), np.zeros(5))}
    problem = case("squared", data, l2=0.0)
    problem.x0[:] = 0.0
    others = case("squared", unequal_clients("squared"), l2=0.0)
    others.x0[:] = 0.0
    common = {"q": q, "local_steps": 3, "local_rate": problem.rate, "weights": "uniform"}
    with_it = play(sp.QFFL(**common), problem, 1).x[0]
    without = play(sp.QFFL(**common), others, 1).x[0]
    assert relative(with_it, without) < EXACT


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("method", [sp.AFL, sp.DRFA])
def test_a_fair_method_on_one_mixture_is_fed_avg(loss, method):
    problem = case(loss)
    p = problem.weights("samples")
    objective = sp.Average(prior=[p[name] for name in problem.names])
    rates = {"local_rate": problem.rate, "local_steps": 4, "server_rate": 0.9}
    run = play(method(objective, dual_rate=0.3, **rates), problem, ROUNDS)
    agree(run.x, play(sp.FedAvg(**rates), problem, ROUNDS).x, EXACT)
    agree(run.weights, [list(p.values())] * ROUNDS, EXACT)


# ------------------------------------------------------------------ methods that become gradient descent

ALONE = {
    "FedAvg": lambda **common: sp.FedAvg(**common),
    "FedProx": lambda **common: sp.FedProx(mu=0.0 if common["local_steps"] > 1 else 0.7, **common),
    "Scaffold I": lambda **common: sp.Scaffold(option="I", **common),
    "Scaffold II": lambda **common: sp.Scaffold(option="II", **common),
    "AFL": lambda **common: sp.AFL(dual_rate=0.1, **common),
    "DRFA": lambda **common: sp.DRFA(dual_rate=0.1, **common),
    "DRFA of one": lambda **common: sp.DRFA(dual_rate=0.1, clients_per_round=1, **common),
    "QFFL": lambda **common: sp.QFFL(q=0.0, **common),
    "DeltaFL": lambda **common: sp.DeltaFL(tail=0.3, **common),
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_a_single_client_makes_gradient_steps(name, steps, loss):
    problem = alone(loss)
    run = play(ALONE[name](local_steps=steps, local_rate=problem.rate), problem, ROUNDS)
    expected = gradient_descent(
        problem.clients["many"].fast_gradient, problem.x0, problem.rate, ROUNDS, steps
    )
    moved(problem, expected)
    agree(run.x, expected, EXACT)
    agree(run.weights, [[1.0]] * ROUNDS, EXACT)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_prox_skip_of_a_single_client_makes_gradient_steps(loss):
    problem = alone(loss)
    run = play(sp.ProxSkip(local_steps=3, local_rate=problem.rate), problem, ROUNDS)
    x = problem.x0
    gradient = problem.clients["many"].fast_gradient
    for seen, call in zip(run.x, run.local, strict=True):
        x = gradient_descent(gradient, x, problem.rate, 1, call.plan.steps)[-1]
        assert relative(seen, x) < EXACT


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_one_local_step_is_gradient_descent_on_the_average(loss, weights):
    """With everybody there and one step, control variates cancel in the mean: Σ p_i (c − c_i) = 0."""
    problem = case(loss)
    common = {"local_steps": 1, "local_rate": problem.rate, "weights": weights}
    expected = gradient_descent(
        average_gradient(problem, weights), problem.x0, problem.rate, ROUNDS
    )
    moved(problem, expected)
    for method in (sp.FedAvg, sp.FedProx, sp.Scaffold, sp.ProxSkip):
        agree(play(method(**common), problem, ROUNDS).x, expected, 1e-11)
    agree(play(sp.Scaffold(option="I", **common), problem, ROUNDS).x, expected, 1e-11)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("steps", [1, 4])
def test_scaffold_of_twins_is_gradient_descent(option, steps):
    """Equal clients have equal c_i, so c − c_i = 0."""
    problem = twins()
    run = play(
        sp.Scaffold(option=option, local_steps=steps, local_rate=problem.rate), problem, ROUNDS
    )
    agree(
        run.x,
        gradient_descent(
            problem.clients["twin 0"].fast_gradient, problem.x0, problem.rate, ROUNDS, steps
        ),
        EXACT,
    )


@pytest.mark.parametrize("objective", [sp.Agnostic(), sp.ChiSquare(0.3)])
def test_drfa_of_twins_with_everybody_there_keeps_lambda_uniform(objective):
    problem = twins()
    run = play(
        sp.DRFA(objective, local_steps=4, local_rate=problem.rate, dual_rate=0.5), problem, ROUNDS
    )
    agree(
        run.x,
        gradient_descent(
            problem.clients["twin 0"].fast_gradient, problem.x0, problem.rate, ROUNDS, 4
        ),
        EXACT,
    )
    agree(run.weights, [np.full(4, 0.25)] * ROUNDS, EXACT)


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_saddle_methods_on_one_mixture_are_gradient_descent(loss, weights):
    problem = case(loss)
    tau = problem.rate
    gradient = average_gradient(problem, weights)
    objective = sp.Average(prior=list(problem.weights(weights).values()))
    expected = gradient_descent(gradient, problem.x0, tau, ROUNDS)
    moved(problem, expected)
    agree(
        play(
            sp.GradientDescentAscent(objective, server_rate=tau, dual_rate=0.1), problem, ROUNDS
        ).x,
        expected,
        EXACT,
    )
    accelerated = sp.ScaffPD(
        objective, local_steps=1, steps=sp.Fixed(tau=tau, sigma=0.1, theta=1.0)
    )
    agree(play(accelerated, problem, ROUNDS).x, expected, EXACT)
    looking_ahead = gradient_descent(
        lambda x: gradient(x - tau * gradient(x)), problem.x0, tau, ROUNDS
    )
    agree(
        play(sp.Extragradient(objective, server_rate=tau, dual_rate=0.1), problem, ROUNDS).x,
        looking_ahead,
        EXACT,
    )


# ------------------------------------------------------------------ relatives of Scaff-PD


def scaffold_with_fresh_variates(problem, weights, steps, rate, server_rate, rounds):
    """SCAFFOLD in which c_i = ∇f_i(x) and c = Σ p_i c_i are asked for anew before the local steps of every round."""
    x = problem.x0
    p = problem.weights(weights)
    iterates = []
    for _ in range(rounds):
        own = {name: f.fast_gradient(x) for name, f in problem.clients.items()}
        c = naive.mean_of(own, p)
        ends = {}
        for name, f in problem.clients.items():
            ends[name] = naive.descent(f, x, steps, rate, lambda j: None, shift=c - own[name])[-1]
        x = x + server_rate * (naive.mean_of(ends, p) - x)
        iterates.append(x)
    return iterates


@pytest.mark.cover(2)
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("steps", [1, 5])
def test_scaff_pd_on_the_average_is_scaffold_with_fresh_control_variates(loss, weights, steps):
    """With Λ = {p}, x⁺ = x − τ Σ p_i Δu_i with τ = η_g η_ℓ J is x + η_g Σ p_i (y_i − x)."""
    problem = case(loss)
    objective = sp.Average(prior=list(problem.weights(weights).values()))
    rule = sp.Fixed(tau=0.9 * problem.rate * steps, sigma=1.0, theta=1.0, local_rate=problem.rate)
    run = play(sp.ScaffPD(objective, local_steps=steps, steps=rule), problem, ROUNDS)
    expected = scaffold_with_fresh_variates(problem, weights, steps, problem.rate, 0.9, ROUNDS)
    moved(problem, expected)
    agree(run.x, expected, 1e-11)
    one_mixture = naive.one_point_prox(objective.prior)
    twice = naive.scaff_pd(
        problem.clients,
        problem.x0,
        ROUNDS,
        steps,
        problem.rate,
        rule.tau,
        1.0,
        1.0,
        one_mixture,
        objective.prior,
    )
    agree([x for x, _ in twice], expected, EXACT)


def test_scaffold_one_is_scaff_pd_on_the_average_with_variates_of_the_round_before():
    """Option I holds c_i = ∇f_i(x of the round before): the first rounds differ, the fixed point is the same."""
    data = synthetic(sizes=(5, 20, 50, 30, 9), sigma=1.0)
    problem = case("squared", numbered(data), l2=0.1)
    fresh = scaffold_with_fresh_variates(problem, "uniform", 5, problem.rate, 1.0, 170)
    run = play(sp.Scaffold(option="I", local_steps=5, local_rate=problem.rate), problem, 170)
    assert relative(run.x[0], fresh[0]) > 1e-3
    optimum = reference_optimum(data, "squared", 0.1, sp.Average()).x
    assert relative(fresh[-1], optimum) < 1e-5
    assert relative(run.x[-1], optimum) < 1e-5


@pytest.mark.parametrize("objective", [sp.Agnostic(), sp.ChiSquare(0.3)])
def test_afl_with_one_step_is_gradient_descent_ascent(objective):
    problem = case("logistic")
    sigma = problem.dual_rate
    afl = play(
        sp.AFL(objective, local_rate=problem.rate / 2, server_rate=2.0, dual_rate=sigma),
        problem,
        ROUNDS,
    )
    gda = play(
        sp.GradientDescentAscent(objective, server_rate=problem.rate, dual_rate=sigma),
        problem,
        ROUNDS,
    )
    agree(afl.x, gda.x, EXACT)
    agree(afl.weights, gda.weights, EXACT)


# ------------------------------------------------------------------ the same minimiser


@pytest.mark.cover(1)
@pytest.mark.parametrize("q", [0.5, 2.0])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_q_ffl_and_the_q_fair_objective_have_one_minimiser(q, weights):
    data = synthetic(d=5, sizes=(20, 40, 60, 30, 25), sigma=1.0)
    problem = case("squared", numbered(data), l2=0.1)
    p = list(problem.weights(weights).values())
    optimum = reference_optimum(data, "squared", 0.1, sp.QFair(q, prior=p)).x
    method = sp.QFFL(q=q, local_steps=1, local_rate=1.25 * problem.rate, weights=weights)
    found = sp.train(method, problem.cohort, rounds=120, x0=problem.x0).x
    assert relative(found, optimum) < 1e-5
    plain = reference_optimum(data, "squared", 0.1, sp.Average(prior=p)).x
    assert relative(plain, optimum) > 1e-2, "and that is another point than that of the average"
