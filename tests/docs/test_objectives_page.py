"""Every statement of docs/objectives.md: the guarantees on a real problem, the limits, and the pictures' numbers."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import scaffpd as sp
from snippets import ROOT, run_python

PAGE = ROOT / "docs" / "objectives.md"
RANDOM = np.random.default_rng(0)
PRIOR = [0.3, 0.1, 0.2, 0.4]
SEVERAL = [RANDOM.uniform(0.1, 2.0, size=4) for _ in range(30)]


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "figures" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hospitals(make):
    return make.hospitals()


@pytest.fixture(scope="module")
def optimum(hospitals):
    """x, the losses and λ at an objective's optimum; each is found once."""
    found = {}

    def solve(objective):
        if repr(objective) not in found:
            tol = 1e-12 if isinstance(objective, sp.QFair) else 1e-9
            result = sp.train(sp.fair(objective), hospitals, tol=tol)
            assert result.status == "converged"
            found[repr(objective)] = result.x, hospitals.evaluate(result.x).loss, result.weights
        return found[repr(objective)]

    return solve


def mixtures(n, many=200):
    return RANDOM.dirichlet(np.full(n, 0.3), size=many)


def chi(weights, p):
    return np.sum((weights - p) ** 2 / p, axis=-1)


def test_the_pictures_and_the_table_are_what_the_script_makes(make, tmp_path, monkeypatch):
    """All are drawn, and those of the average and of the ranges are written: that is what takes long."""
    import matplotlib.pyplot as plt  # here: it is slow to import

    plt.switch_backend("agg")
    written = ("average.svg", "ranges.svg")
    write = make.save
    monkeypatch.setattr(
        make, "save", lambda one, path: write(one, path) if path.name in written else path.touch()
    )
    table = make.main(tmp_path, points=2)
    assert table in PAGE.read_text(encoding="utf-8")
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    others = {"coalition.svg", "strengths.svg"}  # of the report
    assert drawn == {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")} - others
    for name in drawn - {"ranges.svg"}:  # with fewer points, that one is another picture
        assert f"(figures/{name})" in PAGE.read_text(encoding="utf-8")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in written)
    plt.close("all")


def test_a_noisy_client_takes_the_weight_of_a_worst_case_and_not_of_capped_ones(
    tmp_path, monkeypatch
):
    scope = run_python(PAGE)
    cohort = scope["cohort"]
    k = scope["cohort"].names.index("cleveland")
    worst, capped = (
        sp.train(sp.fair(kind), cohort, tol=1e-8).weights[k]
        for kind in (sp.Agnostic(), sp.CVaR(0.5))
    )
    assert worst > 0.9
    assert capped <= 0.5 + 1e-9


def test_nothing_has_a_smaller_value_than_each_optimum(make, optimum):
    for objective in make.CHOICES.values():
        _, losses, _ = optimum(objective)
        for other in make.CHOICES.values():
            slack = 1e-12 if isinstance(objective, sp.QFair) else 1e-8
            assert objective.support(losses) <= objective.support(optimum(other)[1]) + slack


def test_the_worst_case_bounds_every_mixture_and_its_active_clients_are_equal(optimum):
    _, losses, weights = optimum(sp.Agnostic())
    assert np.all(mixtures(4) @ losses <= losses.max() + 1e-12)
    active = losses[weights > 1e-4]
    assert len(active) > 1
    np.testing.assert_allclose(active, losses.max(), atol=1e-6)


@pytest.mark.parametrize("prior", [None, PRIOR])
def test_chi_square(optimum, prior):
    for rho in (0.1, 1.0):
        objective = sp.ChiSquare(rho, prior)
        _, losses, weights = optimum(objective)
        p = objective.weights(4)
        value = objective.support(losses)
        mean = p @ losses
        if losses.min() >= mean - rho:
            assert weights.min() > 0
            assert value == pytest.approx(mean + p @ (losses - mean) ** 2 / (2 * rho), abs=1e-7)
        for some in mixtures(4):
            assert some @ losses <= value + rho / 2 * chi(some, p) + 1e-9
        assert np.all(losses <= value + rho / 2 * (1 / p - 1) + 1e-9)


