"""Comparisons of methods: equal budgets, choices without test rows, the same numbers in any
process.
"""

import csv
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scaffpd as sp
from cases.comparison import METHODS, PROBLEM, Broken, Moody, regression, toy
from cases.refusals import refuses
from experiments.methods import NAMES, main, problem
from scaffpd.algorithms import published
from scaffpd.study.comparison import REFUSED, TUNE, configured, grid
from scaffpd.training.metrics import Summary

SETTING = {"seeds": (0, 1), "rounds": 6, "tune": 3, "processes": 1, "progress": False}


@pytest.fixture(scope="module")
def comparison():
    return sp.compare(METHODS, PROBLEM, **SETTING)


def numbers(found):
    return [[v for k, v in row.items() if k != "seconds"] for row in found.rows]


def test_two_processes_give_the_same_numbers(comparison):
    other = sp.compare(METHODS, PROBLEM, **SETTING | {"processes": 2})
    assert str(numbers(other)) == str(numbers(comparison))


def test_everybody_has_the_same_budget(comparison):
    for label in METHODS:
        for seed in (0, 1):
            own = [run for run in comparison.runs if (run.method, run.seed) == (label, seed)]
            tried = [run for run in own if run.phase == TUNE]
            # Scaff-PD sets its own steps: there is nothing to tune
            assert len(tried) == (0 if label == "Scaff-PD" else 3)
            assert len(own) - len(tried) == 1
            sizes = [len(y) for _, y in toy(seed).train]  # the last run is on all training rows
            np.testing.assert_array_equal(own[-1].scores["train"].counts, sizes)


def test_the_choice_and_the_final_run_by_hand(comparison):
    """FedAvg on seed 1, without anything of the comparison but the rows."""
    cohort = PROBLEM.rehearsal(1, 0.25)
    method = METHODS["FedAvg"]
    rate = method.automatic(cohort)["local_rate"]
    merits = {}
    for factor in (1, 10**0.5, 10**-0.5):
        run = sp.train(replace(method, local_rate=factor * rate), cohort, rounds=6, seed=1)
        found = Summary.of(cohort.evaluate(run.x, "test"))
        merits[factor] = (found.score.worst_20, found.score.mean, -found.loss.worst_20)
    best = max(merits, key=merits.get)
    final = next(r for r in comparison.finals if (r.method, r.seed) == ("FedAvg", 1))
    assert final.factors == {"local_rate": pytest.approx(best)}
    cohort = PROBLEM.cohort(1)
    rate = method.automatic(cohort)["local_rate"]
    assert final.rates["local_rate"] == pytest.approx(best * rate)
    run = sp.train(replace(method, local_rate=best * rate), cohort, rounds=6, seed=1)
    accuracy = cohort.evaluate(run.x, "test").score
    np.testing.assert_array_equal(final.scores["test"].score, accuracy)


def test_test_rows_change_no_choice(comparison):
    def garbage(seed):
        return toy(seed, garbage=True)

    other = sp.compare(METHODS, sp.Problem(garbage, PROBLEM.model), **SETTING)
    pairs = list(zip(comparison.finals, other.finals, strict=True))
    assert [a.factors for a, _ in pairs] == [b.factors for _, b in pairs]
    assert any((a.scores["test"].score != b.scores["test"].score).any() for a, b in pairs)


def test_validation_rows_are_training_rows_of_every_label():
    silos = toy(3)
    cohort = PROBLEM.rehearsal(3, 0.25)
    scores = {split: cohort.evaluate(cohort.start(), split) for split in ("train", "test")}
    sizes = [len(y) for _, y in silos.train]
    held = scores["test"].counts
    np.testing.assert_array_equal(scores["train"].counts + held, sizes)
    np.testing.assert_allclose(held, 0.25 * np.array(sizes), atol=1)


def test_the_first_seed_may_choose_for_all(comparison):
    found = sp.compare(METHODS, PROBLEM, one_choice=True, **SETTING)
    assert {run.seed for run in found.runs if run.phase == TUNE} == {0}
    finals = [run for run in found.finals if run.method == "FedAvg"]
    first = next(run for run in comparison.finals if run.method == "FedAvg")
    assert [run.factors for run in finals] == [first.factors] * 2
    assert finals[0].rates != finals[1].rates  # factors on what is automatic for each partition


@given(budget=st.integers(1, 40), knobs=st.integers(1, 3))
def test_grids_begin_with_the_automatic_rates_and_have_no_holes(budget, knobs):
    method = type("Tuned", (sp.FedAvg,), {"knobs": tuple("abc"[:knobs])})()
    points = grid(method, budget)
    assert len(points) == budget == len({tuple(p.values()) for p in points})
    assert set(points[0].values()) == {1.0}
    steps = [tuple(round(2 * np.log10(f)) for f in p.values()) for p in points]
    distance = [sum((k - 0.5) ** 2 for k in z) for z in steps]
    assert distance == sorted(distance)


def test_strengths_are_tuned_only_where_asked():
    method = sp.ScaffPD(sp.ChiSquare(0.1))
    assert grid(method, 5) == [{}]
    factors = [p["rho"] for p in grid(method, 5, strong=True)]
    assert sorted(factors) == pytest.approx([10**-1.5, 0.1, 10**-0.5, 1, 10**0.5])
    assert factors[0] == 1
    changed, values = configured(method, {"rho": 0.1}, PROBLEM.cohort(0))
    assert changed.objective.rho == values["rho"] == pytest.approx(0.01)
    assert all("q" in point for point in grid(sp.QFFL(), 3, strong=True))
    tail, _ = configured(sp.DeltaFL(tail=0.5), {"tail": 10.0}, PROBLEM.cohort(0))
    assert tail.tail == 1  # more than all clients is none


