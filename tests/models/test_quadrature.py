"""Adaptive quadrature against direct integrals, published results of glmer, and simulated truth."""

import numpy as np
import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy.optimize import minimize
from scipy.special import expit, logsumexp

import scaffpd as sp
from scaffpd.algorithms.evidence import Evidence, Prior
from scaffpd.models.losses import loss_named
from scaffpd.models.quadrature import Posterior, Rows

# lme4's cbpp: new cases and animals, by herd and period (Lesnoff et al. 2004)
CBPP = """2/14 3/12 4/9 0/5|3/22 1/18 1/21 -|8/22 2/16 0/16 2/20|2/10 0/10 2/9 0/6|
5/18 0/25 0/24 1/4|3/17 0/17 0/18 1/20|8/16 1/10 3/9 0/5|12/34 - - -|2/9 0/6 0/8 0/6|
1/22 1/22 0/18 2/22|0/25 5/27 3/22 1/22|2/10 1/8 0/6 0/5|1/21 2/24 0/19 0/23|
11/19 0/2 0/3 0/2|1/19 1/15 1/15 0/15"""

# geepack's respiratory (Koch et al. 1990): patients with 0 … 4 good visits, treated first, by
# whether the status before was good
VISITS = [[[7, 7, 2, 7, 7], [0, 0, 2, 5, 17]], [[18, 4, 3, 3, 3], [1, 5, 5, 5, 10]]]
# MASS's epil (Thall & Vail 1990): seizures in 8 weeks before and during placebo | progabide
SEIZURES = """11/14 11/14 6/11 8/13 66/55 27/22 12/12 52/93 23/22 10/33 52/66 33/30 18/16 42/42
87/59 50/16 18/6 111/123 18/15 20/16 12/14 9/14 17/13 28/30 55/143 9/6 10/10 47/53 |
76/42 38/28 19/7 10/13 19/19 24/11 31/74 14/20 11/10 67/24 41/29 7/4 22/6 13/12 46/65
36/26 38/39 7/7 36/32 11/3 151/302 22/13 41/26 32/10 56/70 24/13 16/15 22/51 25/6 13/0 12/10"""
# ordinal's wine (Randall 1989): a judge's bitterness of two cold bottles, two with contact of
# juice and skins, two warm ones, and two with both
BITTER = """23344455 12132354 23325544 32323253 23433333 32322454 11222323 22233334 12323244"""


def herds():
    found = []
    for line in CBPP.replace("\n", "").split("|"):
        cells = [
            (k, *map(int, cell.split("/"))) for k, cell in enumerate(line.split()) if cell != "-"
        ]
        X = np.concatenate([np.tile(np.eye(4)[k, 1:], (n, 1)) for k, _, n in cells])
        y = np.concatenate([np.arange(n) < cases for _, cases, n in cells]).astype(float)
        found.append((X, y))
    return found


def likelihood(clients, log, nodes=80):
    """The fit of x and √τ of the intercept by plain Gauss-Hermite with 80 nodes."""
    t, w = hermegauss(nodes)
    w = np.log(w / w.sum())

    def value(at):
        z = [X @ at[:-2] + at[-2] for X, _ in clients]
        logs = (
            log(own[:, None] + np.exp(at[-1]) * t, y[:, None]).sum(0)
            for own, (_, y) in zip(z, clients, strict=True)
        )
        return -sum(logsumexp(one + w) for one in logs)

    found = minimize(value, np.zeros(clients[0][0].shape[1] + 2), method="BFGS").x
    return found[:-1], np.exp(found[-1])


def bernoulli(z, y):
    return y * z - np.logaddexp(0, z)


def fitted(clients, loss="logistic", **options):
    cohort = sp.Cohort(clients, sp.Linear(loss, intercept=True, **options))
    return sp.coefficients(cohort, effects="intercepts", restricted=False)