def test_chi_square_leaves_out_who_is_more_than_rho_below_the_mean():
    for losses in SEVERAL:
        mean = losses.mean()
        border = mean - losses.min()
        assert sp.ChiSquare(1.001 * border).maximizer(losses).min() > 0
        assert sp.ChiSquare(0.999 * border).maximizer(losses).min() == 0


@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_the_ball_bounds_the_mixtures_in_it_and_is_some_penalty(optimum, hospitals, delta):
    ball = sp.ChiSquareBall(delta)
    _, losses, weights = optimum(ball)
    p = ball.weights(4)
    bound = ball.support(losses)
    for some in mixtures(4):
        near = p + (some - p) * min(1.0, np.sqrt(delta / chi(some, p)))
        assert near @ losses <= bound + 1e-9
    if weights.min() > 0:
        assert bound == pytest.approx(losses.mean() + np.sqrt(delta * losses.var()), abs=1e-7)
    low = 1e-3
    high = 10.0
    for _ in range(12):
        rho = np.sqrt(low * high)
        low, high = (rho, high) if chi(optimum(sp.ChiSquare(rho))[2], p) > delta else (low, rho)
    np.testing.assert_allclose(optimum(sp.ChiSquare(rho))[1], losses, atol=5e-4)


def test_cvar_bounds_every_group_with_its_share(optimum):
    for alpha, prior in ((0.5, None), (0.35, PRIOR)):
        objective = sp.CVaR(alpha, prior)
        losses = optimum(objective)[1]
        p = objective.weights(4)
        value = objective.support(losses)
        for group in range(1, 16):
            members = np.array([group >> i & 1 for i in range(4)], dtype=bool)
            if p[members].sum() >= alpha:
                assert p[members] @ losses[members] / p[members].sum() <= value + 1e-9
    for losses in SEVERAL:
        for k in (1, 2, 3, 4):
            assert sp.CVaR(k / 4).support(losses) == pytest.approx(np.sort(losses)[-k:].mean())
            assert sp.CVaR(k / 4).maximizer(losses).max() <= 1 / k + 1e-12


def test_bounds_against_the_best_possible_worst_loss(optimum):
    best = optimum(sp.Agnostic())[1].max()
    for rho in (0.02, 0.05, 0.3):
        tilted = sp.Tilted(rho)
        losses, weights = optimum(tilted)[1:]
        assert losses.max() <= best + rho * np.log(4) + 1e-9
        assert np.all(losses <= tilted.support(losses) + rho * np.log(4) + 1e-9)
        assert weights.min() > 0
        assert optimum(sp.ChiSquare(rho))[1].max() <= best + rho * 3 / 2 + 1e-9
    for q in (1.0, 5.0):
        assert optimum(sp.QFair(q))[1].max() <= 4 ** (1 / (q + 1)) * best + 1e-6


def test_nash_is_proportionally_fair(optimum, make):
    b = 0.7
    _, losses, _ = optimum(sp.Nash(b))
    assert np.all(losses < b)
    for other in make.CHOICES.values():
        gains = ((b - optimum(other)[1]) - (b - losses)) / (b - losses)
        assert gains.mean() <= 1e-7
    with pytest.raises(sp.InputError, match="raise b"):
        sp.Nash(0.5).maximizer([0.6, 0.2])


@pytest.mark.parametrize("prior", [None, PRIOR])
def test_the_average_ends(prior):
    average = sp.Average(prior)
    for losses in SEVERAL:
        for end in (
            sp.ChiSquare(1e8, prior),
            sp.Tilted(1e8, prior),
            sp.ChiSquareBall(1e-14, prior),
            sp.CVaR(1, prior),
        ):
            np.testing.assert_allclose(end.maximizer(losses), average.weights(4), atol=1e-6)
            assert end.support(losses) == pytest.approx(average.support(losses), abs=1e-6)
        np.testing.assert_allclose(
            sp.QFair(1e-9, prior).maximizer(losses), average.weights(4), atol=1e-6
        )
        np.testing.assert_allclose(
            1e8 * sp.Nash(1e8, prior).maximizer(losses), average.weights(4), atol=1e-6
        )


