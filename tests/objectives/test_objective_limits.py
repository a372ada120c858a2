"""The ends of every range, and the closed forms between them."""

import numpy as np
import pytest

from cases.objectives import contains
from scaffpd.objectives import (
    ChiSquare,
    ChiSquareBall,
    CVaR,
    Nash,
    QFair,
    Tilted,
)

LOSSES = np.array([0.3, 1.2, 0.7, 0.9])
OLD = np.array([0.4, 0.0, 0.5, 0.1])
PRIOR = np.array([0.1, 0.2, 0.3, 0.4])
MEAN = float(PRIOR @ LOSSES)
VARIANCE = float(PRIOR @ (LOSSES - MEAN) ** 2)


def test_cvar_is_the_mean_of_the_worst_share():
    assert CVaR(0.5).support(LOSSES) == pytest.approx((1.2 + 0.9) / 2, rel=1e-15)
    assert CVaR(0.375).support(LOSSES) == pytest.approx((1.2 + 0.9 / 2) / 1.5, rel=1e-15)
    np.testing.assert_allclose(CVaR(0.4, PRIOR).maximizer(LOSSES), [0, 0.5, 0, 0.5], rtol=1e-14)
    np.testing.assert_allclose(
        CVaR(0.6).maximizer([1, 1, 1, 0]), [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-14
    )


def test_chi_square_is_mean_plus_variance_while_all_have_weight():
    assert ChiSquare(5.0, PRIOR).support(LOSSES) == pytest.approx(MEAN + VARIANCE / 10.0, rel=1e-14)
    assert ChiSquareBall(0.01, PRIOR).support(LOSSES) == pytest.approx(
        MEAN + np.sqrt(0.01 * VARIANCE), rel=1e-14
    )


@pytest.mark.parametrize("delta", [1e-20, 1e-8, 0.3, 1.0, 2.0, 8.99])
def test_the_balls_maximizer_lies_on_the_sphere(delta):
    lam = ChiSquareBall(delta, PRIOR).maximizer(LOSSES)
    reach = min(delta, 1.0 / PRIOR[1] - 1.0)  # of the corner of the worst client
    assert np.sqrt(np.sum((lam - PRIOR) ** 2 / PRIOR)) == pytest.approx(
        np.sqrt(reach), rel=1e-5 if delta < 1e-19 else 1e-9
    )


def test_tilted_is_log_sum_exp():
    value = 0.2 * np.log(np.sum(PRIOR * np.exp(LOSSES / 0.2)))
    assert Tilted(0.2, PRIOR).support(LOSSES) == pytest.approx(value, rel=1e-14)
    worst = np.max(LOSSES - 0.2 * np.log(1.0 / PRIOR))
    assert worst <= value <= LOSSES.max()


def test_q_fair_runs_from_average_to_agnostic():
    np.testing.assert_allclose(QFair(1e-9, PRIOR).maximizer(LOSSES), PRIOR, rtol=1e-8)
    assert QFair(1e-9, PRIOR).support(LOSSES) == pytest.approx(MEAN, rel=1e-8)
    norms = [(QFair(q).support(LOSSES) * (q + 1) * 4) ** (1 / (q + 1)) for q in (1.0, 10.0, 400.0)]
    assert norms[0] > norms[1] > norms[2] >= 1.2
    assert norms[2] == pytest.approx(1.2, rel=1e-3)
    assert QFair(1.0).support(LOSSES) == pytest.approx(np.mean(LOSSES**2) / 2, rel=1e-14)


def test_nash_weighs_a_client_by_the_inverse_of_its_gain():
    nash = Nash(2.0)
    np.testing.assert_allclose(nash.maximizer(LOSSES), 0.25 / (2.0 - LOSSES), rtol=1e-15)
    assert nash.support(LOSSES) == pytest.approx(-np.mean(np.log(2.0 - LOSSES)), rel=1e-14)
    assert nash.support([0.0, 0.0, 2.0, 0.0]) == np.inf
    one_each = Nash([2.0, 3.0, 4.0, 5.0], PRIOR)
    np.testing.assert_allclose(
        one_each.maximizer(LOSSES), PRIOR / (np.arange(2, 6) - LOSSES), rtol=1e-15
    )


def test_a_capped_chi_square_without_a_price_is_cvar():
    """Caps κ are p_i/α with p_i = 1/N and α = 1/(Nκ)."""
    for cap in (0.3, 0.4, 0.7):
        capped = ChiSquare(1e-10, cap=cap)
        tail = CVaR(1 / (4 * cap))
        np.testing.assert_allclose(capped.maximizer(LOSSES), tail.maximizer(LOSSES), atol=1e-9)
        assert capped.support(LOSSES) == pytest.approx(tail.support(LOSSES), abs=1e-9)


def test_a_prior_above_the_cap_starts_at_the_nearest_weights_below_it():
    objective = ChiSquare(0.3, [0.7, 0.2, 0.1], cap=0.5)
    start = objective.start(np.array([1.0, 2.0, 3.0]))
    assert contains(objective, start)
    np.testing.assert_allclose(
        start, [0.5, 1 / 3, 1 / 6], rtol=1e-14
    )  # the others keep their proportions
