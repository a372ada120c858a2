"""Strengths chosen by folds: against sums written out, and on problems whose answer is known."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from cases.cohorts import pairs
from cases.refusals import refuses
from scaffpd import cli
from scaffpd.data.silos import fold_numbers
from scaffpd.study.choosing import Folds, GridPoint, search, simplest

SQUARED = sp.Linear("squared")


def clients(N=4, n=60, spread=0.0, noise=1.0, seed=0, useless=0):
    """Linear regression; the clients' coefficients differ by `spread`, some columns say nothing."""
    random = np.random.default_rng(seed)
    rows = pairs("squared", [n] * N, spread=spread, noise=noise, seed=seed)
    return [(np.hstack([X, random.normal(size=(n, useless))]), y) for X, y in rows]


def envelope_minimiser(pairs, l2, kappa):
    """The joint problem in (x, u_1 … u_N) of the average objective, as one linear system."""
    N = len(pairs)
    d = pairs[0][0].shape[1]
    A = np.zeros(((N + 1) * d,) * 2)
    b = np.zeros((N + 1) * d)
    for i, (X, y) in enumerate(pairs, 1):
        own = slice(i * d, (i + 1) * d)
        gamma = kappa / len(y)
        A[own, own] = 2 * X.T @ X / len(y) + gamma * np.eye(d)
        A[own, :d] = A[:d, own] = -gamma * np.eye(d)
        A[:d, :d] += (l2 + gamma) * np.eye(d)
        b[own] = 2 * X.T @ y / len(y)
    return np.linalg.solve(A, b).reshape(N + 1, d)[1:]


def test_losses_of_a_point_are_those_of_models_solved_for_directly():
    """Squared loss is (⟨a, u⟩ − y)², and N·K of them make a point."""
    rows = clients(spread=0.7)
    K = 3
    choice = sp.choose(rows, SQUARED, sp.Average(), 0.3, [math.inf, 20.0], folds=K, seed=5)
    numbers = [fold_numbers(f"client-{i}", y, K, 5) for i, (_, y) in enumerate(rows)]
    for point in choice.tried:
        expected = np.empty((len(rows), K))
        for k in range(K):
            others = [(X[m != k], y[m != k]) for (X, y), m in zip(rows, numbers, strict=True)]
            if math.isinf(point.strength):
                H = sum(2 * X.T @ X / len(y) for X, y in others) / len(others) + 0.3 * np.eye(3)
                x = np.linalg.solve(H, sum(2 * X.T @ y / len(y) for X, y in others) / len(others))
                models = [x] * len(others)
            else:
                models = envelope_minimiser(others, 0.3, point.strength)
            for i, ((X, y), m, u) in enumerate(zip(rows, numbers, models, strict=True)):
                expected[i, k] = np.mean((X[m == k] @ u - y[m == k]) ** 2)
        # models are trained to 1e-4 of the first loss: to first order, 1e-2 of their coefficients
        np.testing.assert_allclose(point.losses, expected, rtol=0.02)
        assert point.score("mean") == pytest.approx(point.losses.mean())
        assert point.score("worst fifth") == pytest.approx(point.losses.mean(1).max())


def test_clients_that_are_alike_share_a_model_and_others_have_their_own():
    alike = sp.choose(clients(spread=0.0, seed=2), SQUARED, sp.Average(), l2=0.01)
    assert math.isinf(alike.strength)
    assert isinstance(alike.model, sp.Linear)
    assert math.isfinite(alike.personal)  # for those who want personal models all the same
    different = sp.choose(clients(spread=2.0), SQUARED, sp.Average(), l2=0.01)
    assert different.strength < 100
    assert different.model == sp.Personal(sp.Linear("squared", l2=0.01), different.strength)


def test_columns_that_say_nothing_ask_for_a_larger_l2():
    one = {"objective": sp.Average(), "strength": math.inf}
    clean = sp.choose(clients(noise=0.1), SQUARED, **one)
    noisy = sp.choose(clients(n=20, noise=2.0, useless=80), SQUARED, **one)
    assert clean.l2 < 0.02
    assert noisy.l2 > 10 * clean.l2
    assert noisy.model.l2 == noisy.l2
    scaled = sp.choose([(10 * X, y) for X, y in clients(noise=0.1)], SQUARED, **one)
    assert scaled.l2 == pytest.approx(100 * clean.l2, rel=0.06)  # by the features' mean square


