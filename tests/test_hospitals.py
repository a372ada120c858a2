"""The study of the four hospitals, held against scikit-learn, the reference solver and plain formulas."""

from __future__ import annotations

import copy
import csv
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import StratifiedKFold

import scaffpd as sp
from scaffpd import demo, report
from scaffpd.data import heart_disease
from scaffpd.errors import InputError
from scaffpd.objectives import Average, ChiSquare
from scaffpd.reference import reference_optimum
from scaffpd.report.read import read as read_run
from scaffpd.report.verdict import verdict
from scaffpd.runs import train as pipeline
from scaffpd.training import Status


@pytest.fixture(scope="module")
def study():
    return demo.study(splits=3)


def with_ones(X):
    return np.column_stack([X, np.ones(len(X))])


def fitted_by_sklearn(clients, l2):
    """argmin (1/N) Σ_i mean log-loss of i + (l2/2)‖x‖², the intercept in x: all rows at once, weighted."""
    A = np.concatenate([with_ones(X) for X, _ in clients])
    y = np.concatenate([labels for _, labels in clients])
    weights = np.concatenate([np.full(len(labels), 1 / (len(clients) * len(labels))) for _, labels in clients])
    # scikit-learn minimises C Σ weight · loss + ½‖x‖²
    return LogisticRegression(C=1 / l2, fit_intercept=False, solver="newton-cholesky", tol=1e-12).fit(A, y, weights)


# ------------------------------------------------------------------ the numbers


def test_the_population_is_the_documented_one(study):
    assert study.patients.tolist() == [303, 294, 123, 200]
    assert (study.patients * study.ill).round().tolist() == [139, 106, 115, 149]
    assert study.majority[2] == 115 / 123
    assert study.majority[1] == 188 / 294
    for run in study.average:
        assert (run.train.counts + run.test.counts == study.patients).all()


def test_every_run_is_certified(study):
    assert study.certified
    for run in (*study.average, *study.fair):
        assert run.result.status is Status.CONVERGED
        assert run.result.certificate <= study.tol
        assert run.result.message.endswith(study.method)


def test_the_method_is_chosen_and_says_why(study):
    assert (
        study.method
        == "Solved by the minimax Newton method: the losses are convex, gradients are full, and d is small."
    )
    silos = heart_disease(0.3, seed=study.seeds[0])
    cohort = sp.Cohort(silos.train, sp.Linear("logistic", demo.L2, intercept=True))
    for objective, run in ((Average(), study.average[0]), (ChiSquare(study.rho), study.fair[0])):
        same = sp.train(sp.fair(objective), cohort, tol=study.tol)
        np.testing.assert_allclose(run.result.x, same.x, rtol=1e-9)


def test_the_average_model_is_scikit_learns(study):
    """To the certificate's ‖x − x*‖ ≤ √(2·tol/l2), which is below 1e-3."""
    for k, run in zip(study.seeds, study.average, strict=True):
        silos = heart_disease(0.3, seed=k)
        model = fitted_by_sklearn(silos.train, demo.L2)
        np.testing.assert_allclose(run.result.x, model.coef_[0], atol=1e-3)
        for i, (X, y) in enumerate(silos.test):
            assert run.test.accuracy[i] == pytest.approx(accuracy_score(y, model.predict(with_ones(X))), abs=1e-12)
            assert run.test.loss[i] == pytest.approx(log_loss(y, model.predict_proba(with_ones(X))), abs=1e-3)


def test_the_fair_model_is_the_reference_solution(study):
    silos = heart_disease(0.3, seed=study.seeds[0])
    objective = ChiSquare(study.rho)
    optimum = reference_optimum(silos.train, "logistic", demo.L2, objective, intercept=True)
    result = study.fair[0].result
    np.testing.assert_allclose(result.x, optimum.x, atol=1e-3)
    np.testing.assert_allclose(result.weights, optimum.weights, atol=1e-3)
    penalty = demo.L2 / 2 * result.x @ result.x
    value = objective.support(study.fair[0].train.loss + penalty)
    assert value == pytest.approx(optimum.value, abs=2 * study.tol)


def test_a_hospital_rho_above_the_mean_counts_twice(study):
    result, losses = study.fair[0].result, study.fair[0].train.loss
    counted = result.weights > 0
    mean = losses.mean() if counted.all() else np.nan
    expected = (1 + (losses - mean) / study.rho) / len(losses)
    assert counted.all()
    np.testing.assert_allclose(result.weights, expected, atol=1e-3)


