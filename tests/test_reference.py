"""The reference solver against an interior-point method, SciPy, and the optimality conditions."""

from __future__ import annotations

import warnings
from itertools import product

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from scaffpd.data import breast_cancer, digits, heart_disease, synthetic
from scaffpd.errors import InputError
from scaffpd.objectives import (
    Agnostic,
    Average,
    ChiSquare,
    ChiSquareBall,
    CVaR,
    Nash,
    QFair,
    Tilted,
)
from scaffpd.reference import reference_optimum

PRIOR = (0.1, 0.3, 0.25, 0.15, 0.2)
OBJECTIVES = {
    "average": lambda prior=None: Average(prior),
    "agnostic": lambda prior=None: Agnostic(prior),
    "chi_square": lambda prior=None: ChiSquare(0.05, prior),
    "chi_square_ball": lambda prior=None: ChiSquareBall(0.3, prior),
    "cvar": lambda prior=None: CVaR(0.4, prior),
    "tilted": lambda prior=None: Tilted(0.1, prior),
    "q_half": lambda prior=None: QFair(0.5, prior),
    "q_1": lambda prior=None: QFair(1.0, prior),
    "q_2": lambda prior=None: QFair(2.0, prior),
    "q_5": lambda prior=None: QFair(5.0, prior),
    "nash": lambda prior=None: Nash([3.0, 4.0, 5.0, 3.5, 4.5], prior),
}


# ------------------------------------------------------------------ the losses, written a second time


def losses_and_gradients(clients, loss, l2, x, intercept=False):
    """f_i and ∇f_i by plain loops over clients, nothing shared with the package."""
    values = []
    rows = []
    for X, y in clients:
        A = np.column_stack([X, np.ones(len(X))]) if intercept else X
        Z = A @ x.reshape(A.shape[1], -1)
        if loss == "squared":
            difference = Z - np.reshape(y, Z.shape)
            value = np.sum(difference**2)
            slope = 2 * difference
        elif loss == "logistic":
            p = 1 / (1 + np.exp(-Z[:, 0]))
            value = -np.sum(np.log(np.where(y == 1, p, 1 - p)))
            slope = (p - y)[:, None]
        else:
            p = np.exp(Z) / np.exp(Z).sum(1, keepdims=True)
            hot = np.eye(Z.shape[1])[y]
            value = -np.sum(np.log(p[hot == 1]))
            slope = p - hot
        values.append(value / len(A) + l2 / 2 * x @ x)
        rows.append((A.T @ slope).ravel() / len(A) + l2 * x)
    return np.array(values), np.array(rows)


def assert_optimal(result, clients, loss, l2, objective, intercept=False, tolerance=1e-12):
    """λ ∈ Λ, λ maximises ⟨f(x), l⟩ − ψ(l), and Σ λ_i ∇f_i(x) = 0: together they prove optimality."""
    f, G = losses_and_gradients(clients, loss, l2, result.x, intercept)
    weights = result.weights
    assert objective.contains(weights)
    size = weights @ np.abs(f) + abs(objective.value(weights))
    assert result.value == pytest.approx(objective.support(f), rel=1e-12)
    assert objective.support(f) - (weights @ f - objective.value(weights)) <= tolerance * size
    start = losses_and_gradients(clients, loss, l2, np.zeros_like(result.x), intercept)[1]
    assert np.linalg.norm(weights @ G) <= tolerance * (weights @ np.linalg.norm(start, axis=1))
    assert 0 < result.gap <= 1e-13 * max(size, abs(result.value))


# ------------------------------------------------------------------ against an interior-point method


def cvxpy_losses(clients, loss, l2, x):
    """f_i as CVXPY expressions."""
    ridge = l2 / 2 * cp.sum_squares(x)
    if loss == "squared":
        return [cp.sum_squares(X @ x - y) / len(y) + ridge for X, y in clients]
    return [cp.sum(cp.logistic(cp.multiply(1 - 2 * y, X @ x))) / len(y) + ridge for X, y in clients]