def test_a_fair_objective_is_chosen_by_what_it_is_judged_by():
    X = clients(N=1, noise=0.1)[0][0]
    rows = [*clients(N=4, noise=0.1), (X, X @ np.array([3.0, -3.0, 3.0]))]  # outvoted
    options = {"l2": 0.01, "strength": math.inf}
    worst = sp.choose(rows, SQUARED, "CVaR", by="worst fifth", **options)
    assert len(worst.tried) == 4  # the average, which is not chosen, and three strengths
    fair = [one for one in worst.tried if isinstance(one.objective, sp.CVaR)]
    assert worst.point is min(fair, key=lambda one: one.score("worst fifth"))
    mean = sp.choose(rows, SQUARED, "CVaR", by="mean", **options)
    assert mean.objective.alpha > worst.objective.alpha


def made(losses, l2):
    return GridPoint(l2, sp.Average(), math.inf, np.array(losses, dtype=float), 1)


def test_the_rule_takes_the_simplest_within_one_standard_error():
    far = made([[3, 3.1], [3, 3.2]], 1.0)
    # behind by .1 at one client, .3 and −.2 at the other
    near = made([[1.1, 1.3], [1.2, 0.9]], 0.1)
    best = made([[1.0, 1.2], [0.9, 1.1]], 0.01)
    differences = np.array([[0.1, 0.1], [0.3, -0.2]]) / 2
    assert near.score("mean") - best.score("mean") == pytest.approx(0.075)
    error = math.sqrt((differences.var(1, ddof=1) / 2).sum())
    assert error >= 0.075
    assert simplest([far, near, best], "mean") is near
    behind = made([[1.2, 1.4], [1.1, 1.3]], 0.1)  # behind by .2 everywhere: no error at all
    assert simplest([far, behind, best], "mean") is best


def test_the_table_has_a_row_for_every_point_and_a_seed_repeats_it():
    goals = [sp.Average(), sp.CVaR(0.5)]
    grid = (goals, [0.1, 1.0], [math.inf, 10])
    choice = sp.choose(clients(n=12), SQUARED, *grid, folds=2)
    assert len(choice.table) == 8
    assert [row["chosen"] for row in choice.table].count(True) == 1
    first = choice.table[0]
    assert (first["kappa"], first["l2"], first["objective"]) == (math.inf, 1.0, "Average()")
    own = choice.tried[0].losses
    error = np.sqrt((own.var(1, ddof=1) / 2).sum()) / len(own)
    assert first["validation_loss_mean_se"] == pytest.approx(error)
    assert [one.strength for one in choice.line] == [math.inf, 10.0]
    assert {one.l2 for one in choice.line} == {choice.l2}
    assert choice.rounds == sum(point.rounds for point in choice.tried) > 0
    assert choice.point.words() in str(choice)
    again = sp.choose(clients(n=12), SQUARED, *grid, folds=2)
    assert again.table == choice.table


def test_a_label_that_a_fold_lacks_is_known_and_data_frames_are_fine():
    random = np.random.default_rng(0)
    pandas = pytest.importorskip("pandas")
    rows = {}
    for k in range(2):
        y = np.arange(12) % 2
        y[0] = 2 * k
        X = pandas.DataFrame(random.normal(size=(12, 2)), columns=["a", "b"])
        rows[f"site {k}"] = (X, pandas.Series(y))
    own = sp.Personal(sp.Linear("softmax", intercept=True), 1.0, ["intercept"])
    choice = sp.choose(rows, own, sp.ChiSquare(0.1), 0.1, [3.0, 30.0])
    assert list(choice.model.columns) == ["intercept"]
    assert choice.model.model.classes == 3
    assert choice.point.losses.shape == (2, 3)


