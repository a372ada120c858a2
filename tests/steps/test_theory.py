"""`Theory` against the paper's conditions."""

import numpy as np
import pytest

import scaffpd as sp
from cases.reference import reference_optimum
from cases.refusals import refuses
from scaffpd.algorithms.steps.rules import StepProblem
from scaffpd.data import synthetic
from scaffpd.federation import Constants


def problem(objective, L=3.0, mu=0.1, norms=4.0, J=10, n=5):
    constants = Constants(np.full(n, L), np.full(n, mu), True, np.full(n, L), np.full(n, 10))
    return StepProblem(objective, constants, J, False, np.ones(n), lambda: np.full(n, norms))


@pytest.mark.parametrize("rho", [1e-3, 0.1, 10.0])
def test_sc_sc_satisfies_the_four_conditions(rho):
    L = 3.0
    mu = 0.1
    norms = 4.0
    n = 5
    rule = sp.Theory()
    state = rule.start(problem(sp.ChiSquare(rho), L, mu, norms, n=n))
    mu_dual = rho * n
    coupling = np.sqrt(norms * n)
    theta = state.theta
    ratio = (1 - theta) / theta
    assert mu * state.tau >= 4 * ratio * (1 - 1e-12)
    assert mu_dual * state.sigma >= ratio * (1 - 1e-12)
    pi = theta * state.sigma * coupling
    assert 1 / state.tau >= (12 * L + 2 * pi * theta * coupling) * (1 - 1e-12)
    assert 1 / state.sigma >= theta * coupling / pi * (1 - 1e-12)
    omega = 1 / (1 - theta)
    half = 0.5 + 24 * L / mu
    assert mu * mu_dual * omega**2 - (mu * mu_dual + 48 * mu_dual * L) * omega >= 8 * coupling**2
    assert np.isclose(omega, half + np.sqrt(half**2 + 16 * coupling**2 / (mu * mu_dual)))


def test_noise_shortens_constant_steps_as_far_as_the_accuracy_needs():
    objective = sp.ChiSquare(0.1)
    exact = sp.Theory().start(problem(objective))
    assert sp.Theory(noise=1e-3, accuracy=1.0).start(problem(objective)) == exact
    noisy = sp.Theory(noise=2.0, accuracy=1e-3).start(problem(objective, mu=0.1))
    assert 1 / (1 - noisy.theta) == pytest.approx(2.0**2 / (0.1 * 1e-3))
    assert 0.1 * noisy.tau == pytest.approx(4 * (1 - noisy.theta) / noisy.theta)
    free = problem(sp.Agnostic())
    assert sp.Theory(noise=2.0, accuracy=1e-3).start(free) == sp.Theory().start(free)
    for wrong in ({"noise": -1.0}, {"noise": np.nan}, {"accuracy": 0.0}):
        with refuses("theory-noise"):
            sp.Theory(**wrong)
    with refuses("accuracy-missing"):
        sp.Theory(noise=1.0)


def test_the_error_with_minibatches_is_the_one_asked_for():
    """From the optimum on, all of the error is noise; it follows ε, and stays below it."""
    cohort = sp.Cohort(synthetic(N=3, d=4, m=30, seed=1), sp.Linear("squared", l2=10.0))
    best = sp.train(sp.fair(sp.ChiSquare(0.1)), cohort, tol=1e-12).x
    errors = []
    for accuracy in (1e-2, 1e-4):
        steps = sp.Theory(noise=10.0, accuracy=accuracy)
        method = sp.ScaffPD(sp.ChiSquare(0.1), local_steps=2, batch_size=3, steps=steps)
        found = []
        watch = [lambda i, f=found: f.append(10.0 * ((i.state.x.numpy() - best) ** 2).sum())]
        sp.train(method, cohort, rounds=160, x0=best, callbacks=watch)
        errors.append(np.mean(found[60:]))
        assert errors[-1] < accuracy
    assert errors[1] < 0.1 * errors[0]


def test_sc_c_follows_condition_4_1():
    rule = sp.Theory()
    L = 3.0
    mu = 0.1
    coupling = np.sqrt(20.0)
    state = rule.start(problem(sp.Agnostic(), L, mu))
    tau0 = state.tau
    sigma0 = state.sigma
    assert 0.9 / tau0 >= (12 * L + 2 * coupling**2 * sigma0 / 0.9) * (1 - 1e-12)
    gamma = sigma0 / tau0
    for r in range(1, 200):
        previous, (state, accepted) = state, rule.judge(state, None)
        assert accepted
        gamma *= 1 + mu / 4 * previous.tau
        assert np.isclose(state.sigma / state.tau, gamma)
        assert np.isclose(state.theta, previous.sigma / state.sigma)
        assert np.isclose(state.tau * state.sigma, tau0 * sigma0)
        assert gamma >= (mu / 4 * tau0) ** 2 * (sigma0 / tau0) / 9 * r**2


@pytest.mark.parametrize("objective", [sp.ChiSquare(0.1), sp.ChiSquare(1e-4), sp.Agnostic()])
def test_the_local_rate_keeps_the_drift_below_what_the_proof_allows(objective):
    rule = sp.Theory()
    L = 3.0
    J = 25
    state = rule.start(problem(objective, L=L, J=J))
    for _ in range(50):
        rates = rule.rates(state)
        eta_g = rates.tau / (J * rates.local_rate)
        assert eta_g >= 1 - 1e-12
        assert (36 * rates.tau**2 * L + 2 * rates.tau**3 * L**2) / eta_g**2 <= rates.tau / 16 * (
            1 + 1e-9
        )
        state, _ = rule.judge(state, None)


def test_the_proved_linear_rate_is_kept():
    clients = synthetic()
    objective = sp.ChiSquare(0.1)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    optimum = reference_optimum(clients, "squared", 0.1, objective)
    algorithm = sp.ScaffPD(objective, local_steps=10, steps=sp.Theory())
    state = algorithm.init(cohort, 0)
    rule = state.rule

    def gap(s):
        primal = s.x.numpy() - optimum.x
        dual = s.weights - optimum.weights
        return primal @ primal / rule.tau + dual @ dual / rule.sigma

    start = gap(state)
    rounds = 200
    for _ in range(rounds):
        state = algorithm.round(cohort, state)
    assert np.sum((state.x.numpy() - optimum.x) ** 2) / rule.tau <= rule.theta**rounds * start
