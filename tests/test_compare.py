"""`compare`: the same conditions for all, choices that see no test row, numbers that do not hang on how they came."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import comparison_cases as cases
import scaffpd as sp
import scaffpd.study.comparison as compete
from comparison_cases import METHODS, PROBLEM, toy
from scaffpd.errors import InputError
from scaffpd.federation import ClientScores
from scaffpd.study.comparison import Journal
from scaffpd.study.comparison import runs as pool
from scaffpd.study.comparison.problem import Problem, carve
from scaffpd.study.comparison.problem import problem as known_problem
from scaffpd.study.comparison.runs import Run, RunKey, Runner
from scaffpd.study.comparison.setting import (
    Setting,
    choose_methods,
    climb,
    configured,
    grid,
    labelled,
    neighbours,
    zoo,
)
from scaffpd.study.comparison.tables import MEASURES
from scaffpd.training.metrics import Summary

ROUNDS = 3
SETTING = {"seeds": (0, 1), "rounds": ROUNDS, "tune": 3}


def numbers(comparison):
    """Every row but for the time that it took."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in comparison.rows]


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def comparison(folder):
    return sp.compare(METHODS, PROBLEM, **SETTING, out=folder, processes=1)


# ------------------------------------------------------------------ the same numbers, however they came


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_two_processes_give_the_same_numbers(comparison, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "get_context", {"spawn": cases.Copies(1)}.get)
    other = sp.compare(METHODS, PROBLEM, **SETTING, out=tmp_path, processes=2)
    assert numbers(other) == numbers(comparison)
    assert [r.scores["train"].loss.tolist() for r in other.runs] == [
        r.scores["train"].loss.tolist() for r in comparison.runs
    ]
    assert (tmp_path / "clients.csv").read_bytes() == (folder / "clients.csv").read_bytes()


