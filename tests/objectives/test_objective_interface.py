"""What else algorithms rely on: ψ, membership, curvature, the start, and refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from objective_cases import ALL, build, gradient, steps

from cases.objectives import contains
from cases.refusals import refuses
from scaffpd.errors import InputError
from scaffpd.objectives import (
    Agnostic,
    Average,
    ChiSquare,
    ChiSquareBall,
    CVaR,
    Nash,
    QFair,
    Tilted,
)

LOSSES = np.array([0.3, 1.2, 0.7])
UNIFORM = np.full(3, 1.0 / 3.0)


def test_values_of_psi():
    lam = [0.5, 0.5, 0.0]
    assert ChiSquare(2.0).value(lam) == pytest.approx(3.0 * (2 * (1 / 6) ** 2 + (1 / 3) ** 2))
    assert Tilted(2.0).value(lam) == pytest.approx(2.0 * np.log(1.5))
    assert QFair(1.0).value(lam) == pytest.approx(0.5 * 3.0 * 0.5)
    assert Nash(2.0).value([0.5, 0.5, 1.0]) == pytest.approx(
        4.0 - 1.0 - (2 * np.log(1.5) + np.log(3.0)) / 3.0
    )
    for objective in (Average(), Agnostic(), CVaR(0.5), ChiSquareBall(0.5)):
        assert objective.value(lam) == 0.0
    for kind in ("ChiSquare", "Tilted"):
        assert build(kind, 0.3, LOSSES, None).value(UNIFORM) == pytest.approx(0.0, abs=1e-15)


def test_psi_is_infinite_where_it_is_not_defined():
    assert Tilted(1.0).value([1.1, -0.1]) == np.inf
    assert QFair(2.0).value([1.0, -1e-9]) == np.inf
    assert Nash(2.0).value([1.0, 0.0]) == np.inf
    assert Nash(2.0).value([1.0, -1.0]) == np.inf


@pytest.mark.parametrize("kind", ["ChiSquare", "ChiSquareCapped", "Tilted", "QFair", "Nash"])
@given(step=steps(exponent=1.0))
@settings(deadline=None, max_examples=10, derandomize=True)
def test_psi_lies_above_its_tangents(kind, step):
    """ψ(λ') ≥ ψ(λ) + ⟨∇ψ(λ), λ' − λ⟩ + (μ/2)‖λ' − λ‖² with μ = strong_convexity, on Λ."""
    objective = step.objective(kind)
    n = len(step.losses)
    one = objective.prox(step.losses, step.old, 0.1) if objective.simplex else step.old + 0.1
    two = (
        objective.prox(step.losses[::-1], np.full(n, 1.0 / n), 0.2)
        if objective.simplex
        else step.old[::-1] + 0.2
    )
    slope, bend = gradient(objective, one)
    bound = (
        objective.value(one)
        + slope @ (two - one)
        + 0.5 * objective.strong_convexity(n) * np.sum((two - one) ** 2)
    )
    scale = (
        1.0
        + abs(objective.value(one))
        + abs(objective.value(two))
        + np.abs(slope) @ np.abs(two - one)
    )
    assert objective.value(two) >= bound - 1e-12 * scale
    assert objective.curvature(one) == pytest.approx(bend.min(), rel=1e-9)
    assert objective.curvature(one) >= objective.strong_convexity(n) * (1.0 - 1e-12)


def test_strong_convexity():
    prior = [0.2, 0.5, 0.3]
    assert ChiSquare(0.4, prior).strong_convexity(3) == pytest.approx(0.8)
    assert ChiSquare(0.4).strong_convexity(5) == pytest.approx(2.0)
    assert Tilted(0.4, prior).strong_convexity(3) == 0.4
    assert Tilted(0.4).curvature(np.array([0.5, 0.25, 0.25])) == pytest.approx(0.8)
    assert QFair(1.0, prior).strong_convexity(3) == pytest.approx(2.0)
    for objective in (Average(), Agnostic(), CVaR(0.3), ChiSquareBall(0.3), QFair(2.0), Nash(3.0)):
        assert objective.strong_convexity(3) == 0.0
    assert 0.0 < QFair(2.0).curvature(np.array([0.1, 0.0, 0.4])) < np.inf
    assert 0.0 < QFair(0.5).curvature(np.array([0.1, 0.2, 0.4])) < np.inf
    assert Nash(3.0).curvature(np.array([0.1, 0.5, 0.4])) == pytest.approx(1.0 / 3.0 / 0.25)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "losses", [LOSSES, np.zeros(3), np.full(3, 1e8), np.array([0.0, 0.0, 1e-8])]
)
def test_the_start_is_strictly_feasible(kind, losses):
    objective = build(kind, 0.5, losses, np.array([0.2, 0.3, 0.5]))
    start = objective.start(losses)
    assert np.all(np.isfinite(start))
    assert np.all(start > 0.0)
    assert contains(objective, start)
    assert np.isfinite(objective.value(start))
    if objective.simplex:
        np.testing.assert_allclose(start, [0.2, 0.3, 0.5])


@pytest.mark.parametrize("kind", ALL)
def test_lists_and_integers_are_welcome(kind):
    objective = build(kind, 0.5, np.array([1.0, 2.0]), None)
    same = objective.prox(np.array([1.0, 2.0]), np.array([0.5, 0.5]), 1.0)
    np.testing.assert_array_equal(objective.prox([1, 2], [0.5, 0.5], 1), same)
    assert repr(objective).startswith(type(objective).__name__)


