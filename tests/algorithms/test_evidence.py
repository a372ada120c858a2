"""Strengths by evidence: against a dense Hessian, and direct maximisation."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch

import naive_evidence
from cases.refusals import refuses
from scaffpd.algorithms.evidence import Evidence, Prior, strengths
from scaffpd.algorithms.fair import fair
from scaffpd.models import Linear, Module, Personal, personalise
from scaffpd.objectives import Average
from scaffpd.privacy import Private
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import train

OUTPUTS = {"squared": 2, "logistic": 1, "softmax": 3, "poisson": 1}
GROUPS = ["a", "a", "b", "c", "intercept"]


def made(loss, sizes, tau, *, x=None, seed=0, noise=0.7, outputs=1):
    random = np.random.default_rng(seed)
    d = len(tau)
    x = random.standard_normal((d, outputs)) if x is None else np.reshape(x, (d, 1))
    clients = []
    for m in sizes:
        X = random.standard_normal((m, d - 1))
        u = x + np.sqrt(tau)[:, None] * random.standard_normal((d, outputs))
        Z = np.column_stack([X, np.ones(m)]) @ u
        if loss == "squared":
            y = Z + noise * random.standard_normal(Z.shape)
        elif loss == "softmax":
            y = (Z + random.gumbel(size=Z.shape)).argmax(1)
        elif loss == "logistic":
            y = (random.random(m) < 1 / (1 + np.exp(-Z[:, 0]))).astype(float)
        else:
            y = random.poisson(np.logaddexp(0, Z[:, 0])).astype(float)
        clients.append((X, y))
    return clients


def with_ones(clients):
    return [(np.column_stack([X, np.ones(len(X))]), y) for X, y in clients]


def bound(loss, clients, **options):
    classes = 3 if loss == "softmax" else None
    return Cohort(clients, Linear(loss, l2=0, intercept=True, classes=classes), **options)


def evaluated(problem, tau, omega, scale):
    """The exact mode: Newton steps until nothing moves, and then once more."""
    point = problem.mode(Prior(np.array(tau), np.array(omega), scale), problem.zero(), None, 1e-18)
    return problem.at(point.prior, point.x + point.step, point.question)


@pytest.mark.parametrize("loss", OUTPUTS)
def test_evidence_equals_that_of_a_dense_hessian(loss):
    """Clients with fewer rows than features and with more; a group of two features."""
    k = OUTPUTS[loss]
    clients = made(loss, (2, 3, 10, 40), np.full(5, 0.3), outputs=k)
    scale = 1.7 if loss == "squared" else 1.0
    each = np.array([0.5, 0.5, 2.0, 0.01, 0.3]), np.array([1.0, 1.0, 0.2, 3.0, 1e4])
    problem = Evidence(bound(loss, clients), GROUPS, loss, 1e-20)
    found = evaluated(problem, *each, scale)
    want, mode = naive_evidence.evidence(loss, with_ones(clients), *each, scale, k)
    assert found.evidence == pytest.approx(want, rel=1e-8)
    np.testing.assert_allclose(found.x.flatten(), mode[: 5 * k], atol=1e-8)
    if loss == "squared":
        check_slopes(problem, found, clients, each, scale, k)


def check_slopes(problem, found, clients, each, scale, k, e=1e-4):
    """The sums of the fixed point are derivatives of the evidence."""
    size, freedom, _ = problem.moments(found)
    halves = ((size - freedom) / 2).reshape(2, 5)
    for which in (0, 1):
        for j in range(5):
            sides = []
            for sign in (1, -1):
                own = [v.copy() for v in each]
                own[which][j] *= np.exp(sign * e)
                args = "squared", with_ones(clients), *own, scale, k
                sides.append(naive_evidence.evidence(*args)[0])
            assert halves[which][j] == pytest.approx((sides[0] - sides[1]) / (2 * e), abs=1e-5)


def test_logistic_strengths_are_near_the_maximum_of_laplaces_evidence():
    """The fixed point leaves out how the curvature moves with τ; with 30 rows a client that costs
    little evidence.
    """
    clients = made("logistic", (30,) * 10, np.array([0.8, 0.3, 0.5]), x=[1.0, -0.5, 0.2])
    groups = ["a", "b", "intercept"]
    found = strengths(bound("logistic", clients), groups, "logistic", worth=-np.inf, tol=1e-8)

    def minus(theta):
        tau = np.exp(theta[:3])
        omega = np.append(np.exp(theta[3:]), found.omega[2])
        return -naive_evidence.evidence("logistic", with_ones(clients), tau, omega)[0]

    start = np.log(np.concatenate([np.maximum(found.tau, 1e-3), found.omega[:2]]))
    assert -minus(start) == pytest.approx(found.evidence, abs=1e-2)
    bounds = [(-9, 5)] * 5
    options = {"eps": 1e-3, "maxiter": 25}
    best = scipy.optimize.minimize(minus, start, method="L-BFGS-B", bounds=bounds, options=options)
    assert -best.fun - found.evidence < 0.3


@pytest.mark.parametrize("loss", OUTPUTS)
def test_the_unit_of_a_column_does_not_matter(loss):
    clients = made(loss, (12, 30, 8, 25, 14, 9, 20, 11), np.array([0.5, 0.0, 0.5, 0.3]), seed=3)
    factors = np.array([1e3, 0.02, 7.0])
    scaled = [(X * factors, y) for X, y in clients]
    plain, other = (
        strengths(bound(loss, rows), ["a", "b", "c", "intercept"], loss)
        for rows in (clients, scaled)
    )
    assert other.evidence == pytest.approx(plain.evidence, abs=1e-5)
    back = torch.from_numpy(np.append(factors, 1.0))[:, None]
    k = len(plain.x) // 4
    assert torch.allclose(other.x.view(-1, k) * back, plain.x.view(-1, k), atol=1e-5)
    np.testing.assert_allclose(other.tau * back[:, 0].numpy() ** 2, plain.tau, rtol=1e-4)


def test_clients_that_do_not_differ_share_all_coefficients():
    clients = made("squared", (200,) * 10, np.zeros(4), seed=5)
    found = strengths(bound("squared", clients), ["a", "b", "c", "intercept"], "squared")
    shared = found.freedom < 3
    assert shared.all()
    assert np.isinf(found.strength[found.tau == 0]).all()
    one = strengths(
        bound("squared", clients),
        ["a", "b", "c", "intercept"],
        "squared",
        strength=np.full(4, np.inf),
    )
    assert np.isinf(one.strength).all()
    assert torch.allclose(one.x, found.x, atol=0.02)


def test_one_client_has_nobody_to_differ_from():
    clients = made("logistic", (50,), np.zeros(3))
    found = strengths(bound("logistic", clients), ["a", "b", "intercept"], "logistic")
    assert np.isinf(found.strength).all()
    assert np.isfinite(found.l2).all()


@pytest.mark.parametrize("loss", OUTPUTS)
@pytest.mark.parametrize("sizes", [(6, 9), (25, 40, 3), (5,) * 8])
def test_awkward_columns_and_clients(loss, sizes):
    """A constant column, one of zeros, a duplicate, and clients with one class or constant y."""
    clients = []
    for X, y in made(loss, sizes, np.full(3, 0.4)):
        extra = np.column_stack([X, np.full(len(X), 3.0), np.zeros(len(X)), X[:, 0]])
        clients.append((extra, y))
    clients[0] = (clients[0][0], np.zeros_like(clients[0][1]))
    groups = ["a", "b", "constant", "zeros", "again", "intercept"]
    found = strengths(bound(loss, clients), groups, loss)
    assert np.isfinite(found.evidence)
    assert np.isfinite(found.l2).all()
    assert (found.l2 > 0).all()
    assert not np.isnan(found.strength).any()
    assert torch.isfinite(found.x).all()
    assert found.rounds < 60


def test_separated_clients_are_capped():
    """Every client is separated by the same column: no coefficient runs away."""
    random = np.random.default_rng(0)
    clients = []
    for _ in range(8):
        X = random.standard_normal((20, 2))
        clients.append((X, (X[:, 0] > 0).astype(float)))
    found = strengths(bound("logistic", clients), ["a", "b", "intercept"], "logistic")
    assert found.omega[0] <= 110
    assert 3 < found.x[0] < 40


def test_refusals():
    clients = made("logistic", (5, 6), np.full(3, 0.4))
    with refuses("groups-length"):
        strengths(bound("logistic", clients), ["a", "b"], "logistic")
    network = Module(torch.nn.Linear(2, 2).double())
    labels = [(X, y.astype(int)) for X, y in clients]
    with refuses("evidence-not-linear"):
        strengths(Cohort(labels, network), ["a", "b", "intercept"], "softmax")


def test_a_cohort_settles_what_its_model_leaves_to_the_data():
    """Training for the clients' sizes then ends at the mode."""
    sizes = np.array([30, 12, 45, 20, 8, 33, 27, 15])
    clients = made("logistic", sizes, np.array([0.8, 0.0, 0.5]))
    cohort = Cohort(clients, Personal(Linear("logistic", "auto", intercept=True)))
    found = cohort.strengths
    assert cohort.model.strength == tuple(found.strength)
    assert cohort.model.model.l2 == tuple(found.l2)
    assert found.l2[-1] < 1e-6 * found.l2[:-1].min()
    result = train(fair(Average(prior=sizes / sizes.sum())), cohort, rounds=30, tol=1e-9)
    np.testing.assert_allclose(result.x, found.x, atol=5e-3)
    assert "shared" in str(found) or "intercept" in str(found)


def test_numbers_that_are_given_stay():
    clients = made("squared", (30, 12, 25, 20, 8, 33, 27, 15), np.array([0.8, 0.3, 0.5]))
    model = Linear("squared", 0.02, intercept=True)
    one = Cohort(clients, Personal(model, columns=[0, "intercept"]))
    assert one.model.model.l2 == 0.02
    assert np.isfinite(one.model.strength).tolist() == [True, False, True]
    other = Cohort(clients, Personal(replace(model, l2="auto"), 3.0))
    assert other.model.strength == 3.0
    assert len(other.model.model.l2) == 3
    np.testing.assert_allclose(other.strengths.strength, 3.0)
    assert Cohort(clients, model).strengths is None


def test_auto_is_refused_where_it_cannot_be():
    model = Linear("logistic", "auto")
    with refuses("private-evidence"):
        Private(model)
    with refuses("strength-not-one-number"):
        Personal(Module(torch.nn.Linear(2, 2)))
    with refuses("strength-not-settled"):
        personalise(np.zeros(2), np.zeros((3, 2)), np.zeros(3), Personal(model))
