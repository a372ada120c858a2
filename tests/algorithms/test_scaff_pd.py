"""Scaff-PD converges as the paper says, with minibatches too; test_zoo.py has its pseudo-code."""

import numpy as np
import pytest

import scaffpd as sp
from cases.reference import reference_optimum
from scaffpd.data import synthetic

CHI = sp.ChiSquare(0.1)


def cohort(**data):
    return sp.Cohort(synthetic(**data), sp.Linear("squared", l2=0.1))


def distances(method, federation, optimum, rounds):
    """‖x − x*‖² after every round, and the result."""
    found = []
    note = lambda now: found.append(float(np.sum((now.state.x.numpy() - optimum.x) ** 2)))
    result = sp.train(method, federation, rounds=rounds, callbacks=[note])
    return np.array(found), result


@pytest.mark.sample(2)
@pytest.mark.parametrize("rho", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("rule", [sp.Auto(), sp.Fixed(0.15, 2.0, 0.0, 0.15 / 100)], ids=repr)
def test_linear_convergence_on_the_papers_problem(rho, rule):
    """Log distance against the round is a straight line down to 1e-20, where it stays."""
    objective = sp.ChiSquare(rho)
    optimum = reference_optimum(synthetic(), "squared", 0.1, objective)
    method = sp.ScaffPD(objective, local_steps=100, steps=rule)
    found, _ = distances(method, cohort(), optimum, 140)
    assert found[-1] <= 1e-20
    reached = int(np.argmax(found <= 1e-20))
    rounds = np.arange(reached)
    assert np.corrcoef(rounds, np.log(found[:reached]))[0, 1] < -0.95


@pytest.mark.sample(2)
@pytest.mark.parametrize(("batch_size", "tol"), [(1, 3e-2), (16, 3e-3), (1000, 1e-8)])
def test_minibatch_steps_with_full_control_variates_stay_certified(batch_size, tol):
    federation = cohort(sigma=0.3)
    method = sp.ScaffPD(CHI, local_steps=20, batch_size=batch_size)
    result = sp.train(method, federation, rounds=600, tol=tol)
    assert result.status == "converged"
    optimum = reference_optimum(synthetic(sigma=0.3), "squared", 0.1, CHI)
    assert CHI.support(federation.evaluate(result.x).loss) - optimum.value <= result.certificate


def test_fully_stochastic_runs_have_no_certificate_and_a_floor_that_falls_with_the_batch():
    optimum = reference_optimum(synthetic(sigma=0.3), "squared", 0.1, CHI)
    rule = sp.Fixed(tau=0.1, sigma=0.1, theta=0.0, local_rate=0.01)
    floors = []
    for batch_size in (4, 64):
        method = sp.ScaffPD(CHI, 10, batch_size, steps=rule, full_gradients=False)
        found, result = distances(method, cohort(sigma=0.3), optimum, 70)
        floors.append(np.mean(found[-35:]))
        assert result.certificate == np.inf
        assert "minibatch" in result.message
    assert floors[1] < floors[0] / 4


def test_steps_that_are_rejected_are_counted_and_change_nothing():
    clients = synthetic(sigma=1.0, seed=3, scaling=1.0)
    federation = sp.Cohort(clients, sp.Linear("squared", l2=0.01))
    history = sp.train(sp.ScaffPD(sp.Agnostic(), local_steps=1), federation, rounds=200).history
    rejected = np.flatnonzero(~history["accepted"])
    assert len(rejected) > 0
    np.testing.assert_array_equal(history.losses[rejected], history.losses[rejected - 1])
    # One exchange, and two turns of scalars where losses are all rounding.
    assert set(np.diff(history["exchanges"])) <= {1, 3}
