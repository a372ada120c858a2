"""One objective after the other: the same optima as each alone, in fewer rounds."""

from __future__ import annotations

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.fairness_path import SYMBOLS, grid

TOL = 1e-7
OTHERS = ("ChiSquareBall", "Tilted")  # as ChiSquare, on the simplex; their grids are tested alike


@pytest.fixture(scope="module")
def cohort():
    silos = sp.data.heart_disease()
    return sp.Cohort(silos.train, sp.Linear("logistic", l2=0.03, intercept=True), silos.names)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.long if k in OTHERS else ()) for k in SYMBOLS])
def test_every_point_is_as_good_as_a_run_of_its_own_and_cheaper(cohort, kind):
    average = sp.train(sp.fair(sp.Average()), cohort, tol=TOL)
    objectives = grid(kind, average.history.losses[-1], points=5)
    warm = sp.path(list(objectives.values()), cohort, tol=TOL)
    cold = sp.path(list(objectives.values()), cohort, tol=TOL, warm=False)
    assert {r.status for r in [*warm, *cold]} == {sp.Status.CONVERGED}
    for objective, a, b in zip(objectives.values(), warm, cold, strict=True):
        reached = [objective.support(cohort.evaluate(r.x).loss) for r in (a, b)]
        assert abs(reached[0] - reached[1]) <= 2 * TOL
    assert sum(r.rounds for r in warm) < 0.6 * sum(r.rounds for r in cold)


def test_the_grid_goes_from_the_average_to_the_worst_case():
    objectives = grid("ChiSquare", np.array([0.1, 0.2, 0.6]), points=4)
    assert [type(o).__name__ for o in objectives.values()] == ["Average", *["ChiSquare"] * 4, "Agnostic"]
    rhos = [o.rho for o in list(objectives.values())[1:-1]]
    assert rhos == sorted(rhos, reverse=True)
    assert list(objectives)[1] == f"ρ = {rhos[0]:g}"


def test_a_follower_starts_with_what_is_known_and_resumes_nothing(cohort):
    seen = []
    sp.train(sp.fair(sp.ChiSquare(0.1)), cohort, tol=TOL, callbacks=[lambda m: seen.append(m.state)])
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
    with pytest.raises(sp.InputError, match="needs a list of objectives"):
        sp.path([], cohort)
    with pytest.raises(sp.InputError, match="goes along ChiSquare"):
        grid("Nash", np.ones(3))


def test_many_points_stay_apart():
    objectives = grid("ChiSquare", np.array([0.1, 0.2, 0.6]), points=300)
    assert len(objectives) == 302
    assert len({o.rho for o in list(objectives.values())[1:-1]}) == 300
