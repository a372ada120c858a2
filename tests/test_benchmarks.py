"""One smoke test: benchmarks measure, and what is published is what they have stored."""

import sys
from pathlib import Path

import numpy as np
import pytest

import intervals
import rounds
import scaffpd as sp
import solver

SPEED = Path(__file__).resolve().parents[1] / "benchmarks" / "speed"


def test_rounds_are_counted():
    cell = rounds.measure(("synthetic", "ChiSquare", rounds.OURS, 0))
    assert cell["cost"][0] <= 20


def test_the_solver_and_its_peer_solve_the_same_problem():
    clients = solver.labelled(0, 4, 30, 5)
    for loss in ("squared", "logistic"):
        cohort = sp.Cohort(clients, sp.Linear(loss, l2=solver.L2))
        objective = sp.Tilted(0.1)
        found = sp.train(sp.fair(objective), cohort, tol=1e-9)
        value = objective.support(cohort.evaluate(found.x).loss)
        assert solver.lbfgs(clients, loss, objective, 200).fun == pytest.approx(value, abs=1e-7)


def test_intervals_cover():
    found = intervals.gains(60, 6, 0.3, labels=False, seed=0)
    assert set(map(len, found.values())) == {180}
    for name in ("mean over clients", "one client", "worst fifth"):
        assert 0.9 <= np.mean(found[name]) <= 0.99


def test_speed_pages_are_those_of_the_stored_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(SPEED))
    monkeypatch.delitem(sys.modules, "publish", raising=False)
    import publish

    found = publish.stored(SPEED)
    if not found:
        pytest.skip("no measurements are stored: run benchmarks/speed/run.py")
    assert (SPEED / "RESULTS.md").read_text(encoding="utf-8") == publish.page(found)
    sys.modules.pop("publish", None)
