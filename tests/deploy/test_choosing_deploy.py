"""Strengths chosen and joining measured among silos: the cohort's numbers, what leaves, and who refuses."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
from deploy_cases import MODEL, QUICK, encoded, federation, run
from secure_silos import SCAFF_PD, secured

import scaffpd as sp
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import decode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile

GRID = (
    '\n[choosing]\nl2 = [0.3, 0.01]\nstrength = [inf, 30.0]\nfolds = 2\nby = "mean"\nbudget = 200\n'
)
UNGIVEN = {"rho = 0.1\n": "", "rounds = 500": "rounds = 60"}
JOINING = {"tol = 1e-6": "tol = 1e-6\njoining = true"}
ROUGHLY = {"tol = 1e-6": "tol = 1e-3\njoining = true"}
TELLS = "\n[limits]\njoining = true\n"


def folder(path):
    return FederationFile.read(path).folder


def chosen_in(path):
    return json.loads((folder(path) / "choice.json").read_text())


def lines(path, more):
    path.write_text(path.read_text() + more)


def messages(transport, *kinds):
    """(site, question, answer) of these kinds."""
    for site, asked, answer in transport.log:
        question = decode(asked, 2**31)
        if question.kind in kinds:
            yield site, question, decode(answer, 2**31)


def pairs(path, places):
    rows, model = encoded(path, places)
    return {n: rows[n].train for n in places}, {n: rows[n].test for n in places}, model


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    path, places = federation(
        tmp_path_factory.mktemp("silos"), 2, replacing=UNGIVEN, more=GRID + QUICK
    )
    return path, places, *run(path, places)


def test_silos_choose_what_a_cohort_chooses(chosen):
    path, places, outcome, _ = chosen
    assert outcome.status == "converged", outcome.sentence
    found = chosen_in(path)
    train, _, model = pairs(path, places)
    assert model.l2 == found["l2"]  # the model of the run has it
    grid = ([0.3, 0.01], [math.inf, 30.0], "mean")
    model = replace(model, l2=0.1)
    here = sp.choose(train, model, "ChiSquare", *grid, folds=2, budget=200)
    theirs = {
        (row["kappa"], row["l2"], row["objective"]): row["validation_loss_mean"]
        for row in found["tried"]
    }
    ours = {(str(p.strength), p.l2, repr(p.objective)): p.score("mean") for p in here.tried}
    shared = [key for key in theirs if key in ours]
    assert len(shared) >= 2  # ρ goes by losses that are exact to 1e-4, and two methods find them
    for key in shared:
        assert theirs[key] == pytest.approx(ours[key], rel=6e-3)
    best = min(
        found["tried"],
        key=lambda row: (
            row["validation_loss_mean"] if "ChiSquare" in row["objective"] else math.inf
        ),
    )
    assert found["l2"] == best["l2"]
    assert 0 < found["objective"]["rho"] != 0.1


def test_one_number_a_fold_and_a_point_goes_up(chosen):
    path, places, _, transport = chosen
    held = list(messages(transport, "held_out_loss"))
    assert len(held) >= len(chosen_in(path)["tried"]) * 2 * len(places)
    for _, _, answer in held:
        assert {name: array.shape for name, array in answer.arrays.items()} == {"scalars": (1,)}
        assert set(answer.values) == {"question", "silo"}
    assert not list(messages(transport, "joining_scores"))


@pytest.mark.parametrize("rho", ["", "rho = 0.02\n"])
def test_a_chosen_strength_keeps_the_cap(tmp_path, rho):
    """Of four silos va would get 0.4 of the weight."""
    capped = {"rho = 0.1\n": f"cap = 0.3\n{rho}", "tol = 1e-6": "tol = 1e-3"}
    more = "\n[choosing]\nl2 = [0.1]\nstrength = [inf]\nfolds = 2\nbudget = 40\n"
    path, places = federation(tmp_path, replacing=capped, more=more)
    outcome, _ = run(path, places)
    assert outcome.status == "converged", outcome.sentence
    found = chosen_in(path)
    tried = {row["objective"] for row in found["tried"]}
    assert all("cap=0.3" in one for one in tried - {"Average()"})
    assert len(tried) == (1 if rho else 4)  # the average is tried, and not chosen
    assert (found["objective"]["rho"] == 0.02) == bool(rho)
    with (folder(path) / "clients.csv").open() as file:
        weights = [float(row["weight"]) for row in csv.DictReader(file)]
    assert max(weights) == pytest.approx(0.3, abs=1e-6)  # at the cap, and not beyond it


def test_choosing_works_with_masked_sums(tmp_path):
    grid = "\n[choosing]\nl2 = [0.1]\nstrength = [inf, 30.0]\nfolds = 2\nbudget = 12\n"
    path, places = secured(
        tmp_path, silos=3, replacing={**SCAFF_PD, "rounds = 500": "rounds = 5"}, more=grid
    )
    outcome, transport = run(path, places)
    assert outcome.status != "failed", outcome.sentence
    assert chosen_in(path)["l2"] == 0.1
    seen = list(messages(transport, "held_out_loss", "gradients"))
    assert {question.kind for _, question, _ in seen} == {"held_out_loss", "gradients"}
    for _, _, answer in seen:  # no vector that is not masked
        assert set(answer.arrays) <= {"scalars"}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("\n[limits]\nchoosing = false\n", "limits.choosing in its file is false"),
        ("\n[limits]\nrows = 60\n", "reports the loss of 60 rows or more, and a fold would have"),
    ],
)
def test_a_silo_may_refuse_folds(tmp_path, rules, words):
    path, places = federation(
        tmp_path, replacing=UNGIVEN, more=GRID.replace("folds = 2", "folds = 4") + QUICK
    )
    lines(next(iter(places.values())), rules)
    outcome, _ = run(path, places)
    assert outcome.status == "failed"
    assert words in outcome.sentence


def test_a_silo_takes_other_strengths_and_nothing_else_for_the_same_run(chosen):
    """Other columns, other folds, or other strengths where noise is accounted for, are another run."""
    path, places, _, _ = chosen
    setup = DeployedRun(folder(path)).setup()
    place = next(iter(places.values()))
    trial = setup.with_model(fold=0, folds=2, seed=0)
    noisy = replace(setup, privacy={"epsilon": 1.0})
    for first, second, refused in (
        (setup, setup.with_model(l2=0.5, strength=3.0), ""),
        (setup, replace(setup, mean=setup.mean + 1), "another agreement already"),
        (trial, trial.with_model(fold=1), ""),
        (trial, trial.with_model(seed=1), "another cut into folds already"),
        (noisy, noisy.with_model(l2=0.5), "another set of strengths already"),
    ):
        silo = Silo.open(place)
        silo._bind(first)
        if not refused:
            silo._bind(second)
            continue
        with pytest.raises(InputError, match=refused):
            silo._bind(second)


@pytest.mark.parametrize("own", [False, True])
def test_joining_is_what_a_cohort_measures_and_only_scores_leave(tmp_path, own):
    change = {**JOINING, **({MODEL: MODEL + "strength = 30.0\n"} if own else {})}
    path, places = federation(tmp_path, 2, replacing=change, more=QUICK)
    for place in places.values():
        lines(place, TELLS)
    outcome, transport = run(path, places)
    assert outcome.status == "converged", outcome.sentence
    table = csv.DictReader((folder(path) / "joining.csv").read_text().splitlines())
    rows = {(row["client"], row["model"]): row for row in table}
    train, test, model = pairs(path, places)
    objective = FederationFile.read(path).method.objective
    here = sp.joining(
        train, test, model, objective, strength=30.0 if own else 100.0, tol=1e-6, word="silo"
    )
    for i, name in enumerate(here.names):
        for k, kind in enumerate(here.models):
            assert float(rows[name, kind]["test_loss"]) == pytest.approx(here.loss[k, i], rel=2e-3)
            assert float(rows[name, kind]["test_accuracy"]) == pytest.approx(
                here.score[k, i], abs=0.02
            )
        gain = here.gains("fair")[i]
        assert float(rows[name, "fair"]["gain_over_alone_low"]) == pytest.approx(gain.low, abs=5e-3)
    assert json.loads((folder(path) / "joining.json").read_text())["sentence"] in outcome.sentence
    asked = list(messages(transport, "joining_scores"))
    assert len(asked) == len(places)
    for _, _, answer in asked:
        shapes = {name: array.shape for name, array in answer.arrays.items()}
        assert shapes == {"means": (2, 5), "covariances": (2, 5, 5), "scalars": (2,)}
        assert set(answer.values) == {"question", "silo"}


def test_scores_leave_only_where_the_silos_file_allows_it(tmp_path):
    path, places = federation(tmp_path, 3, replacing=ROUGHLY, more=QUICK)
    first, *others = places
    for name in others:
        lines(places[name], TELLS)
    outcome, transport = run(path, places)
    assert f"({first} did not release theirs.)" in outcome.sentence
    table = csv.DictReader((folder(path) / "joining.csv").read_text().splitlines())
    assert {row["client"] for row in table} == set(others)
    (refusal,) = [
        answer for site, _, answer in messages(transport, "joining_scores") if site == first
    ]
    assert refusal.kind == "refused"
    assert not refusal.arrays
    assert "limits.joining in its file is false" in refusal.values["sentence"]


def test_where_nobody_tells_nothing_is_written(tmp_path):
    path, places = federation(tmp_path, 2, replacing=ROUGHLY, more=QUICK)
    outcome, _ = run(path, places)
    assert outcome.status == "converged"
    assert "Gains from joining were not measured: no silo releases its scores" in outcome.sentence
    assert not (folder(path) / "joining.csv").exists()


@pytest.mark.parametrize(
    ("replacing", "more", "words"),
    [
        ({MODEL: '[model]\nkind = "net"\n'}, GRID, "has [choosing], which needs a linear model."),
        (
            {"tol = 1e-6": ""},
            GRID + "\n[privacy]\nepsilon = 4.0\n",
            "needs a run without [privacy]",
        ),
        (
            {},
            GRID.replace("folds = 2", "folds = 1"),
            "a whole number from 2 to 20 for choosing.folds",
        ),
        ({}, GRID.replace('"mean"', '"median"'), "did you mean 'mean'"),
    ],
)
def test_what_cannot_be_chosen_is_refused(tmp_path, replacing, more, words):
    path, _ = federation(tmp_path, replacing=replacing, more=more)
    with pytest.raises(InputError) as caught:
        FederationFile.read(path)
    assert words in str(caught.value)
