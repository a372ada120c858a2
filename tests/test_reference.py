"""The reference solver against the optimality conditions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.objectives import contains
from cases.reference import reference_optimum
from scaffpd.data import digits, heart_disease, synthetic
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

OBJECTIVES = {
    "average": Average,
    "agnostic": Agnostic,
    "chi_square": lambda prior: ChiSquare(0.05, prior),
    "chi_square_ball": lambda prior: ChiSquareBall(0.3, prior),
    "cvar": lambda prior: CVaR(0.4, prior),
    "tilted": lambda prior: Tilted(0.1, prior),
    "q_half": lambda prior: QFair(0.5, prior),
    "q_2": lambda prior: QFair(2.0, prior),
    "nash": lambda prior: Nash([3.0, 4.0, 5.0, 3.5, 4.5], prior),
}


def losses_and_gradients(clients, loss, l2, x, intercept=False):
    """f_i and ∇f_i by plain loops over clients, nothing shared with the solver."""
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
    """λ ∈ Λ, λ maximises ⟨f(x), l⟩ − ψ(l), and Σ λ_i ∇f_i(x) = 0: a proof."""
    f, G = losses_and_gradients(clients, loss, l2, result.x, intercept)
    weights = result.weights
    assert contains(objective, weights)
    size = weights @ np.abs(f) + abs(objective.value(weights))
    assert result.value == pytest.approx(objective.support(f), rel=1e-12)
    assert objective.support(f) - (weights @ f - objective.value(weights)) <= tolerance * size
    start = losses_and_gradients(clients, loss, l2, np.zeros_like(result.x), intercept)[1]
    assert np.linalg.norm(weights @ G) <= tolerance * (weights @ np.linalg.norm(start, axis=1))
    assert 0 < result.gap <= 1e-13 * max(size, abs(result.value))


FAMILIES = {
    "hospitals": (lambda: heart_disease().train, "logistic", 1e-3, True),
    "digits": (lambda: [(X[:, ::4], y) for X, y in digits(clients=5).train], "softmax", 1e-3, True),
}


@pytest.mark.parametrize("objective", [Agnostic(), ChiSquareBall(0.3), QFair(2.0)], ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
def test_optimality_conditions_hold_to_rounding(family, objective):
    load, loss, l2, intercept = FAMILIES[family]
    clients = load()
    result = reference_optimum(clients, loss, l2, objective, intercept=intercept)
    assert_optimal(result, clients, loss, l2, objective, intercept)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(OBJECTIVES)), d=st.integers(1, 30))
def test_random_problems(seed, name, d):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 30, 5).tolist()
    sigma = 10 ** random.uniform(-2, 1)
    clients = synthetic(N=5, d=d, sizes=sizes, sigma=sigma, seed=seed, scaling=1.0)
    objective = OBJECTIVES[name](random.dirichlet(np.full(5, 3.0)))
    if name == "nash":
        objective = Nash([1.2 * np.mean(y**2) + 0.1 for _, y in clients])
    result = reference_optimum(clients, "squared", 0.05, objective)
    assert_optimal(result, clients, "squared", 0.05, objective, tolerance=1e-11)


def test_more_active_clients_than_features():
    """λ* is not unique when more than d + 1 clients share the worst loss."""
    corners = [(np.array([[1.0]]), np.array([s])) for s in (1.0, -1.0, 1.0, -1.0, 1.0)]
    result = reference_optimum(corners, "squared", 0.1, Agnostic())
    assert abs(result.x[0]) < 1e-12
    assert_optimal(result, corners, "squared", 0.1, Agnostic())