@pytest.mark.parametrize("prior", [None, PRIOR])
def test_the_worst_case_ends(prior):
    p = sp.Average(prior).weights(4)
    exact = (sp.ChiSquareBall(1 / p.min() - 1, prior), sp.CVaR(p.min(), prior))
    for losses in SEVERAL:
        for end in exact:
            assert end.support(losses) == pytest.approx(losses.max(), rel=1e-12)
        for end in (sp.ChiSquare(1e-9, prior), sp.Tilted(1e-9, prior)):
            assert end.support(losses) == pytest.approx(losses.max(), rel=1e-6)
        norm = (501 * sp.QFair(500, prior).support(losses)) ** (1 / 501)
        assert norm == pytest.approx(losses.max(), rel=1e-2)
        assert sp.Agnostic(prior).support(losses) == losses.max()


def test_before_their_ends_they_are_not_there():
    losses = np.array([0.2, 0.4, 0.6, 1.0])
    assert sp.CVaR(0.26).support(losses) < 1.0
    assert sp.ChiSquareBall(2.99).support(losses) < 1.0
    assert sp.CVaR(0.99).support(losses) > losses.mean()


def test_scales_and_shifts():
    for losses in SEVERAL:
        for k in (0.01, 7.0):
            for kind in (sp.ChiSquare, sp.Tilted):
                assert kind(0.3).support(k * losses) == pytest.approx(
                    k * kind(0.3 / k).support(losses)
                )
            for objective in (sp.CVaR(0.4), sp.ChiSquareBall(0.3), sp.Agnostic()):
                assert objective.support(k * losses) == pytest.approx(k * objective.support(losses))
                np.testing.assert_allclose(
                    objective.maximizer(k * losses), objective.maximizer(losses), atol=1e-9
                )
        for objective in (
            sp.Average(),
            sp.Agnostic(),
            sp.CVaR(0.4),
            sp.ChiSquare(0.3),
            sp.Tilted(0.3),
        ):
            np.testing.assert_allclose(
                objective.maximizer(losses + 5), objective.maximizer(losses), atol=1e-9
            )
        for objective in (sp.QFair(2), sp.Nash(9.0)):
            moved = objective.maximizer(losses + 5)
            before = objective.maximizer(losses)
            assert not np.allclose(moved / moved.sum(), before / before.sum(), rtol=1e-2)
        assert sp.QFair(1).support(losses) == pytest.approx((losses**2).mean() / 2)


def test_the_average_by_sizes_is_the_loss_of_the_pooled_rows(hospitals):
    silos = sp.data.heart_disease(test_fraction=0.0)
    sizes = [len(y) for _, y in silos.train]
    pooled = sp.Cohort(
        [tuple(np.concatenate(part) for part in zip(*silos.train, strict=True))], hospitals.model
    )
    apart = sp.train(sp.fair(sp.Average(prior=sizes)), hospitals, tol=1e-10)
    together = sp.train(sp.fair(sp.Average()), pooled, tol=1e-10)
    np.testing.assert_allclose(apart.x, together.x, atol=1e-4)


def test_a_cap_bounds_a_client_and_the_guarantee_is_about_mixtures_below_it():
    rho = 0.1
    cap = 0.4
    for losses in SEVERAL:
        n = len(losses)
        objective = sp.ChiSquare(rho, cap=cap)
        value = objective.support(losses)
        p = np.full(n, 1 / n)
        assert objective.maximizer(losses + 1e6 * (np.arange(n) == 0))[0] <= cap
        for lam in np.random.default_rng(0).dirichlet(np.ones(n), 200):
            if lam.max() <= cap:
                assert lam @ losses <= value + rho / 2 * chi(lam, p) + 1e-12
        np.testing.assert_allclose(sp.ChiSquare(rho, cap=1 / n).maximizer(losses), p)
        tail = sp.CVaR(1 / (n * cap)).support(losses)
        assert sp.ChiSquare(1e-9, cap=cap).support(losses) == pytest.approx(tail, abs=1e-7)
