"""One objective after the other: the same optima as each alone, in fewer rounds."""

import numpy as np
import pytest

import scaffpd as sp
from cases.refusals import refuses
from scaffpd.objectives import named
from scaffpd.study.path import WALKABLE, grid

TOL = 1e-7
OTHERS = ("ChiSquareBall", "Tilted")  # as ChiSquare, on the simplex; their grids are tested alike


@pytest.fixture(scope="module")
def cohort():
    silos = sp.data.heart_disease()
    return sp.Cohort(silos.train, sp.Linear("logistic", l2=0.03, intercept=True), silos.names)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.long if k in OTHERS else ()) for k in WALKABLE]
)
def test_every_point_is_as_good_as_a_run_of_its_own_and_cheaper(cohort, kind):
    average = sp.train(sp.fair(sp.Average()), cohort, tol=TOL)
    objectives = grid(named(kind), average.history.losses[-1], points=5)
    warm = sp.path(list(objectives.values()), cohort, tol=TOL)
    cold = [sp.train(sp.fair(one), cohort, tol=TOL) for one in objectives.values()]
    assert {r.status for r in [*warm, *cold]} == {sp.Status.CONVERGED}
    for objective, a, b in zip(objectives.values(), warm, cold, strict=True):
        reached = [objective.support(cohort.evaluate(r.x).loss) for r in (a, b)]
        assert abs(reached[0] - reached[1]) <= 2 * TOL
    assert sum(r.rounds for r in warm) < 0.6 * sum(r.rounds for r in cold)


def test_the_grid_goes_from_the_average_to_the_worst_case():
    objectives = grid(sp.ChiSquare(0.1), np.array([0.1, 0.2, 0.6]), points=4)
    assert [type(o).__name__ for o in objectives.values()] == [
        "Average",
        *["ChiSquare"] * 4,
        "Agnostic",
    ]
    rhos = [o.rho for o in list(objectives.values())[1:-1]]
    assert rhos == sorted(rhos, reverse=True)
    assert list(objectives)[1] == f"ρ = {rhos[0]:g}"


def test_a_follower_starts_with_what_is_known_and_resumes_nothing(cohort):
    seen = []
    sp.train(
        sp.fair(sp.ChiSquare(0.1)), cohort, tol=TOL, callbacks=[lambda m: seen.append(m.state)]
    )
    again = sp.train(sp.fair(sp.ChiSquare(0.1)), cohort, tol=10 * TOL, x0=seen[-1])
    assert again.rounds == 0
    assert again.status is sp.Status.CONVERGED
    other = sp.train(sp.ScaffPD(sp.ChiSquare(0.1)), cohort, rounds=1, x0=seen[-1])  # takes x alone
    assert other.history.losses[0] == pytest.approx(seen[-1].losses)


def test_weights_outside_the_next_set_are_brought_into_it(cohort):
    seen = []
    sp.train(sp.fair(sp.Agnostic()), cohort, tol=TOL, callbacks=[lambda m: seen.append(m.state)])
    for objective in (sp.CVaR(0.5), sp.ChiSquareBall(0.05), sp.Average(), sp.QFair(1.0)):
        result = sp.train(sp.fair(objective), cohort, tol=TOL, x0=seen[-1])
        alone = sp.train(sp.fair(objective), cohort, tol=TOL)
        assert result.status is sp.Status.CONVERGED
        assert np.isfinite(result.history["certificate"][0])
        assert objective.support(result.history.losses[-1]) == pytest.approx(
            objective.support(alone.history.losses[-1]), abs=2 * TOL
        )


def test_what_cannot_be_followed_is_refused(cohort):
    with refuses("path-without-objectives"):
        sp.path([], cohort)
    with refuses("path-without-strength"):
        grid(sp.Nash(1.0), np.ones(3))


@pytest.mark.parametrize("prior", [None, [4.0, 1.0, 2.0, 1.0]])
def test_no_point_of_a_capped_path_exceeds_the_cap(cohort, prior):
    """The Agnostic end would put all weight on one client; with a cap κ, ρ → 0 is any λ_i ≤ κ."""
    goal = sp.ChiSquare(0.1, prior, cap=0.3)
    points = grid(goal, np.array([0.2, 0.9, 0.3, 0.4]), points=3)
    assert [o.cap for o in list(points.values())[1:-1]] == [0.3] * 3
    for name, objective in points.items():
        if name != "average":  # whose weights are its prior, whatever clients say
            assert sp.train(sp.fair(objective), cohort, tol=1e-4).weights.max() <= 0.3 + 1e-9, name
    random = np.random.default_rng(0)
    for losses in random.exponential(size=(20, 4)):
        limit = sp.ChiSquare(1e-9, prior, cap=0.3).support(losses)
        assert points["worst case"].support(losses) == pytest.approx(limit, abs=1e-7)
    exact = grid(sp.ChiSquare(0.1, cap=1 / 3), np.array([0.1, 0.2, 0.6]), 1)["worst case"]
    np.testing.assert_allclose(
        exact.maximizer([0.0, 5.0, 1.0]), 1 / 3
    )  # a cap that leaves no choice


def test_many_points_stay_apart():
    objectives = grid(sp.ChiSquare(0.1), np.array([0.1, 0.2, 0.6]), points=300)
    assert len(objectives) == 302
    assert len({o.rho for o in list(objectives.values())[1:-1]}) == 300