def test_herds_are_those_of_glmer():
    """cbind(incidence, size − incidence) ~ period + (1 | herd), binomial: as lme4 1.1 prints it by
    Laplace's approximation (nAGQ = 1), and with 80 nodes.
    """
    found = fitted(herds())
    x, deviation = likelihood(herds(), bernoulli)
    np.testing.assert_allclose(found.estimate, x, atol=2e-3)
    assert found.between[3] == pytest.approx(deviation, rel=5e-3)
    published = [-0.9919, -1.1282, -1.5797, -1.3983]
    np.testing.assert_allclose(found.estimate, published, rtol=0.02)
    np.testing.assert_allclose(found.error, [0.3032, 0.3228, 0.4220, 0.2312], rtol=0.02)
    assert found.between[3] == pytest.approx(0.6421, rel=0.02)


def respiratory():
    """outcome ~ treat + baseline + (1 | id), binomial"""
    clients = [
        (np.tile([placebo, before], (4, 1)), np.arange(4) < good)
        for placebo, baselines in enumerate(VISITS)
        for before, numbers in enumerate(baselines)
        for good, number in enumerate(numbers)
        for _ in range(number)
    ]
    found = fitted(clients)
    return [*found.estimate, found.between[2]], found.error


def epilepsy():
    """y ~ trt + post + trt:post + offset(log(weeks)) + (1 | subject), poisson"""
    clients = []
    for treated, words in enumerate(SEIZURES.split("|")):
        for one in words.split():
            y = np.array([*map(float, one.split("/"))])
            X = np.array([[treated, post, treated * post] for post in (0, 1)])
            clients.append((X, np.column_stack([y, [8, 8]])))
    found = fitted(clients, "poisson", exposed=True)
    return [*found.estimate, found.between[3]], found.error


def wine():
    """rating ~ temp + contact + (1 | judge)"""
    X = np.repeat([[0, 0], [0, 1], [1, 0], [1, 1]], 2, axis=0)
    clients = [(X, np.array([*map(int, judge)]) - 1) for judge in BITTER.split()]
    found = fitted(clients, "ordinal", classes=5)
    cuts = -found.estimate[5] + np.append(0, np.cumsum(found.estimate[2:5]))
    return [*found.estimate[:2], *cuts, found.between[5]], found.error[[0, 1, 5]]


# R 4.2.2's lme4 1.1-31 (glmer, optimizer bobyqa) and ordinal 2022.11-16 (clmm), both with nAGQ = 25
REFERENCES = {
    respiratory: ([-2.0280526, 3.2419433, 0.0608621, 2.05821], [0.542292, 0.587781, 0.411480]),
    epilepsy: (
        [-0.0244352, 0.1087191, -0.1016016, 1.0331816, 0.780025],
        [0.2105772, 0.0469114, 0.0650712, 0.1526221],
    ),
    wine: (
        [3.06189, 1.83343, -1.62349, 1.51280, 4.22705, 6.08615, 1.13478],
        [0.595076, 0.512171, 0.683385],
    ),
}


@pytest.mark.parametrize("study", REFERENCES, ids=lambda study: study.__name__)
def test_studies_are_those_of_lme4_and_ordinal(study):
    estimates, errors = study()
    wanted, their_errors = REFERENCES[study]
    least = 0.02 * np.append(their_errors, np.zeros(len(wanted) - len(their_errors)))
    assert (np.abs(np.subtract(estimates, wanted)) < 0.02 * np.abs(wanted) + least).all()
    np.testing.assert_allclose(errors, their_errors, rtol=0.02)


def patients(random, N=111, m=4):
    """Treatment and baseline of patients with four visits: 2.03, 2.92, and a deviation of 1.98."""
    found = []
    for i in range(N):
        a = np.array([i % 2, random.integers(2)], dtype=float)
        z = a @ [2.03, 2.92] - 1.5 + 1.98 * random.standard_normal()
        found.append((np.tile(a, (m, 1)), (random.random(m) < expit(z)).astype(float)))
    return found