@pytest.mark.sample(2)
@pytest.mark.parametrize("after", [1, 7, 15])
def test_what_was_interrupted_goes_on_with_the_same_numbers(
    comparison, tmp_path, monkeypatch, after
):
    done = []
    real = Runner.carry_out

    def interrupted(self, job):
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(job)
        return real(self, job)

    monkeypatch.setattr(Runner, "carry_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sp.compare(METHODS, PROBLEM, **SETTING, out=tmp_path, processes=1)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == after
    again = []
    monkeypatch.setattr(Runner, "carry_out", lambda self, job: again.append(job) or real(self, job))
    resumed = sp.compare(METHODS, PROBLEM, **SETTING, out=tmp_path, processes=1)
    assert numbers(resumed) == numbers(comparison)
    assert not set(again) & set(done)
    assert len(again) + len(done) == len(comparison.runs)


def test_a_call_that_is_done_runs_nothing(comparison, folder, monkeypatch):
    monkeypatch.setattr(Runner, "carry_out", lambda *_: pytest.fail("ran again"))
    assert numbers(sp.compare(METHODS, PROBLEM, **SETTING, out=folder, processes=1)) == numbers(
        comparison
    )


def test_a_line_that_was_being_written_is_cut_off(comparison, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    log = tmp_path / "runs.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]) + lines[-2][:50])
    assert numbers(sp.compare(METHODS, PROBLEM, **SETTING, out=tmp_path, processes=1)) == numbers(
        comparison
    )
    assert len(log.read_bytes().splitlines()) == len(lines)


SCRIPT = """
import scaffpd as sp
from comparison_cases import METHODS, PROBLEM, toy
{definition}
sp.compare(METHODS, sp.Problem({data}, PROBLEM.model, "toy"), **{setting}, out={out!r}, processes=2)
"""


def script(tmp_path, definition="", data="toy"):
    """A script that compares in two processes, as its author might write it, without a guard."""
    path = tmp_path / "script.py"
    out = tmp_path / "out"
    path.write_text(SCRIPT.format(definition=definition, data=data, setting=SETTING, out=str(out)))
    environment = os.environ | {"PYTHONPATH": os.path.dirname(cases.__file__)}
    running = subprocess.Popen(
        [sys.executable, path], env=environment, stderr=subprocess.PIPE, text=True
    )
    return running, out / "runs.jsonl"


@pytest.mark.long
def test_killed_in_two_processes(comparison, tmp_path):
    """Kill -9 as soon as a run is on disk; the same call goes on."""
    running, log = script(tmp_path)
    deadline = time.monotonic() + 120
    while (
        not (log.exists() and log.stat().st_size)
        and running.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    assert running.communicate()[1] == ""
    assert log.stat().st_size
    assert numbers(sp.compare(METHODS, PROBLEM, **SETTING, out=log.parent, processes=1)) == numbers(
        comparison
    )


@pytest.mark.long
def test_a_script_that_defines_what_it_compares_needs_a_guard(tmp_path):
    running, _ = script(tmp_path, "def mine(seed): return toy(seed)", "mine")
    assert "keep what it does under `if __name__" in running.communicate()[1]
    assert running.returncode == 1


def test_without_a_folder_nothing_is_written(comparison, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert numbers(sp.compare(METHODS, PROBLEM, **SETTING, processes=1)) == numbers(comparison)
    assert list(tmp_path.iterdir()) == []


def test_runs_survive_json(comparison):
    for run in comparison.runs:
        written = json.dumps(run.to_json())
        again = Run.from_json(json.loads(written))
        assert json.dumps(again.to_json()) == written
        assert again.job == run.job
        assert all((again.scores[k].loss == run.scores[k].loss).all() for k in run.scores)


# ------------------------------------------------------------------ budget and choice


def test_the_budget_is_kept(comparison):
    jobs = [run.job for run in comparison.runs]
    assert len(jobs) == len(set(jobs)) == 2 * (3 + 3 + 0) + 2 * 3
    for seed in (0, 1):
        assert sum(j == RunKey("FedAvg", seed, "tune", j.point) for j in jobs) == 3
        assert sum(j == RunKey("DRFA", seed, "tune", j.point) for j in jobs) == 3
        assert not any(j.method == "Scaff-PD" and j.phase == "tune" for j in jobs)
        assert sum(j.seed == seed and j.phase == "final" for j in jobs) == 3
    assert {run.rounds for run in comparison.runs} == {ROUNDS}


def test_a_budget_of_one_takes_the_automatic_rates():
    alone = sp.compare(METHODS, PROBLEM, rounds=ROUNDS, tune=1, processes=1)
    assert [run.job.phase for run in alone.runs] == ["final"] * 3
    cohort = PROBLEM.cohort(0)
    for run in alone.runs:
        result = sp.train(METHODS[run.job.method], cohort, rounds=ROUNDS)
        assert run.scores["test"].loss.tolist() == cohort.evaluate(result.x, "test").loss.tolist()
        assert run.exchanges == result.history["exchanges"][-1]


def test_the_choice_and_the_final_run_by_hand(comparison):
    """All of tuning once more with nothing but `train`."""
    for seed in (0, 1):
        random = np.random.default_rng([seed, 2])
        silos = toy(seed)
        parts = [carve(pair, 0.25, random) for pair in silos.train]
        small = sp.Cohort(
            [p[0] for p in parts], PROBLEM.model, silos.names, test=[p[1] for p in parts]
        )
        scored = []
        base = 1 / small.constants().smoothness.max()
        for k, factor in enumerate((1.0, 10**0.5, 10.0)):
            result = sp.train(
                sp.FedAvg(local_steps=3, local_rate=factor * base), small, rounds=ROUNDS, seed=seed
            )
            scores = small.evaluate(result.x, "test")
            worst = np.sort(scores.accuracy)[:2].mean()
            scored.append(
                (worst, scores.accuracy.mean(), -np.sort(scores.loss)[-2:].mean(), -k, factor)
            )
        factor = max(scored)[-1]
        run = next(r for r in comparison.finals if r.job.method == "FedAvg" and r.job.seed == seed)
        assert run.factors == {"local_rate": factor}
        cohort = sp.Cohort(silos.train, PROBLEM.model, silos.names, test=silos.test)
        rate = factor / cohort.constants().smoothness.max()
        assert run.rates["local_rate"] == pytest.approx(rate)
        result = sp.train(
            sp.FedAvg(local_steps=3, local_rate=rate), cohort, rounds=ROUNDS, seed=seed
        )
        assert run.scores["test"].loss == pytest.approx(cohort.evaluate(result.x, "test").loss)


def test_test_rows_change_no_choice(comparison):
    spoilt = sp.compare(
        METHODS, replace(PROBLEM, data=partial(toy, garbage=True)), **SETTING, processes=1
    )
    pairs = list(zip(comparison.runs, spoilt.runs, strict=True))
    assert [a.job for a, _ in pairs] == [
        b.job for _, b in pairs
    ]  # the point of every final run included
    for a, b in pairs:
        assert all((a.scores[k].loss == b.scores[k].loss).all() for k in a.scores if k != "test")
        if a.job.phase == "final":
            assert a.scores["test"].accuracy == pytest.approx(1 - b.scores["test"].accuracy)


def test_validation_rows_are_training_rows_of_every_label():
    X = np.arange(40.0).reshape(20, 2)
    y = np.array([0] * 12 + [1] * 8)
    (A, a), (B, b) = carve((X, y), 0.25, np.random.default_rng(0))
    assert sorted([*A[:, 0], *B[:, 0]]) == X[:, 0].tolist()
    assert np.bincount(b).tolist() == [3, 2]
    alone = carve((X[:1], y[:1]), 0.25, np.random.default_rng(0))
    assert len(alone[0][1]) == len(alone[1][1]) == 1
    (_, a), (_, b) = carve((X, np.linspace(0, 1, 20)), 0.25, np.random.default_rng(0))
    assert (len(a), len(b)) == (15, 5)


def scored(point, accuracy, loss):
    """A tuning run with made-up validation scores of five clients (a fifth is one client)."""
    names = tuple("abcde")
    scores = ClientScores(
        names, np.array(loss, dtype=float), np.array(accuracy, dtype=float), np.full(5, 10)
    )
    return Run(
        RunKey("FedAvg", 0, "tune", point), {}, {}, "round limit", "", scores={"validation": scores}
    )


def test_selection_follows_the_measure_then_the_mean_then_the_loss():
    even = scored(0, [0.6] * 5, [1] * 5)
    unequal = scored(1, [0.5, 1, 1, 1, 1], [1] * 5)
    assert even.merit("worst_20") > unequal.merit("worst_20")
    assert even.merit("mean") < unequal.merit("mean")
    better_mean = scored(2, [0.6, 0.9, 0.9, 0.9, 0.9], [1] * 5)
    assert better_mean.merit("worst_20") > even.merit("worst_20")
    lower_loss = scored(3, [0.6] * 5, [0.9] * 5)
    assert lower_loss.merit("worst_20") > even.merit("worst_20")
    ten = [
        ClientScores(
            tuple("abcdefghij"), np.ones(10), np.array([*pair, *[9] * 8]) / 10, np.full(10, 3)
        )
        for pair in ((1, 9), (2, 2))
    ]
    worst, fifth = (replace(even, scores={"validation": score}) for score in ten)
    assert worst.merit("worst") < fifth.merit("worst")
    assert worst.merit("worst_20") > fifth.merit("worst_20")


def test_ties_go_to_the_first_configuration():
    setting = Setting({"FedAvg": sp.FedAvg()}, PROBLEM, (0,), 2, 3, 0.25, "mean", False)
    journal = Journal(None, {})
    for point in range(3):
        journal.add(scored(point, [0.5] * 5 if point == 0 else [0.7] * 5, [1] * 5))
    assert compete._final(setting, journal, "FedAvg", 0) == RunKey("FedAvg", 0, "final", 1)


def test_validation_rows_differ_between_seeds():
    fixed = Problem(PROBLEM.silos(0), PROBLEM.model, "fixed")
    first, second = (fixed.rehearsal(seed, 0.25) for seed in (0, 1))
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == fixed.rehearsal(0, 0.25).fingerprint


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 3))
def test_grids(budget, knobs):
    names = tuple(f"knob{k}" for k in range(knobs))
    method = type("Method", (), {"knobs": names})()
    points = grid(method, budget)
    assert len(points) == (budget if knobs else 1)
    assert len({tuple(p.values()) for p in points}) == len(points)
    assert points[0] == dict.fromkeys(names, 1.0)


def test_the_grids_that_are_stated():
    def factors(method, n):
        return [tuple(round(v, 2) for v in p.values()) for p in grid(method, n)]

    assert sorted(factors(sp.FedAvg(), 5)) == [(0.32,), (1.0,), (3.16,), (10.0,), (31.62,)]
    assert factors(sp.AFL(), 5) == [(1, 1), (3.16, 1), (1, 3.16), (3.16, 3.16), (10, 1)]
    assert factors(sp.ScaffPD(sp.Average()), 5) == [()]


def test_a_rate_that_was_given_is_what_factors_are_on():
    cohort = PROBLEM.cohort(0)
    method, rates = configured(sp.FedAvg(local_rate=0.2), {"local_rate": 10.0}, cohort)
    assert method.local_rate == rates["local_rate"] == pytest.approx(2.0)
    own = sp.FedAvg()
    same, rates = configured(own, {"local_rate": 1.0}, cohort)
    assert same is own
    assert rates == own.automatic(cohort)


# ------------------------------------------------------------------ those who cannot


def test_who_cannot_work_is_skipped_with_the_reason():
    theory = sp.ScaffPD(sp.QFair(1.0), steps=sp.Theory())
    hopeless = sp.FedAvg(local_rate=1e9)
    methods = {"theory": theory, "hopeless": hopeless, "fine": sp.FedAvg(local_steps=2)}
    result = sp.compare(
        methods, sp.Problem(cases.regression, sp.Linear("squared")), rounds=40, tune=3, processes=1
    )
    assert result.table[0].method == "fine"
    assert "simplex" in result.line("theory").failures
    assert result.line("hopeless").failures == "It diverged with each of its 3 configurations."
    status = {run.job.method: run.status for run in result.finals}
    assert status == {"theory": "refused", "hopeless": "skipped", "fine": "round limit"}
    tuning = [
        run.status for run in result.runs if run.job == RunKey("hopeless", 0, "tune", run.job.point)
    ]
    assert tuning == ["diverged"] * 3
    assert "theory is not ranked: Theory needs weights on the simplex" in str(result)
    assert (
        result.verdict("hopeless")
        == "hopeless is not ranked: It diverged with each of its 3 configurations."
    )
    assert "only method that is ranked" in result.verdict("fine")
    assert not any(row["model"] == "theory" for row in result.client_rows)


def test_who_fails_on_some_seeds_is_not_ranked():
    methods = {"moody": cases.Moody(local_steps=2), "FedAvg": sp.FedAvg(local_steps=2)}
    problem = sp.Problem(cases.regression, sp.Linear("squared"))
    result = sp.compare(methods, problem, seeds=(0, 1, 2), rounds=40, tune=1, processes=1)
    line = result.line("moody")
    assert line.failures == "On 1 of 3 seeds: It diverged with the rates that were chosen."
    assert line.seeds == 2
    assert result.table[-1] is line
    good = [r["test_loss_mean"] for r in result.rows if r["model"] == "moody" and r["seed"] != 1]
    assert line.mean["test_loss_mean"] == pytest.approx(np.mean(good))


def test_everybody_may_fail(tmp_path):
    methods = {"a": sp.ScaffPD(sp.QFair(1.0), steps=sp.Theory())}
    result = sp.compare(methods, PROBLEM, rounds=2, out=tmp_path, processes=1)
    assert " ".join(str(result).split()).endswith(f"a is not ranked: {result.runs[0].message}")
    assert read(tmp_path / "table.csv")[0]["seeds"] == "0"
    assert read(tmp_path / "clients.csv") == []
    assert "a is not ranked" in rendered(result, 80)


def test_a_bug_of_one_method_is_its_reason_and_not_the_end_of_the_others():
    result = sp.compare(
        {"fine": sp.FedAvg(), "broken": cases.Broken()}, PROBLEM, rounds=2, tune=1, processes=1
    )
    assert result.line("fine").failures == ""
    assert (
        "raised ZeroDivisionError: a bug (seed 0, configuration 0)"
        in result.line("broken").failures
    )


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_that_fail_or_end(monkeypatch):
    """A job that raises says so with its traceback, one that refuses and a worker that is killed with a sentence."""
    monkeypatch.setattr(pool, "get_context", {"spawn": cases.Copies(0)}.get)
    with pool.Pool(cases.twice, 2, "numbers") as workers:
        assert sorted(workers.work([1, 2, 3])) == [2, 4, 6]
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            list(workers.work([1, 0]))
        with pytest.raises(InputError, match=r"^No such number\.$"):
            list(workers.work([1, 404]))
        with pytest.raises(RuntimeError, match="AwkwardError: this and that"):
            list(workers.work([1, np.inf]))
        for jobs in ([1, -1], [1, 2]):  # nothing can be sent to a pool that has lost a worker
            with pytest.raises(RuntimeError, match="A worker process was killed"):
                list(workers.work(jobs))
    assert not multiprocessing.active_children()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rounds": 6}, "other rounds"),
        ({"tune": 2}, "other grid and tune"),
        ({"seeds": (0, 2)}, "other seeds and data"),
        ({"validation": 0.5}, "other validation"),
        ({"select": "mean"}, "other select"),
        ({"methods": {"FedAvg": sp.FedAvg()}}, "other methods and grid"),
        (
            {"problem": replace(PROBLEM, model=sp.Linear("logistic", l2=0.1))},
            "other model and data",
        ),
        ({"problem": replace(PROBLEM, data=partial(toy, garbage=True))}, "other data"),
        ({"problem": replace(PROBLEM, name="other")}, "other problem"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(comparison, folder, change, word):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    call = {"methods": METHODS, "problem": PROBLEM, **SETTING, "processes": 1} | change
    with pytest.raises(InputError, match=f"has a comparison with {word}; use another folder"):
        sp.compare(**call, out=folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_of_an_earlier_version_says_so(comparison, folder, tmp_path):
    note = json.loads((folder / "about.json").read_text())
    note["versions"]["scaffpd"] = "0.1.0"
    note["setting"]["rounds"] = 6
    (tmp_path / "about.json").write_text(json.dumps(note))
    with pytest.raises(
        InputError,
        match=r"other rounds, written by scaffpd 0\.1\.0, whose comparisons do not go on",
    ):
        sp.compare(METHODS, PROBLEM, **SETTING, processes=1, out=tmp_path)


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "runs.csv").write_text("precious")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "about.json").write_text("[]")
    for name, words in (
        ("file", "it is a file"),
        ("mine", "runs.csv of something else"),
        ("odd", "not of a compar"),
    ):
        with pytest.raises(InputError, match=words):
            sp.compare(METHODS, PROBLEM, **SETTING, out=tmp_path / name, processes=1)
    assert (tmp_path / "mine" / "runs.csv").read_text() == "precious"


def test_numbers_of_numpy_are_numbers(tmp_path):
    more = {"validation": np.float32(0.25), "strengths": np.False_, "climb": np.True_}
    sp.compare(
        [sp.FedAvg()], PROBLEM, rounds=np.int64(1), tune=1, out=tmp_path, processes=1, **more
    )
    said = json.loads((tmp_path / "about.json").read_text())["setting"]
    assert (said["validation"], said["strengths"], said["climb"]) == (0.25, False, True)


def test_a_record_that_cannot_be_read_is_refused(tmp_path):
    call = {
        "methods": [sp.FedAvg()],
        "problem": PROBLEM,
        "rounds": 1,
        "tune": 1,
        "out": tmp_path,
        "processes": 1,
    }
    sp.compare(**call)
    (tmp_path / "runs.jsonl").write_text("what?\n")
    with pytest.raises(InputError, match="not a readable record"):
        sp.compare(**call)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": []}, "at least one method"),
        ({"methods": sp.FedAvg()}, "list or a mapping"),
        ({"methods": [sp.FedAvg]}, "methods such as"),
        ({"methods": {"x": 3}}, "methods such as"),
        (
            {"methods": [SimpleNamespace(init=1, round=1, resume=1, uncertified="")]},
            "methods such as",
        ),
        ({"problem": toy}, "a problem such as"),
        ({"seeds": 3}, r"such as range\(5\)"),
        ({"seeds": ()}, "at least one seed"),
        ({"seeds": (1, 1)}, "got 1 2 times"),
        ({"seeds": (-1,)}, "whole numbers"),
        ({"rounds": 0}, "rounds >= 1"),
        ({"tune": 0}, "tune >= 1"),
        ({"processes": 0}, "processes >= 1"),
        ({"validation": 1.0}, "0 < validation < 1"),
        ({"select": "wurst"}, "did you mean 'worst'"),
    ],
)
def test_mistakes_get_a_sentence(change, words):
    call = {"methods": METHODS, "problem": PROBLEM, "rounds": 2, "processes": 1} | change
    with pytest.raises(InputError, match=words):
        sp.compare(**call)


