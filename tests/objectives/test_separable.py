"""Weights that clients find by themselves, from one threshold, are those of the objective's own
prox and maximizer.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaffpd.algorithms.thresholds import ThresholdSearch
from scaffpd.objectives import (
    Agnostic,
    Average,
    ChiSquare,
    ChiSquareBall,
    CVaR,
    Excess,
    QFair,
    Tilted,
)

losses = st.lists(st.floats(-3, 3), min_size=2, max_size=9).map(np.array)
strengths = st.floats(0.02, 20)


def objectives(rho, n):
    prior = np.arange(1.0, n + 1)
    return [
        ChiSquare(rho),
        ChiSquare(rho, prior),
        ChiSquare(rho, cap=min(1.0, 1.5 / n)),
        Tilted(rho),
        Tilted(rho, prior),
        CVaR(0.6),
        CVaR(0.6, prior),
        Agnostic(),
        Average(prior),
        Excess(ChiSquare(rho), np.linspace(-1, 1, n)),
    ]


def solved(form, L, delta, centre, expected=None):
    """ν by the server's own search, from sums over clients; and how many exchanges it took."""
    search = ThresholdSearch(
        float(L.mean()) if expected is None else expected, float(L.std()) + 1e-3, form.tilt
    )
    for asked in range(1, 30):
        levels = search.next()
        masses = np.array([form.weights(L, nu, delta, centre).sum() for nu in levels])
        bounds = np.array([form.conjugate(L, nu, delta, centre).sum() for nu in levels])
        search.take(levels, masses, bounds)
        if (found := search.found(1e-12, 1e-15)) is not None:
            return found, asked
    raise AssertionError("no threshold was found")


@settings(max_examples=25, deadline=None)
@given(losses, strengths, st.floats(0.05, 5))
def test_weights_are_those_of_the_prox_and_the_maximizer(L, rho, delta):
    n = len(L)
    for objective in objectives(rho, n):
        form = objective.separable(n)
        fixed = 0.0 if form.curved else delta
        centre = np.full(n, 1 / n) if isinstance(objective, CVaR) else objective.weights(n)
        level, _ = solved(form, L, fixed, centre)
        weights = form.weights(L, level.nu, fixed, centre)
        wanted = objective.maximizer(L) if fixed == 0 else objective.prox(L, centre, 1 / fixed)
        np.testing.assert_allclose(weights, wanted, atol=2e-5)
        away = 0.0 if fixed == 0 else fixed / 2 * float(np.square(wanted - centre).sum())
        value = float(wanted @ L) - objective.value(wanted) - away
        assert level.value == pytest.approx(value, abs=1e-8)


@settings(max_examples=60, deadline=None)
@given(losses, strengths, st.floats(-5, 5))
def test_every_threshold_bounds_the_support_and_moments_give_the_penalty(L, rho, nu):
    n = len(L)
    for objective in objectives(rho, n):
        form = objective.separable(n)
        p = objective.weights(n)
        bound = nu + float(form.conjugate(L, nu, 0.0, p).sum())
        assert bound >= objective.support(L) - 1e-12 * (1 + abs(bound))
        weights = form.weights(L, nu, 1.0 if not form.curved else 0.0, p)
        if weights.sum() > 1e-3:
            mass = float(weights.sum())
            paid = (
                form.cost(float(form.moment(weights).sum()), mass)
                + float(form.offset @ weights) / mass
            )
            assert paid == pytest.approx(
                objective.value(weights / mass), rel=1e-9, abs=1e-9 * (1 + rho)
            )


@settings(max_examples=40, deadline=None)
@given(losses, strengths)
def test_a_client_by_itself_finds_the_same_weight(L, rho):
    n = len(L)
    for objective in objectives(rho, n):
        whole = objective.separable(n)
        alone = [
            whole.only([i]).weights(L[i : i + 1], 0.3, 0.5, whole.prior[i : i + 1])[0]
            for i in range(n)
        ]
        np.testing.assert_allclose(alone, whole.weights(L, 0.3, 0.5, whole.prior), rtol=1e-12)


def test_a_warm_start_needs_one_exchange_where_nothing_bends():
    L = np.array([0.3, 0.5, 0.4, 0.45])
    form = ChiSquare(1.0).separable(4)
    assert solved(form, L, 0.0, form.prior, expected=0.41)[1] == 1
    assert solved(Tilted(0.1).separable(4), L, 0.0, form.prior, expected=0.41)[1] <= 2


def test_objectives_without_a_threshold_have_no_form():
    assert QFair(1.0).separable(3) is None
    assert ChiSquareBall(0.5).separable(3) is None
