"""The quasi-Newton minimax method: its algebra against dense matrices, its answers against an interior-point solver."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.reference import reference_optimum
from naive import Client, relative, unequal_clients
from scaffpd.algorithms.minimax import compact
from scaffpd.algorithms.quasi_newton_minimax import (
    InverseHessian,
    Pairs,
    combined,
    conjugated,
    inverse_hessian,
)
from scaffpd.errors import InputError

LOSSES = {"squared": 1, "logistic": 1, "softmax": 3}
OBJECTIVES = [
    sp.Average(),
    sp.Agnostic(),
    sp.ChiSquare(rho=0.05),
    sp.ChiSquareBall(delta=0.5),
    sp.CVaR(alpha=0.3),
    sp.Tilted(rho=0.1),
    sp.QFair(q=1.0),
    sp.Nash(b=40.0),
]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
L2 = 0.1


def squares(N=4, d=5, m=20, own=0.0, seed=1):
    """Squared losses; with `own`, every client measures its features in units of its own."""
    random = np.random.default_rng(seed)
    centre = random.standard_normal(d)
    data = []
    for _ in range(N):
        X = random.standard_normal((m, d)) * 10 ** (own * random.uniform(-1, 1, d))
        data.append((X, X @ (centre + 0.5 * random.standard_normal(d))))
    return data


def labels(N=4, d=4, m=30, seed=1):
    random = np.random.default_rng(seed)
    data = [random.standard_normal((m, d)) for _ in range(N)]
    return [
        (X, (X @ random.standard_normal(d) + random.standard_normal(m) > 0).astype(int))
        for X in data
    ]


def cohort(data, loss="squared", l2=L2, **options):
    return sp.Cohort(data, sp.Linear(loss, l2=l2), **options)


def states(method, federation, rounds, x0=None):
    """Every state of a run, the first before any round."""
    state = method.init(federation, 0, x0)
    found = [state]
    for _ in range(rounds):
        state = method.round(federation, state)
        found.append(state)
    return found


# ------------------------------------------------------------------ the algebra


def dense(pairs, initial):
    """BFGS as a matrix."""
    H = np.diag(initial.numpy())
    for s, y in zip(pairs.steps.numpy(), pairs.changes.numpy(), strict=True):
        V = np.eye(len(s)) - np.outer(y, s) / (s @ y)
        H = V.T @ H @ V + np.outer(s, s) / (s @ y)
    return H


def quadratic(d, seed=0):
    random = np.random.default_rng(seed)
    Q, _ = np.linalg.qr(random.standard_normal((d, d)))
    return torch.from_numpy(Q @ np.diag(10 ** random.uniform(-1.5, 1.5, d)) @ Q.T), random


@pytest.mark.parametrize("K", [0, 1, 4, 12])
def test_products_and_factors_are_those_of_the_dense_matrix(K):
    A, random = quadratic(7)
    steps = torch.from_numpy(random.standard_normal((K, 7)))
    H = InverseHessian(Pairs(steps, steps @ A), torch.from_numpy(random.random(7) + 0.1))
    full = dense(H.pairs, H.initial)
    v = torch.from_numpy(random.standard_normal(7))
    assert relative(H.apply(v), full @ v.numpy()) < 1e-10
    for N in (1, 3, 20):
        C = torch.from_numpy(random.standard_normal((N, 7)))
        E = H.factor(C)
        assert len(E) <= max(N, 7 + K)
        assert len(E) <= N or N > 7 + K
        assert relative(E.mT @ E, C.numpy() @ full @ C.numpy().T) < 1e-10


def test_a_factor_keeps_the_digits_of_a_small_combination():
    """Clients' gradients nearly cancel at the optimum: ‖E λ‖² comes out right where λᵀ(CᵀHC)λ would be rounding."""
    A, random = quadratic(6)
    steps = torch.from_numpy(random.standard_normal((4, 6)))
    H = InverseHessian(Pairs(steps, steps @ A), torch.ones(6, dtype=torch.float64))
    c, small = torch.from_numpy(random.standard_normal((2, 6)))
    E = H.factor(torch.stack([c, -c + 1e-10 * small]))
    both = E.numpy() @ np.ones(2)
    assert (
        relative(both @ both, 1e-20 * small.numpy() @ dense(H.pairs, H.initial) @ small.numpy())
        < 1e-3
    )


