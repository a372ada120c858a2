"""Scaff-PD against the paper's pseudo-code written out in NumPy, and its reductions to plain methods."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq

import scaffpd as sp
from cases.reference import reference_optimum
from scaffpd.data import synthetic

STEPS = sp.Fixed(tau=0.3, sigma=0.4, theta=0.8, local_rate=0.02)


def squared_loss(X, y, l2):
    m = len(X)
    return (
        lambda x: float(np.mean((X @ x - y) ** 2) + l2 / 2 * x @ x),
        lambda x: 2 * X.T @ (X @ x - y) / m + l2 * x,
    )


def logistic_loss(X, y, l2):
    m = len(X)
    return (
        lambda x: float(np.mean(np.logaddexp(0, X @ x) - y * (X @ x)) + l2 / 2 * x @ x),
        lambda x: X.T @ (1 / (1 + np.exp(-X @ x)) - y) / m + l2 * x,
    )


def chi_square_prox(s, center, sigma, rho):
    """argmin over the simplex by bisection on the multiplier, straight from the optimality conditions."""
    n = len(s)
    weights = lambda nu: np.maximum(0, (s + rho + center / sigma - nu) / (rho * n + 1 / sigma))
    low = np.min(s + rho + center / sigma) - n * (rho * n + 1 / sigma)
    high = np.max(s + rho + center / sigma)
    return weights(brentq(lambda nu: weights(nu).sum() - 1, low, high, xtol=1e-15, rtol=1e-15))


def q_fair_prox(s, center, sigma):
    """q = 1: min Σ λ²N/2 − sλ + (λ−l)²/(2σ) over λ ≥ 0."""
    n = len(s)
    return np.maximum(0, (s + center / sigma) / (n + 1 / sigma))


def algorithms_1_and_2(clients, loss, l2, prox, weights, steps, J, rounds):
    """The paper's pseudo-code, one client and one local step at a time."""
    functions = [loss(X, y, l2) for X, y in clients]
    x = np.zeros(clients[0][0].shape[1])
    L_previous = None
    iterates = []
    for _ in range(rounds):
        L = np.array([f(x) for f, _ in functions])
        c = [g(x) for _, g in functions]
        s = L + steps.theta * (L - (L if L_previous is None else L_previous))
        weights = prox(s, weights, steps.sigma)
        total = weights.sum()
        mean = sum(w * c_i for w, c_i in zip(weights, c, strict=True)) / total
        move = np.zeros_like(x)
        for w, (_, g), c_i in zip(weights, functions, c, strict=True):
            u = x.copy()
            for _ in range(J):
                u = u - steps.local_rate * (g(u) - c_i + mean)
            move += w * (x - u) / (steps.local_rate * J)
        x = x - steps.tau * move
        L_previous = L
        iterates.append((x, weights))
    return iterates


def trajectory(algorithm, cohort, rounds):
    """x^{r+1} and the λ^{r+1} that led to it, for every round."""
    seen = []
    state = algorithm.init(cohort, 0)
    for _ in range(rounds):
        used = state.weights
        state = algorithm.round(cohort, state)
        seen.append((state.x.numpy(), used))
    return seen


@pytest.mark.parametrize("J", [1, 2, 25])
def test_equals_the_pseudo_code_on_squared_losses(J):
    clients = synthetic(sizes=(5, 20, 50, 100, 9), sigma=1.0)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    algorithm = sp.ScaffPD(sp.ChiSquare(rho=0.05), local_steps=J, steps=STEPS)
    expected = algorithms_1_and_2(
        clients,
        squared_loss,
        0.1,
        lambda s, c, t: chi_square_prox(s, c, t, 0.05),
        np.full(5, 0.2),
        STEPS,
        J,
        8,
    )
    for (x, weights), (x_naive, naive) in zip(
        trajectory(algorithm, cohort, 8), expected, strict=True
    ):
        np.testing.assert_allclose(x, x_naive, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weights, naive, rtol=1e-10, atol=1e-12)


