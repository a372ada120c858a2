"""The game of being in it: naive ridge fits and all orders of joining, made-up games, and the
axioms of Shapley.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.refusals import refuses

L2 = 0.05


def made(seed=0, clients=4, rows=9, held=30, d=3, apart=0.6):
    rng = np.random.default_rng(seed)
    train = []
    test = []
    common = rng.normal(size=d)
    for _ in range(clients):
        X = rng.normal(size=(rows + held, d))
        y = X @ (common + apart * rng.normal(size=d)) + 0.5 * rng.normal(size=len(X))
        train.append((X[:rows], y[:rows]))
        test.append((X[rows:], y[rows:]))
    return train, test


def ridge(train, group, prior):
    """argmin_x Σ p_i (1/m_i) Σ_j (⟨a_j, x⟩ − y_j)² + (l2/2)‖x‖², by the normal equations."""
    p = np.array([prior[i] for i in group])
    d = train[0][0].shape[1]
    p = p / p.sum()
    A = L2 * np.eye(d)
    b = np.zeros(d)
    for weight, i in zip(p, group, strict=True):
        X, y = train[i]
        A = A + 2 * weight * X.T @ X / len(y)
        b = b + 2 * weight * X.T @ y / len(y)
    return np.linalg.solve(A, b)


def loss(x, pair):
    return np.mean((pair[0] @ x - pair[1]) ** 2)


def naive(train, test, prior):
    """L_i(S) of all groups, from ridge fits."""
    N = len(train)
    groups = [g for size in range(1, N + 1) for g in itertools.combinations(range(N), size)]
    return {g: np.array([loss(ridge(train, g, prior), test[i]) for i in g]) for g in groups}


def orders_mean(losses, N):
    """Shapley's value as the mean over all N! orders of what a client adds when it comes."""
    alone = [losses[(i,)][0] for i in range(N)]
    total = np.zeros(N)

    def v(group):
        group = tuple(sorted(group))
        return (
            sum(alone[i] - own for i, own in zip(group, losses[group], strict=True))
            if group
            else 0.0
        )

    for order in itertools.permutations(range(N)):
        for k, i in enumerate(order):
            total[i] += v(order[: k + 1]) - v(order[:k])
    return total / math.factorial(N), v(range(N))


@pytest.mark.parametrize("prior", [None, [1.0, 2.0, 3.0, 4.0]])
def test_everything_is_what_ridge_fits_and_all_orders_say(prior):
    train, test = made()
    found = sp.coalition(train, test, sp.Linear("squared", L2), sp.Average(prior=prior), tol=1e-13)
    losses = naive(train, test, prior or [1.0] * 4)
    assert set(found.losses) == set(losses)
    for group, own in losses.items():
        np.testing.assert_allclose(found.losses[group], own, rtol=1e-5)
    shapley, total = orders_mean(losses, 4)
    np.testing.assert_allclose(found.shapley, shapley, atol=1e-5)
    assert found.shapley.sum() == pytest.approx(total, abs=1e-5)
    assert not found.errors.any()
    whole = losses[0, 1, 2, 3]
    for j in range(4):
        others = tuple(i for i in range(4) if i != j)
        rise = [losses[others][k] - whole[i] for k, i in enumerate(others)]
        np.testing.assert_allclose(found.matrix[list(others), j], rise, atol=1e-5)
        assert found.brings[j] == pytest.approx(np.mean(rise), abs=1e-5)
        assert (
            found.gets[j]
            == found.matrix[j, j]
            == pytest.approx(losses[(j,)][0] - whole[j], abs=1e-5)
        )


def test_drawn_orders_agree_with_all_within_their_errors_and_add_up():
    train, test = made(seed=3, clients=5)
    model = sp.Linear("squared", L2)
    exact = sp.coalition(train, test, model)
    drawn = sp.coalition(train, test, model, most=4, permutations=60, seed=2)
    assert (drawn.errors > 0).all()
    assert (np.abs(drawn.shapley - exact.shapley) < 4 * drawn.errors).all()
    assert drawn.shapley.sum() == pytest.approx(exact.shapley.sum(), abs=1e-6)
    np.testing.assert_allclose(drawn.matrix, exact.matrix, atol=1e-4)


def test_twins_have_the_same_share():
    train, test = made(seed=1, clients=3)
    found = sp.coalition([*train, train[0]], [*test, test[0]], sp.Linear("squared", L2), tol=1e-12)
    assert found.shapley[0] == pytest.approx(found.shapley[3], abs=1e-6)
    assert found.brings[0] == pytest.approx(found.brings[3], abs=1e-6)
    assert np.ptp(found.shapley[:3]) > 1e-2


