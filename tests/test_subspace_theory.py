"""What docs/subspace-saddle.md proves of the subspace saddle method, on problems that would show
it false.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.algorithms import subspace_saddle
from scaffpd.algorithms.subspace import SubspaceModel

FLAT = [sp.Agnostic(), sp.CVaR(alpha=0.3), sp.ChiSquareBall(delta=0.5)]
BENT = [sp.ChiSquare(rho=0.05), sp.Tilted(rho=0.1)]


def chebyshev(N=20, d=12, l2=0.01, seed=0):
    """One row a client: regression in the maximum norm for `Agnostic`, with about d active
    clients.
    """
    random = np.random.default_rng(seed)
    X = random.standard_normal((N, d))
    w = random.standard_normal(d) / d**0.5
    rows = {str(i): (X[i : i + 1], X[i : i + 1] @ w + random.standard_normal(1)) for i in range(N)}
    return sp.Cohort(rows, sp.Linear("squared", l2=l2)), X


def optimum(cohort, objective):
    result = sp.train(sp.SubspaceSaddle(objective, memory=60), cohort, rounds=200, tol=1e-11)
    assert result.status is sp.Status.CONVERGED
    return objective.support(result.history.losses[-1]) - 0.5 * result.certificate


def model_at(cohort, objective, x, weights, V, w=0.0, stiffness=1.0):
    """The server's model at x in the span of V, D = I."""
    at = cohort.gradients(x)
    seen = at.restriction(x.new_tensor(V), weights, x.new_ones(len(x)))
    held = np.broadcast_to(w, len(weights)).astype(float)
    return SubspaceModel(
        objective, at.losses, seen.slopes, seen.curvature, weights, held, stiffness
    )


def random_point(cohort, objective, random):
    """x, and a λ ∈ Λ that has nothing to do with it."""
    x = cohort.start().new_tensor(random.standard_normal(cohort.dimension))
    return x, objective.maximizer(random.standard_normal(len(cohort.names)))


# --- lemmas


@pytest.mark.parametrize("objective", FLAT + BENT, ids=str)
def test_lemma_1_a_damped_model_lies_above_the_merit(objective):
    """δκ ≥ L: F_w(L(x + Vα)) ≤ max_l m(α, l) for every α, whatever w, λ and V are."""
    random = np.random.default_rng(3)
    cohort, X = chebyshev()
    smooth = 2 * (X**2).sum(1).max() + 0.01
    for _ in range(5):
        x, weights = random_point(cohort, objective, random)
        V = np.linalg.qr(random.standard_normal((12, 4)))[0]
        model = model_at(cohort, objective, x, weights, V, random.random(20), smooth)
        alpha = 10 ** random.uniform(-2, 1) * random.standard_normal(4)
        above = replace(model, losses=model.losses + model.slopes @ alpha).merit(
            model.losses + model.slopes @ alpha, 0
        )
        above += 0.5 * alpha @ (2 * model.curvature + smooth * np.eye(4)) @ alpha  # δ = 1, κ = L
        losses = cohort.evaluate(x + x.new_tensor(V @ alpha)).loss
        assert model.merit(losses, 1e-12) <= above * (1 + 1e-9)


@pytest.mark.parametrize("objective", FLAT + BENT, ids=str)
def test_theorem_1_a_subspace_that_sees_everything_promises_a_share_of_the_excess(objective):
    """ε ≥ (μ/ℓ)(F(x) − F*), ℓ = (1 + δ)L + δκ, for V = R^d, w = 0 and any λ in Q."""
    random = np.random.default_rng(4)
    cohort, X = chebyshev(l2=0.3)
    best = optimum(cohort, objective)
    smooth = 2 * (X**2).sum(1).max() + 0.3
    for damping in (0.0, 0.5, 8.0):
        x, weights = random_point(cohort, objective, random)
        model = model_at(cohort, objective, x, weights, np.eye(12))
        value = objective.support(model.losses)
        promise = value - model.solve(damping, 1e-10).value
        assert promise >= 0.3 / ((1 + damping) * smooth + damping) * (value - best) - 1e-8


# --- counter-examples, and the safeguard


@pytest.mark.sample(1)
@pytest.mark.parametrize("objective", [sp.Agnostic(), sp.ChiSquare(rho=0.003)], ids=str)
def test_theorem_3_a_centre_that_moves_in_every_round_wanders_and_one_that_waits_converges(
    objective, monkeypatch
):
    monkeypatch.setattr(subspace_saddle, "PATIENCE", 20)  # any number will do
    cohort, _ = chebyshev()
    method = sp.SubspaceSaddle(objective, memory=3)
    states = []
    result = sp.train(
        method, cohort, rounds=400, tol=1e-4, callbacks=[lambda now: bool(states.append(now.state))]
    )
    assert result.status is sp.Status.CONVERGED
    held = [state for state in states if len(state.centre)]
    assert held
    for before, after in pairwise(held):  # ν moves where (ω/2) max ‖l − ν‖² explains the rest
        if after.hold < before.hold:
            assert after.certificate <= 2 * before.hold
    monkeypatch.setattr(subspace_saddle, "PATIENCE", 10**9)
    wandering = sp.train(method, cohort, rounds=70, tol=1e-5)
    assert wandering.history["certificate"].min() > 1e-2


