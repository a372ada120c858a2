"""A run as a folder: complete, repeatable, resumable, with the numbers of the library."""

from __future__ import annotations

import csv
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.linear_model import Ridge

import scaffpd as sp
from cases.reference import reference_optimum
from cases.refusals import refuses
from cases.runs import Nobody, asked, patients, trained
from scaffpd.federation import ClientScores
from scaffpd.federation.questions import SPLITS
from scaffpd.pipeline.models import Contest, Trained
from scaffpd.program import path as walking
from scaffpd.program.path import knee
from scaffpd.program.train import one_run
from scaffpd.report.folder import RunFolder
from scaffpd.report.record import RunRecord
from scaffpd.settings.run import RunConfig
from scaffpd.tasks.classification import Classification
from scaffpd.training.metrics import Spread


def run(config, place, watcher=None, fresh=False):
    return trained(config, place, watcher, fresh)[:2]


def rows(file):
    with file.open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_a_folder_has_everything_and_repeats_itself_bit_for_bit(tmp_path):
    models, _ = run(asked(patients(tmp_path / "p.csv")), tmp_path / "one")
    names = {"config.toml", "run.json", "checkpoint", "lock"}
    names |= {"model.safetensors", "average.safetensors", "fair.safetensors"}
    names |= {"rounds.csv", "clients.csv", "scores.csv", "coefficients.csv", "effects.csv"}
    assert names == {p.name for p in (tmp_path / "one").iterdir()}
    (tmp_path / "two").mkdir()
    again, _ = run(RunConfig.read(tmp_path / "one" / "config.toml"), tmp_path / "two")
    for a, b in zip(models, again, strict=True):
        assert np.array_equal(a.result.x, b.result.x)
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert np.array_equal(stored["x"], models[1].result.x)


def test_the_record_has_what_was_trained_and_csv_files_have_the_record(tmp_path):
    models, prepared = run(asked(patients(tmp_path / "p.csv")), tmp_path / "run")
    found = RunRecord.read(tmp_path / "run")
    assert (found.title, found.clients) == ("p: 3 clients", list(prepared.names))
    assert [model.role for model in found.models] == ["before", "after"]
    assert found.reading.model_dump(exclude_none=True)["target"] == "outcome"
    table = rows(tmp_path / "run" / "clients.csv")
    for own, model in zip(models, found.models, strict=True):
        assert model.certificate == own.result.certificate <= 1e-6
        assert [s.test_score for s in model.clients] == own.scores["test"].score.tolist()
        assert [s.weight for s in model.clients] == own.result.weights.tolist()
        assert model.last.losses == own.result.history.losses[-1].tolist()
        mine = [row for row in table if row["model"] == model.name]
        assert [float(row["test_accuracy"]) for row in mine] == own.scores["test"].score.tolist()
    fair = [row for row in rows(tmp_path / "run" / "rounds.csv") if row["model"] == "fair"]
    assert [float(row["loss[west]"]) for row in fair] == [
        one.losses[2] for one in found.models[1].history
    ]


def test_the_numbers_are_those_of_the_library(tmp_path):
    config = asked(patients(tmp_path / "p.csv"), model={"l2": 1e-3})
    models, prepared = run(config, tmp_path / "run")
    ridge = [1e-3] * len(prepared.columns) + [1e-6]  # hardly any on the intercept
    cohort = sp.Cohort(prepared.train, sp.Linear("logistic", ridge, intercept=True), prepared.names)
    by_hand = sp.train(sp.fair(sp.ChiSquare(0.1)), cohort, tol=1e-6)
    assert np.array_equal(by_hand.x, models[1].result.x)
    optimum = reference_optimum(
        # a coefficient of a column c times as large has a ridge that is c² times as small
        [(np.c_[X, np.full(len(X), 1e3**0.5)], y) for X, y in prepared.train],
        "logistic",
        1e-3,
        sp.ChiSquare(0.1),
    )
    assert abs(sp.ChiSquare(0.1).support(cohort.evaluate(by_hand.x).loss) - optimum.value) < 1e-5