def test_a_client_that_shares_no_column_with_the_others_neither_brings_nor_gets():
    train, test = made(seed=4, clients=3, rows=20)
    wide = [[(np.hstack([X, np.zeros_like(X)]), y) for X, y in part] for part in (train, test)]
    for part, (X, y) in zip(wide, (train[0], test[0]), strict=True):
        part.append((np.hstack([np.zeros_like(X), X]), y))
    found = sp.coalition(*wide, sp.Linear("squared", 1e-7), tol=1e-13, rounds=500)
    assert abs(found.shapley[3]) < 1e-4 < np.abs(found.shapley[:3]).min()
    assert abs(found.brings[3]) < 1e-4
    assert abs(found.gets[3]) < 1e-4


def test_a_made_up_game_has_the_shares_that_one_works_out_by_hand():
    """0 and 1 save one each as a pair; 2 changes nothing for anybody, and is the null player."""
    pair = {
        (0,): [2.0],
        (1,): [2.0],
        (2,): [3.0],
        (0, 1): [1.0, 1.0],
        (0, 2): [2.0, 3.0],
        (1, 2): [2.0, 3.0],
    }
    losses = pair | {(0, 1, 2): [1.0, 1.0, 3.0]}
    game = sp.Coalition.of("abc", {g: np.array(own) for g, own in losses.items()})
    np.testing.assert_allclose(game.shapley, [1, 1, 0], atol=1e-15)
    np.testing.assert_allclose(game.gets, [1, 1, 0])
    np.testing.assert_allclose(game.matrix, [[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(game.brings, [0.5, 0.5, 0])
    assert "2 of them gain" in str(game)


def test_members_are_scored_with_their_own_models():
    train, test = made(seed=5, clients=3)
    model = sp.Personal(sp.Linear("squared", L2), 5.0)
    found = sp.coalition(train, test, model, sp.CVaR(0.5), tol=1e-12)
    for group in [(0, 2), (0, 1, 2)]:
        cohort = sp.Cohort([train[i] for i in group], model)
        result = sp.train(sp.fair(sp.CVaR(0.5)), cohort, tol=1e-12)
        own = [loss(u, test[i]) for u, i in zip(result.personal, group, strict=True)]
        np.testing.assert_allclose(found.losses[group], own, rtol=1e-4)


def test_without_a_proof_no_group_starts_from_what_others_have_learnt():
    """A network that is trained for one round is what one round from its own start makes of it."""
    network = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1), torch.nn.Flatten(0)
    )
    train, test = ([(X.astype("f4"), y.astype("f4")) for X, y in part] for part in made(clients=2))
    model = sp.Module(network, torch.nn.functional.mse_loss)
    found = sp.coalition(train, test, model, rounds=1)
    for i in range(2):
        cohort = sp.Cohort([train[i]], model, [f"client-{i}"], test=[test[i]])
        result = sp.train(sp.fair(sp.Average()), cohort, rounds=1)
        assert found.alone[i] == pytest.approx(cohort.evaluate(result.x, "test").loss[0], rel=1e-5)


def test_groups_that_lack_a_class_train_the_same_model():
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(12, 2)), rng.integers(0, top, 12)) for top in (2, 2, 3)]
    found = sp.coalition(pairs, pairs, sp.Linear("softmax", 0.1))
    assert all(np.isfinite(own).all() for own in found.losses.values())


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("too-few-clients", {"train": made()[0][:1], "test": made()[1][:1]}),
        ("test-data-unusable", {"test": made()[1][:3]}),
        ("not-a-model", {"model": "linear"}),
        ("not-an-objective", {"objective": "fair"}),
        ("too-few-permutations", {"permutations": 1}),
    ],
)
def test_refusals(code, change):
    train, test = made()
    arguments = {"train": train, "test": test, "model": sp.Linear("squared", L2)} | change
    with refuses(code):
        sp.coalition(**arguments)


def test_groups_too_small_for_a_cap_share_alike_and_all_together_keep_it():
    """A cap of 0.4 needs three clients: of two each has a half, as with Average; one has all."""
    train, test = made()
    losses = {}
    for goal in (sp.ChiSquare(1e-3, cap=0.4), sp.Average(), sp.ChiSquare(1e-3)):
        found = sp.coalition(train, test, sp.Linear("squared", L2), goal, tol=1e-9)
        losses[repr(goal)] = {g: found.losses[g] for g in found.losses}
    capped, average, free = losses.values()
    for group in capped:
        if len(group) <= 2:
            np.testing.assert_allclose(capped[group], average[group], atol=1e-4)
    assert any(
        np.abs(capped[group] - free[group]).max() > 1e-3 for group in capped if len(group) > 1
    )