def cvxpy_objective(objective, f):
    """max_{λ∈Λ} ⟨f, λ⟩ − ψ(λ), each in its own textbook form rather than through λ."""
    n = len(f)
    p = objective.weights(n)
    if isinstance(objective, Average):
        return cp.sum([w * t for w, t in zip(p, f, strict=True)])
    if isinstance(objective, Agnostic):
        return cp.maximum(*f)
    nu = cp.Variable()
    excess = [w * cp.pos(t - nu) for w, t in zip(p, f, strict=True)]
    if isinstance(objective, CVaR):  # Rockafellar and Uryasev
        return nu + cp.sum(excess) / objective.alpha
    squares = [w * cp.square(cp.pos(t - nu)) for w, t in zip(p, f, strict=True)]
    if isinstance(objective, ChiSquare):  # min_ν ν + Σ p [f − ν]₊²/(2ρ) + ρ/2
        return nu + cp.sum(squares) / (2 * objective.rho) + objective.rho / 2
    if isinstance(objective, ChiSquareBall):  # Duchi and Namkoong: √(1+δ) ‖[f − ν]₊‖_p + ν
        rooted = cp.hstack([np.sqrt(w) * cp.pos(t - nu) for w, t in zip(p, f, strict=True)])
        return nu + np.sqrt(1 + objective.delta) * cp.norm(rooted)
    if isinstance(objective, Tilted):
        return objective.rho * cp.log_sum_exp(cp.hstack(f) / objective.rho + np.log(p))
    if isinstance(objective, QFair):
        power = objective.q + 1
        return (
            cp.sum([w * cp.power(t, power, approx=False) for w, t in zip(p, f, strict=True)])
            / power
        )
    levels = objective.levels(n)
    return -cp.sum([w * cp.log(b - t) for w, t, b in zip(p, f, levels, strict=True)])


def cvxpy_optimum(clients, loss, l2, objective):
    x = cp.Variable(clients[0][0].shape[1])
    t = cp.Variable(len(clients))
    below = [f <= bound for f, bound in zip(cvxpy_losses(clients, loss, l2, x), t, strict=True)]
    problem = cp.Problem(cp.Minimize(cvxpy_objective(objective, list(t))), below)
    with (
        warnings.catch_warnings()
    ):  # where it stops short of 1e-9 it says so, and is still good enough here
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver="CLARABEL", tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
    return x.value, problem.value


def small(loss):
    random = np.random.default_rng(7)
    clients = synthetic(N=5, d=3, sizes=[8, 12, 6, 10, 9], sigma=0.5, seed=3)
    if loss == "squared":
        return clients
    return [(X, (y + random.standard_normal(len(y)) > 0).astype(np.int64)) for X, y in clients]