def test_compact_keeps_the_products_of_columns():
    E = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 4)))
    R = compact(E)
    assert R.shape == (4, 4)
    assert relative(R.mT @ R, E.mT @ E) < 1e-13
    assert compact(E.mT).shape == (4, 9)


@pytest.mark.parametrize("K", [1, 5, 8, 20])
def test_conjugated_pairs_of_a_quadratic_are_exact_on_all_steps(K):
    A, random = quadratic(8)
    steps = torch.from_numpy(random.standard_normal((K, 8)))
    pairs = conjugated(Pairs(steps, steps @ A), 1e-2, 1e2)
    assert len(pairs) == min(K, 8)
    products = (pairs.steps @ pairs.changes.mT).numpy()
    assert np.abs(products - np.diag(np.diag(products))).max() < 1e-9 * np.diag(products).max()
    assert relative(pairs.steps[-1], steps[-1]) < 1e-15  # the newest is as it was
    H = InverseHessian(pairs, torch.ones(8, dtype=torch.float64))
    for s in steps[-8:]:
        assert relative(H.apply(A @ s), s) < 1e-7
    if K >= 8:
        assert relative(dense(pairs, H.initial), torch.linalg.inv(A)) < 1e-6


def test_pairs_of_two_hessians_are_not_conjugated():
    A, random = quadratic(6)
    B, _ = quadratic(6, seed=1)
    steps = torch.from_numpy(random.standard_normal((2, 6)))
    raw = Pairs(steps, torch.stack([steps[0] @ B, steps[1] @ A]))
    assert torch.equal(conjugated(raw, 0.0, 1e3).steps, steps)
    near = Pairs(steps, torch.stack([steps[0] @ (A + 1e-4 * B), steps[1] @ A]))
    assert not torch.equal(conjugated(near, 0.0, 1e3).steps, steps)


def test_useless_pairs_are_left_out():
    A, random = quadratic(5)
    s = torch.from_numpy(random.standard_normal((3, 5)))
    raw = Pairs(
        torch.stack([s[0], s[1], 0 * s[1], s[2], s[0] + 1e-9 * s[1]]), torch.stack([*s, s[0], s[0]])
    )
    changes = torch.stack([s[0] @ A, -s[1] @ A, 0 * s[1], s[2] @ A, s[0] @ A])
    kept = conjugated(Pairs(raw.steps, changes), 1e-3, 1e3)
    assert (
        len(kept) == 2
    )  # without negative curvature, a step of no length, and what a newer step says already
    assert len(conjugated(Pairs(s[:0], s[:0]), 0.0, 1.0)) == 0


def test_the_history_speaks_for_every_lambda():
    """y_k = Σ λ_i Δc_i: whatever λ is, H times Σ λ_i ∇²f_i gives back every step."""
    federation = cohort(squares(d=8))
    state = states(sp.QuasiNewtonMinimax(sp.Agnostic()), federation, 4)[-1]
    clients = [Client(X, y, "squared", L2, 1) for X, y in squares(d=8)]
    random = np.random.default_rng(0)
    for weights in (np.eye(4)[2], random.random(4), 100 * random.random(4)):
        A = sum(w * client.hessian(np.zeros(8)) for w, client in zip(weights, clients, strict=True))
        H = inverse_hessian(state, weights)
        assert len(H.pairs) == 4
        for s in state.points.diff(dim=0):
            assert relative(H.apply(torch.from_numpy(A @ s.numpy())), s) < 1e-8


# ------------------------------------------------------------------ what the method asks


