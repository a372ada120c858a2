"""What docs/extending.md adds is as right as what the package has: the same properties, the same independent checks."""

from __future__ import annotations

import csv
import sys
import tomllib
from pathlib import Path

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from objective_cases import Step, steps

import scaffpd as sp
from cases.reference import reference_optimum
from runtimes import EVERYTHING, NAMES, RUNTIMES, data_of, federation_of
from scaffpd import cli
from scaffpd.cli.train import requested
from scaffpd.federation import LocalPlan
from scaffpd.models import losses
from scaffpd.run.settings.run import RunConfig
from scaffpd.study.choosing import search
from scaffpd.study.folds import Folds
from snippets import ROOT, blocks, run_python

quick = settings(deadline=None, max_examples=20, derandomize=True)
PAGE = ROOT / "docs" / "extending.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("extending"))
        patch.setitem(losses.LOSSES, "share", None)
        return run_python(PAGE)


@pytest.fixture
def share(page, monkeypatch):
    monkeypatch.setitem(losses.LOSSES, "share", page["Share"])
    return page["Share"]()


def lengths(name):
    code = next(code for code in blocks(PAGE, "python") if f"class {name}" in code)
    return len([line for line in code.splitlines() if line.strip()])


@pytest.mark.parametrize("name", ["Floor", "Share", "Optimistic", "Unpunctual", "GradientVariance"])
def test_each_is_short(name):
    assert lengths(name) <= 45


def problem(step: Step):
    epsilon = min(0.9, step.parameter / (1 + step.parameter))
    return epsilon, step.prior


@given(step=steps())
@quick
def test_the_proximal_step_is_feasible_and_consistent(page, step):
    epsilon, prior = problem(step)
    floor = page["Floor"](epsilon, prior)
    old = epsilon * floor.weights(len(step.old)) + (1 - epsilon) * step.old
    lam = floor.prox(step.losses, old, step.sigma)
    assert floor.contains(lam, 1e-12)
    assert floor.contains(floor.maximizer(step.losses), 1e-12)
    scale = 1 + np.abs(step.losses).max()
    # no feasible mixture beats the support; the maximizer attains it
    assert step.losses @ lam <= floor.support(step.losses) + 1e-12 * scale
    best = floor.maximizer(step.losses)
    assert step.losses @ best == pytest.approx(
        floor.support(step.losses), rel=1e-12, abs=1e-12 * scale
    )
    assert floor.support(step.losses) == pytest.approx(
        epsilon * sp.Average(prior).support(step.losses) + (1 - epsilon) * step.losses.max(),
        rel=1e-12,
        abs=1e-15,
    )


@given(step=steps(clients=6, exponent=0.7))
@settings(deadline=None, max_examples=15, derandomize=True)
def test_the_proximal_step_agrees_with_an_interior_point_solver(page, step):
    epsilon, prior = problem(step)
    floor = page["Floor"](epsilon, prior)
    ours = floor.prox(step.losses, step.old, step.sigma)
    n = len(step.losses)
    lam = cp.Variable(n)
    members = [lam >= epsilon * floor.weights(n), cp.sum(lam) == 1]
    cost = -step.losses @ lam + cp.sum_squares(lam - step.old) / (2 * step.sigma)
    theirs = float(cp.Problem(cp.Minimize(cost), members).solve(solver=cp.CLARABEL))
    mine = -step.losses @ ours + np.sum((ours - step.old) ** 2) / (2 * step.sigma)
    assert mine == pytest.approx(theirs, rel=2e-6, abs=2e-6)


@given(step=steps(clients=6, exponent=0.7))
@quick
def test_the_derivative_of_the_proximal_step(page, step):
    epsilon, prior = problem(step)
    floor = page["Floor"](epsilon, prior)
    h = 1e-6
    jacobian = floor.prox_jacobian(step.losses, step.old, step.sigma)
    assert np.linalg.eigvalsh(jacobian).min() >= -1e-12 * step.sigma
    lam = floor.prox(step.losses, step.old, step.sigma)
    inside = lam - epsilon * floor.weights(len(lam))
    if np.all((inside == 0) | (inside > 1e-3 * (1 + step.sigma))):  # not at a kink
        for i, unit in enumerate(np.eye(len(lam))):
            moved = floor.prox(step.losses + h * unit, step.old, step.sigma)
            back = floor.prox(step.losses - h * unit, step.old, step.sigma)
            if np.array_equal(moved > lam - inside, back > lam - inside):
                np.testing.assert_allclose(
                    (moved - back) / (2 * h), jacobian[:, i], atol=1e-5 * (1 + step.sigma)
                )


