"""Nothing overflows, warns or loses its digits: sizes from 1e-8 to 1e8, steps from 1e-12 to 1e12,
any tie.
"""

import numpy as np
import pytest
from objective_cases import ALL, build, optimality_error

from scaffpd.objectives import ChiSquare, ChiSquareBall, CVaR, QFair, Tilted

SIGMAS = (1e-12, 1e-6, 1.0, 1e6, 1e12)
PARAMETERS = (1e-8, 1e-2, 0.6, 1e3, 1e8)


def patterns(n):
    random = np.random.default_rng(n)
    return {
        "small": 1e-8 * random.exponential(size=n),
        "large": 1e8 * random.exponential(size=n),
        "close": 1e8 + random.integers(0, 8, n) * 2.0**-20,
        "mixed": 10.0 ** random.uniform(-8, 8, n),
        "ties": random.integers(0, 3, n).astype(float),
        "equal": np.full(n, 0.7),
        "zero": np.zeros(n),
        "negative": -random.exponential(size=n),
    }


@pytest.mark.sample(12)
@pytest.mark.parametrize("n", [1, 2, 7, 60])
@pytest.mark.parametrize("kind", ALL)
def test_every_extreme_is_solved(kind, n):
    random = np.random.default_rng(0)
    olds = (np.full(n, 1.0 / n), np.eye(n)[0], random.dirichlet(np.full(n, 0.2)))
    priors = (None, 10.0 ** random.uniform(-3, 0, n))
    for i, (name, losses) in enumerate(patterns(n).items()):
        for parameter in PARAMETERS:
            objective = build(kind, parameter, losses, priors[i % 2])
            best = objective.maximizer(losses)
            assert np.all(np.isfinite(best)), (name, parameter)
            assert np.isfinite(objective.support(losses)), (name, parameter)
            for j, sigma in enumerate(SIGMAS):
                old = olds[(i + j) % 3]
                lam = objective.prox(losses, old, sigma)
                assert np.all(np.isfinite(lam)), (name, parameter, sigma)
                assert np.all(lam >= 0.0), (name, parameter, sigma)
                if objective.simplex:
                    assert abs(lam.sum() - 1.0) <= 1e-15 * (1 + np.log2(n)), (
                        name,
                        parameter,
                        sigma,
                    )
                error = optimality_error(objective, losses, old, sigma, lam)
                assert error <= 1e-11, (name, parameter, sigma, error)


@pytest.mark.sample(4)
@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("prior", ["uniform", "random"])
def test_a_hundred_thousand_clients(kind, prior):
    n = 100_000
    random = np.random.default_rng(0)
    losses = random.exponential(size=n)
    old = random.dirichlet(np.ones(n))
    p = None if prior == "uniform" else random.uniform(0.2, 5.0, n)
    for parameter, sigma in ((0.3, 1e-6), (0.3, 1e-2), (3.0, 1e2)):
        objective = build(kind, parameter, losses, p)
        lam = objective.prox(losses, old, sigma)
        assert not objective.simplex or abs(lam.sum() - 1.0) <= 2e-15
        assert optimality_error(objective, losses, old, sigma, lam) <= 1e-11
        best = objective.maximizer(losses)
        assert objective.support(losses) == pytest.approx(
            losses @ best - objective.value(best), rel=1e-10
        )
        np.testing.assert_allclose(objective.prox(losses, best, sigma), best, rtol=1e-8, atol=1e-12)


def test_a_long_capped_step_keeps_the_old_weights_among_ties():
    """Measured from the largest loss, σs would swamp l in the tie that decides (1e20 against 1)."""
    losses = np.array([1e8, 0.0, 0.0, 0.0])
    old = np.array([0.25, 0.375, 0.25, 0.125])
    lam = CVaR(0.5).prox(losses, old, 1e12)
    np.testing.assert_allclose(
        lam, [0.5, 0.375 - 0.25 / 3, 0.25 - 0.25 / 3, 0.125 - 0.25 / 3], rtol=1e-14
    )


def test_a_client_with_a_tiny_prior_does_not_upset_the_sum():
    prior = np.array([1e-12, 1.0, 1.0])
    for objective in (
        ChiSquare(1.0, prior),
        Tilted(1.0, prior),
        ChiSquareBall(0.5, prior),
        CVaR(0.5, prior),
    ):
        lam = objective.prox([1e6, 0.0, 1.0], np.full(3, 1 / 3), 1e3)
        assert abs(lam.sum() - 1.0) <= 1e-15
        assert (
            optimality_error(objective, np.array([1e6, 0.0, 1.0]), np.full(3, 1 / 3), 1e3, lam)
            <= 1e-9
        )


def test_large_exponents_overflow_to_infinity_and_not_to_nan():
    assert QFair(100.0).support([1e8, 1.0]) == np.inf
    assert np.isfinite(QFair(100.0).prox([1e8, 1.0], [0.5, 0.5], 1e3)).all()
    assert np.isfinite(QFair(100.0).start(np.array([1e8, 1.0]))).all()