def test_lemma_1_few_trials_in_a_row_are_rejected():
    """6 + (3/2) log₂(L/μ), and one more in a run."""
    random = np.random.default_rng(0)
    clients = {
        str(i): (3 * random.standard_normal((8, 6)), random.integers(0, 2, 8)) for i in range(6)
    }
    cohort = sp.Cohort(clients, sp.Linear("logistic", l2=1e-3))
    method = sp.SubspaceSaddle(sp.Agnostic(), memory=4)
    taken = []
    sp.train(
        method,
        cohort,
        rounds=60,
        tol=1e-8,
        x0=20 * cohort.start().new_tensor(random.standard_normal(6)),
        callbacks=[lambda now: bool(taken.append(now.state.accepted))],
    )
    runs = [len(run) for run in "".join("+" if one else "-" for one in taken).split("+")]
    assert 0 < max(runs) <= 7 + 1.5 * np.log2(cohort.constants().smoothness.max() / 1e-3)


# --- Hessians: single, and their sum


def logistic_clients(mu):
    """Return eight clients, and M of their Hessians: the logistic loss bends by at most 1/(6√3)
    more.
    """
    random = np.random.default_rng(0)
    m = 30
    rows = [random.standard_normal((m, 5)) + 0.3 * random.standard_normal(5) for _ in range(8)]
    cohort = sp.Cohort([(X, random.integers(0, 2, m)) for X in rows], sp.Linear("logistic", l2=mu))
    bent = [np.linalg.eigvalsh((X.T * np.linalg.norm(X, axis=1)) @ X / m)[-1] for X in rows]
    return cohort, max(bent) / (6 * 3**0.5)


@pytest.mark.parametrize("objective", FLAT + BENT, ids=str)
def test_theorem_4_a_certificate_falls_with_order_three_halves(objective):
    """C⁺ ≤ (2√2/3) M (C/μ)^{3/2} + M² C²/(2μ³) without damping."""
    mu = 0.05
    cohort, M = logistic_clients(mu)
    method = sp.MinimaxNewton(objective)
    state = method.init(cohort, x0=cohort.start() + 1.0)
    informative = 0
    for _ in range(6):
        C = state.certificate
        damping = state.damping
        state = method.round(cohort, state)
        bound = (2 * 2**0.5 / 3) * M * (C / mu) ** 1.5 + M**2 * C**2 / (2 * mu**3)
        if state.accepted and damping == 0 and C > 1e-9:
            assert state.certificate <= bound + 1e-12
            informative += bound < C
    assert informative
    assert state.certificate < 1e-9


@pytest.mark.parametrize("objective", FLAT + BENT, ids=str)
def test_theorem_5_a_certificate_is_of_second_order_in_the_step(objective, monkeypatch):
    """C⁺ ≤ h‖p‖² + (M/3)‖p‖³ + (h‖λ⁺ − λ‖₁‖p‖ + (M/2)‖p‖²)²/(2μ) and ‖p‖² ≤ 2C/μ without damping,
    up to the accuracy of the saddle point.
    """
    monkeypatch.setattr("scaffpd.algorithms.minimax_newton.SINGLE", 0)
    mu = 0.05
    cohort, M = logistic_clients(mu)
    method = sp.MinimaxNewton(objective)
    state = method.init(cohort, x0=cohort.start() + 1.0)
    informative = 0
    for _ in range(8):
        old = state
        C = old.certificate
        H = old.at.hessians().numpy()
        h = np.abs(np.linalg.eigvalsh(H - np.tensordot(old.weights, H, 1))).max()
        state = method.round(cohort, old)
        p = float((state.x - old.x).norm())
        moved = np.abs(state.weights - old.weights).sum()
        bound = h * p**2 + M / 3 * p**3 + (h * moved * p + M / 2 * p**2) ** 2 / (2 * mu)
        inexact = 1e-3 * min(old.promise, 1.0) + 1e-12
        if state.accepted and old.damping == 0 and C > 1e-9:
            assert state.certificate <= bound + inexact
            assert p**2 <= 2 * (C + inexact) / mu
            informative += bound < C
    assert informative
    assert state.certificate < 1e-9