PARAMETERS = [
    ("number-not-positive", "rho", lambda: ChiSquare(0.0)),
    ("not-a-number", "rho", lambda: ChiSquare(float("nan"))),
    ("not-a-number", "rho", lambda: ChiSquare("much")),
    ("not-a-number", "rho", lambda: ChiSquare(None)),
    ("number-not-positive", "cap", lambda: ChiSquare(0.1, cap=0.0)),
    ("cap-out-of-range", "1.5", lambda: ChiSquare(0.1, cap=1.5)),
    ("not-a-number", "cap", lambda: ChiSquare(0.1, cap="half")),
    ("cap-too-small", "0.333333 (1/3)", lambda: ChiSquare(0.1, cap=0.2).maximizer(LOSSES)),
    ("number-not-positive", "rho", lambda: Tilted(-1.0)),
    ("number-not-positive", "rho", lambda: Tilted(float("inf"))),
    ("number-not-positive", "delta", lambda: ChiSquareBall(0)),
    ("scale-out-of-range", "rho", lambda: ChiSquare(1e-300)),
    ("prior-too-uneven", "1e-90 and 1", lambda: Average([1.0, 1e-90])),
    ("number-not-positive", "q", lambda: QFair(-2)),
    ("number-not-positive", "alpha", lambda: CVaR(0.0)),
    ("alpha-out-of-range", "1.5", lambda: CVaR(1.5)),
    ("not-numbers", "'b'", lambda: Nash("b")),
    ("number-not-finite", "client 0", lambda: Nash(float("nan"))),
    ("number-not-finite", "client 1", lambda: Nash([1.0, np.inf])),
    ("not-a-vector", "(1, 1)", lambda: Nash([[1.0]])),
    ("prior-not-positive", "client 1", lambda: Average([1.0, 0.0])),
    ("not-numbers", "prior", lambda: CVaR(0.5, "abc")),
    ("not-a-vector", "(0,)", lambda: Tilted(0.5, [])),
]
ARGUMENTS = [
    ("prox-lengths-differ", "2 and 1", lambda o: o.prox([1, 2], [1.0], 1.0)),
    ("number-not-finite", "s, but client 1", lambda o: o.prox([1, np.nan], UNIFORM[:2], 1.0)),
    ("number-not-finite", "1e+50", lambda o: o.prox([1, 2, 1e200], UNIFORM, 1.0)),
    ("number-not-finite", "l, but client 1", lambda o: o.prox(LOSSES, [0.5, np.inf, 0.5], 1.0)),
    ("number-not-positive", "sigma", lambda o: o.prox(LOSSES, UNIFORM, 0.0)),
    ("number-not-positive", "sigma", lambda o: o.prox(LOSSES, UNIFORM, -1.0)),
    ("not-a-number", "sigma", lambda o: o.prox(LOSSES, UNIFORM, np.nan)),
    ("number-not-positive", "sigma", lambda o: o.prox_step(LOSSES, UNIFORM, 0.0)),
    ("not-a-vector", "in s, ", lambda o: o.prox(0.5, UNIFORM, 1.0)),
    ("number-not-finite", "losses, but client 1", lambda o: o.support([1.0, -np.inf, 0.0])),
    ("not-numbers", "losses", lambda o: o.maximizer(["a", "b", "c"])),
    ("not-a-vector", "losses", lambda o: o.support([])),
    ("number-not-finite", "weights, but client 0", lambda o: o.value([np.nan, 0.0, 1.0])),
    ("prior-length", "there are 4", lambda o: o.support(np.ones(4))),
    ("prior-length", "there are 2", lambda o: o.prox(np.ones(2), np.ones(2), 1.0)),
    ("prior-length", "there are 2", lambda o: o.value(np.ones(2))),
]


@pytest.mark.parametrize(("code", "words", "make"), PARAMETERS)
def test_bad_parameters_are_refused(code, words, make):
    with refuses(code) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ALL)
def test_bad_arguments_are_refused(kind):
    objective = build(kind, 0.5, LOSSES, np.ones(3))
    for code, words, call in ARGUMENTS:
        with refuses(code) as caught:
            call(objective)
        assert str(caught.value).startswith(f"{type(objective).__name__} ")
        assert words in str(caught.value)


def test_nash_names_the_client_that_has_nothing_to_gain():
    nash = Nash(1.0)
    names = ["Basel", "Bern", "Chur"]
    nash.check(np.array([0.5, 0.9, 0.1]), names)
    with pytest.raises(
        InputError,
        match=r"^Nash needs every loss below b, but client Bern has loss 1\.2 and b = 1: ",
    ):
        nash.check(LOSSES, names)
    with pytest.raises(InputError, match=r"client 1 has loss 1\.2"):
        nash.maximizer(LOSSES)
    with pytest.raises(InputError, match="client Chur has loss 1 and b = 1"):
        nash.check(np.array([0.5, 0.9, 1.0]), names)
    with pytest.raises(InputError, match="Nash cannot start because no client's loss is below b"):
        nash.start(np.array([1.0, 2.0, 3.0]))
    with pytest.raises(InputError, match="Nash has b for 2 clients, but there are 3"):
        Nash([1.0, 2.0]).support(LOSSES)