@pytest.mark.parametrize("loss", LOSSES)
def test_every_clients_gradient_and_diagonal(loss):
    outputs = LOSSES[loss]
    data = unequal_clients(loss, outputs)
    federation = sp.Cohort(data, sp.Linear(loss, l2=L2, classes=3 if loss == "softmax" else None))
    x = torch.from_numpy(0.3 * np.random.default_rng(1).standard_normal(federation.dimension))
    everybody = federation.gradients(x)
    some = federation.gradients(x, clients=[5, 0, 3])
    before = federation.traffic.snapshot()
    each = everybody.each()
    diagonals = everybody.diagonals()
    sent = (
        federation.traffic.exchanges - before.exchanges,
        federation.traffic.bytes_up - before.bytes_up,
    )
    assert sent == (1, 8 * 8 * federation.dimension)  # the c_i have gone up with the losses
    for i, (X, y) in enumerate(data.values()):
        client = Client(X, y, loss, L2, outputs)
        assert relative(each[i], client.gradient(x.numpy())) < 1e-12
        assert relative(diagonals[i], np.diag(client.hessian(x.numpy()))) < 1e-12
    assert relative(some.each(), each[[5, 0, 3]]) < 1e-12
    assert relative(some.diagonals(), diagonals[[5, 0, 3]]) < 1e-12


@pytest.mark.parametrize(
    ("loss", "data", "before"), [("squared", squares(), 3), ("logistic", labels(), 2)]
)
def test_one_exchange_a_round(loss, data, before):
    federation = cohort(data, loss)
    history = sp.train(sp.QuasiNewtonMinimax(sp.ChiSquare(rho=0.05)), federation, rounds=5).history
    N = 4
    d = federation.dimension
    assert history["exchanges"].tolist() == [before + r for r in range(6)]
    assert np.all(np.diff(history["bytes_up"]) == 8 * N * (d + 3))
    assert np.all(np.diff(history["bytes_down"]) == 8 * N * d)


# ------------------------------------------------------------------ where it goes


@pytest.mark.cover(1)
@every_objective
@pytest.mark.parametrize("loss", ["squared", "badly scaled", "logistic"])
@pytest.mark.parametrize(
    ("method", "most"), [(sp.QuasiNewtonMinimax, 16), (sp.MinimaxGradient, 40)]
)
def test_it_reaches_the_optimum_of_another_solver(method, most, loss, objective):
    kind = "logistic" if loss == "logistic" else "squared"
    data = labels() if kind == "logistic" else squares(own=0.5 if loss == "badly scaled" else 0.0)
    federation = cohort(data, kind)
    best = reference_optimum(data, kind, L2, objective)
    result = sp.train(method(objective), federation, rounds=most, tol=1e-9)
    assert result.status is sp.Status.CONVERGED
    value = objective.support(federation.evaluate(result.x).loss)
    assert -1e-11 <= value - best.value <= result.certificate + best.gap
    assert np.sum((result.x - best.x) ** 2) <= 2 * (result.certificate + best.gap) / (
        L2 * min(1, result.weights.sum())
    )


def test_softmax_and_several_outputs():
    random = np.random.default_rng(0)
    X = [random.standard_normal((25, 3)) for _ in range(3)]
    hot = [np.eye(3)[random.integers(0, 3, 25)] for _ in X]
    for loss, y in (("softmax", [h.argmax(1) for h in hot]), ("squared", hot)):
        data = list(zip(X, y, strict=True))
        objective = sp.CVaR(alpha=0.5)
        result = sp.train(sp.QuasiNewtonMinimax(objective), cohort(data, loss), rounds=40, tol=1e-9)
        assert result.status is sp.Status.CONVERGED
        best = reference_optimum(data, loss, L2, objective)
        assert (
            abs(objective.support(cohort(data, loss).evaluate(result.x).loss) - best.value) < 1e-8
        )


def test_a_quadratic_takes_about_as_many_rounds_as_it_has_dimensions():
    """As conjugate gradients would that know λ."""
    for seed in range(2):
        federation = cohort(squares(N=3, d=12, m=4, seed=seed), l2=1e-3)
        for objective in (sp.Average(), sp.ChiSquare(rho=0.05)):
            result = sp.train(sp.QuasiNewtonMinimax(objective), federation, rounds=40, tol=1e-8)
            assert result.status is sp.Status.CONVERGED
            assert result.rounds <= 12 + 3


