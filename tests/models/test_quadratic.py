"""Squared loss: J local steps in closed form are J local steps, for any rank, rate and J."""

import numpy as np
import pytest
import torch
from mpmath import mp, mpf

import scaffpd as sp
from naive import Client, relative, unequal_clients
from scaffpd.federation import LocalPlan
from scaffpd.models import numerics, quadratic
from scaffpd.models.local_steps import local_gain
from scaffpd.models.quadratic import QuadraticOracle


def problem(l2=0.03, outputs=1, intercept=False, dtype=None):
    data = unequal_clients("squared", outputs)
    cohort = sp.Cohort(data, sp.Linear("squared", l2=l2, intercept=intercept), dtype=dtype)
    clients = [Client(X, y, "squared", l2, outputs, intercept) for X, y in data.values()]
    return cohort, clients, np.random.default_rng(1).standard_normal(cohort.dimension)


def rates_of(clients, scale=1.0):
    L = np.array([client.smoothness for client in clients])
    return np.divide(scale, L, out=np.zeros_like(L), where=L > 1e-12)


def errors(cohort, clients, x, plan, rates):
    """Relative errors of every d_i, and of a weighted sum, against the loop of Algorithm 2."""
    weights = np.linspace(0.2, 1, len(clients))
    at = cohort.gradients(torch.tensor(x))
    c = at.sum(weights / weights.sum())
    updates = cohort.local_updates(torch.tensor(x), at, c, plan)
    loops = [
        client.descend(x, client.fast_gradient(x), c.numpy(), rate, plan.steps)
        for client, rate in zip(clients, rates, strict=True)
    ]
    single = [
        relative(updates.sum(w), d)
        for w, d in zip(np.eye(len(clients)), loops, strict=True)
        if d.any()
    ]
    return max(*single, relative(updates.sum(weights), weights @ np.array(loops)))


