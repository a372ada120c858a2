"""Proportional odds: its terms, its optimum, its certificates and its effects."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy.special import expit

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.models.ordinal import CLOSEST, DISTANCE, Ordinal

LOSS = Ordinal()
MODEL = sp.Linear("ordinal", 0.0, intercept=True, classes=4)


def made(clients=6, rows=150, tau=0.0, seed=0):
    random = np.random.default_rng(seed)
    found = []
    for _ in range(clients):
        X = random.standard_normal((rows, 2))
        z = X @ [1.0, -0.5] + tau * random.standard_normal() + random.logistic(size=rows)
        found.append((X, np.searchsorted([-1, 0.5, 2], z)))
    return found


def surprise(x, X, y):
    """Return −log(σ(θ_{y+1} − η) − σ(θ_y − η)), term by term as textbooks have it."""
    cuts = np.array([-np.inf, *(np.append(0.0, np.cumsum(x[2:-1])) - x[-1]), np.inf])
    eta = X @ x[:2]
    return -np.log(expit(cuts[y + 1] - eta) - expit(cuts[y] - eta))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_client_loses_a_third_of_its_mean_negative_log_likelihood(weighted):
    x = np.array([0.7, -0.3, 1.2, 0.8, 0.4])
    clients = made(rows=20)
    w = np.random.default_rng(1).uniform(0.5, 2, (6, 20)) if weighted else np.ones((6, 20))
    model = sp.Linear("ordinal", 0.0, intercept=True, classes=4, weighted=weighted)
    pairs = [
        (X, np.column_stack([y, own]) if weighted else y)
        for (X, y), own in zip(clients, w, strict=True)
    ]
    found = sp.Cohort(pairs, model).losses(torch.from_numpy(x))
    theirs = [
        np.average(surprise(x, *c), weights=own) / 3 for c, own in zip(clients, w, strict=True)
    ]
    np.testing.assert_allclose(found, theirs, rtol=1e-12)
    X, y = clients[0]
    logs = model.outputs(x, X)
    np.testing.assert_allclose(-logs[np.arange(20), y], surprise(x, X, y), rtol=1e-10)
    np.testing.assert_allclose(np.exp(logs).sum(1), 1)
    h = 1e-5
    more = [surprise(np.append(x[:-1], x[-1] + step), X, y) for step in (-h, 0, h)]
    slopes, bends = model.slopes(x, X, pairs[0][1])
    np.testing.assert_allclose(slopes[:, 0], (more[2] - more[0]) / (2 * h), atol=1e-8)
    np.testing.assert_allclose(
        bends[:, 0], (more[2] - 2 * more[1] + more[0]) / h**2, rtol=1e-3, atol=1e-4
    )


@given(st.floats(-1, 30), st.floats(-5, 5), st.sampled_from([-1.0, 1.0, DISTANCE]))
def test_curvature_falls_no_faster_than_certificates_need(z, v, kind):
    at, there, y = (torch.tensor([[one]], dtype=torch.float64) for one in (z, z + v, kind))
    R = float(LOSS.widening(at, y))
    # by logarithms, so that no number underflows
    fallen = np.log(float(LOSS.bends(at, y))) - np.log(float(LOSS.bends(there, y)))
    assert fallen <= R * abs(v) + 1e-9
    assert float(LOSS.bends(at, y)) <= float(LOSS.steepness(y)) * (1 + 1e-9)


@pytest.mark.parametrize("kind", [-1.0, 0.0, 1.0, DISTANCE])
def test_derivatives_are_those_of_the_value(kind):
    z = torch.cat([torch.linspace(-3, 20, 200), torch.linspace(0, 3 * CLOSEST, 50)]).double()
    z.requires_grad_()
    y = torch.full((len(z), 1), float(kind), dtype=torch.float64)
    slope = torch.autograd.grad(LOSS.value(z[:, None], y).sum(), z, create_graph=True)[0]
    np.testing.assert_allclose(slope.detach(), LOSS.residual(z[:, None], y)[:, 0].detach(), 1e-9)
    assert bool((LOSS.value(z[:, None], y) >= 0).all())
    r = LOSS.residual(z[:, None], y)[:, 0]
    if kind:
        bend = torch.autograd.grad(r.sum(), z)[0]
        np.testing.assert_allclose(bend, LOSS.bends(z[:, None], y)[:, 0].detach(), 1e-6)


@pytest.mark.parametrize("d", [1e-9, 0.00099, 0.00101, 0.3, 0.7, 40.0])
def test_values_of_distances_match_arithmetic_in_hundred_digits(d):
    z, y = (torch.tensor([[one]], dtype=torch.float64) for one in (d, DISTANCE))
    with mp.workdps(100):
        exact, e = mpf(d), mpf(CLOSEST)
        value = -mp.log(-mp.expm1(-max(exact, e)))
        slope = -1 / mp.expm1(max(exact, e))
        if exact < e:
            bend = 1 / (4 * mp.sinh(e / 2) ** 2)
            value += (exact - e) * slope + (exact - e) ** 2 / 2 * bend
            slope += (exact - e) * bend
        units = LOSS.accuracy(1)
        assert abs(float(LOSS.value(z, y)) - value) <= units.value * 2**-53 * value
        assert abs(float(LOSS.residual(z, y)) - slope) <= units.slope * 2**-53 * -slope


def test_its_optimum_and_errors_are_those_of_statsmodels():
    peer = pytest.importorskip("statsmodels.miscmodels.ordinal_model")
    clients = made(3, 60)
    X, y = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    theirs = peer.OrderedModel(y, X, distr="logit").fit(method="bfgs", gtol=1e-7, disp=0)
    cuts = theirs.model.transform_threshold_params(theirs.params[2:])[1:-1]
    expected = [*theirs.params[:2], *np.diff(cuts), -cuts[0]]
    cohort = sp.Cohort(clients, MODEL)
    result = sp.train(sp.fair(sp.Average()), cohort, 50, 1e-10)
    assert result.certificate < 1e-10  # without any ridge
    np.testing.assert_allclose(result.x, expected, atol=1e-4)
    found = sp.coefficients(cohort, effects="fixed")
    np.testing.assert_allclose(found.estimate, expected, atol=1e-4)
    np.testing.assert_allclose(found.error[[0, 1, 4]], theirs.bse[:3], rtol=1e-3)
    assert found.names[2:] == ("cut 1 to 2", "cut 2 to 3", "intercept")


@pytest.mark.parametrize("l2", [0.0, 1e-3])
def test_certificates_hold_at_every_round(l2):
    clients = [(X * [100, 0.01], y) for X, y in made(4, 60, 1.0, 5)]
    cohort = sp.Cohort(clients, sp.Linear("ordinal", l2, intercept=True, classes=4))

    def value(x):
        return np.mean([surprise(x, X, y).mean() / 3 for X, y in clients]) + l2 / 2 * x @ x

    best = value(sp.train(sp.fair(sp.Average()), cohort, 60, 1e-13).x)
    proven = 0
    for rounds in range(1, 16):
        result = sp.train(sp.fair(sp.Average()), cohort, rounds)
        assert result.certificate >= value(result.x) - best - 1e-13
        proven += result.certificate < 1e-3
    assert proven


def test_random_intercepts_are_those_of_thirty_nodes():
    clients = made(30, 12, 1.2, 3)
    cohort = sp.Cohort(clients, sp.Personal(MODEL, 1.0))
    found = sp.coefficients(cohort, effects="intercepts", restricted=False)
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)

    def likelihood(x, deviation):
        total = 0.0
        for X, y in clients:
            each = [surprise(np.append(x[:-1], x[-1] + deviation * t), X, y).sum() for t in nodes]
            total += np.log(weights @ np.exp(-np.array(each)))
        return total

    x, s = found.estimate, found.between[-1]
    top = likelihood(x, s)
    for j in range(len(x)):  # nothing is better, a tenth of an error away
        for sign in (-1, 1):
            other = x + sign * 0.1 * found.error[j] * np.eye(len(x))[j]
            assert likelihood(other, s) < top
    assert likelihood(x, 0.95 * s) < top
    assert likelihood(x, 1.05 * s) < top
    assert not found.between[:-1].any()


def test_a_category_of_one_row_in_a_thousand_has_its_probability():
    ((X, y),) = made(1, 1000)
    y[y == 2] = 1
    y[7] = 2
    result = sp.train(sp.fair(sp.Average()), sp.Cohort([(X, y)], MODEL), 60, 1e-10)
    assert result.certificate < 1e-10
    assert result.x[3] > CLOSEST
    assert np.exp(MODEL.outputs(result.x, X))[:, 2].mean() == pytest.approx(1e-3, rel=0.05)


def test_personal_models_share_the_distances_of_cut_points():
    cohort = sp.Cohort(made(8, 40, 1.0), sp.Personal(MODEL, 3.0))
    result = sp.train(sp.fair(sp.CVaR(0.5)), cohort, 40, 1e-9)
    assert result.certificate < 1e-9
    assert not np.ptp(result.personal[:, 2:4], axis=0).any()
    assert np.ptp(result.personal, axis=0)[[0, 1, 4]].min() > 0.01


def test_it_needs_its_categories():
    with refuses("ordinal-without-classes"):
        sp.Linear("ordinal", intercept=True)
    with refuses("ordinal-without-classes"):
        sp.Linear("ordinal", classes=3)
    with refuses("label-beyond-classes"):
        sp.Cohort(made(), sp.Linear("ordinal", 0.0, intercept=True, classes=3))
    with refuses("private-rows-weighted"):
        sp.Private(MODEL, noise=1.0, clip=1.0)