@pytest.mark.sample(4)
@every_objective
def test_the_certificate_is_never_below_the_true_gap(objective):
    """F(x) − min_y Σ λ_i f_i(y) + ψ(λ), by dense algebra, in every round."""
    data = squares(own=0.5, seed=3)
    clients = [Client(X, y, "squared", L2, 1) for X, y in data]
    for state in states(sp.QuasiNewtonMinimax(objective), cohort(data), 9):
        H = sum(
            w * client.hessian(state.x.numpy())
            for w, client in zip(state.weights, clients, strict=True)
        )
        g = sum(
            w * client.gradient(state.x.numpy())
            for w, client in zip(state.weights, clients, strict=True)
        )
        assert objective.contains(state.weights)
        dual = (
            objective.support(state.losses)
            - state.weights @ state.losses
            + objective.value(state.weights)
        )
        gap = dual + g @ np.linalg.solve(H, g) / 2
        assert gap <= state.certificate


def test_the_certificate_takes_the_better_weights():
    federation = cohort(squares(own=0.5, seed=3))
    found = states(sp.QuasiNewtonMinimax(sp.Agnostic()), federation, 6)
    assert any(not np.array_equal(state.weights, state.model_weights) for state in found)
    for state in found:
        g = combined(state.model_weights, state.gradients).numpy()
        short = state.losses.max() - state.model_weights @ state.losses
        own = short + g @ g / (2 * state.model_weights @ state.constants.strong_convexity)
        assert state.certificate <= own + state.floor


def test_a_rejected_step_leaves_x_and_teaches():
    """Clients with units of their own: the first steps are too long, κ grows, and every point tried is kept."""
    federation = cohort(squares(N=3, d=6, m=30, own=1.5, seed=4), l2=0.01)
    objective = sp.ChiSquare(rho=0.05)
    found = states(sp.QuasiNewtonMinimax(objective), federation, 11)
    rejected = 0
    for before, after in pairwise(found):
        assert after.rounds == before.rounds + 1
        assert len(after.points) == len(before.points) + 1
        if after.accepted:
            assert after.damping in (before.damping, max(1.0, before.damping / 4))
            fell = objective.support(after.losses) < objective.support(before.losses) + 1e-9
            assert fell or after.certificate < before.certificate / 2
            continue
        rejected += 1
        assert torch.equal(after.x, before.x)
        assert after.certificate == before.certificate
        assert after.damping == before.damping * (2 if before.accepted else 4)
    assert rejected == 2
    assert found[-1].certificate < 1e-6


# ------------------------------------------------------------------ how users run it


@pytest.mark.cover(1)
@pytest.mark.parametrize("pairs", [2, 60])
@pytest.mark.parametrize(("loss", "data"), [("squared", squares(own=0.7)), ("logistic", labels())])
def test_a_resumed_run_is_the_run(loss, data, pairs, tmp_path):
    method = sp.QuasiNewtonMinimax(sp.Tilted(rho=0.1), pairs=pairs)
    whole = sp.train(method, cohort(data, loss), rounds=6)
    for cut in (1, 4):
        sp.train(method, cohort(data, loss), rounds=cut, checkpoint=tmp_path / f"run-{cut}")
        rest = sp.train(method, cohort(data, loss), rounds=6, checkpoint=tmp_path / f"run-{cut}")
        assert np.array_equal(rest.x, whole.x)
        assert np.array_equal(rest.weights, whole.weights)
        for column in ("certificate", "accepted", "exchanges", "bytes_up", "bytes_down"):
            assert np.array_equal(rest.history[column], whole.history[column]), column


def test_the_history_is_as_long_as_it_was_asked_to_be():
    state = states(
        sp.QuasiNewtonMinimax(sp.CVaR(alpha=0.5), pairs=3), cohort(labels(), "logistic"), 6
    )[-1]
    assert state.points.shape == (4, 4)
    assert state.answers.shape == (4, 4, 4)
    assert state.diagonals.shape == (0, 4)


@every_objective
def test_one_client_one_feature(objective):
    random = np.random.default_rng(0)
    for N, d in ((1, 3), (3, 1), (1, 1)):
        data = [(random.standard_normal((9, d)), random.standard_normal(9)) for _ in range(N)]
        result = sp.train(sp.QuasiNewtonMinimax(objective), cohort(data), rounds=30, tol=1e-9)
        assert result.status is sp.Status.CONVERGED


