"""Minimax from sums: the same optimum, a certificate that holds, and nothing seen but sums."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.federation.own_weights import LEAST, OwnSums
from scaffpd.objectives.floored import Floored

ENDS = [
    sp.Average(),
    sp.Average(prior=[0.2, 0.3, 0.4, 0.05, 0.05]),
    sp.ChiSquare(0.1),
    sp.ChiSquare(0.3, prior=[1, 2, 3, 2, 1]),
    sp.ChiSquare(0.02, cap=0.4),
    sp.Tilted(0.1),
    sp.Tilted(1.0, prior=[1, 2, 3, 2, 1]),
    sp.QFair(0.7),
    sp.QFair(3.0),
    sp.Nash(b=6.0),
    Floored(sp.ChiSquare(0.11, cap=0.4), 0.14),
    Floored(sp.ChiSquare(0.02, prior=[1, 2, 3, 2, 1]), 0.3),
    Floored(sp.Tilted(0.1), 0.09),
]


def clients(loss="logistic", n=5, d=4, seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    found = []
    for i in range(n):
        X = random.standard_normal((6 + 9 * i, d))
        y = X @ (random.standard_normal(d) + i / n) + random.logistic(size=len(X))
        if loss != "squared":
            y = np.digitize(y, [-1.0, 1.0] if loss == "softmax" else [0.0])
        found.append((X, scale * y if loss == "squared" else y))
    classes = 3 if loss == "softmax" else None
    return sp.Cohort(found, sp.Linear(loss, l2=0.02, classes=classes))


@pytest.mark.parametrize("loss", ["logistic", "squared", "softmax"])
@pytest.mark.parametrize("objective", ENDS, ids=repr)
@pytest.mark.sample(12)
def test_the_optimum_of_fair_with_a_certificate_that_holds(objective, loss):
    """The other method sees every loss and Hessian, and solves its models by interior points."""
    cohort = clients(loss, scale=0.3)
    wanted = sp.train(sp.fair(objective), cohort, 60, 1e-13)
    best = objective.support(cohort.evaluate(wanted.x).loss)
    gaps = []

    def compared(info):
        gap = objective.support(cohort.evaluate(info.state.x).loss) - best
        assert info.state.certificate >= gap - 1e-13 * (1 + abs(best))
        assert np.isnan(info.state.losses).all()
        assert np.isnan(info.state.weights).all()
        gaps.append(gap)

    found = sp.train(
        sp.MinimaxSums(objective), sp.SecureAggregation(cohort), 80, 1e-12, callbacks=[compared]
    )
    assert found.status in ("converged", "precision")
    assert gaps[-1] <= found.certificate
    np.testing.assert_allclose(found.x, wanted.x, rtol=0, atol=1e-5)
    assert found.rounds <= 60


@pytest.mark.parametrize("objective", ENDS, ids=repr)
def test_conjugates_against_a_grid(objective):
    """φ is the largest l t − ψ(l), at the weight that is returned; its slope is that weight's."""
    p = np.array([0.1, 0.2, 0.35])
    top = objective._most(p) if objective.simplex else np.full(3, 50.0)
    least = objective._least(p)
    grid = least + np.linspace(1e-9, 1, 20_001)[:, None] * (top - least)
    if isinstance(objective, sp.Average):
        grid = p[None]
    costs = np.array([objective._penalties(row, p) for row in grid])
    for t in (-0.8, -0.05, 0.0, 0.04, 0.3, 2.0):
        if not objective.simplex and t < 0:
            continue
        value, weights, slope, bound = objective._conjugate(np.full(3, t), p)
        near = (grid * t - costs).max(0)
        assert (value >= near - 1e-12).all()
        np.testing.assert_allclose(value, near, atol=1e-3)
        np.testing.assert_allclose(
            value, weights * t - objective._penalties(weights, p), atol=1e-30
        )
        assert (slope <= bound + 1e-15).all()
        step = 1e-7
        after = objective._conjugate(np.full(3, t + step), p)
        np.testing.assert_allclose((after[0] - value) / step, weights, rtol=1e-4, atol=1e-5)
        free = slope > 0
        np.testing.assert_allclose((after[1] - weights)[free] / step, slope[free], rtol=1e-3)


