"""`coefficients`: a mixed model, a dense Hessian, quadrature, and categories in two codings."""

import warnings

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp, softmax

import naive_evidence
import scaffpd as sp
from cases.refusals import refuses
from scaffpd.algorithms.evidence import Evidence, Prior
from scaffpd.study import freedom
from scaffpd.study.coefficients import level_contrast


def made(sizes, tau, labels=False, seed=0):
    """Clients whose coefficients, the intercept last, vary by τ around (1, −½, ½)."""
    random = np.random.default_rng(seed)
    clients = []
    for m in sizes:
        X = random.standard_normal((m, len(tau) - 1))
        u = np.array([1.0, -0.5, 0.5]) + np.sqrt(tau) * random.standard_normal(len(tau))
        z = X @ u[:-1] + u[-1]
        noise = random.logistic(size=m) if labels else random.standard_normal(m)
        clients.append((X, (z + noise > 0).astype(int) if labels else z + noise))
    return clients


@pytest.mark.filterwarnings("ignore")
def test_estimates_and_errors_are_those_of_a_mixed_model():
    mixed = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    clients = made([20] * 8, [0.5, 0.0, 0.3])
    model = sp.Personal(sp.Linear("squared", intercept=True), columns=[0, "intercept"])
    found = sp.coefficients(sp.Cohort(clients, model))
    X = np.concatenate([np.column_stack([X, np.ones(len(X))]) for X, _ in clients])
    y = np.concatenate([y for _, y in clients])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        free = mixed.MixedLMParams.from_components(
            fe_params=np.ones(3), cov_re=np.eye(2), vcomp=np.ones(0)
        )
        peer = mixed.MixedLM(y, X, np.repeat(np.arange(8), 20), exog_re=X[:, [0, 2]]).fit(free=free)
    np.testing.assert_allclose(found.estimate, peer.fe_params, atol=2e-3)
    np.testing.assert_allclose(found.error, np.sqrt(np.diag(peer.cov_params())[:3]), rtol=0.01)
    spread = [*np.diag(peer.cov_re)]
    np.testing.assert_allclose(found.between**2, [spread[0], 0, spread[1]], atol=0.02)
    np.testing.assert_allclose(found.freedom, [7, 157, 7], rtol=0.01)
    squares = (X**2).mean(0)
    between = spread[0] * squares[0] + spread[1]
    assert found.share == pytest.approx(between / (between + peer.scale), abs=0.01)
    assert "shared" in str(found)
    row = found.table()[1]
    assert row["high"] - row["estimate"] == pytest.approx(1.975 * found.error[1], rel=1e-3)


def test_covariances_are_blocks_of_the_inverse_of_one_dense_hessian(monkeypatch):
    monkeypatch.setattr(freedom, "MANY", 0)  # at the estimated deviations, without an integral
    clients = made([2, 9, 30, 12], [0.5, 0.2, 0.3])
    cohort = sp.Cohort(clients, sp.Linear("squared", 0.1, intercept=True))
    rotation = np.random.default_rng(1).normal(size=(3, 3))
    found = sp.coefficients(cohort, rotation, shift=2.0, effects="slopes")
    plain = sp.coefficients(cohort, effects="slopes")
    rows = [(np.column_stack([X, np.ones(len(X))]), y) for X, y in clients]
    # σ² from the share of the variance
    squares = np.concatenate([X for X, _ in rows])
    between = plain.between**2 @ (squares**2).mean(0)
    scale = 2 * between * (1 / plain.share - 1)
    parts = ("squared", rows, 1, plain.between**2, np.full(3, 1e9), scale)
    t = np.zeros(15)
    _, gradient, hessian = naive_evidence.joint(*parts, t)
    covariance = np.linalg.inv(hessian)
    mode = (t - covariance @ gradient).reshape(-1, 3)
    for own, estimate, error in zip(
        range(5),
        [found.estimate, *found.own],
        [found.error, *found.own_error],
        strict=True,
    ):
        block = covariance[3 * own : 3 * own + 3, 3 * own : 3 * own + 3]
        np.testing.assert_allclose(estimate, rotation @ mode[own] + [0, 0, 2], atol=1e-3)
        wanted = np.sqrt(np.diag(rotation @ block @ rotation.T))
        np.testing.assert_allclose(error, wanted, rtol=1e-3)
    name = found.clients[2]
    assert found.table(name)[0]["estimate"] == found.own[2, 0]
    with refuses("unknown-name"):
        found.table("nobody")


@pytest.mark.parametrize("differing", [2, 4])
def test_labels_use_means_and_the_slope_of_their_integral(differing):
    """Against finite differences: of quadrature, and of Φ + ½ log det where more differ."""
    random = np.random.default_rng(5)
    clients = [
        (X, (X.sum(1) + random.logistic(size=m) > 0).astype(int))
        for m, X in ((m, random.standard_normal((m, 4))) for m in (6, 25))
    ]
    cohort = sp.Cohort(clients, sp.Linear("logistic", 0.1, intercept=True))
    problem = Evidence(cohort, [*"abcd", "intercept"], "logistic", 1e-20, means=True)
    tau = np.array([0.6, 0.0, 0.5, 0.3, 0.4]) * ([1, 0, 1, 0, 0] if differing == 2 else 1)
    prior = Prior(tau, np.full(5, np.inf), 1.0)
    x = problem.zero() + 0.3

    def value(point):
        (total, determinant, _), slope, _ = problem.ask(prior, point, None)[1]
        return total + determinant / 2, slope

    slope = value(x)[1]
    for j in range(5):
        step = 0 * x
        step[j] = 1e-4
        difference = (value(x + step)[0] - value(x - step)[0]) / 2e-4
        assert float(slope[j]) == pytest.approx(difference, rel=1e-4, abs=1e-5)


