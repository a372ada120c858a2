"""One way from rows to a result: `scaffpd train`, an estimator, a silo, and `sp.run` itself."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from cases.runs import asked, patients, trained
from cases.silos import ROUGH, federation
from cases.silos import run as deployed
from scaffpd.tasks.classification import Classification

WALKS = Path(__file__).parents[2] / "docs" / "walks.py"
STEPS = {"columns.py", "models.py", "run.py", "sites.py"}
JUDGED = {"judging.py", "prepared.py"}


@pytest.fixture(scope="module")
def clients():
    random = np.random.default_rng(4)
    w = np.array([1.0, -1.0, 0.5])
    made = []
    for k in range(4):
        X = random.normal(size=(80, 3))
        y = (X @ w * (1 if k else -1) + random.normal(size=80) > 0).astype(int)
        made.append((X, y))
    return [(X[:60], y[:60]) for X, y in made], [(X[60:], y[60:]) for X, y in made]


def test_all_take_the_same_steps(tmp_path, clients):
    """The files of the pipeline that run: an estimator stops after training."""
    passed = runpy.run_path(str(WALKS))["passed"]

    def steps(walk):
        return {Path(f).name for f in passed(walk).files if f.startswith("pipeline/")}

    config = asked(patients(tmp_path / "p.csv", 90))
    assert steps(lambda: trained(config, tmp_path / "run")) == STEPS | JUDGED | {"shapes.py"}
    path, places = federation(tmp_path / "silos", 3, replacing=ROUGH)
    assert steps(lambda: deployed(path, places)) == STEPS | JUDGED
    X, y = (np.concatenate(part) for part in zip(*clients[0], strict=True))
    owner = np.repeat(np.arange(4), 60)
    assert steps(lambda: sp.FairFederatedClassifier().fit(X, y, owner)) == STEPS


def test_run_agrees_settles_trains_and_scores(clients):
    """Against a cohort that is made by hand, trained and scored."""
    names = list("abcd")
    sites, encoding = sp.SitesHere.of_arrays(names, *clients, Classification())
    model = sp.Linear("logistic", "auto", intercept=True)
    method = sp.fair(sp.ChiSquare(0.1))
    shared = sp.Contest("fair", model, method, tol=1e-12)
    own = sp.Contest("personal", sp.Personal(model), sp.fair(sp.Average()), tol=1e-12)
    found = sp.run(sp.Settings(encoding, [shared, own]), sites)
    assert [one.name for one in found.models] == ["fair", "personal"]
    for one, asked_for in zip(found.models, (model, sp.Personal(model)), strict=True):
        cohort = sp.Cohort(clients[0], asked_for, names, test=clients[1])
        wanted = sp.train(one.contest.algorithm, cohort, tol=1e-12, progress=False)
        np.testing.assert_allclose(one.result.x, wanted.x, atol=1e-6)
        scores = cohort.evaluate(one.result.x, "test")
        np.testing.assert_allclose(one.shown.score, scores.score)
    assert found.own is None
    stopped = sp.run(sp.Settings(encoding, [shared]), sites, until="trained")
    assert stopped.models[0].scores == {}
    assert np.array_equal(stopped.models[0].result.x, found.models[0].result.x)


def test_a_function_may_choose_the_next_model(clients):
    """It sees what has been trained; with `follows` the next one starts there."""
    sites, encoding = sp.SitesHere.of_arrays(list("abcd"), *clients, Classification())
    model = sp.Linear("logistic", 0.1)

    def following(known, models):
        assert known is encoding
        rho = 10.0 ** -len(models)
        goal = sp.fair(sp.ChiSquare(rho))
        return sp.Contest(f"{rho}", model, goal, tol=1e-9, follows=True) if rho > 1e-3 else None

    found = sp.run(sp.Settings(encoding, following), sites)
    assert [one.name for one in found.models] == ["1.0", "0.1", "0.01"]
    worst = [one.result.history.losses[-1].max() for one in found.models]
    assert worst == sorted(worst, reverse=True)