def test_folds_are_even_in_size_and_labels():
    y = np.array([0] * 9 + [1] * 3)
    number = fold_numbers("a", y, 3, 0)
    assert [np.bincount(y[number == k]).tolist() for k in range(3)] == [[3, 1]] * 3
    z = np.random.default_rng(1).normal(size=11)
    assert sorted(np.bincount(fold_numbers("a", z, 3, 0)).tolist()) == [3, 4, 4]


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("unknown-name", {"by": "third"}),
        ("one-fold", {"folds": 1}),
        ("strength-out-of-range", {"l2": -1.0}),
        ("strength-out-of-range", {"l2": math.inf}),
        ("strength-out-of-range", {"strength": 0.0}),
        ("unknown-name", {"objective": "ChiSqare"}),
        ("not-an-objective", {"objective": [3]}),
        ("not-a-model", {"model": "linear"}),
        ("not-pairs", {"clients": sp.Cohort(clients(), SQUARED)}),
        ("budget-too-small", {"budget": 5}),
    ],
)
def test_refusals(code, wrong):
    with refuses(code):
        sp.choose(**{"clients": clients(), "model": SQUARED} | wrong)


@pytest.mark.parametrize("budget", [None, 60])
def test_free_strengths_keep_the_prior_and_the_cap(budget):
    rows = Folds.of(clients(spread=1.0), SQUARED, None, 2, 0)
    goal = sp.ChiSquare(0.1, prior=[1, 1, 1, 2], cap=0.3)
    choice = search(rows, [goal], 0.1, math.inf, "mean", 0, budget, free=True)
    assert {type(one.objective) for one in choice.tried} == {sp.Average, sp.ChiSquare}
    for point in choice.tried:
        assert np.array_equal(point.objective.prior, goal.prior)
        assert getattr(point.objective, "cap", 0.3) == 0.3
    assert len({one.objective.strength for one in choice.tried}) == 4  # the average has none
    assert choice.objective.cap == 0.3
    fixed = search(rows, [goal], 0.1, math.inf, "mean", 0, budget)
    assert [one.objective for one in fixed.tried] == [goal]


def test_a_budget_is_never_exceeded_and_warm_starts_are_cheap():
    silos = sp.data.heart_disease()
    model = sp.Linear("logistic", intercept=True)
    within = sp.choose(silos.train, model, "ChiSquare", budget=150)
    assert within.rounds <= 150
    assert within.strength in {one.strength for one in within.line}
    grid = sp.choose(silos.train, model, "ChiSquare", [0.1, 0.03], math.inf)
    cold = 0
    for point in grid.tried:
        cohort = sp.Cohort(silos.train, sp.Linear("logistic", l2=point.l2, intercept=True))
        cold += 3 * sp.train(sp.fair(point.objective), cohort, tol=7e-5).rounds
    assert grid.rounds < 0.75 * cold  # the run that finds the spread of losses included


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Three sites, of which one is noisier; forty columns that say nothing."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    lines = [",".join(["site", *(f"x{k}" for k in range(42)), "y"])]
    for site, noise in (("a", 0.3), ("b", 0.3), ("c", 2.0)):
        for row in random.normal(size=(40, 42)):
            y = row[0] - 2 * row[1] + noise * random.normal()
            lines.append(",".join([site, *(f"{v:.3f}" for v in row), f"{y:.3f}"]))
    (tmp_path / "table.csv").write_text("\n".join(lines))
    data = '[data]\nfile = "table.csv"\nclient = "site"\ntarget = "y"\n'
    Path("run.toml").write_text(data + '[objective]\nkind = "ChiSquare"\ncap = 0.4\n')


def trained(*words):
    quick = ("--no-report", "--quiet", "--splits", "0", "--out", "run", "--fresh")
    assert cli.run(["train", "run.toml", *words, *quick]) == 0
    found = tomllib.loads(Path("run/config.toml").read_text())
    assert found["objective"]["cap"] == 0.4  # whether ρ is chosen or given
    return found["model"]["l2"], found["objective"]["rho"]


def test_a_table_chooses_what_is_left_out(table):
    l2, rho = trained()
    assert l2 > 0.05  # not 0.001: columns are many, rows are few
    assert rho != 0.1
    assert trained("--l2", "0.02", "--objective", "chi2", "--strength", "0.7") == (0.02, 0.7)
    usual = trained("--no-choose")
    assert usual[0] == pytest.approx(0.3 * 42 / 96, rel=0.05)
    private = trained("--epsilon", "5", "--rounds", "2")
    assert private == (0.001, 0.1)  # folds would spend ε
