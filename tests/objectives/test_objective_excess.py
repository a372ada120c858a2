"""Excess losses: the objective of f_i − b_i, in every operation, with its certificate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from objective_cases import ALL, build

import scaffpd as sp
from cases.objectives import contains
from cases.reference import reference_optimum
from cases.refusals import refuses
from scaffpd.run.settings.methods import objective_of

LOSSES = np.array([0.9, 0.4, 1.3, 0.7])
B = np.array([0.5, 0.1, 1.1, 0.2])


@pytest.mark.parametrize("kind", ALL)
def test_operations_are_those_of_the_shifted_losses(kind):
    plain = build(kind, 0.4, LOSSES - B, None)
    excess = sp.Excess(plain, B)
    old = plain.start(LOSSES - B)
    assert excess.simplex == plain.simplex
    for sigma in (0.3, np.array([0.1, 1.0, 0.5, 2.0])):
        step = excess.prox(LOSSES, old, sigma)
        np.testing.assert_allclose(step, plain.prox(LOSSES - B, old, sigma))
        np.testing.assert_allclose(
            excess.prox_step(LOSSES, old, sigma).jacobian(),
            plain.prox_step(LOSSES - B, old, sigma).jacobian(),
        )
        random = np.random.default_rng(0)

        def goal(w, sigma=sigma):
            return excess.value(w) - LOSSES @ w + np.sum((w - old) ** 2 / (2 * sigma))

        for _ in range(50):  # from the definition: no other λ ∈ Λ does better
            other = plain.prox(random.normal(size=4), step, 0.1)
            assert goal(step) <= goal(other) + 1e-12
    best = excess.maximizer(LOSSES)
    assert excess.support(LOSSES) == pytest.approx(LOSSES @ best - excess.value(best))
    assert excess.support(LOSSES) == pytest.approx(plain.support(LOSSES - B))
    assert contains(excess, best)
    assert excess.strong_convexity(4) == plain.strong_convexity(4)
    assert excess.curvature(best) == plain.curvature(best)
    np.testing.assert_array_equal(excess.weights(4), plain.weights(4))
    np.testing.assert_allclose(excess.start(LOSSES), old)


def clients(loss):
    random = np.random.default_rng(7)
    pairs = []
    for n, noise in ((30, 0.1), (12, 2.0), (20, 0.5)):
        X = random.normal(size=(n, 3))
        z = X @ random.normal(size=3) + noise * random.normal(size=n)
        pairs.append((X, z if loss == "squared" else (z > 0).astype(int)))
    return pairs


@pytest.mark.cover(1)
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("kind", ALL)
def test_the_proven_gap_covers_the_true_one(kind, loss):
    pairs = clients(loss)
    cohort = sp.Cohort(pairs, sp.Linear(loss, l2=0.05))
    own = np.array([reference_optimum([pair], loss, 0.05, sp.Average()).value for pair in pairs])
    np.testing.assert_allclose(cohort.optima(), own, rtol=1e-10)
    start = cohort.losses(cohort.start()) - own
    objective = build(kind, 0.4, start, None)
    result = sp.train(sp.fair(sp.Excess(objective, "own")), cohort, tol=1e-9, rounds=300)
    numbers = sp.Excess(objective, own)
    best = reference_optimum(pairs, loss, 0.05, numbers)
    excess = numbers.support(cohort.losses(torch.as_tensor(result.x))) - best.value
    assert result.status == "converged"
    assert excess <= result.certificate + best.gap
    assert abs(excess) <= 2e-9
    few = sp.train(sp.ScaffPD(numbers, local_steps=2), cohort, rounds=2)
    assert (
        numbers.support(cohort.losses(torch.as_tensor(few.x))) - best.value
        <= few.certificate + best.gap
    )


def test_regret_looks_at_what_a_client_could_have():
    """By losses the noisiest client counts most; by regret the one that could have had nearly no
    loss counts too.
    """
    cohort = sp.Cohort(clients("squared"), sp.Linear("squared", l2=0.05))
    raw = sp.train(sp.fair(sp.Agnostic()), cohort, tol=1e-9)
    regret = sp.train(sp.fair(sp.Excess(sp.Agnostic(), "own")), cohort, tol=1e-9)
    assert raw.weights[0] == 0 < regret.weights[0]
    assert raw.weights[1] > regret.weights[1]
    worst = [(cohort.evaluate(r.x).loss - cohort.optima()).max() for r in (raw, regret)]
    assert worst[1] < 0.8 * worst[0]


def test_own_optima_of_personal_models():
    """min_x F_i(x), where x is free as well: what training that client alone comes to."""
    pairs = clients("squared")
    model = sp.Personal(sp.Linear("squared", l2=0.05), 3.0)
    alone = [
        sp.train(sp.fair(sp.Average()), sp.Cohort([pair], model), tol=1e-12, progress=False)
        for pair in pairs
    ]
    found = [float(one.history.last_losses[0]) for one in alone]
    np.testing.assert_allclose(sp.Cohort(pairs, model).optima(), found, rtol=1e-9)


def test_a_settings_file_names_an_offset(tmp_path):
    made = objective_of({"kind": "CVaR", "alpha": 0.5, "offset": [0.1, 0.2]}, tmp_path / "run.toml")
    assert isinstance(made, sp.Excess)
    assert made.support([1.1, 0.3]) == pytest.approx(sp.CVaR(0.5).support([1.0, 0.1]))
    assert (
        objective_of({"kind": "CVaR", "alpha": 0.5, "offset": "own"}, tmp_path / "run.toml").offset
        == "own"
    )


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("offset-not-numbers", lambda: sp.Excess(sp.CVaR(0.5), "mine")),
        ("number-not-finite", lambda: sp.Excess(sp.CVaR(0.5), [0.1, np.nan])),
        ("not-an-objective", lambda: sp.Excess("CVaR", 0.0)),
        ("not-an-objective", lambda: sp.Excess(sp.Excess(sp.CVaR(0.5), 0.0), 0.0)),
        (
            "offset-length",
            lambda: sp.Excess(sp.CVaR(0.5), [0.1, 0.2]).support([1.0, 2.0, 3.0]),
        ),
        ("offset-not-settled", lambda: sp.Excess(sp.CVaR(0.5), "own").support([1.0, 2.0])),
    ],
)
def test_refusals(code, make):
    with refuses(code):
        make()
