"""`Auto`: its formulas, and that it is safe on problems that nobody tuned it for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.algorithms.steps.rules import AutoState, Trial, curvature_and_change, longest_step

positive = st.floats(1e-6, 1e6)


@given(slope=positive, b=positive, a=st.one_of(st.just(0.0), positive))
def test_the_longest_step_keeps_half_of_the_promise(slope, b, a):
    e = longest_step(slope, b, a, otherwise=1.0)
    assert b * e + a * e**2 == pytest.approx(slope / 2, rel=1e-9)


def test_without_a_coupling_it_is_the_exact_line_search():
    H = np.diag([1.0, 10.0])
    c = np.array([2.0, -1.0])
    d = np.array([1.0, -0.2])
    bregman = 0.5 * 0.3**2 * d @ H @ d  # of a step 0.3 along d
    assert longest_step(c @ d, bregman / 0.3**2, 0.0, 1.0) == pytest.approx((c @ d) / (d @ H @ d))


def trial(before, after, weights, step=0.1, slope=1.0, bend=None, objective=None):
    objective = objective or sp.Agnostic()
    return Trial(
        objective,
        np.array(before),
        np.array(after),
        np.array(weights),
        step,
        slope,
        2.2e-16,
        bend,
    )


def test_curvature_is_the_bregman_distance_of_the_weighted_loss():
    t = trial([1.0, 2.0], [0.95, 1.94], [0.5, 0.5], step=0.1, slope=1.0)
    bregman, change = curvature_and_change(t)
    assert bregman == pytest.approx(0.5 * (-0.05) + 0.5 * (-0.06) + 0.1)
    np.testing.assert_allclose(
        change, [0.005, -0.005], atol=1e-15
    )  # centred: only differences between clients count


def test_where_losses_are_all_rounding_the_gradients_decide():
    # f_1 = f_2 = 1e6 + (h/2)z² from z = 0 to z = 1e-7: the losses do not even change in float64
    h = 3.0
    z = 1e-7
    t = trial(
        [1e6, 1e6],
        [1e6, 1e6],
        [0.5, 0.5],
        step=1.0,
        slope=0.0,
        bend=lambda: h / 2 * z * z,
    )
    bregman, change = curvature_and_change(t)
    assert bregman == pytest.approx(h / 2 * z * z)
    np.testing.assert_allclose(change, 0, atol=1e-30)


@pytest.mark.parametrize(
    ("after", "slope", "field"),
    [
        ([np.nan, 1.0], 1.0, "step"),
        ([np.inf, 1.0], 1.0, "step"),
        ([1.0, 1.0], np.nan, "local_scale"),
    ],
)
def test_broken_numbers_are_rejected_and_shrink_what_broke(after, slope, field):
    state, accepted = sp.Auto().judge(
        AutoState(), trial([1.0, 1.0], after, [0.5, 0.5], step=1.0, slope=slope)
    )
    assert not accepted
    assert getattr(state, field) < getattr(AutoState(), field)


def test_it_falls_back_to_what_theory_asks_for_when_nothing_improves():
    state = AutoState(gamma=1e-9, best=-1e9)
    rule = sp.Auto()
    for _ in range(60):
        after = 1 - 0.6 * state.step * 1e-3  # most of the promise is kept
        state, accepted = rule.judge(
            state, trial([1.0, 1.0], [after, after], [0.5, 0.5], step=state.step, slope=1e-3)
        )
        assert accepted
    assert state.strict


objectives = st.sampled_from(
    [
        sp.Average(),
        sp.Agnostic(),
        sp.ChiSquare(1e-3),
        sp.ChiSquare(1.0),
        sp.ChiSquareBall(0.3),
        sp.CVaR(0.3),
        sp.Tilted(0.01),
        sp.QFair(0.3),
        sp.QFair(3.0),
    ]
)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 5))]
)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    N=st.integers(1, 8),
    d=st.integers(1, 20),
    scaling=st.floats(0, 1.5),
    sigma=st.floats(0, 3),
    l2=st.sampled_from([1e-4, 1e-2, 1.0]),
    J=st.sampled_from([1, 3, 30, 300, 3000]),
    objective=objectives,
)
def test_random_problems_never_diverge(part, seed, N, d, scaling, sigma, l2, J, objective):
    """Progress may be slow: thousands of local steps at a client with one sample pull everybody
    its way.
    """
    sizes = np.random.default_rng(seed).integers(1, 40, N).tolist()
    clients = sp.data.synthetic(N=N, d=d, sigma=sigma, scaling=scaling, sizes=sizes, seed=seed)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=l2))
    result = sp.train(sp.ScaffPD(objective, local_steps=J), cohort, rounds=100, tol=1e-8)
    assert result.status in ("converged", "round limit", "precision")
    assert np.isfinite(result.certificate)
    values = [objective.support(losses) for losses in result.history.losses]
    assert values[-1] <= 3 * values[0]
    assert min(values) <= values[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(6))
def test_nash_never_leaves_its_domain(seed):
    """With b barely above the first losses, a long step would make some client worse off than its
    fallback.
    """
    clients = sp.data.synthetic(N=4, d=6, m=15, sigma=1.5, scaling=1.0, seed=seed)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    b = 1.01 * cohort.gradients(cohort.start()).losses
    result = sp.train(sp.ScaffPD(sp.Nash(b)), cohort, rounds=100, tol=1e-8)
    assert result.status in ("converged", "round limit")
    losses = result.history.losses
    near = np.any(
        b - losses[-1] <= 1e-11 * b
    )  # then rounding may be all that is left of b − f_i, and nothing is proven
    assert np.isfinite(result.certificate) != near
    assert np.all(losses < b)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_size_of_the_targets_does_not_matter(scale):
    """A penalty that is tiny or huge against the losses must not stall the weights."""
    clients = [(X, scale * y) for X, y in sp.data.synthetic()]
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    result = sp.train(sp.ScaffPD(sp.ChiSquare(0.1)), cohort, rounds=150, tol=1e-8 * scale**2)
    assert result.status == "converged"


def test_local_steps_that_blow_up_are_shortened():
    """A network whose curvature grows away from the start: 1/L_i of the start is far too long."""

    class Quartic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((3,), 0.05, dtype=torch.float64))

        def forward(self, x):
            return (x * self.w**4).sum(-1, keepdim=True)

    clients = [
        (100 * np.abs(X[:, :3]), 100 * np.abs(y) + 50) for X, y in sp.data.synthetic(N=3, m=20)
    ]
    result = sp.train(
        sp.ScaffPD(sp.Agnostic(), local_steps=20),
        sp.Cohort(clients, sp.Module(Quartic(), "squared")),
        rounds=12,
    )
    assert result.status == "round limit"
    assert np.all(np.isfinite(result.x))
    assert result.history.losses[-1].max() < result.history.losses[0].max()


def test_it_needs_full_losses():
    with refuses("auto-needs-full-losses"):
        sp.ScaffPD(sp.Agnostic(), batch_size=4, full_gradients=False)


def test_where_sums_hide_gradients_their_sums_decide_and_else_the_last_curvature():
    flat = trial([1.0, 1.0], [1.0, 1.0], [0.5, 0.5], step=1e-9, slope=1e-12)
    assert curvature_and_change(flat, 3e-30)[0] >= 3e-30
    seen = replace(flat, bend=lambda: 7e-25)
    assert curvature_and_change(seen, 3e-30)[0] == 7e-25
    assert curvature_and_change(replace(flat, bend=lambda: -1.0), 3e-30)[0] == 0.0


def test_a_run_that_does_not_get_there_says_why_and_what_would():
    """Never just that all rounds were made: what `fair` would do."""
    cohort = sp.Cohort(sp.data.synthetic(scaling=1.0), sp.Linear("squared", l2=0.01))
    result = sp.train(sp.ScaffPD(sp.Agnostic()), cohort, rounds=8, tol=1e-10)
    assert result.status is sp.Status.ROUND_LIMIT
    assert "sp.fair(objective) would choose a second-order method" in result.message
    assert (
        sp.train(sp.fair(sp.Agnostic()), cohort, rounds=8, tol=1e-10).status is sp.Status.CONVERGED
    )
    fixed = sp.train(
        sp.ScaffPD(sp.Agnostic(), steps=sp.Fixed(1e-4, 0.01, 0.0, 1e-4)), cohort, rounds=2
    )
    assert fixed.message == "All rounds were made."