@pytest.mark.parametrize("far", [0.0, 2.0])
@pytest.mark.parametrize(
    ("size", "objective"),
    [
        (3.0, sp.ChiSquare(0.1)),  # λ was at a vertex, and ν crept
        (1e5, sp.ChiSquare(300.0)),  # the first step was beyond all numbers of a sum
        (1e5, sp.Tilted(10.0)),
    ],
    ids=repr,
)
def test_counts_of_any_size_from_any_start(size, objective, far):
    random = np.random.default_rng(0)
    made = []
    for _ in range(5):
        X = random.normal(size=(60, 4))
        z = X @ [0.6, -0.4, 0.3, 0.1] + np.log(size) + 0.3 * random.normal()
        made.append((X, random.poisson(np.exp(z)).astype(float)))
    cohort = sp.Cohort(made, sp.Linear("poisson", l2=1e-3, intercept=True))
    federation = sp.SecureAggregation(cohort)
    x0 = far * np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    method = sp.MinimaxSums(objective, steep=True)
    found = sp.train(method, federation, 100, 1e-6 * size, x0=x0)
    wanted = sp.train(sp.fair(objective), cohort, 100, 1e-7 * size)
    assert found.status == wanted.status == "converged"
    np.testing.assert_allclose(found.x, wanted.x, atol=0.02)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 3), min_size=3, max_size=8), st.floats(0.05, 2))
def test_the_least_over_levels_is_the_objective(losses, rho):
    """min_ν ν + Σ φ_i(L_i − ν) is the support function, by a search over ν."""
    L = np.array(losses)
    n = len(L)
    for objective in (sp.ChiSquare(rho), sp.ChiSquare(rho, cap=1.5 / n), sp.Tilted(rho)):
        p = objective.weights(n)
        low = L.min() - 3 * rho * n
        high = L.max() + rho
        for _ in range(70):
            nu = (low + high) / 2
            mass = objective._conjugate(L - nu, p)[1].sum()
            low, high = (nu, high) if mass > 1 else (low, nu)
        value = nu + objective._conjugate(L - nu, p)[0].sum()
        assert value == pytest.approx(objective.support(L), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rho", [1e-3, 0.05, 1.0])
def test_nobody_has_more_than_its_share_of_a_sum(rho, monkeypatch):
    """At every point of the run, for weights that jump from silo to silo as well."""
    shares = []
    numbers = OwnSums._numbers

    def watched(self, losses, error, p):
        weights, table = numbers(self, losses, error, p)
        shares.append((weights.sum(), weights.max() / weights.sum()))
        return weights, table

    monkeypatch.setattr(OwnSums, "_numbers", watched)
    objective = sp.ChiSquare(rho, cap=0.4)
    for loss in ("logistic", "squared"):
        federation = sp.SecureAggregation(clients(loss, scale=5.0))
        sp.train(sp.MinimaxSums(objective), federation, 40)
    assert min(mass for mass, _ in shares) >= LEAST - 1e-12
    assert max(share for _, share in shares) <= 0.4 / LEAST + 1e-12
    assert max(share for _, share in shares) > 0.3


def test_a_run_that_was_interrupted_goes_on_with_the_same_numbers(tmp_path):
    method = sp.MinimaxSums(sp.ChiSquare(0.05, cap=0.4))
    whole = sp.train(method, sp.SecureAggregation(clients()), 9)
    file = sp.Checkpoint(tmp_path / "run.npz", every=1)
    sp.train(method, sp.SecureAggregation(clients()), 4, checkpoint=file)
    found = sp.train(method, sp.SecureAggregation(clients()), 9, checkpoint=file)
    np.testing.assert_array_equal(found.x, whole.x)
    assert found.certificate == whole.certificate


def test_what_it_cannot_do():
    for objective in (sp.Agnostic(), sp.CVaR(0.5), sp.ChiSquareBall(0.5), sp.Nash(b=[3.0, 4.0])):
        with refuses("objective-not-separable"):
            sp.MinimaxSums(objective)
    with refuses("objective-not-separable"):  # the prior is above the cap
        sp.MinimaxSums(sp.ChiSquare(0.1, prior=[9, 1, 1], cap=0.4))
    with refuses("start-not-finite"):
        sp.train(sp.MinimaxSums(sp.Nash(b=0.1)), clients())
    with refuses("not-convex"):
        from runtimes import cohort_of

        sp.train(sp.MinimaxSums(sp.ChiSquare(0.1)), cohort_of("module"))
