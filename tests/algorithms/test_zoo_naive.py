"""Every method against its paper's pseudo-code in plain NumPy, with the method's own draws handed to the naive loop."""

from __future__ import annotations

import naive_zoo as naive
import numpy as np
import pytest
from zoo_cases import OUTPUTS, agree, case, moved, play

import scaffpd as sp

ROUNDS = 4
LOSSES = tuple(OUTPUTS)
# batch size, clients per round, weights
SETTINGS = [
    (None, None, "samples"),
    (None, None, "uniform"),
    (None, 4, "samples"),
    (3, None, "uniform"),
    (3, 4, "samples"),
    (3, 4, "uniform"),
]
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_setting = pytest.mark.parametrize(("batch_size", "chosen", "weights"), SETTINGS)
every_batch = pytest.mark.parametrize("batch_size", [None, 3])
RHO = 0.7
OBJECTIVES = {
    "agnostic": (sp.Agnostic(), naive.agnostic_prox),
    "chi-square": (sp.ChiSquare(RHO), naive.chi_square_prox(RHO)),
    "q-fair": (sp.QFair(1.0), naive.q_fair_prox),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def common(problem, batch_size, chosen, weights):
    """Keyword arguments of the package's methods."""
    return {
        "batch_size": batch_size,
        "clients_per_round": chosen,
        "weights": weights,
        "local_rate": problem.rate,
    }


def sampled(run, chosen):
    """Clients really were sampled, and not the same ones every time."""
    if chosen is not None:
        assert {len(set(names)) for names in run.participants} == {chosen}
        assert len({tuple(sorted(names)) for names in run.participants}) > 1


def first_losses(run, problem):
    """(round, name) → the rows of the losses that a round asked for, where it asked for any on a minibatch."""
    asked = [
        [*a, *b] for a, b in zip(run.questions("losses"), run.questions("gradients"), strict=True)
    ]
    return lambda r, name: problem.rows(asked[r][0].key, name, asked[r][0].batch_size)


@every_loss
def test_the_quick_arithmetic_is_that_of_the_loops_over_samples(loss):
    problem = case(loss)
    for f in problem.clients.values():
        for rows in (None, np.zeros(3, dtype=int), np.arange(len(f.A))[::2]):
            value, gradient = f.value_and_gradient(problem.x0, rows)
            np.testing.assert_allclose(naive.loss_of(f, problem.x0, rows), value, rtol=1e-13)
            np.testing.assert_allclose(
                f.fast_gradient(problem.x0, rows), gradient, rtol=1e-11, atol=1e-13
            )


# ------------------------------------------------------------------ averages


@pytest.mark.cover(1)
@every_loss
@every_setting
def test_fed_avg(loss, batch_size, chosen, weights):
    problem = case(loss)
    method = sp.FedAvg(
        local_steps=5, server_rate=0.9, **common(problem, batch_size, chosen, weights)
    )
    run = play(method, problem, ROUNDS)
    sampled(run, chosen)
    expected = naive.fed_avg(
        problem.clients,
        problem.x0,
        ROUNDS,
        5,
        problem.rate,
        problem.weights(weights),
        run.participants,
        run.batches(problem),
        server_rate=0.9,
    )
    moved(problem, expected)
    agree(run.x, expected)


@pytest.mark.cover(1)
@every_loss
@every_setting
def test_fed_prox(loss, batch_size, chosen, weights):
    problem = case(loss)
    mu = 0.1 / problem.rate
    method = sp.FedProx(
        mu=mu, local_steps=5, server_rate=0.9, **common(problem, batch_size, chosen, weights)
    )
    run = play(method, problem, ROUNDS)
    sampled(run, chosen)
    expected = naive.fed_prox(
        problem.clients,
        problem.x0,
        ROUNDS,
        5,
        problem.rate,
        problem.weights(weights),
        mu,
        run.participants,
        run.batches(problem),
        server_rate=0.9,
    )
    moved(problem, expected)
    agree(run.x, expected)


@pytest.mark.cover(2)
@every_loss
@every_setting
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold(loss, batch_size, chosen, weights, option):
    problem = case(loss)
    method = sp.Scaffold(
        option=option,
        local_steps=5,
        server_rate=0.9,
        **common(problem, batch_size, chosen, weights),
    )
    run = play(method, problem, ROUNDS)
    sampled(run, chosen)
    fresh = run.questions("gradients")
    expected = naive.scaffold(
        problem.clients,
        problem.x0,
        ROUNDS,
        5,
        problem.rate,
        problem.weights(weights),
        option,
        run.participants,
        run.batches(problem),
        lambda r, name: problem.rows(fresh[r][0].key, name, batch_size),
        server_rate=0.9,
    )
    moved(problem, expected)
    agree(run.x, expected)


@pytest.mark.cover(2)
@every_loss
@every_batch
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_prox_skip(loss, batch_size, weights):
    problem = case(loss)
    method = sp.ProxSkip(
        local_steps=4, batch_size=batch_size, local_rate=problem.rate, weights=weights
    )
    run = play(method, problem, ROUNDS)
    steps = [call.plan.steps for call in run.local]
    assert len(set(steps)) > 1, "the number of local steps is random"
    expected = naive.scaffnew(
        problem.clients,
        problem.x0,
        steps,
        1 / 4,
        problem.rate,
        problem.weights(weights),
        run.batches(problem),
    )
    moved(problem, expected)
    agree(run.x, expected)


# ------------------------------------------------------------------ the worst mixture


@pytest.mark.cover(2)
@every_loss
@every_batch
@every_objective
@pytest.mark.parametrize("steps", [1, 5])
def test_afl(loss, batch_size, objective, steps):
    problem = case(loss)
    chosen, prox = OBJECTIVES[objective]
    method = sp.AFL(
        chosen,
        local_steps=steps,
        batch_size=batch_size,
        local_rate=problem.rate,
        server_rate=0.9,
        dual_rate=problem.dual_rate,
    )
    run = play(method, problem, ROUNDS)
    expected = naive.afl(
        problem.clients,
        problem.x0,
        ROUNDS,
        problem.rate,
        problem.dual_rate,
        steps,
        prox,
        run.batches(problem),
        first_losses(run, problem),
        server_rate=0.9,
        start=run.states[0].weights,
    )
    moved(problem, [x for x, _ in expected])
    agree(run.x, [x for x, _ in expected])
    agree(run.weights, [w for _, w in expected])


@pytest.mark.cover(2)
@every_loss
@every_batch
@every_objective
@pytest.mark.parametrize("chosen", [None, 4])
def test_drfa(loss, batch_size, objective, chosen):
    problem = case(loss)
    kind, prox = OBJECTIVES[objective]
    method = sp.DRFA(
        kind,
        local_steps=5,
        batch_size=batch_size,
        local_rate=problem.rate,
        clients_per_round=chosen,
        dual_rate=problem.dual_rate / 5,
        server_rate=0.9,
    )
    run = play(method, problem, ROUNDS)
    snapshots = [call.plan.snapshot for call in run.local]
    assert len(set(snapshots)) > 1
    asked = [calls[0] for calls in run.questions("losses")]
    drawn = None
    if chosen is not None:
        drawn = [names_drawn(call, problem.names, chosen) for call in run.local]
        assert all(len(call.clients) == len(set(call.clients)) == chosen for call in asked)
    expected = naive.drfa(
        problem.clients,
        problem.x0,
        ROUNDS,
        5,
        problem.rate,
        problem.dual_rate / 5,
        snapshots,
        drawn,
        [call.clients for call in asked],
        run.batches(problem),
        lambda r, name: problem.rows(asked[r].key, name, asked[r].batch_size),
        prox,
        server_rate=0.9,
        start=run.states[0].weights,
    )
    moved(problem, [x for x, _ in expected])
    agree(run.x, [x for x, _ in expected])
    agree(run.weights, [w for _, w in expected])


def names_drawn(call, names, chosen):
    """D with its repetitions, from the weights (how often drawn)/m that the server summed with."""
    times = np.rint(chosen * call.sums[0]).astype(int)
    np.testing.assert_allclose(times / chosen, call.sums[0], rtol=1e-14)
    assert times.sum() == chosen
    return list(np.repeat(names, times))


# ------------------------------------------------------------------ other fair methods


@pytest.mark.cover(2)
@every_loss
@pytest.mark.parametrize("chosen", [None, 4])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("q", [0.0, 0.5, 3.0])
def test_q_fed_sgd(loss, chosen, weights, q):
    problem = case(loss)
    method = sp.QFFL(q=q, local_steps=1, **common(problem, None, chosen, weights))
    run = play(method, problem, ROUNDS)
    sampled(run, chosen)
    expected = naive.q_fed_sgd(
        problem.clients,
        problem.x0,
        ROUNDS,
        q,
        1 / problem.rate,
        problem.weights(weights),
        run.participants,
    )
    moved(problem, expected)
    agree(run.x, expected)


@pytest.mark.sample(9)
@pytest.mark.cover(2)
@every_loss
@every_setting
@pytest.mark.parametrize("q", [0.5, 2.0])
def test_q_fed_avg(loss, batch_size, chosen, weights, q):
    """F_k is over all rows of a client, whatever its local steps look at."""
    problem = case(loss)
    method = sp.QFFL(q=q, local_steps=5, **common(problem, batch_size, chosen, weights))
    run = play(method, problem, ROUNDS)
    sampled(run, chosen)
    expected = naive.q_fed_avg(
        problem.clients,
        problem.x0,
        ROUNDS,
        q,
        5,
        problem.rate,
        problem.weights(weights),
        run.participants,
        run.batches(problem),
    )
    moved(problem, expected)
    agree(run.x, expected)


@pytest.mark.sample(9)
@pytest.mark.cover(2)
@every_loss
@every_setting
@pytest.mark.parametrize("tail", [0.31, 0.57])
def test_delta_fl(loss, batch_size, chosen, weights, tail):
    problem = case(loss)
    method = sp.DeltaFL(
        tail=tail, local_steps=5, server_rate=0.9, **common(problem, batch_size, chosen, weights)
    )
    run = play(method, problem, ROUNDS)
    sampled_clients = [calls[0].clients for calls in run.questions("losses")]
    expected = naive.delta_fl(
        problem.clients,
        problem.x0,
        ROUNDS,
        5,
        problem.rate,
        problem.weights(weights),
        tail,
        sampled_clients,
        run.batches(problem),
        server_rate=0.9,
    )
    moved(problem, expected)
    agree(run.x, expected)


# ------------------------------------------------------------------ saddle points without local steps


@pytest.mark.cover(1)
@every_loss
@every_objective
def test_gradient_descent_ascent(loss, objective):
    problem = case(loss)
    kind, prox = OBJECTIVES[objective]
    tau = problem.rate
    sigma = problem.dual_rate
    run = play(sp.GradientDescentAscent(kind, server_rate=tau, dual_rate=sigma), problem, ROUNDS)
    first = run.states[0].weights
    expected = naive.gradient_descent_ascent(
        problem.clients, problem.x0, ROUNDS, tau, sigma, prox, first
    )
    moved(problem, [x for x, _ in expected])
    agree(run.x, [x for x, _ in expected])
    agree(run.weights, [w for _, w in expected])


@pytest.mark.cover(1)
@every_loss
@every_objective
def test_extragradient(loss, objective):
    problem = case(loss)
    kind, prox = OBJECTIVES[objective]
    tau = problem.rate
    sigma = problem.dual_rate
    run = play(sp.Extragradient(kind, server_rate=tau, dual_rate=sigma), problem, ROUNDS)
    first = run.states[0].weights
    expected = naive.extragradient(problem.clients, problem.x0, ROUNDS, tau, sigma, prox, first)
    moved(problem, [x for x, _ in expected])
    agree(run.x, [x for x, _ in expected])
    agree(run.weights, [w for _, w in expected])


@pytest.mark.cover(2)
@every_loss
@every_objective
@pytest.mark.parametrize("theta", [0.0, 0.8])
def test_accelerated_primal_dual(loss, objective, theta):
    problem = case(loss)
    kind, prox = OBJECTIVES[objective]
    tau = problem.rate
    sigma = problem.dual_rate
    steps = sp.Fixed(tau=tau, sigma=sigma, theta=theta)
    run = play(sp.ScaffPD(kind, local_steps=1, steps=steps), problem, ROUNDS)
    first = kind.start(naive.losses_at(problem.clients, problem.x0))
    expected = naive.accelerated_primal_dual(
        problem.clients, problem.x0, ROUNDS, tau, sigma, theta, prox, first
    )
    moved(problem, [x for x, _ in expected])
    agree(run.x, [x for x, _ in expected])
    # A state holds the dual step at its x: λ of this round's x step is that of the state before.
    agree([state.weights for state in run.states[:-1]], [w for _, w in expected])


# ------------------------------------------------------------------ rates that nobody gave


@every_loss
@every_batch
def test_the_automatic_local_rate_is_one_over_the_largest_smoothness(loss, batch_size):
    """L_i, or with minibatches of b rows L_i + (max_j L_ij − L_i)/b, unless a client has no more than b rows."""
    problem = case(loss)
    steepness = []
    for f in problem.clients.values():
        rows = [
            type(f)(f.A[j : j + 1], f.y[j : j + 1], f.loss, f.l2, f.k).smoothness
            for j in range(len(f.A))
        ]
        drawn = batch_size is not None and len(f.A) > batch_size
        steepness.append(
            f.smoothness + max(0.0, max(rows) - f.smoothness) / batch_size
            if drawn
            else f.smoothness
        )
    expected = 1 / max(steepness)
    for method in (sp.FedAvg, sp.Scaffold, sp.ProxSkip, sp.QFFL, sp.DeltaFL, sp.AFL, sp.DRFA):
        found = method(batch_size=batch_size).automatic(problem.cohort)["local_rate"]
        assert found == pytest.approx(expected, rel=1e-9)
        run = play(method(batch_size=batch_size, local_steps=2), problem, 1)
        assert run.local[0].plan.rate == pytest.approx(expected, rel=1e-9)
    pulled = sp.FedProx(mu=3.0, batch_size=batch_size).automatic(problem.cohort)["local_rate"]
    assert pulled == pytest.approx(1 / (max(steepness) + 3.0), rel=1e-9)