def test_problems_that_are_none():
    with pytest.raises(InputError, match="Silos or a function"):
        sp.Problem([1, 2], sp.Linear())
    with pytest.raises(InputError, match="a model such as"):
        sp.Problem(toy, sp.Linear)
    with pytest.raises(InputError, match="needs a name"):
        sp.Problem(toy, sp.Linear(), "")
    with pytest.raises(InputError, match="must return Silos"):
        sp.compare(METHODS, sp.Problem(lambda seed: 3, sp.Linear()), processes=1)
    with pytest.raises(InputError, match="no test rows"):
        sp.compare(
            METHODS, sp.Problem(replace(toy(0), test=[]), sp.Linear("logistic")), processes=1
        )


def test_what_cannot_be_sent_is_said_before_the_work():
    problem = replace(PROBLEM, data=lambda s: toy(s))
    with pytest.raises(InputError, match="cannot be sent to other processes"):
        sp.compare(METHODS, problem, processes=2)
    here = sp.compare({"FedAvg": METHODS["FedAvg"]}, problem, rounds=2, tune=1, processes=1)
    assert here.finals[0].status == "round limit"


# ------------------------------------------------------------------ the tables


def test_mean_and_deviation_over_seeds(comparison):
    for line in comparison.table:
        runs = [run for run in comparison.finals if run.job.method == line.method]
        worst = [np.sort(run.scores["test"].accuracy)[:2].mean() for run in runs]
        assert line.mean["test_accuracy_worst_20"] == pytest.approx(np.mean(worst))
        assert line.deviation["test_accuracy_worst_20"] == pytest.approx(np.std(worst, ddof=1))
        loss = [
            np.average(run.scores["train"].loss, weights=run.scores["train"].counts) for run in runs
        ]
        assert line.mean["train_loss_weighted_mean"] == pytest.approx(np.mean(loss))
        assert line.seeds == 2
    ranks = [line.mean["test_accuracy_worst_20"] for line in comparison.table]
    assert ranks == sorted(ranks, reverse=True)


