"""`ScaffPD` with nothing set solves every objective on every family: certified, and at the
reference optimum.
"""

import numpy as np
import pytest

import scaffpd as sp
from cases.reference import reference_optimum
from problems import OBJECTIVES, families, objectives

QUICK = ["synthetic", "badly scaled", "unequal sizes", "rank-deficient", "breast cancer"]
SLOW = {("breast cancer", name) for name in OBJECTIVES}
SLOW |= {("rank-deficient", name) for name in ("Average", "Tilted", "CVaR", "ChiSquareBall")}
CASES = [
    pytest.param(family, objective, marks=pytest.mark.long if (family, objective) in SLOW else [])
    for family in QUICK
    for objective in OBJECTIVES
]
PROBLEMS = {}


def problem(family):
    if family not in PROBLEMS:
        PROBLEMS[family] = families()[family]()
    return PROBLEMS[family]


def solve_and_compare(family, name):
    chosen = problem(family)
    objective = objectives(chosen)[name]
    model = chosen.model
    optimum = reference_optimum(chosen.clients, model.loss, model.l2, objective, model.intercept)
    cohort = chosen.cohort()
    size = np.linalg.norm(optimum.x)
    total = optimum.weights.sum()
    enough = (
        0.5 * model.l2 * total * (1e-5 * size) ** 2
    )  # the gap that promises x to a relative 1e-5

    def never_below(moment):
        excess = objective.support(moment.state.losses) - optimum.value
        assert excess <= moment.state.certificate + 1e-13 * (1 + abs(optimum.value))

    result = sp.train(
        sp.ScaffPD(objective), cohort, rounds=2000, tol=min(1e-8, enough), callbacks=[never_below]
    )
    assert result.status in ("converged", "precision")
    assert result.certificate <= 1e-8
    assert np.linalg.norm(result.x - optimum.x) <= 1e-5 * size


@pytest.mark.sample(9)
@pytest.mark.parametrize(("family", "objective"), CASES)
def test_auto_reaches_the_certified_optimum(family, objective):
    solve_and_compare(family, objective)


DEGENERATE = {
    "one": sp.data.synthetic(N=1, m=20),
    "twins": sp.data.synthetic(N=1, m=20) * 3,
    "single samples": [(X[:1], y[:1]) for X, y in sp.data.synthetic()],
    "nothing to learn": [(X, 0 * y) for X, y in sp.data.synthetic()],
    "empty features": [(0 * X, y) for X, y in sp.data.synthetic()],
}
SOME = [sp.Average(), sp.Agnostic(), sp.ChiSquare(0.1), sp.CVaR(0.5), sp.QFair(1.0)]


@pytest.mark.cover(1)
@pytest.mark.parametrize("objective", SOME, ids=str)
@pytest.mark.parametrize("clients", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_federations(objective, clients):
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    assert sp.train(sp.ScaffPD(objective), cohort, rounds=1500, tol=1e-8).status == "converged"


def test_a_far_away_start_is_no_problem():
    cohort = problem("badly scaled").cohort()
    x0 = 1e4 * np.random.default_rng(0).standard_normal(cohort.dimension)
    result = sp.train(sp.ScaffPD(sp.Agnostic()), cohort, rounds=1000, tol=1e-8, x0=x0)
    assert result.status == "converged"
