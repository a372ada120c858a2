"""What docs/faq.md says of numbers and outcomes."""

from __future__ import annotations

import numpy as np
import pytest

import scaffpd as sp
from cases.reference import reference_optimum
from snippets import ROOT, run_python

PAGE = ROOT / "docs" / "faq.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("faq"))
        return run_python(PAGE)


def test_every_status_is_explained():
    text = PAGE.read_text(encoding="utf-8")
    for status in sp.Status:
        assert f"| `{status}` |" in text


def test_scaffold_with_too_long_steps_diverges_and_with_its_own_does_not(page):
    cohort = page["quadratic"]
    rate = page["rate"]
    assert (
        sp.train(sp.Scaffold(local_steps=10, local_rate=4 * rate), cohort, rounds=50).status
        == "diverged"
    )
    done = sp.train(sp.Scaffold(local_steps=10), cohort, rounds=50)
    best = sp.train(sp.fair(sp.Average()), cohort, tol=1e-10)
    np.testing.assert_allclose(done.x, best.x, atol=1e-4)


def test_the_certificate_of_another_methods_model_holds(page):
    bound = page["check"].history["certificate"][0]
    known = reference_optimum(page["silos"].train, "logistic", 0.01, sp.Average(), intercept=True)
    excess = page["cohort"].evaluate(page["found"].x).loss.mean() - known.value
    assert 0 < excess <= bound < 20 * excess


def test_single_precision_ends_as_precision(page):
    done = sp.train(sp.fair(sp.Agnostic()), page["single"], tol=1e-12)
    assert done.status == "precision"


def test_accuracies_are_over_clients_and_over_samples(page):
    scores = page["cohort"].evaluate(page["result"].x, "test")
    summary = page["Summary"].of(scores).accuracy
    assert summary.mean == pytest.approx(scores.accuracy.mean())
    assert summary.weighted_mean == pytest.approx(
        scores.accuracy @ scores.counts / scores.counts.sum()
    )
    assert summary.worst_20 == summary.worst == scores.accuracy.min()
    weights = page["weights"]
    intercept = page["intercept"]
    X, y = page["silos"].test[0]
    assert scores.accuracy[0] == np.mean((X @ weights + intercept > 0).ravel() == y)


def test_the_callback_saw_every_round(page):
    assert [rounds for rounds, _ in page["rows"]] == list(range(1, len(page["rows"]) + 1))
    assert set(page["rows"][0][1]) == set(page["cohort"].names)


def test_scaling_by_sums_is_scaling_the_pooled_rows(page):
    pooled = np.concatenate([X for X, _ in page["scaled"]])
    np.testing.assert_allclose(pooled.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(pooled.std(0), 1, rtol=1e-12)


def test_what_is_tiny_in_units_of_q_fair():
    assert sp.QFair(5).support([0.4] * 4) < 1e-3