def test_runs_csv_reads_back(comparison, folder):
    rows = read(folder / "runs.csv")
    assert len(rows) == len(comparison.runs)
    for row, run in zip(rows, comparison.runs, strict=True):
        assert (row["model"], int(row["seed"]), row["phase"]) == run.job[:3]
        for split, scores in run.scores.items():
            summary = Summary.of(scores)
            for kind in ("loss", "accuracy"):
                for name in MEASURES:
                    value = getattr(getattr(summary, kind), name)
                    assert type(value)(row[f"{split}_{kind}_{name}"]) == value
        missing = "test" if run.job.phase == "tune" else "validation"
        assert row[f"{missing}_loss_mean"] == ""
        assert float(row["bytes_up"]) == run.bytes_up
        knob = row["factor_local_rate"]
        assert (float(knob) if knob else None) == run.factors.get("local_rate")


def test_clients_csv_reads_back(comparison, folder):
    rows = read(folder / "clients.csv")
    assert len(rows) == 2 * 3 * 6
    for run in comparison.finals:
        mine = [
            row
            for row in rows
            if row["model"] == run.job.method and int(row["seed"]) == run.job.seed
        ]
        assert [row["client"] for row in mine] == list(cases.NAMES)
        assert [float(row["test_loss"]) for row in mine] == run.scores["test"].loss.tolist()
        assert [float(row["train_accuracy"]) for row in mine] == run.scores[
            "train"
        ].accuracy.tolist()
        assert [int(row["test_rows"]) for row in mine] == [9] * 6
        assert [float(row["weight"]) for row in mine] == run.weights


