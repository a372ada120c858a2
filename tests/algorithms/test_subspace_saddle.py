"""The subspace saddle method: its questions against dense matrices, its answers against an
interior-point solver.
"""

import numpy as np
import pytest
import torch
from awkward import AWKWARD

import scaffpd as sp
from naive import Client, relative, unequal_clients
from scaffpd.errors import InputError
from scaffpd.federation import ProximalPlan

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


def problem(loss, l2=0.05):
    outputs = LOSSES[loss]
    data = unequal_clients(loss, outputs)
    model = sp.Linear(loss, l2=l2, classes=3 if loss == "softmax" else None)
    return sp.Cohort(data, model), [Client(X, y, loss, l2, outputs) for X, y in data.values()]


def point(cohort, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(cohort.dimension))


# --- what the method asks


@pytest.mark.parametrize("loss", LOSSES)
def test_a_restriction_is_what_dense_matrices_say(loss):
    cohort, clients = problem(loss)
    x = point(cohort)
    random = np.random.default_rng(3)
    V = random.standard_normal((cohort.dimension, 4))
    w = random.random(8)
    D = random.random(cohort.dimension) + 0.1
    seen = cohort.gradients(x).restriction(torch.from_numpy(V), w, torch.from_numpy(D))
    H = sum(wi * client.hessian(x.numpy()) for wi, client in zip(w, clients, strict=True))
    c = np.array([client.gradient(x.numpy()) for client in clients])
    assert relative(seen.curvature, V.T @ H @ V) < 1e-12
    assert relative(seen.slopes, c @ V) < 1e-12
    assert relative(seen.sizes, (c**2 / D).sum(1)) < 1e-12
    assert relative(cohort.gradients(x).diagonal(w), np.diag(H)) < 1e-12


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_local_models_are_solved(loss):
    cohort, clients = problem(loss)
    x = 0.1 * point(cohort)
    c = point(cohort, 2)
    outputs = len(x) // clients[0].A.shape[1]
    D = np.repeat(np.random.default_rng(0).random(len(x) // outputs) + 0.5, outputs)
    plan = ProximalPlan(0.5, torch.from_numpy(D))
    updates = cohort.proximal_steps(cohort.gradients(x), c, plan)
    for i, client in enumerate(clients):
        expected = np.linalg.solve(client.hessian(x.numpy()) + 0.5 * np.diag(D), c.numpy())
        assert relative(updates.sum(np.eye(8)[i]), expected) < 1e-10


# --- what it finds


@pytest.mark.sample(24)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("clients", AWKWARD.values(), ids=AWKWARD)
def test_awkward_problems(clients, objective):
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    result = sp.train(sp.SubspaceSaddle(objective), cohort, rounds=60, tol=1e-7)
    assert result.status is sp.Status.CONVERGED
    assert np.isfinite(result.x).all()


@pytest.mark.parametrize("objective", OBJECTIVES[:7], ids=str)
def test_starting_far_away_and_losses_that_are_hardly_convex(objective):
    clients = sp.data.synthetic(sigma=0.5)
    far = sp.train(
        sp.SubspaceSaddle(objective),
        sp.Cohort(clients, sp.Linear(l2=0.1)),
        rounds=100,
        tol=1e-7,
        x0=np.full(10, 1e4),
    )
    assert far.status is sp.Status.CONVERGED
    flat = sp.train(
        sp.SubspaceSaddle(objective), sp.Cohort(clients, sp.Linear(l2=1e-8)), rounds=60, tol=1e-7
    )
    assert flat.status is sp.Status.CONVERGED


def test_without_strong_convexity_it_says_how_far_the_model_still_sees():
    clients = sp.data.synthetic(N=3, d=8, m=4)
    result = sp.train(
        sp.SubspaceSaddle(sp.Agnostic()), sp.Cohort(clients, sp.Linear(l2=0.0)), rounds=20
    )
    assert result.certificate == np.inf
    assert "promised" in result.message
    nearly = sp.train(
        sp.SubspaceSaddle(sp.Agnostic()),
        sp.Cohort(clients, sp.Linear(l2=1e-9)),
        rounds=60,
        tol=1e-7,
    )
    assert result.history.losses[-1].max() == pytest.approx(
        nearly.history.losses[-1].max(), abs=1e-6
    )


def test_columns_of_zeros_and_flat_losses():
    """Without a regulariser: a feature that nobody has does no harm; where nobody has any, a
    sentence says so.
    """
    clients = [(X * (np.arange(10) != 3), y) for X, y in sp.data.synthetic()]
    result = sp.train(
        sp.SubspaceSaddle(sp.ChiSquare(rho=0.1)), sp.Cohort(clients, sp.Linear(l2=0.0)), rounds=10
    )
    without = [(np.delete(X, 3, 1), y) for X, y in clients]
    same = sp.train(
        sp.SubspaceSaddle(sp.ChiSquare(rho=0.1)), sp.Cohort(without, sp.Linear(l2=0.0)), rounds=10
    )
    np.testing.assert_allclose(np.delete(result.x, 3), same.x, atol=1e-6)
    nothing = sp.Cohort([(0 * X, y) for X, y in clients], sp.Linear(l2=0.0))
    with pytest.raises(InputError, match="do not depend on the model"):
        sp.train(sp.SubspaceSaddle(sp.Average()), nothing, rounds=2)


def test_weights_are_held_by_what_the_subspace_does_not_see():
    """w_i² = s (⟨c, d⟩/‖c‖²) (‖c_i‖² − ‖Vᵀc_i‖²), with d from the clients' local models."""
    cohort, _ = problem("logistic")
    method = sp.SubspaceSaddle(sp.ChiSquare(rho=0.05), memory=3)
    state = method.init(cohort, x0=point(cohort))
    around = method._look(cohort, state)
    d, c = (vector.numpy() for vector in around.fresh)
    V = around.V.numpy()
    C = state.at.each().numpy()
    outside = (C**2).sum(1) - ((C @ V) ** 2).sum(1)
    np.testing.assert_allclose(around.w**2, (c @ d) / (c @ c) * outside, rtol=1e-9, atol=1e-12)
    assert np.ptp(around.w) > 0