def test_equals_the_pseudo_code_on_logistic_losses():
    clients = [
        (X, (y > 0).astype(float)) for X, y in synthetic(sizes=(5, 20, 50, 100, 9), sigma=1.0)
    ]
    cohort = sp.Cohort(clients, sp.Linear("logistic", l2=0.1))
    steps = sp.Fixed(tau=1.0, sigma=2.0, theta=1.0, local_rate=0.2)
    algorithm = sp.ScaffPD(sp.ChiSquare(rho=0.01), local_steps=10, steps=steps)
    expected = algorithms_1_and_2(
        clients,
        logistic_loss,
        0.1,
        lambda s, c, t: chi_square_prox(s, c, t, 0.01),
        np.full(5, 0.2),
        steps,
        10,
        8,
    )
    for (x, weights), (x_naive, naive) in zip(
        trajectory(algorithm, cohort, 8), expected, strict=True
    ):
        np.testing.assert_allclose(x, x_naive, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weights, naive, rtol=1e-10, atol=1e-12)


def test_off_the_simplex_c_and_weights_enter_normalised():
    clients = synthetic(sigma=0.3)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    steps = sp.Fixed(tau=0.05, sigma=0.02, theta=0.5, local_rate=0.02)
    objective = sp.QFair(q=1.0)
    first = objective.start(cohort.gradients(cohort.start()).losses)
    expected = algorithms_1_and_2(clients, squared_loss, 0.1, q_fair_prox, first, steps, 10, 8)
    algorithm = sp.ScaffPD(objective, local_steps=10, steps=steps)
    for (x, weights), (x_naive, naive) in zip(
        trajectory(algorithm, cohort, 8), expected, strict=True
    ):
        np.testing.assert_allclose(x, x_naive, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weights, naive, rtol=1e-10, atol=1e-12)


def test_one_local_step_on_the_average_is_gradient_descent():
    clients = synthetic()
    algorithm = sp.ScaffPD(
        sp.Average(), local_steps=1, steps=sp.Fixed(tau=0.2, sigma=1.0, local_rate=0.1)
    )
    gradients = [squared_loss(X, y, 0.1)[1] for X, y in clients]
    x = np.zeros(10)
    for seen, _ in trajectory(algorithm, sp.Cohort(clients, sp.Linear("squared", l2=0.1)), 10):
        x = x - 0.2 * np.mean([g(x) for g in gradients], axis=0)
        np.testing.assert_allclose(seen, x, rtol=1e-12)


@pytest.mark.parametrize(
    "objective",
    [
        sp.Average(),
        sp.Agnostic(),
        sp.ChiSquare(0.1),
        sp.ChiSquareBall(0.5),
        sp.CVaR(0.5),
        sp.Tilted(0.1),
    ],
)
def test_a_single_client_makes_plain_local_gradient_steps(objective):
    (X, y), *_ = synthetic()
    gradient = squared_loss(X, y, 0.1)[1]
    steps = sp.Fixed(
        tau=5 * 0.05, sigma=1.0, theta=1.0, local_rate=0.05
    )  # τ = J η: x⁺ is where the client ended
    algorithm = sp.ScaffPD(objective, local_steps=5, steps=steps)
    x = np.zeros(10)
    for seen, weights in trajectory(
        algorithm, sp.Cohort([(X, y)], sp.Linear("squared", l2=0.1)), 6
    ):
        for _ in range(5):
            x = x - 0.05 * gradient(x)
        np.testing.assert_allclose(seen, x, rtol=1e-11)
        np.testing.assert_allclose(weights, [1.0])


def test_a_round_costs_two_exchanges():
    cohort = sp.Cohort(synthetic(), sp.Linear("squared", l2=0.1))
    algorithm = sp.ScaffPD(sp.ChiSquare(0.1), steps=STEPS)
    history = sp.train(algorithm, cohort, rounds=7).history
    exchanges, up, down = (history[name] for name in ("exchanges", "bytes_up", "bytes_down"))
    np.testing.assert_array_equal(np.diff(exchanges), 2)
    np.testing.assert_array_equal(np.diff(down), 8 * 5 * 20)  # x and c to five clients
    np.testing.assert_array_equal(
        np.diff(up), 8 * 5 * 23
    )  # c_i, L_i, two bounds on rounding, and the update back