def test_table_csv_reads_back(comparison, folder):
    for row, line in zip(read(folder / "table.csv"), comparison.table, strict=True):
        assert row["model"] == line.method
        assert row["failures"] == ""
        assert float(row["test_accuracy_worst_20_mean"]) == line.mean["test_accuracy_worst_20"]
        assert float(row["test_accuracy_worst_20_sd"]) == line.deviation["test_accuracy_worst_20"]
        assert row["batch_size"] == ("4" if line.method == "DRFA" else "")


def test_about_says_what_was_done(comparison, folder):
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    assert about["setting"]["methods"]["FedAvg"] == repr(METHODS["FedAvg"])
    assert about["setting"]["grid"]["FedAvg"] == [{"local_rate": f} for f in (1.0, 10**0.5, 10.0)]
    assert about["versions"]["scaffpd"] == sp.__version__


def test_to_csv_needs_a_folder(comparison, tmp_path, folder):
    with pytest.raises(InputError, match="does not exist"):
        comparison.to_csv(tmp_path / "nowhere")
    comparison.to_csv(tmp_path)
    for name in ("runs.csv", "clients.csv", "table.csv"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_regression_is_ranked_by_loss():
    methods = [sp.FedAvg(local_steps=k) for k in (1, 4)]
    result = sp.compare(
        methods, sp.Problem(cases.regression, sp.Linear("squared")), rounds=3, tune=2, processes=1
    )
    assert [line.method for line in result.table] == [
        "FedAvg(local_steps=4)",
        "FedAvg(local_steps=1)",
    ]
    assert result.rows[0]["train_accuracy_mean"] is None
    assert "accuracy" not in str(result)
    assert "worst-20 % test loss" in result.verdict("FedAvg(local_steps=1)")


# ------------------------------------------------------------------ labels and the zoo


def test_labels_are_short_and_unique():
    methods = [
        sp.FedAvg(),
        sp.FedAvg(local_steps=3),
        sp.FedProx(),
        sp.FedProx(),
        sp.ScaffPD(sp.Average()),
    ]
    labels = list(labelled(methods))
    assert labels == [
        "FedAvg(local_steps=10)",
        "FedAvg(local_steps=3)",
        "FedProx",
        "FedProx #2",
        "ScaffPD",
    ]
    fair = labelled([sp.ScaffPD(sp.Average()), sp.ScaffPD(sp.ChiSquare(0.1))])
    assert list(fair) == ["ScaffPD(Average())", "ScaffPD(ChiSquare(rho=0.1))"]


# A choice between some of the zoo; and the method for losses that stay with their clients, of which
# a comparison has none.
ELSEWHERE = {
    "Fair",
    "fair",
    "MinimaxSums",
    "ALGORITHMS",
    "Algorithm",
}


def test_the_zoo_is_complete_and_can_be_sent():
    from scaffpd import algorithms

    methods = zoo(sp.ChiSquare(0.1), local_steps=7, batch_size=5)
    assert {type(method).__name__ for method in methods.values()} == set(
        algorithms.__all__
    ) - ELSEWHERE
    assert repr(pickle.loads(pickle.dumps(methods))) == repr(methods)
    steps = {label: getattr(method, "local_steps", None) for label, method in methods.items()}
    assert {label for label, J in steps.items() if J != 7} == {
        *(
            "AFL",
            "GDA",
            "Extragradient",
            "Minimax Newton",
            "Subspace saddle",
        ),
    }
    full = {
        label for label, method in methods.items() if getattr(method, "batch_size", None) is None
    }
    assert full == {
        "GDA",
        "Extragradient",
        "Minimax Newton",
        "Subspace saddle",
    }


@pytest.mark.parametrize("label", ["Minimax Newton", "Subspace saddle"])
def test_methods_without_a_step_size_have_nothing_but_strengths_to_tune(label):
    method = zoo(sp.ChiSquare(0.1))[label]
    assert grid(method, 9) == [{}]
    assert [set(point) for point in grid(method, 9, strong=True)] == [{"rho"}] * 9


def test_fair_is_compared_as_what_it_chooses():
    """So the table has that method's J, exchanges and bytes."""
    objective = sp.ChiSquare(0.1)
    methods = {"fair": sp.fair(objective), "itself": sp.MinimaxNewton(objective)}
    result = sp.compare(methods, PROBLEM, rounds=3, tune=1, processes=1)
    assert repr(result.setting.methods["fair"]) == repr(methods["itself"])
    fair, itself = (result.line(label) for label in methods)
    assert fair.local_steps is None
    assert {k: v for k, v in fair.mean.items() if k != "seconds"} == {
        k: v for k, v in itself.mean.items() if k != "seconds"
    }
    noisy = sp.compare([sp.fair(objective, 2, 4)], PROBLEM, rounds=2, tune=1, processes=1).line(
        "Fair"
    )
    assert (noisy.local_steps, noisy.batch_size) == (2, 4)


def test_methods_by_name():
    methods = zoo(sp.ChiSquare(0.1))
    assert list(choose_methods(methods, ["scaffpd", "FEDAVG", "Δ-FL"])) == [
        "FedAvg",
        "Δ-FL",
        "Scaff-PD",
    ]
    assert list(choose_methods(methods, ["delta-fl", "gradientdescentascent"])) == ["Δ-FL", "GDA"]
    assert list(choose_methods(methods, ["subspace-saddle", "MinimaxNewton"])) == [
        "Minimax Newton",
        "Subspace saddle",
    ]
    with pytest.raises(InputError, match="did you mean 'FedAvg'"):
        choose_methods(methods, ["FedAvgg"])


def test_every_method_of_the_zoo_runs_tuned_and_scored():
    result = sp.compare(zoo(sp.ChiSquare(0.1), 2, 4), PROBLEM, rounds=3, tune=2, processes=1)
    assert [line.failures for line in result.table] == [""] * 14


@pytest.mark.parametrize("name", ["digits", "hospitals", "breast-cancer", "synthetic"])
def test_the_known_problems_can_be_split_and_sent(name):
    problem = pickle.loads(pickle.dumps(known_problem(name)))
    for seed in range(5):
        cohort = problem.cohort(seed)
        assert cohort.evaluate(cohort.start(), "test").counts.min() >= 2
        assert problem.rehearsal(seed, 0.25).evaluate(cohort.start(), "test").counts.min() >= 1


# ------------------------------------------------------------------ the screen


def rendered(comparison, width, **more):
    console = Console(width=width, file=io.StringIO(), **more)
    console.print(comparison)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(comparison, width):
    out = rendered(comparison, width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out
    for word in (
        "worst 20 %",
        "mean",
        "J",
        "batch",
        "changes",
        "MB",
        "2 of 6 clients",
        "2 seeds",
        "on test rows",
    ):
        assert word in " ".join(out.split()).replace("On test", "on test")
    assert (lines[1].count("worst 20 %") == 2) == (width == 120)  # there is room for the losses
    assert all(sum(line.startswith(label) for line in lines) == 1 for label in METHODS)


def test_the_best_of_a_column_is_bold(comparison):
    out = rendered(comparison, 120, force_terminal=True)
    best = comparison.table[0]
    cell = f"{100 * best.mean['test_accuracy_worst_20']:.1f} ± {100 * best.deviation['test_accuracy_worst_20']:.1f}"
    assert f"\x1b[1m{cell}\x1b[0m" in out


def test_the_verdict_in_a_sentence(comparison):
    first, *others = (line.method for line in comparison.table)
    assert comparison.verdict(first).startswith(f"{first} has the best worst-20 % test accuracy")
    best = comparison.table[0]
    name = "test_accuracy_worst_20"
    for label in others:
        line = comparison.line(label)
        words = comparison.verdict(label)
        if line.mean[name] == best.mean[name]:
            assert "has the best" in words
        else:
            near = best.mean[name] - line.mean[name] <= best.deviation[name]
            assert (
                "within one standard deviation" if near else "more than one standard deviation"
            ) in words
    with pytest.raises(InputError, match="did you mean 'FedAvg'"):
        comparison.verdict("FedAv")


def test_one_seed_has_no_deviation():
    result = sp.compare(METHODS, PROBLEM, rounds=1, tune=1, processes=1)
    assert ", after 1 round; " in str(result)
    assert "±" not in str(result)
    assert "seed 0" in str(result)
    last = result.table[-1]
    if last.mean[result.criterion] < result.table[0].mean[result.criterion]:
        assert "a single seed has no standard deviation" in result.verdict(last.method)


def test_the_bar_counts_all_runs(monkeypatch, tmp_path):
    counts = []

    class Spy(compete.Tally):
        def __init__(self, wanted, total):
            super().__init__(False, total)
            counts.append([total, 0])

        def advance(self, text, runs=1):
            counts[-1][1] += runs

    monkeypatch.setattr(compete, "Tally", Spy)
    for _ in range(2):  # the second time all of them are done already
        sp.compare({"FedAvg": METHODS["FedAvg"]}, PROBLEM, **SETTING, out=tmp_path, processes=1)
        assert counts[-1] == [8, 8]


def test_silent_without_a_terminal(capfd):
    sp.compare(METHODS, PROBLEM, rounds=1, tune=1, processes=1)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_strengths_are_tuned_only_where_asked():
    method = sp.ScaffPD(sp.Tilted(rho=0.2, prior=[1, 3]))
    assert grid(method, 5) == [{}]
    factors = grid(method, 5, strong=True)
    assert [round(f["rho"], 3) for f in factors] == [1.0, 0.316, 0.1, 3.162, 0.032]
    changed, values = configured(method, factors[2], None)
    assert values == {"rho": pytest.approx(0.02)}
    assert changed.objective.rho == pytest.approx(0.02)
    np.testing.assert_allclose(changed.objective.prior, [0.25, 0.75])
    assert method.objective.rho == 0.2
    capped, _ = configured(sp.ScaffPD(sp.ChiSquare(0.1, [1, 3], cap=0.6)), factors[2], None)
    assert (capped.objective.rho, capped.objective.cap) == (pytest.approx(0.01), 0.6)
    assert grid(sp.ScaffPD(sp.Agnostic()), 5, strong=True) == [{}]
    assert list(grid(sp.GradientDescentAscent(sp.ChiSquare(0.1)), 5, strong=True)[0]) == [
        "server_rate",
        "dual_rate",
        "rho",
    ]
    assert [p["q"] for p in grid(sp.QFFL(), 4, strong=True)] == pytest.approx(
        [1, 1, 0.316, 0.316], abs=1e-3
    )
    wide, values = configured(
        sp.DeltaFL(tail=0.5, local_rate=1.0), {"local_rate": 1.0, "tail": 3.16}, None
    )
    assert wide.tail == values["tail"] == 1.0


def test_every_label_selects_itself():
    methods = zoo(sp.ChiSquare(0.1))
    for label in methods:
        assert list(choose_methods(methods, [label])) == [label]
        assert "," not in label


def test_tuned_and_automatic_runs_pay_for_the_same_questions():
    methods = {"AFL": sp.AFL(), "DRFA": sp.DRFA(local_steps=2), "FedAvg": sp.FedAvg(local_steps=2)}
    result = sp.compare(methods, PROBLEM, rounds=2, tune=3, processes=1)
    for label in methods:
        tuning = [run for run in result.runs if run.job.method == label and run.job.phase == "tune"]
        assert len({(run.exchanges, run.bytes_up) for run in tuning}) == 1, label


def test_one_seed_may_choose_for_all():
    problem = sp.Problem(
        partial(sp.data.digits, clients=4, alpha=1.0, test_fraction=0.3),
        sp.Linear("softmax", classes=10),
        "digits",
    )
    options = {"seeds": range(3), "rounds": 3, "tune": 4, "processes": 1, "progress": False}
    alone = sp.compare({"FedAvg": sp.FedAvg(local_steps=3)}, problem, **options)
    shared = sp.compare({"FedAvg": sp.FedAvg(local_steps=3)}, problem, **options, choosing=1)
    both = sp.compare({"FedAvg": sp.FedAvg(local_steps=3)}, problem, **options, choosing=2)
    tuned = {
        seed: [r for r in alone.runs if r.job.seed == seed and r.job.phase == "tune"]
        for seed in range(3)
    }
    assert [run.job.seed for run in shared.runs] == [0, 0, 0, 0, 0, 1, 2]
    assert len(both.runs) == 8 + 3
    assert {run.job.point for run in shared.finals} == {alone.finals[0].job.point}
    means = [
        np.mean([tuned[seed][k].merit("worst_20") for seed in (0, 1)], axis=0).tolist()
        for k in range(4)
    ]
    assert {run.job.point for run in both.finals} == {max(range(4), key=lambda k: (means[k], -k))}
    assert "of the first seed" in str(shared)
    assert "of 2 seeds" in str(both)


def test_climbing_goes_beyond_the_edge_of_the_grid():
    """A method whose best rate is far above its automatic one gets there, within twice the budget."""
    problem = sp.Problem(
        partial(sp.data.digits, clients=4, alpha=1.0, test_fraction=0.3),
        sp.Linear("softmax", classes=10),
        "digits",
    )
    method = {"FedAvg": sp.FedAvg(local_steps=2, local_rate=1e-5)}
    options = {"rounds": 4, "tune": 3, "processes": 1, "progress": False, "select": "mean"}
    fixed = sp.compare(method, problem, **options)
    climbed = sp.compare(method, problem, **options, climb=True)
    tuned = [run for run in climbed.runs if run.job.phase == "tune"]
    assert [run.job for run in climbed.runs[:3]] == [run.job for run in fixed.runs[:3]]
    assert 3 < len(tuned) <= 6
    assert climbed.finals[0].rates["local_rate"] > fixed.finals[0].rates["local_rate"]
    merits = {run.job.point: run.merit("mean") for run in tuned}
    assert climbed.finals[0].job.point == max(merits, key=lambda point: (merits[point], -point))
    assert "among at most 6" in str(climbed)


def test_a_climb_ends_where_all_neighbours_are_worse():
    problem = sp.Problem(
        partial(sp.data.digits, clients=4, alpha=1.0, test_fraction=0.3),
        sp.Linear("softmax", classes=10),
        "digits",
    )
    options = {
        "rounds": 3,
        "tune": 7,
        "processes": 1,
        "progress": False,
        "climb": True,
        "strengths": True,
    }
    found = sp.compare({"FedProx": sp.FedProx(local_steps=2)}, problem, **options)
    lattice = found.setting.lattice["FedProx"]
    tried = {run.job.point for run in found.runs if run.job.phase == "tune"}
    best = found.finals[0].job.point
    assert len(tried) == 14 or set(neighbours(lattice, best)) <= tried


def test_a_climb_goes_on_from_the_first_of_the_best_and_never_from_a_failure():
    merits = {4: (1.0, 9.0), 1: None, 2: (2.0, 0.0), 3: (2.0, 0.0)}
    near = {2: [1, 5, 3, 7, 9]}.get
    assert climb(merits, near, 9) == (2, [5, 7, 9])
    assert climb(merits, near, 5) == (2, [5])
    assert climb(merits, near, 3) == (2, [])
    assert climb({1: None}, near, 9) == (None, [])


def test_the_lattice_begins_with_the_grid():
    for method in (sp.FedAvg(), sp.DRFA(sp.ChiSquare(0.1)), sp.FedProx()):
        assert grid(method, 1000, True)[:9] == grid(method, 9, True)
        lattice = grid(method, 1000, True)
        near = neighbours(lattice, 0)
        assert len(near) == 2 * len(lattice[0])
        for point in near:
            ratios = [lattice[point][name] / factor for name, factor in lattice[0].items()]
            assert sorted(round(abs(2 * np.log10(r)), 9) for r in ratios) == [
                *[0.0] * (len(ratios) - 1),
                1.0,
            ]