def test_the_fair_model_serves_the_worst_training_loss_better(study):
    assert (study.training_log_loss.fair[:, 1] < study.training_log_loss.average[:, 1]).all()
    assert (study.training_log_loss.fair[:, 0] > study.training_log_loss.average[:, 0]).all()


def test_overall_columns_are_mean_and_worst(study):
    np.testing.assert_array_equal(study.overall_accuracy.fair[:, 0], study.accuracy.fair.mean(1))
    np.testing.assert_array_equal(study.overall_accuracy.fair[:, 1], study.accuracy.fair.min(1))
    np.testing.assert_array_equal(study.overall_log_loss.average[:, 1], study.log_loss.average.max(1))


def test_l2_is_what_cross_validation_within_the_training_patients_picks():
    """For the average model's mean log-loss; no held-out patient is touched."""
    candidates = (0.003, 0.01, 0.03, 0.1, 0.3)
    losses = np.zeros(len(candidates))
    for seed in range(4):
        clients = heart_disease(0.3, seed=seed).train
        folds = [list(StratifiedKFold(5, shuffle=True, random_state=seed).split(X, y)) for X, y in clients]
        for f in range(5):
            kept, out = (
                [(X[rows[f][part]], y[rows[f][part]]) for (X, y), rows in zip(clients, folds, strict=True)]
                for part in (0, 1)
            )
            for c, l2 in enumerate(candidates):
                x = reference_optimum(kept, "logistic", l2, Average(), intercept=True).x
                losses[c] += np.mean([np.logaddexp(0, (1 - 2 * y) * (with_ones(X) @ x)).mean() for X, y in out])
    assert candidates[losses.argmin()] == demo.L2


# ------------------------------------------------------------------ noise


def test_the_t_test_is_corrected_for_shared_patients():
    """A change of 1 with a deviation of s over J splits is clear while s < 1 / (t √(1/J + n₂/n₁)), and no longer."""
    J, overlap = 10, 3 / 7
    pattern = np.resize([1.0, -1.0], J)[:, None] / np.sqrt(J / (J - 1))
    limit = 1 / (student.ppf(0.975, J - 1) * np.sqrt(1 / J + overlap))
    deviations = limit * np.array([0.99, 1.01])
    comparison = demo.PairedChange(np.zeros((J, 2)), 1 + pattern * deviations, overlap)
    np.testing.assert_allclose(comparison.mean_change, 1)
    np.testing.assert_allclose(comparison.deviation, deviations)
    assert comparison.clear.tolist() == [True, False]


def test_no_change_and_an_invisible_change_are_not_clear():
    zeros = np.zeros((5, 2))
    assert not demo.PairedChange(zeros, zeros + np.array([0.0, 1e-5]), 0.4).clear.any()


# ------------------------------------------------------------------ behaviour


def test_a_seed_determines_everything_and_another_changes_the_splits():
    first, again, other = (demo.study(splits=2, seed=seed) for seed in (3, 3, 4))
    assert first.seeds == (6, 7)
    assert other.seeds == (8, 9)
    for a, b in zip(first.fair + first.average, again.fair + again.average, strict=True):
        np.testing.assert_array_equal(a.result.x, b.result.x)
        np.testing.assert_array_equal(a.test.loss, b.test.loss)
    assert (first.log_loss.average != other.log_loss.average).all()


def test_progress_and_threads(monkeypatch):
    seen, threads = [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda n, real=torch.set_num_threads: (seen.append(n), real(n)))
    done = []
    demo.study(splits=2, tol=1e-2, progress=done.append)
    assert done == [1, 2]
    assert seen == [1, threads]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("arguments", "word"), [({"rho": 0}, "rho"), ({"seed": -1}, "seed"), ({"splits": 1}, "splits"), ({"tol": 0}, "tol")]
)
def test_bad_arguments_are_refused(arguments, word):
    with pytest.raises(InputError, match=word):
        demo.study(**arguments)


def test_an_interrupted_run_interrupts_the_study(monkeypatch):
    real = pipeline.train
    monkeypatch.setattr(
        pipeline, "train", lambda *a, **k: replace(real(*a[:2], 1, *a[3:], **k), status=Status.INTERRUPTED)
    )
    with pytest.raises(KeyboardInterrupt):
        demo.study(splits=2)


def test_a_study_that_is_not_certified_says_so(monkeypatch):
    monkeypatch.setattr(demo, "MOST_ROUNDS", 3)
    study = demo.study(splits=2)
    assert not study.certified
    assert all("NOT the 1e-08 asked for" in line for line in demo.certificates(study)[:2])


