"""The certificate against 150-digit truth; `benchmarks/adversary.py` prints the docs' numbers."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import adversary as hostile
import scaffpd as sp
from scaffpd.algorithms.minimax import certify, length

SERVER = st.integers(0, 2**31)


@st.composite
def points(draw):
    """Any point, the kinds of which Hypothesis can vary one by one."""
    point = hostile.drawn(np.random.default_rng(draw(st.integers(0, 2**31))))
    changes = {
        "objective": draw(st.sampled_from(hostile.OBJECTIVES)),
        "pattern": draw(st.sampled_from(hostile.PATTERNS)),
        "clients": draw(st.sampled_from([1, 2, 5])),
        "single": draw(st.booleans()),
    }
    if point.loss == "cox":
        changes["single"] = False
        if changes["objective"] == "QFair":
            changes["objective"] = "Average"
    if changes["single"]:
        changes["targets_scale"] = max(min(point.targets_scale, 6.0), -6.0)
    return hostile.replace(point, **changes)


def check(point):
    try:
        found = hostile.judge(point)
    except hostile.UndecidedError:
        assume(False)
    assert found.holds, (point, found)


@settings(max_examples=12, deadline=None)
@given(point=points())
def test_no_point_breaks_the_certificate(point):
    check(point if point.features < 50 else hostile.replace(point, features=400))


def server_truth(objective, losses, weights, gradient, mu):
    """The right-hand side of the certificate for exact losses and gradients."""
    w = hostile.normal_weights(objective, weights)
    dual = (
        hostile.support(objective, losses) - hostile.fdot(w, losses) + hostile.penalty(objective, w)
    )
    mass = hostile.fsum(hostile.exact(weights)) if objective.simplex else 1
    return dual + (hostile.mpf(gradient) / mass) ** 2 / (2 * hostile.fdot(w, hostile.exact(mu)))


@pytest.mark.parametrize(
    ("examples", "most"), [(40, 8), pytest.param(2000, 70, marks=pytest.mark.long)]
)
def test_the_servers_part_holds_for_all_losses_within_their_bounds(examples, most):
    @settings(max_examples=examples, deadline=None)
    @given(
        seed=SERVER,
        kind=st.sampled_from(hostile.OBJECTIVES),
        scale=st.floats(-150, 45),
        error=st.floats(-18, 0),
    )
    def search(seed, kind, scale, error):
        check_server(np.random.default_rng(seed), kind, scale, error, most)

    search()


def check_server(random, kind, scale, error, most):
    """L_i anywhere in L̂_i ± e_i, and its ends in particular: support must be taken there, not its
    slope at L̂.
    """
    n = int(random.choice([1, 2, 3, most]))
    losses = 10**scale * random.uniform(0.5, 1, n) * (1 + 1e-15 * random.integers(0, 4, n))
    bounds = 10.0 ** (scale + error) * random.uniform(0, 1, n)
    objective = hostile.objective_of(hostile.Point(0, kind), losses, random)
    assume(
        kind != "Nash" or (objective.levels(n) > losses).any()
    )  # there is a gain, where rounding has left one
    start = objective.start(losses)
    weights = (
        objective.prox(losses, start, random.uniform(0.1, 10)) if random.random() < 0.5 else start
    )
    if not objective.simplex and random.random() < 0.5:
        weights = 10 ** random.uniform(-40, 3, n)
    gradient = float(10 ** random.uniform(-80, 10))
    mu = 10 ** random.uniform(-8, 1, n)
    proof = certify(objective, losses, weights, gradient, mu, (bounds, np.zeros(n)))
    for sign in (random.choice([-1, 0, 1], n), np.ones(n), np.where(losses == losses.max(), 1, -1)):
        true = [
            a + int(s) * b
            for a, s, b in zip(*map(hostile.exact, (losses, sign, bounds)), strict=True)
        ]
        truth = server_truth(objective, true, weights, gradient, mu)
        assert truth <= hostile.mpf(proof.gap) or proof.gap == np.inf, (
            objective,
            float(truth),
            proof,
        )


@pytest.mark.parametrize("room", [-1, 0, 1, 2, 100])
def test_nash_proves_nothing_where_rounding_may_have_eaten_the_gain(room):
    """b within `room` bounds of the loss: up to one, b − f ≤ 0 may be true."""
    losses = np.array([1.0, 2.0])
    e = np.full(2, 1e-15)
    objective = sp.Nash(losses + room * 1e-15 + np.array([0.0, 1.0]))
    gap = certify(objective, losses, np.array([1e15, 1.0]), 0.0, np.ones(2), (e, np.zeros(2))).gap
    assert (gap == np.inf) == (room <= 1)


def long_row(n, dtype):
    """One client, one row a of n equal numbers, x = a, and a target that hides the gradient.

    f(ta) = (ts − y)² + (l2/2) t²s with s = ‖a‖². The target is s + l2/2, for which x is optimal,
    with s added up in single precision, one product after the other: who adds up like that sees no
    gradient at all. The error is in the data, so that every machine gets the same problem.
    """
    value = np.float32(0.1)
    row = np.full((1, n), value)
    rounded = np.add.accumulate(np.full(n, value * value), dtype=np.float32)[-1]
    s = n * Fraction(float(value)) ** 2
    l2 = 0.6 * float(s)
    y = np.array([rounded + np.float32(l2 / 2)])
    cohort = sp.Cohort([(row, y)], sp.Linear("squared", l2=l2), dtype=dtype)
    at = cohort.gradients(torch.full((n,), float(value), dtype=dtype))
    one = np.ones(1)
    mu = cohort.constants().strong_convexity
    proof = certify(sp.Average(), at.losses, one, length(at.sum(one)), mu, at.rounding())
    target = Fraction(float(y[0]))
    ridge = Fraction(l2)
    loss = (s - target) ** 2 + ridge / 2 * s
    best = target**2 * ridge / 2 / (s + ridge / 2)
    assert abs(target - s - ridge / 2) > s / 10**5, "the error is visible"
    return proof.gap, loss - best, abs(Fraction(at.losses[0]) - loss), at.rounding()[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [10**4, 10**5, pytest.param(10**7, marks=pytest.mark.long)])
def test_equal_signs_in_a_long_row_do_not_fool_it(n, dtype):
    """The certificate is ‖∇f‖²/(2 l2), the gap ‖∇f‖²/(2(2s + l2)): 13/3 of it, for l2 = 0.6 s.

    Rounding may add to it: bounds are those of sums in any order, n·2⁻⁵³ for products of doubles,
    and 2⁻²⁴ for a gradient that is sent in single precision. The error in the target is at least
    10⁻⁵ of s, hundreds of times that, so that 5 leaves room for all of it.
    """
    certificate, gap, error, bound = long_row(n, dtype)
    assert gap <= Fraction(certificate)
    assert error <= Fraction(bound)
    assert certificate < 5 * gap