def test_the_ends_of_the_floor_are_known_objectives(page):
    losses = np.array([0.3, 1.2, 0.7])
    old = np.array([0.5, 0.2, 0.3])
    np.testing.assert_allclose(
        page["Floor"](0.0).prox(losses, old, 2.0), sp.Agnostic().prox(losses, old, 2.0)
    )
    np.testing.assert_allclose(
        page["Floor"](1 - 1e-12).prox(losses, old, 2.0), np.full(3, 1 / 3), atol=1e-11
    )
    per_client = np.array([0.5, 1.0, 2.0])
    assert page["Floor"](0.3).contains(page["Floor"](0.3).prox(losses, old, per_client), 1e-12)


def test_the_floor_is_solved_to_what_an_independent_solver_finds(page):
    clients = page["silos"].train
    cohort = sp.Cohort(clients, sp.Linear("logistic", l2=0.01, intercept=True))
    known = reference_optimum(clients, "logistic", 0.01, page["Floor"](0.4), intercept=True)
    for method in (sp.fair(page["Floor"](0.4)), sp.ScaffPD(page["Floor"](0.4))):
        result = sp.train(method, cohort, tol=1e-7, rounds=3000)
        assert result.status == "converged"
        value = page["Floor"](0.4).support(cohort.evaluate(result.x).loss)
        assert value - known.value <= result.certificate + known.gap
        np.testing.assert_allclose(result.x, known.x, atol=2e-2)


def test_the_loss_agrees_with_autograd(share):
    random = np.random.default_rng(0)
    z = torch.tensor(10 * random.standard_normal((50, 1)), requires_grad=True)
    y = torch.tensor(random.uniform(size=(50, 1)))
    value = share.value(z, y)
    torch.testing.assert_close(value, (torch.log1p(torch.exp(z)) - y * z).squeeze(-1))
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), z)
    torch.testing.assert_close(share.residual(z, y), slope)
    torch.testing.assert_close(share.bends(z, y), bend)
    torch.testing.assert_close(
        share.bend(z, y, torch.ones(50, 1, 3).double()), bend[..., None].expand(50, 1, 3)
    )
    assert bend.max() <= share.curvature


def test_the_loss_is_logistic_loss_where_shares_are_labels(share, page):
    model = {"l2": 0.01, "intercept": True}
    soft = sp.Cohort(
        [(X, y.astype(float)) for X, y in page["silos"].train], sp.Linear("share", **model)
    )
    hard = sp.Cohort(page["silos"].train, sp.Linear("logistic", **model))
    x = np.random.default_rng(1).standard_normal(len(soft.start()))
    np.testing.assert_allclose(soft.evaluate(x).loss, hard.evaluate(x).loss, rtol=1e-13)
    a, b = (sp.train(sp.fair(sp.CVaR(0.5)), cohort, tol=1e-8) for cohort in (soft, hard))
    np.testing.assert_allclose(a.x, b.x, rtol=1e-6)
    with pytest.raises(sp.InputError, match="between 0 and 1"):
        sp.Cohort([(np.ones((3, 1)), np.array([0.1, 0.2, 1.3]))], sp.Linear("share"))


def test_the_algorithm_converges_and_resumes(page, tmp_path):
    cohort = page["cohort"]
    objective = sp.ChiSquare(rho=0.1)
    whole = sp.train(page["Optimistic"](objective), cohort, tol=1e-8)
    known = reference_optimum(page["clients"], "squared", 0.1, objective)
    assert whole.status == "converged"
    assert np.sum((whole.x - known.x) ** 2) <= 2 * whole.certificate / 0.1
    for rounds in (10, 1000):
        parted = sp.train(
            page["Optimistic"](objective),
            cohort,
            rounds=rounds,
            tol=1e-8,
            checkpoint=tmp_path / "half.ckpt",
        )
    assert np.array_equal(parted.x, whole.x)
    assert parted.rounds == whole.rounds


def test_unpunctual_clients_are_those_of_a_naive_loop(page):
    """One step each is FedAvg; and every client counts by its mean step, however many it makes."""
    cohort = page["cohort"]
    method = page["Unpunctual"](local_steps=5)
    state = method.init(cohort, 3)
    steps = np.random.default_rng([3, 0]).integers(1, 6, len(cohort.names))
    move = 0
    for i, number in enumerate(steps):
        plan = LocalPlan(int(number), state.local_rate)
        d = cohort.local_updates(state.x, None, None, plan, [i]).each()[0]
        move = move + state.prior[i] * d / number
    expected = state.x - (state.prior @ steps) * move
    torch.testing.assert_close(method.round(cohort, state).x, expected)
    once = sp.train(page["Unpunctual"](local_steps=1), cohort, rounds=5)
    np.testing.assert_allclose(once.x, sp.train(sp.FedAvg(local_steps=1), cohort, rounds=5).x)


def test_the_algorithm_converges_without_curvature_in_the_weights(page):
    result = sp.train(page["Optimistic"](sp.Agnostic()), page["cohort"], rounds=3000, tol=1e-6)
    assert result.status == "converged"