def test_a_rate_that_was_given_is_what_factors_are_on():
    method = sp.FedAvg(local_rate=0.2)
    cohort = PROBLEM.cohort(0)
    assert configured(method, {"local_rate": 1.0}, cohort)[0] is method
    assert configured(method, {"local_rate": 10.0}, cohort)[0].local_rate == pytest.approx(2.0)


def test_failures_are_named_and_not_ranked():
    methods = {
        "bug": Broken(),
        "moody": Moody(local_steps=3),
        "wild": sp.FedAvg(local_steps=3, local_rate=1e12),
        "good": sp.FedAvg(local_steps=3),
    }
    found = sp.compare(methods, PROBLEM, **SETTING)
    assert found.table[0].method == "good"
    failures = {line.method: line.failures for line in found.table}
    assert failures["good"] == ""
    assert "ZeroDivisionError: a bug" in failures["bug"]
    assert failures["moody"].startswith("On 1 of 2 seeds: It diverged")
    assert "diverged" in failures["wild"]
    assert {run.status for run in found.finals if run.method == "bug"} == {REFUSED}
    assert "bug: ZeroDivisionError" in str(found)


def test_mean_and_deviation_over_seeds(comparison):
    line = comparison.line("DRFA")
    values = [
        Summary.of(run.scores["test"]).score.worst_20
        for run in comparison.finals
        if run.method == "DRFA"
    ]
    assert line.mean["test_accuracy_worst_20"] == pytest.approx(np.mean(values))
    assert line.deviation["test_accuracy_worst_20"] == pytest.approx(np.std(values, ddof=1))
    ranks = [line.mean["test_accuracy_worst_20"] for line in comparison.table]
    assert ranks == sorted(ranks, reverse=True)
    header, *shown = str(comparison).splitlines()[: 1 + len(METHODS)]
    assert header.split()[:4] == ["method", "worst", "20", "%"]
    assert [row.split()[0] for row in shown] == [line.method for line in comparison.table]
    best = comparison.table[0]
    name = "test_accuracy_worst_20"
    assert f"{100 * best.mean[name]:.1f} ± {100 * best.deviation[name]:.1f}" in shown[0]


def test_tables_read_back(comparison, tmp_path):
    comparison.to_csv(tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(comparison.runs)
    for row, run in zip(rows, comparison.runs, strict=True):
        assert (row["model"], row["phase"]) == (run.method, run.phase)
        assert float(row["train_loss_mean"]) == pytest.approx(run.scores["train"].loss.mean())


def test_regression_is_ranked_by_loss():
    found = sp.compare(
        {"FedAvg": sp.FedAvg(), "ours": sp.ScaffPD(sp.Agnostic())},
        sp.Problem(regression, sp.Linear("squared", l2=0.1)),
        rounds=5,
        tune=2,
        processes=1,
    )
    assert not found.scored
    losses = [line.mean["test_loss_worst_20"] for line in found.table]
    assert losses == sorted(losses)
    assert np.isnan(found.table[0].deviation["test_loss_worst_20"])


def test_fair_is_compared_as_what_it_chooses():
    found = sp.compare({"ours": sp.fair(sp.ChiSquare(0.1))}, PROBLEM, rounds=2, tune=1, processes=1)
    assert type(found.methods["ours"]) is not type(sp.fair(sp.Average()))


def test_every_published_method_is_tuned_and_scored():
    methods = published(sp.ChiSquare(0.1), local_steps=2)
    assert pickle.loads(pickle.dumps(methods)).keys() == methods.keys()
    found = sp.compare(methods, PROBLEM, rounds=2, tune=2, strengths=True, processes=1)
    assert not [line.failures for line in found.table if line.failures]


@pytest.mark.parametrize("name", NAMES)
def test_known_problems_have_test_rows_for_every_client(name):
    found = problem(name)
    silos = found.silos(1)
    assert min(len(y) for _, y in silos.test) > 0
    assert found.rehearsal(1, 0.25).names == silos.names


def test_the_experiment_prints_a_table_and_writes_it(tmp_path, capsys):
    words = ["hospitals", "--rounds", "2", "--tune", "1", "--processes", "1", "--seeds", "2"]
    assert main([*words, "--out", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "worst 20 %" in out
    assert "Scaff-PD" in out
    assert (tmp_path / "new" / "table.txt").read_text() == out
    assert (tmp_path / "new" / "runs.csv").read_text().count("\n") > 20


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("no-methods", {"methods": {}}),
        ("no-methods", {"methods": [sp.FedAvg()]}),
        ("problem-without-silos", {"problem": replace(PROBLEM, data=3)}),
        ("seeds-differ", {"seeds": (1, 1)}),
        ("problem-without-test-rows", {"problem": replace(PROBLEM, data=replace(toy(0), test=[]))}),
    ],
)
def test_what_cannot_be_compared(code, change):
    with refuses(code):
        sp.compare(**{"methods": METHODS, "problem": PROBLEM, "progress": False} | change)