@pytest.mark.sample(11)
@pytest.mark.cover(2)
@pytest.mark.parametrize("prior", [None, PRIOR], ids=["uniform", "prior"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_agrees_with_an_interior_point_method(loss, name, prior):
    clients = small(loss)
    objective = OBJECTIVES[name](prior)
    result = reference_optimum(clients, loss, 0.1, objective)
    x, value = cvxpy_optimum(clients, loss, 0.1, objective)
    assert result.value == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(result.x, x, atol=1e-4)
    assert_optimal(result, clients, loss, 0.1, objective)


# ------------------------------------------------------------------ against SciPy


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_the_average_agrees_with_scipy(loss):
    silos = heart_disease(test_fraction=0.0)
    clients = silos.train if loss == "logistic" else [(X[:, :5], y) for X, y in silos.train]
    objective = Average([0.4, 0.3, 0.2, 0.1])
    l2 = 0.01
    result = reference_optimum(clients, loss, l2, objective, intercept=True)

    def average(x):
        f, G = losses_and_gradients(clients, loss, l2, x, intercept=True)
        return objective.prior @ f, objective.prior @ G

    found = minimize(
        average, np.zeros_like(result.x), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    assert result.value == pytest.approx(found.fun, rel=1e-13)
    np.testing.assert_allclose(result.x, found.x, atol=1e-6)


def test_the_average_of_squares_solves_the_normal_equations():
    clients = synthetic(scaling=1.0)
    result = reference_optimum(clients, "squared", 0.1, Average())
    left = sum(2 * X.T @ X / len(y) for X, y in clients) / 5 + 0.1 * np.eye(10)
    right = sum(2 * X.T @ y / len(y) for X, y in clients) / 5
    np.testing.assert_allclose(result.x, np.linalg.solve(left, right), rtol=1e-11)
    np.testing.assert_array_equal(result.weights, np.full(5, 0.2))


# ------------------------------------------------------------------ optimality conditions

FAMILIES = {
    "synthetic": (synthetic, "squared", 0.1, False),
    "badly_scaled": (lambda: synthetic(sigma=1.0, scaling=1.0), "squared", 0.01, False),
    "rank_deficient": (lambda: synthetic(d=200, m=30), "squared", 0.01, False),
    "breast_cancer": (lambda: breast_cancer().train[:5], "logistic", 1e-3, True),
    "heart_disease": (
        lambda: [*heart_disease().train, *heart_disease(seed=1).train[:1]],
        "logistic",
        1e-3,
        True,
    ),
    "digits": (lambda: [(X[:, ::4], y) for X, y in digits(clients=5).train], "softmax", 1e-3, True),
}


LARGE = {("digits", name) for name in OBJECTIVES} - {
    ("digits", name) for name in ("agnostic", "q_2", "chi_square_ball")
}


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*case, marks=pytest.mark.long if case in LARGE else ())
        for case in product(FAMILIES, OBJECTIVES)
    ],
)
def test_optimality_conditions_hold_to_rounding(family, name):
    load, loss, l2, intercept = FAMILIES[family]
    clients = load()
    prior = PRIOR if name in ("chi_square", "cvar", "q_5", "tilted", "chi_square_ball") else None
    objective = OBJECTIVES[name](prior)
    if name == "nash":
        d = (clients[0][0].shape[1] + intercept) * (10 if loss == "softmax" else 1)
        start, _ = losses_and_gradients(clients, loss, l2, np.zeros(d), intercept)
        objective = Nash(1.1 * start)
    result = reference_optimum(clients, loss, l2, objective, intercept=intercept)
    assert_optimal(result, clients, loss, l2, objective, intercept)


@pytest.mark.long
def test_ten_clients_and_650_parameters():
    clients = digits().train
    result = reference_optimum(clients, "softmax", 1e-3, Agnostic(), intercept=True)
    assert_optimal(result, clients, "softmax", 1e-3, Agnostic(), intercept=True)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(OBJECTIVES)), d=st.integers(1, 30))
def test_random_problems(part, seed, name, d):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 30, 5).tolist()
    clients = synthetic(
        N=5, d=d, sizes=sizes, sigma=10 ** random.uniform(-2, 1), seed=seed, scaling=1.0
    )
    objective = OBJECTIVES[name](random.dirichlet(np.full(5, 3.0)))
    if name == "nash":
        objective = Nash([1.2 * np.mean(y**2) + 0.1 for _, y in clients])
    result = reference_optimum(clients, "squared", 0.05, objective)
    assert_optimal(result, clients, "squared", 0.05, objective, tolerance=1e-11)


# ------------------------------------------------------------------ corners


def test_targets_with_columns_are_independent_regressions():
    clients = synthetic(N=3, d=4, m=9, seed=2)
    both = [(X, np.column_stack([y, 1 - 2 * y])) for X, y in clients]
    result = reference_optimum(both, "squared", 0.1, Average())
    one = reference_optimum(clients, "squared", 0.1, Average())
    other = reference_optimum([(X, 1 - 2 * y) for X, y in clients], "squared", 0.1, Average())
    np.testing.assert_allclose(
        result.x.reshape(4, 2), np.column_stack([one.x, other.x]), rtol=1e-12
    )
    robust = reference_optimum(both, "squared", 0.1, Agnostic())
    assert_optimal(robust, both, "squared", 0.1, Agnostic())