def test_four_rows_a_patient_are_as_true_as_by_eighty_nodes():
    random = np.random.default_rng(4)
    every = []
    for k in range(10):
        clients = patients(random)
        found = fitted(clients)
        every.append([*found.estimate[:2], found.between[2]])
        if k == 0:
            x, deviation = likelihood(clients, bernoulli)
            np.testing.assert_allclose(found.estimate, x, rtol=0.02)
            assert found.between[2] == pytest.approx(deviation, rel=0.02)
    # Laplace's were at 2.45, 3.88 and 2.76
    error = np.std(every, 0) / np.sqrt(len(every))
    np.testing.assert_array_less(np.abs(np.mean(every, 0) - [2.03, 2.92, 1.98]), 4 * error)


@pytest.mark.parametrize("differing", [1, 2, 3])
def test_product_rules_are_integrals_over_a_grid(differing):
    random = np.random.default_rng(differing)
    A = torch.tensor(random.standard_normal((1, 5, 3)))
    y = torch.tensor(1.0 - 2 * random.integers(0, 2, (1, 5, 1)))
    z = torch.tensor(random.standard_normal((1, 5, 1)))
    S = torch.tensor([1.2, 0.9, 0.7]) * (torch.arange(3) < differing)
    S = S.double()
    loss = loss_named("logistic")
    weight = torch.ones(1, 5, dtype=torch.float64)
    v = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)

    def total(at):
        p = z + ((A[0] * S) @ at.T).T[..., None]
        return loss.value(p, y).sum(1) + at.square().sum(1) / 2

    optimiser = torch.optim.LBFGS([v], max_iter=200, tolerance_grad=1e-12, tolerance_change=0)

    def closure():
        optimiser.zero_grad()
        value = total(v).sum()
        value.backward()
        return value

    optimiser.step(closure)
    mode = v.detach()
    p = z + ((A[0] * S) @ mode[0])[None, :, None]
    found = Posterior(loss, Rows(A, y, weight, p), S, mode, torch.zeros(1, 3, 3).double())
    axis = torch.linspace(-7, 7, 71, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * differing).view(-1, differing)
    at = torch.cat([grid, torch.zeros(len(grid), 3 - differing)], 1)
    log = -total(at)
    share = torch.softmax(log, 0)
    integral = torch.logsumexp(log, 0) + differing * np.log(0.2 / np.sqrt(2 * np.pi))
    assert float(found.value[0]) == pytest.approx(-float(integral), abs=1e-3)
    mean = share @ at
    np.testing.assert_allclose(found.mean[0] + mode[0], mean, atol=1e-3)
    covariance = (at - mean).mT @ (share[:, None] * (at - mean))
    k = differing
    np.testing.assert_allclose(found.covariance[0, :k, :k], covariance[:k, :k], atol=2e-3)
    g = (A[0].mT @ loss.residual(z + ((A[0] * S) @ at.T).T[..., None], y))[..., 0]
    np.testing.assert_allclose(found.gradient[0], share @ g, atol=1e-3)
    bends = loss.bends(z + ((A[0] * S) @ at.T).T[..., None], y)[..., 0]
    H = A[0].mT @ ((share @ bends)[:, None] * A[0])
    g = g - share @ g
    Q = H - g.mT @ (share[:, None] * g)
    np.testing.assert_allclose(found.Q[0], Q, atol=5e-3)
    J = (at[:, :k] - mean[:k]).mT @ (share[:, None] * g)
    np.testing.assert_allclose(found.change[0, :k], J, atol=4e-3)


def test_the_slope_of_the_evidence_is_that_of_the_fixed_point():
    """In the log of a variance, at the maximum of x: half of a − b."""
    clients = patients(np.random.default_rng(0), 30)
    cohort = sp.Cohort(clients, sp.Linear("logistic", intercept=True))
    problem = Evidence(
        cohort, ["a", "b", "intercept"], "logistic", 1e-14, means=True, restricted=False
    )

    def at(tau):
        prior = Prior(np.array([0, 0, tau]), np.full(3, 1e6), 1.0)
        return problem.mode(prior, problem.zero(), None, 1e-12)

    size, freedom, _ = problem.moments(at(1.5))
    slope = (at(1.5 * np.exp(1e-3)).evidence - at(1.5 * np.exp(-1e-3)).evidence) / 2e-3
    assert slope == pytest.approx((size - freedom)[0, 2] / 2, rel=1e-3)