@pytest.mark.sample(2)
@pytest.mark.cover(1)
@pytest.mark.parametrize("rho", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("steps", ["auto", "fixed"])
def test_linear_convergence_on_the_papers_problem(rho, steps):
    clients = synthetic()
    objective = sp.ChiSquare(rho)
    optimum = reference_optimum(clients, "squared", 0.1, objective)
    rule = (
        sp.Auto()
        if steps == "auto"
        else sp.Fixed(tau=0.15, sigma=2.0, theta=0.0, local_rate=0.15 / 100)
    )
    distances = []
    sp.train(
        sp.ScaffPD(objective, local_steps=100, steps=rule),
        sp.Cohort(clients, sp.Linear("squared", l2=0.1)),
        rounds=140,
        callbacks=[lambda m: distances.append(float(np.sum((m.state.x.numpy() - optimum.x) ** 2)))],
    )
    distances = np.array(distances)
    reached = int(np.argmax(distances <= 1e-20))
    assert distances.min() <= 1e-20
    assert distances[-1] <= 1e-20, "it must stay there"
    # linear: log distance against the round is a straight line down to 1e-20
    rounds = np.arange(reached)
    assert np.polyfit(rounds, np.log(distances[:reached]), 1)[0] < 0
    assert np.corrcoef(rounds, np.log(distances[:reached]))[0, 1] < -0.95


@pytest.mark.sample(2)
@pytest.mark.parametrize(("batch_size", "tol"), [(1, 3e-2), (16, 3e-3), (1000, 1e-8)])
def test_minibatch_steps_with_full_control_variates_stay_certified(batch_size, tol):
    clients = synthetic(sigma=0.3)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    algorithm = sp.ScaffPD(sp.ChiSquare(0.1), local_steps=20, batch_size=batch_size)
    result = sp.train(algorithm, cohort, rounds=600, tol=tol)
    optimum = reference_optimum(clients, "squared", 0.1, sp.ChiSquare(0.1))
    assert result.status == "converged"
    value = sp.ChiSquare(0.1).support(cohort.evaluate(result.x).loss)
    assert value - optimum.value <= result.certificate


def test_fully_stochastic_runs_have_no_certificate_and_settle_at_a_floor_that_falls_with_the_batch():
    clients = synthetic(sigma=0.3)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    optimum = reference_optimum(clients, "squared", 0.1, sp.ChiSquare(0.1))
    floors = []
    for batch_size in (4, 64):
        steps = sp.Fixed(tau=0.1, sigma=0.1, theta=0.0, local_rate=0.01)
        algorithm = sp.ScaffPD(
            sp.ChiSquare(0.1),
            local_steps=10,
            batch_size=batch_size,
            steps=steps,
            full_gradients=False,
        )
        distances = []
        result = sp.train(
            algorithm,
            cohort,
            rounds=70,
            callbacks=[
                lambda m, d=distances: d.append(float(np.sum((m.state.x.numpy() - optimum.x) ** 2)))
            ],
        )
        floors.append(np.mean(distances[-35:]))
        assert result.certificate == np.inf
        assert "minibatch" in result.message
    assert floors[1] < floors[0] / 4


def test_steps_that_are_rejected_are_counted_and_change_nothing():
    clients = synthetic(sigma=1.0, seed=3, scaling=1.0)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.01))
    result = sp.train(sp.ScaffPD(sp.Agnostic(), local_steps=1), cohort, rounds=200)
    rejected = np.flatnonzero(~result.history["accepted"])
    assert len(rejected) > 0
    np.testing.assert_array_equal(
        result.history.losses[rejected], result.history.losses[rejected - 1]
    )
    assert set(np.diff(result.history["exchanges"])) <= {1, 3}, (
        "one, and two turns of scalars where losses are all rounding"
    )