def test_the_average_model_of_a_table_of_numbers_is_ridge_regression(tmp_path):
    config = asked(
        patients(tmp_path / "p.csv", number=True),
        objective={"kind": "Average"},
        training={"tol": 1e-10},
        model={"l2": 1e-3},
    )
    models, prepared = run(config, tmp_path / "run")
    assert [m.name for m in models] == ["average"]
    weights = np.concatenate([np.full(len(y), 1 / len(y)) for _, y in prepared.train])
    X = np.concatenate([X for X, _ in prepared.train])
    y = np.concatenate([y for _, y in prepared.train])
    ridge = Ridge(alpha=3 * 1e-3 / 2, tol=1e-12).fit(X, y, sample_weight=weights)
    assert models[0].result.x == pytest.approx([*ridge.coef_, ridge.intercept_], abs=1e-4)


def test_an_interrupted_run_goes_on_with_the_same_numbers(tmp_path):
    # a ridge that is given: by evidence, training would start close to the end
    config = asked(patients(tmp_path / "p.csv"), training={"tol": 1e-9}, model={"l2": 1e-3})
    whole, _ = run(config, tmp_path / "whole")
    first, _ = run(config, tmp_path / "run", Nobody(after=whole[0].result.rounds + 3))
    assert first[-1].result.status is sp.Status.INTERRUPTED
    watcher = Nobody()
    second, _ = run(config, tmp_path / "run", watcher)
    assert watcher.seen == whole[1].result.rounds - 3
    assert np.array_equal(second[-1].result.x, whole[-1].result.x)


def test_another_run_in_the_same_folder_is_refused_and_a_longer_one_is_not(tmp_path):
    file = patients(tmp_path / "p.csv")
    run(asked(file, training={"rounds": 2, "tol": 0}), tmp_path / "run")
    longer, _ = run(asked(file, training={"rounds": 4, "tol": 0}), tmp_path / "run")
    assert longer[-1].result.rounds == 4
    other = asked(file, objective={"kind": "Agnostic"})
    with refuses("folder-of-another-run"):
        run(other, tmp_path / "run")
    run(other, tmp_path / "run", fresh=True)


def test_a_tol_that_cannot_be_certified_is_refused_only_where_it_was_asked_for(tmp_path):
    file = patients(tmp_path / "p.csv")
    bare = {"model": {"l2": 0.0}, "algorithm": {"kind": "ScaffPD"}}
    models, _ = run(asked(file, **bare, training={"rounds": 3}), tmp_path / "run")
    assert models[-1].result.rounds == 3
    with refuses("tol-without-certificate"):
        run(asked(file, **bare, training={"tol": 1e-3}), tmp_path / "other")


def test_a_path_has_its_knee_and_keeps_that_model(tmp_path):
    config = RunConfig.of(
        {"data": {"source": "hospitals", "test": 0.3}, "path": {"points": 4}}, "hospitals"
    )
    watcher = Nobody()
    models = one_run("path", config, tmp_path / "path", True, watcher).models
    assert watcher.models == [m.name for m in models]
    assert [models[0].name, models[-1].name] == ["average", "worst case"]
    found = RunRecord.read(tmp_path / "path")
    assert found.path.rounds == sum(m.result.rounds for m in models)
    assert list(found.names) == watcher.models
    chosen = next((m for m in models if m.role == "after"), models[0])
    assert found.path.knee == found.main.name == chosen.name
    stored = load_file(tmp_path / "path" / "model.safetensors")["x"]
    assert np.array_equal(stored, chosen.result.x)
    again = RunConfig.read(tmp_path / "path" / "config.toml")
    assert again.path.points == 4
    assert RunFolder(tmp_path / "path").fits("path", again)
    losses = [m.result.history.losses[-1].max() for m in models]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("held", "at"), [((0.7, 0.8), 0), ((0.9, 0.8), 1), ((0.7, 0.4), 0)])