@pytest.mark.cover(2)
@pytest.mark.parametrize("steps", [1, 2, 10, 200, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("l2", [0.0, 1e-6, 0.03])
@pytest.mark.parametrize(("outputs", "intercept"), [(1, False), (3, True)])
def test_the_closed_form_equals_the_loop(steps, l2, outputs, intercept):
    cohort, clients, x = problem(l2, outputs, intercept)
    assert isinstance(cohort._oracle, QuadraticOracle)
    for scale in (1.0, 1.9):
        assert (
            errors(cohort, clients, x, LocalPlan(steps, scale=scale), rates_of(clients, scale))
            < 1e-10
        )
    largest = max(client.smoothness for client in clients)
    for rate in (0.01 / largest, 1.9 / largest):
        assert (
            errors(cohort, clients, x, LocalPlan(steps, rate=rate), [rate] * len(clients)) < 1e-10
        )


def test_badly_scaled_columns():
    random = np.random.default_rng(4)
    X = random.standard_normal((50, 8)) * 10.0 ** np.arange(-4, 4)
    data = [(X, random.standard_normal(50)), (X[:5], random.standard_normal(5))]
    cohort = sp.Cohort(data, sp.Linear("squared", l2=1e-3))
    clients = [Client(X, y, "squared", 1e-3) for X, y in data]
    x = np.zeros(8)  # elsewhere the loop's own x − u would lose the digits
    for steps in (1, 100, 1000):
        assert errors(cohort, clients, x, LocalPlan(steps), rates_of(clients)) < 1e-10


@pytest.mark.parametrize(
    "h", [0.0, 1e-300, 1e-18, 1e-9, 1e-3, 0.4999, 0.5, 0.5001, 0.9, 1.0, 1.5, 1.9, 2.0]
)
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_the_gain_to_full_precision(h, steps):
    """ϕ(h) = (1 − (1 − ηh)^J)/h with η = 1, and ηJ at zero."""
    with mp.workdps(400):
        exact = float((1 - (1 - mpf(h)) ** steps) / mpf(h)) if h else float(steps)
    got = local_gain(
        torch.tensor([h], dtype=torch.float64), torch.ones(1, dtype=torch.float64), steps
    )
    assert float(got[0]) == pytest.approx(exact, rel=1e-13, abs=1e-14)


def test_strong_convexity_is_the_smallest_eigenvalue_and_never_more():
    cohort, clients, x = problem(l2=0.0, dtype=torch.float64)
    mu = dict(zip(cohort.names, cohort.constants().strong_convexity, strict=True))
    true = {
        name: np.linalg.eigvalsh(client.hessian(x))[0]
        for name, client in zip(cohort.names, clients, strict=True)
    }
    for name in ("as many", "many"):
        assert mu[name] == pytest.approx(true[name], rel=1e-8)
        assert mu[name] <= true[name] * (1 + 1e-12)
    deficient = (
        "one sample",
        "fewer than features",
        "repeated rows",
        "a zero column",
        "constant",
        "all zero",
    )
    assert [mu[name] for name in deficient] == [0.0] * len(deficient)


@pytest.mark.parametrize("smallest", [0.0, 1e-7, 1e-6, 1e-5])
def test_single_precision_claims_no_more_convexity_than_there_is(smallest):
    """In float32 a smallest singular value may be noise; no certificate may use it."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        U, V = (np.linalg.qr(random.standard_normal((m, 5)))[0] for m in (60, 5))
        X = ((U * np.array([1, 1, 0.5, 0.1, smallest])) @ V.T).astype(np.float32)
        cohort = sp.Cohort([(X, X[:, 0])], sp.Linear("squared", l2=0.0), dtype=torch.float32)
        exact = 2 / 60 * np.linalg.svd(X.astype(np.float64), compute_uv=False)[-1] ** 2
        assert cohort.constants().strong_convexity[0] <= exact


def test_features_whose_squares_underflow_do_no_harm():
    """In float32 the squares of 1e-21 have almost no digits; a client moves by η J c along them."""
    random = np.random.default_rng(0)
    X = np.hstack([random.standard_normal((6, 2)), 1e-21 * random.standard_normal((6, 3))])
    weights = np.array([0.5, 0.5])
    moves = []
    for dtype in (torch.float32, torch.float64):
        cohort = sp.Cohort([(X, np.ones(6))] * 2, sp.Linear("squared", l2=0.0), dtype=dtype)
        x = cohort.start()
        at = cohort.gradients(x)
        moves.append(
            cohort.local_updates(x, at, x + 1, LocalPlan(1000, scale=1e-3)).sum(weights).numpy()
        )
    np.testing.assert_allclose(moves[0], moves[1], rtol=1e-4)


def test_bounds_cover_an_error_of_the_compressed_rows(monkeypatch):
    """A factor that is off by all that its noise allows, in the direction in which x shows it."""
    random = np.random.default_rng(0)
    x = random.standard_normal(6)
    data = [(random.standard_normal((3000, 6)) * 30, random.standard_normal(3000)) for _ in "ab"]
    model = sp.Linear("squared", l2=0.1)
    truth = sp.Cohort(data, model).gradients(torch.tensor(x))
    for eta in (1e-3, 1e-6):

        def worst(rows, eta=eta):
            gram = rows.mT @ rows
            b = gram.diagonal(dim1=1, dim2=2).sqrt() * torch.tensor(np.sign([*x, -1.0]))
            factor = torch.linalg.cholesky(gram + eta * b[:, :, None] * b[:, None]).mT
            return factor, torch.full((len(gram),), 1.001 * eta, dtype=torch.float64)

        monkeypatch.setattr(numerics, "triangle_of", worst)
        at = sp.Cohort(data, model).gradients(torch.tensor(x))
        off = np.abs(at.losses - truth.losses)
        assert np.all(off <= at.rounding()[0])
        assert np.all(off > at.rounding()[0] / 20)  # and are no looser than lengths make them
        moved = (at.each() - truth.each()).norm(dim=1).numpy()
        assert np.all(moved <= at.rounding()[1])
        assert np.all(moved > at.rounding()[1] / 20)


def test_rows_are_made_orthogonal_in_pieces(monkeypatch):
    A = torch.randn(2, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(quadratic, "PIECE", 24)  # rows of three at a time
    rows = quadratic.orthogonal_rows(A)
    torch.testing.assert_close(rows.mT @ rows, A.mT @ A)
    torch.testing.assert_close(torch.tril(rows @ rows.mT, -1), torch.zeros(2, 4, 4).double())