# ------------------------------------------------------------------ files


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables_of_all_splits_read_back(study, tmp_path):
    demo.write(study, tmp_path, "scaffpd demo")
    rows = read(tmp_path / "splits.csv")
    for model, comparison in (("average", study.accuracy.average), ("fair", study.accuracy.fair)):
        assert sum(row["model"] == model for row in rows) == 3 * 4
        for i, name in enumerate(study.names):
            mine = [row for row in rows if row["model"] == model and row["client"] == name]
            np.testing.assert_array_equal([float(row["test_accuracy"]) for row in mine], comparison[:, i])
            assert [int(row["split"]) for row in mine] == list(study.seeds)
            assert {int(r["train_rows"]) + int(r["test_rows"]) for r in mine} == {study.patients[i]}
    rounds = [row for row in read(tmp_path / "rounds.csv") if row["model"] == "fair"]
    assert float(rounds[-1]["certificate"]) == study.fair[0].result.certificate
    assert "weight[Long Beach]" in rounds[0]


def test_the_folder_is_that_of_a_run_with_means_over_splits(study, tmp_path):
    demo.write(study, tmp_path, "scaffpd demo")
    found = read_run(tmp_path)
    assert verdict(found) == (f"{demo.headline(study)}.", demo.caveat(study))
    for name, table in (("average", study.accuracy.average), ("fair", study.accuracy.fair)):
        scores = found.scores[name]
        np.testing.assert_allclose([s.value for s in scores], table.mean(0))
        np.testing.assert_allclose([s.deviation for s in scores], table.std(0, ddof=1))
    assert [s.clear for s in found.scores["fair"]] == study.accuracy.clear.tolist()
    assert demo.baseline(study) in found.remarks


@pytest.mark.parametrize("rho", [1e-4, 1e3])
def test_the_report_stands_extremes(rho, tmp_path):
    demo.write(demo.study(rho, splits=2), tmp_path, "scaffpd demo")
    picture = report.write_picture(tmp_path, "clients", tmp_path / "demo.png")
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    ink = (pixels < 0.9).any(-1)
    assert 0.005 < ink.mean() < 0.3
    margin = np.concatenate([ink[:, :10].ravel(), ink[:, -10:].ravel(), ink[:10].ravel(), ink[-10:].ravel()])
    assert not margin.any(), "something runs off the page"


# ------------------------------------------------------------------ sentences


def altered(study, accuracy, log_loss=(0, 0, 0, 0), deviation=1e-3):
    """The same study with other mean changes, all with the given deviation."""
    other, wiggle = copy.copy(study), deviation * np.array([[1.0], [-1.0], [0.0]])
    for name, moved in (("accuracy", accuracy), ("log_loss", log_loss)):
        kept = getattr(study, name)
        vars(other)[name] = replace(kept, fair=kept.average + np.asarray(moved) + wiggle)
    return other


def test_a_clear_gain_is_called_clear(study):
    words = altered(study, accuracy=(0, 0, -0.02, 0.05), log_loss=(0, 0, 0.1, -0.2))
    assert demo.headline(words) == (
        "Long Beach, served worst, gains 5.0 points; Switzerland loses 2.0 points: both clear of noise"
    )
    first, second = demo.findings(words)
    assert "+5.0 ± 0.1 points, clear of noise" in first
    for claim in ("Switzerland's accuracy (2.0 points worse)", "Long Beach's log-loss (0.200 better)"):
        assert claim in second


def test_noise_is_called_noise(study):
    words = altered(study, accuracy=(0, 0, -0.02, 0.05), deviation=0.2)
    assert demo.headline(words).endswith("both within noise")
    mixed = altered(study, accuracy=(0, 0, -0.001, 0.05), deviation=2e-3)
    assert demo.headline(mixed) == (
        "Long Beach, served worst, gains 5.0 points (clear of noise); Switzerland loses 0.1 points (within noise)"
    )


def test_nothing_gained_is_not_dressed_up(study):
    assert demo.headline(altered(study, (0, 0, 0, 0))) == "Long Beach, served worst, is served as before"
    assert demo.headline(altered(study, (0, 0, 0, -0.05))) == (
        "Long Beach, served worst, loses 5.0 points: clear of noise"
    )


def test_signs():
    assert [demo.signed(v, 1) for v in (1.25, -3.21, 0.04, -0.04)] == ["+1.3", "−3.2", "0.0", "0.0"]


def test_where_one_answer_does_as_well_that_is_said(study):
    text = demo.baseline(study)
    assert text is not None
    assert "93.5 % in Switzerland" in text
    assert "Cleveland" not in text
    other = copy.copy(study)
    vars(other)["accuracy"] = replace(study.accuracy, average=np.ones((3, 4)))
    assert demo.baseline(other) is None