def test_a_path_suggests_a_point_that_held_out_rows_confirm(held, at):
    """Training rows choose the second point, which gives the worst-served ten points more."""

    def point(name, role, *shares):
        scores = [
            ClientScores(("a", "b"), np.zeros(2), np.array(pair), np.array([9, 9]))
            for pair in shares
        ]
        result = SimpleNamespace(x=np.zeros(1), rounds=1)
        contest = Contest(name, None, None, role)
        return Trained(contest, None, None, result, dict(zip(SPLITS, scores, strict=True)))

    models = [
        point("average", "before", (0.6, 0.9), (0.7, 0.8)),
        point("ρ = 1", "", (0.7, 0.9), held),
    ]
    rows = SimpleNamespace(task=Classification(), test=[1], model=None)
    found = walking.suggested(models, rows)
    assert [one.role for one in found] == ["before", "after" if at else ""]
    goal = SimpleNamespace(parameter="rho")
    why = walking.about(SimpleNamespace(goal=goal), rows, found).why
    assert why.startswith(
        "ρ = 1, chosen on training rows; on"
        if at
        else "average; ρ = 1, chosen on training rows, is no"
    )


def spread(mean, worst):
    zero = Spread(*[0.0] * 4, "", "", *[0.0] * 3)
    return replace(zero, mean=mean, worst_20=worst)


def test_the_knee():
    accuracy = [spread(0.90, 0.60), spread(0.899, 0.70), spread(0.89, 0.72), spread(0.80, 0.73)]
    assert knee(accuracy, upwards=True) == 2
    assert knee([spread(1.0, 3.0), spread(1.01, 2.0), spread(2.5, 1.9)], upwards=False) == 1
    assert knee([spread(0.9, 0.6), spread(0.9, 0.6015)], upwards=True) == 0
    assert knee([spread(0.9, 0.6), spread(0.8, 0.5)], upwards=True) == 0
    assert (
        knee([spread(0.9, 0.6), spread(0.78, 0.65)], upwards=True) == 0
    )  # twelve points of the mean for five


def test_a_prior_goes_along_the_path(tmp_path):
    objective = {"kind": "ChiSquare", "rho": 0.1, "prior": [3, 1, 1, 1]}
    config = RunConfig.of(
        {"data": {"source": "hospitals"}, "objective": objective, "path": {"points": 1}},
        "hospitals",
    )
    for model in one_run("path", config, tmp_path, True, Nobody()).models:
        assert model.objective.weights(4)[0] == pytest.approx(0.5)


def test_folders_of_others_are_left_alone(tmp_path):
    config = asked(patients(tmp_path / "p.csv"))
    mine = tmp_path / "mine"
    (mine / "checkpoint").mkdir(parents=True)
    (mine / "checkpoint" / "model.pt").write_text("mine")
    (mine / "config.toml").write_text('[data]\nsource = "hospitals"\n')
    for fresh in (False, True):
        with refuses("folder-of-others"):
            run(config, mine, fresh=fresh)
    (mine / "config.toml").unlink()
    run(config, mine)
    run(config, mine, fresh=True)
    assert (mine / "checkpoint" / "model.pt").read_text() == "mine"


def test_a_fresh_start_leaves_nothing_of_the_old_run(tmp_path):
    file = patients(tmp_path / "p.csv")
    run(asked(file), tmp_path / "run")
    (tmp_path / "run" / "report.html").write_text("old")
    with RunFolder(tmp_path / "run").opened(
        "train", asked(file, objective={"kind": "Agnostic"}), fresh=True
    ):
        pass  # as if it were killed here
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert left == {"config.toml", "checkpoint", "lock"}
    assert not list((tmp_path / "run" / "checkpoint").iterdir())


def test_the_average_model_is_certified_where_the_method_asked_for_is_not(tmp_path):
    asked = {
        "data": {"source": "hospitals"},
        "algorithm": {"kind": "FedAvg"},
        "training": {"rounds": 30, "splits": 0},
    }
    config = RunConfig.of(asked, "hospitals")
    (average, fed_avg), _ = run(config, tmp_path / "run")
    assert average.result.status is sp.Status.CONVERGED
    assert average.result.certificate <= 1e-6
    assert (average.result.rounds < 30, fed_avg.result.rounds) == (True, 30)
    assert np.isinf(fed_avg.result.certificate)