@pytest.mark.sample(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_question_of_ones_own_is_answered_in_every_runtime(page, runtime, tmp_path):
    """Its class is the only place that knows it: costs, messages and what a silo lets out follow."""
    code = next(code for code in blocks(PAGE, "python") if "class GradientVariance" in code)
    own = "import torch\nfrom dataclasses import dataclass\n" + code.split("\n\n\nvariance = ")[0]
    asks = EVERYTHING.replace("UPDATES})", 'UPDATES, "gradient_variance"})')
    federation = federation_of(runtime, "squared", tmp_path, algorithm=own + "\n" + asks)
    x = federation.start() + 0.3
    seen = federation.ask(page["GradientVariance"](x, 3, (7,), 150)).numbers("variance")
    assert (federation.traffic.exchanges, federation.traffic.bytes_up) == (1, 8 * len(NAMES))
    assert federation.traffic.bytes_down == 8 * len(x) * len(NAMES)
    for value, (X, y) in zip(seen, data_of("squared")[0].values(), strict=True):
        rows = (
            2 * (X @ x.numpy() - y)[:, None] * X
        )  # the gradients of single rows; batches draw with replacement
        np.testing.assert_allclose(value, rows.var(0).sum() / 3, rtol=0.25)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """`mine.py` with the page's Floor, in the working directory."""
    code = next(code for code in blocks(PAGE, "python") if "class Floor" in code)
    (tmp_path / "mine.py").write_text(
        f"{code}\n\nclass Plain(Floor):\n    parameter, strengths, usual = '', None, None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield
    sys.modules.pop("mine", None)


def written(folder):
    """[objective] of a run's settings, and (model, weight) of all its clients."""
    with Path(folder, "clients.csv").open() as file:
        weights = [(row["model"], float(row["weight"])) for row in csv.DictReader(file)]
    return tomllib.loads(Path(folder, "config.toml").read_text())["objective"], weights


def test_the_command_line_takes_an_objective_of_ones_own(mine):
    """Nothing but the class says its argument, letter, usual value, and the strengths of a path."""
    quick = [
        "hospitals",
        "--objective",
        "mine:Floor",
        "--no-report",
        "--quiet",
        "--l2",
        "0.1",
        "--tol",
        "1e-3",
    ]
    assert cli.run(["train", *quick, "--strength", "0.8", "--splits", "0", "--out", "run"]) == 0
    objective, weights = written("run")
    assert objective == {"kind": "mine:Floor", "epsilon": 0.8}
    assert min(weight for _, weight in weights) >= 0.2 - 1e-9
    assert RunConfig.read(Path("run/config.toml")).goal.epsilon == 0.8  # the same command goes on
    usual = requested("hospitals", {"objective": "mine:Floor"})
    assert (usual.goal.epsilon, "strength" in usual.left_out) == (0.5, True)
    assert cli.run(["path", *quick, "--points", "2", "--out", "path"]) == 0
    _, weights = written("path")
    assert list(dict.fromkeys(model for model, _ in weights)) == [
        "average",
        "ε = 0.67",
        "ε = 0.33",
        "worst case",
    ]


def test_folds_choose_the_strength_of_an_objective_of_ones_own(page):
    rows = Folds.of(
        page["silos"].train, sp.Linear("logistic", intercept=True), page["silos"].names, 2, 0
    )
    choice = search(rows, page["Floor"](0.5), 0.1, np.inf, "mean", 0, None, free=True)
    assert [one.objective.strength for one in choice.tried] == [None, 0.75, 0.5, 0.25]
    assert f"Floor with ε = {choice.objective.epsilon:.3g}" in choice.sentence


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train hospitals --objective mine:Floor --strength 2",
            "Floor needs 0 <= epsilon < 1, got 2.0.",
        ),
        (
            "train hospitals --objective mine:np",
            "'mine:np' is no objective: it has to be a class of scaffpd.objectives",
        ),
        (
            "train hospitals --objective mine:Flor",
            "Unknown name in 'mine', 'Flor': did you mean 'Floor'?",
        ),
        ("train hospitals --objective yours:Floor", "There is no module 'yours'"),
        (
            "train hospitals --objective mine:Plain --strength 1",
            "Plain has no strength: leave --strength out.",
        ),
        (
            "train hospitals --objective mine:Plain",
            "is not complete: missing 1 required positional argument: 'epsilon'",
        ),
        (
            "path own.toml",
            "A fairness path goes along ChiSquare, ChiSquareBall, CVaR, Tilted, QFair, not along Plain.",
        ),
    ],
)
def test_what_is_wrong_with_an_objective_of_ones_own_is_said(mine, capsys, words, said):
    Path("own.toml").write_text(
        '[data]\nsource = "hospitals"\n[objective]\nkind = "mine:Plain"\nepsilon = 0.5\n'
    )
    assert cli.run(words.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())