def test_the_intercept_is_the_last_feature():
    clients = synthetic(N=3, d=4, m=9, seed=2)
    by_hand = [(np.column_stack([X, np.ones(9)]), y) for X, y in clients]
    a = reference_optimum(clients, "squared", 0.1, CVaR(0.5), intercept=True)
    b = reference_optimum(by_hand, "squared", 0.1, CVaR(0.5))
    np.testing.assert_array_equal(a.x, b.x)


def test_two_label_softmax_is_logistic_with_half_the_penalty():
    clients = small("logistic")
    one = reference_optimum(clients, "logistic", 0.05, Tilted(0.1))
    two = reference_optimum(clients, "softmax", 0.1, Tilted(0.1))
    W = two.x.reshape(-1, 2)
    np.testing.assert_allclose(W[:, 1] - W[:, 0], one.x, atol=1e-12)
    assert two.value == pytest.approx(one.value, rel=1e-13)


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"nash"}))
def test_one_client_and_identical_clients(name):
    client = synthetic(N=1, d=6, m=4, seed=5)
    alone = reference_optimum(client, "squared", 0.1, Average()).x
    for copies in (1, 5):
        objective = OBJECTIVES[name](PRIOR if copies == 5 else None)
        result = reference_optimum(client * copies, "squared", 0.1, objective)
        np.testing.assert_allclose(result.x, alone, rtol=1e-9)


def test_more_active_clients_than_features():
    """λ* is not unique when more than d + 1 clients share the worst loss."""
    corners = [(np.array([[1.0]]), np.array([s])) for s in (1.0, -1.0, 1.0, -1.0, 1.0)]
    result = reference_optimum(corners, "squared", 0.1, Agnostic())
    assert abs(result.x[0]) < 1e-12
    assert result.value == pytest.approx(1.0, rel=1e-14)
    assert_optimal(result, corners, "squared", 0.1, Agnostic())


def test_zero_targets_have_the_zero_solution():
    clients = [(X, 0 * y) for X, y in synthetic(N=3)]
    for objective in (Agnostic(), QFair(2.0), Nash(1.0)):
        result = reference_optimum(clients, "squared", 0.1, objective)
        assert not result.x.any()
        assert np.isfinite(result.gap)


def test_nash_starts_above_b_and_ends_below():
    clients = synthetic()
    start = np.array([np.mean(y**2) for _, y in clients])
    objective = Nash(0.5 * start)
    result = reference_optimum(clients, "squared", 0.1, objective)
    assert_optimal(result, clients, "squared", 0.1, objective)


def test_nash_without_an_agreement_is_refused():
    with pytest.raises(InputError, match="Nash has no optimum here"):
        reference_optimum(synthetic(), "squared", 0.1, Nash(0.01))


@pytest.mark.parametrize(
    ("loss", "l2", "clients", "message"),
    [
        ("square", 0.1, [(np.ones((2, 1)), np.ones(2))], "did you mean 'squared'"),
        ("squared", 0.0, [(np.ones((2, 1)), np.ones(2))], "l2 > 0"),
        ("squared", 0.1, [(np.ones(2), np.ones(2))], "shape"),
        ("squared", 0.1, [(np.ones((2, 1)), np.ones(3))], "as many targets"),
        (
            "squared",
            0.1,
            [(np.ones((2, 1)), np.ones(2)), (np.ones((2, 3)), np.ones(2))],
            "same features",
        ),
        ("squared", 0.1, [(np.full((2, 1), np.nan), np.ones(2))], "finite"),
        ("softmax", 0.1, [(np.ones((2, 1)), np.array([0, np.inf]))], "finite targets"),
        ("squared", 0.1, [], "at least one client"),
        ("logistic", 0.1, [(np.ones((2, 1)), np.array([1, 2]))], "labels 0 and 1"),
        ("softmax", 0.1, [(np.ones((2, 1)), np.array([0.5, 1]))], "whole labels"),
        ("softmax", 0.1, [(np.ones((2, 1)), np.array([-1, 1]))], "whole labels"),
    ],
)
def test_what_cannot_work_is_refused(loss, l2, clients, message):
    with pytest.raises(InputError, match=message):
        reference_optimum(clients, loss, l2, Agnostic())