@every_objective
def test_identical_clients(objective):
    data = squares(N=1) * 4
    result = sp.train(sp.QuasiNewtonMinimax(objective), cohort(data), rounds=30, tol=1e-9)
    assert result.status is sp.Status.CONVERGED
    X, y = data[0]
    best = np.linalg.solve(2 * X.T @ X / len(X) + L2 * np.eye(5), 2 * X.T @ y / len(X))
    np.testing.assert_allclose(result.x, best, atol=1e-3)


@pytest.mark.sample(3)
@pytest.mark.cover(1)
@pytest.mark.parametrize("objective", OBJECTIVES[:-1], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize(("loss", "data"), [("squared", squares()), ("logistic", labels())])
def test_a_start_far_away(loss, data, objective):
    federation = cohort(data, loss)
    x0 = 1e4 * np.random.default_rng(0).standard_normal(federation.dimension)
    result = sp.train(sp.QuasiNewtonMinimax(objective), federation, rounds=100, tol=1e-7, x0=x0)
    assert result.status is sp.Status.CONVERGED


@pytest.mark.sample(2)
@every_objective
def test_float32_goes_as_far_as_it_can(objective):
    result = sp.train(
        sp.QuasiNewtonMinimax(objective),
        cohort(squares(), dtype=torch.float32),
        rounds=60,
        tol=1e-12,
    )
    assert result.x.dtype == np.float32
    assert result.status in (sp.Status.CONVERGED, sp.Status.PRECISION, sp.Status.ROUND_LIMIT)
    assert result.certificate < 1e-2
    fine = sp.train(sp.QuasiNewtonMinimax(objective), cohort(squares()), rounds=40, tol=1e-9)
    np.testing.assert_allclose(result.x, fine.x, atol=3e-2)


def test_a_start_at_the_optimum_stays():
    federation = cohort(squares())
    method = sp.QuasiNewtonMinimax(sp.ChiSquare(rho=0.05))
    best = sp.train(method, federation, rounds=40, tol=1e-12)
    again = sp.train(method, federation, rounds=3, x0=best.x)
    np.testing.assert_allclose(again.x, best.x, atol=1e-6)
    zero = cohort([(X, 0 * y) for X, y in squares()])
    assert np.array_equal(sp.train(method, zero, rounds=3).x, np.zeros(5))


def test_without_strong_convexity_there_is_no_certificate():
    federation = cohort([(X, X[:, 0]) for X, _ in squares(d=8, m=3)], l2=0.0)
    with pytest.raises(InputError, match="no loss is strongly convex"):
        sp.train(sp.QuasiNewtonMinimax(sp.Agnostic()), federation, rounds=3, tol=1e-3)
    result = sp.train(sp.QuasiNewtonMinimax(sp.Agnostic()), federation, rounds=25)
    assert result.history.losses[-1].max() < 1e-10 * result.history.losses[0].max()


def test_networks_train():
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()
    data = [(random.standard_normal((m, 3)), random.integers(0, 2, m)) for m in (4, 9, 13, 6)]
    result = sp.train(
        sp.QuasiNewtonMinimax(sp.ChiSquare(rho=0.05)),
        sp.Cohort(data, sp.Module(net, l2=0.01)),
        rounds=20,
    )
    assert result.history.losses[-1].max() < 0.9 * result.history.losses[0].max()
    assert result.certificate == np.inf
    assert "not known to be convex" in result.message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sp.QuasiNewtonMinimax(None), "QuasiNewtonMinimax needs an objective"),
        (lambda: sp.QuasiNewtonMinimax(sp.Average(), pairs=0), "whole number pairs >= 1, got 0"),
        (
            lambda: sp.QuasiNewtonMinimax(sp.Average(), pairs=1.5),
            "whole number pairs >= 1, got 1.5",
        ),
        (
            lambda: sp.train(sp.QuasiNewtonMinimax(sp.Nash(b=1e-3)), cohort(squares()), rounds=1),
            "Nash needs every loss below b",
        ),
        (
            lambda: sp.train(
                sp.QuasiNewtonMinimax(sp.Average(prior=[1, 1])), cohort(squares()), rounds=1
            ),
            "prior for 2 clients",
        ),
    ],
)
def test_mistakes_get_a_sentence(make, message):
    with pytest.raises(InputError, match=message):
        make()