def test_categories_are_differences_from_their_mean_in_any_coding():
    """All levels as zeros and ones, against one level left out."""
    random = np.random.default_rng(3)
    clients = []
    codes = []
    for _ in range(5):
        code = random.integers(3, size=40)
        v = random.standard_normal(40)
        y = np.array([0.0, 1.0, 3.0])[code] + v + random.standard_normal(40)
        clients.append((v, code, y))
        codes.append(code)
    shares = np.bincount(np.concatenate(codes)) / 200
    full = [(np.column_stack([v, np.eye(3)[c]]), y) for v, c, y in clients]
    left = [(np.column_stack([v, np.eye(3)[c][:, 1:]]), y) for v, c, y in clients]
    model = sp.Personal(sp.Linear("squared", intercept=True), columns="intercept")
    L = level_contrast(["", *["c"] * 3, ""], np.array([0, *shares, 0]), np.ones(5))
    found = sp.coefficients(sp.Cohort(full, model), L)
    to_levels = np.array([[0, 0], [1, 0], [0, 1]])
    contrast = np.eye(3) - shares
    peer = sp.coefficients(sp.Cohort(left, model))
    wanted = contrast @ to_levels @ peer.estimate[1:3]
    np.testing.assert_allclose(found.estimate[1:4], wanted, atol=1e-3)
    assert found.error[1:4].max() < 0.3


def test_what_has_no_coefficients_is_refused():
    X = np.random.default_rng(0).standard_normal((9, 2))
    three = sp.Cohort([(X, np.arange(9) % 3)] * 2, sp.Linear("softmax", 0.1, intercept=True))
    two = sp.Cohort([(X, X)] * 2, sp.Linear("squared", 0.1, intercept=True))
    with refuses("coefficients-of-several-outputs"):
        sp.coefficients(two)
    with refuses("unknown-name"):
        sp.coefficients(three, effects="random")
    with refuses("unknown-name"):
        sp.coefficients(three, errors="jackknife")
    network = sp.Module(torch.nn.Linear(2, 1), "squared", 0.1)
    with refuses("coefficients-not-linear"):
        sp.coefficients(sp.Cohort([(X, expit(X[:, 0]))] * 2, network))


def test_own_intercepts_of_counts_integrate_over_the_deviation(monkeypatch):
    """Eight clients of ten rows, against the posterior on a grid of u, x and deviations."""
    random = np.random.default_rng(2)
    y = [random.poisson(np.exp(0.3 + 0.3 * random.standard_normal()), 10) for _ in range(8)]
    cohort = sp.Cohort([(np.ones((10, 1)), own) for own in y], sp.Linear("poisson"))
    found = sp.coefficients(cohort, effects="slopes")
    deviation, x, u = np.arange(0.05, 2.5, 0.1), np.linspace(-1.5, 2.5, 41), np.linspace(-4, 4, 161)
    likelihood = np.array([own.sum() * u - 10 * np.exp(u) for own in y])
    far = (u - x[:, None, None]) / deviation[:, None]
    each = likelihood[:, None, None] - far**2 / 2 - np.log(deviation)[:, None]
    total = logsumexp(each, axis=-1)
    weight = softmax(total.sum(0))
    mean, square = (
        (weight * (np.exp(each - total[..., None]) * power).sum(-1)).sum((1, 2))
        for power in (u, u**2)
    )
    wanted = np.sqrt(square - mean**2)
    assert np.abs(found.own[:, 0] - mean).max() < 0.1 * wanted.min()
    np.testing.assert_allclose(found.own_error[:, 0], wanted, rtol=0.05)
    monkeypatch.setattr(freedom, "MANY", 0)
    plugged = sp.coefficients(cohort, effects="slopes")
    assert (plugged.own_error[:, 0] / wanted).min() < 0.7  # covered 89 %


def test_a_table_that_is_there_several_times_is_not_certain():
    """Its clients differ by nothing at all, which is no chance; nor do robust errors know one."""
    (X, y) = made([30], [0.0] * 3)[0]
    model = sp.Linear("squared", intercept=True)
    found = sp.coefficients(sp.Cohort([(X, y)] * 6, model), effects="slopes")
    pooled = sp.coefficients(sp.Cohort([(X, y)] * 6, model), effects="fixed")
    assert (found.error > 0.3 * pooled.error).all()
    alone = sp.Cohort([(X, y)], model)
    robust, plain = (sp.coefficients(alone, errors=kind) for kind in ("robust", "model"))
    np.testing.assert_allclose(robust.error, plain.error)
    assert "robust" not in robust.said
