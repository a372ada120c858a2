"""A table of clients in a few numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scaffpd.federation import ClientScores
from scaffpd.training.metrics import Summary, a_fifth, gini, jain

SCORES = ClientScores(
    names=("a", "b", "c"),
    loss=np.array([0.2, 0.9, 0.4]),
    accuracy=np.array([0.9, 0.7, 0.6]),
    counts=np.array([10, 30, 60]),
)


def test_the_worst_loss_is_the_largest():
    loss = Summary.of(SCORES).loss
    assert (loss.worst, loss.worst_client, loss.best, loss.best_client) == (0.9, "b", 0.2, "a")
    assert loss.mean == pytest.approx(0.5)
    assert loss.weighted_mean == pytest.approx(0.2 * 0.1 + 0.9 * 0.3 + 0.4 * 0.6)
    assert loss.deviation == pytest.approx(np.sqrt((0.09 + 0.16 + 0.01) / 3))


def test_the_worst_accuracy_is_the_smallest():
    accuracy = Summary.of(SCORES).accuracy
    assert accuracy is not None
    assert (accuracy.worst, accuracy.worst_client, accuracy.best, accuracy.best_client) == (
        0.6,
        "c",
        0.9,
        "a",
    )
    assert accuracy.mean == pytest.approx(2.2 / 3)
    assert accuracy.weighted_mean == pytest.approx(0.09 + 0.21 + 0.36)


def test_regression_has_no_accuracy():
    scores = ClientScores(SCORES.names, SCORES.loss, np.full(3, np.nan), SCORES.counts)
    assert Summary.of(scores).accuracy is None


def scores(loss, accuracy=None, counts=None):
    N = len(loss)
    accuracy = np.full(N, np.nan) if accuracy is None else np.array(accuracy, dtype=float)
    counts = np.ones(N, dtype=int) if counts is None else np.array(counts)
    return ClientScores(
        tuple(f"c{i}" for i in range(N)), np.array(loss, dtype=float), accuracy, counts
    )


# ------------------------------------------------------------------ fifths


@pytest.mark.parametrize(
    ("N", "k"), [(1, 1), (2, 1), (4, 1), (5, 1), (6, 2), (10, 2), (11, 3), (20, 4), (100, 20)]
)
def test_a_fifth_is_rounded_up(N, k):
    assert a_fifth(N) == k


def test_the_worst_and_best_fifth_of_twenty_are_four():
    loss = np.random.default_rng(0).permutation(np.arange(20.0))
    summary = Summary.of(scores(loss, accuracy=1 - loss / 20))
    assert (summary.loss.worst_20, summary.loss.best_20) == (17.5, 1.5)
    assert summary.accuracy.worst_20 == pytest.approx(1 - 17.5 / 20)
    assert summary.accuracy.best_20 == pytest.approx(1 - 1.5 / 20)


def test_of_four_clients_the_fifths_are_the_worst_and_the_best():
    summary = Summary.of(scores([0.3, 0.1, 0.4, 0.2], accuracy=[0.5, 0.9, 0.6, 0.8]))
    for spread in (summary.loss, summary.accuracy):
        assert (spread.worst_20, spread.best_20) == (spread.worst, spread.best)


def test_one_client_is_everything():
    loss = Summary.of(scores([0.7])).loss
    assert {loss.mean, loss.weighted_mean, loss.worst, loss.best, loss.worst_20, loss.best_20} == {
        0.7
    }
    assert (loss.deviation, loss.gini, loss.jain) == (0.0, 0.0, 1.0)


# ------------------------------------------------------------------ Gini and Jain

SIZES = st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=30)


def gini_by_double_loop(v):
    return sum(abs(a - b) for a in v for b in v) / (2 * len(v) * math.fsum(v))


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=30))
def test_gini_and_jain_by_their_definitions(values):
    v = [x if x > 1e-100 else 0.0 for x in values]  # squares that do not underflow
    assume(max(v) > 0)
    assert gini(v) == pytest.approx(gini_by_double_loop(v), abs=1e-9)
    assert jain(v) == pytest.approx(
        math.fsum(v) ** 2 / (len(v) * math.fsum(x * x for x in v)), rel=1e-9
    )


@given(SIZES, st.randoms(use_true_random=False))
def test_indices_stay_in_their_ranges_and_know_no_order(values, random):
    N = len(values)
    assert 0 <= gini(values) <= (N - 1) / N + 1e-12
    assert 1 / N - 1e-12 <= jain(values) <= 1
    shuffled = random.sample(values, N)
    assert gini(shuffled) == pytest.approx(gini(values), abs=1e-12)
    assert jain(shuffled) == pytest.approx(jain(values), abs=1e-12)


@given(st.integers(1, 20), st.floats(0, 1e300, allow_subnormal=False))
def test_equal_clients_are_perfectly_fair(N, value):
    assert gini([value] * N) == pytest.approx(0, abs=1e-12)
    assert jain([value] * N) == pytest.approx(1, abs=1e-12)


def test_one_that_has_everything():
    assert gini([0, 0, 0, 5.0]) == pytest.approx(3 / 4)
    assert jain([0, 0, 0, 5.0]) == pytest.approx(1 / 4)


def test_all_zeros_are_equal():
    assert (gini([0.0, 0.0]), jain([0.0, 0.0])) == (0.0, 1.0)
    accuracy = Summary.of(scores([1.0, 2.0], accuracy=[0.0, 0.0])).accuracy
    assert (accuracy.worst_20, accuracy.best_20, accuracy.gini, accuracy.jain) == (
        0.0,
        0.0,
        0.0,
        1.0,
    )


@pytest.mark.parametrize("bad", [-1.0, np.inf, np.nan])
def test_indices_of_what_has_no_shares_are_not_numbers(bad):
    assert math.isnan(gini([1.0, bad]))
    assert math.isnan(jain([1.0, bad]))


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), min_size=1, max_size=40))
def test_a_spread_is_in_order(rows):
    loss = [r[0] for r in rows]
    spread = Summary.of(scores(loss, counts=[r[1] for r in rows])).loss
    chain = [spread.best, spread.best_20, spread.mean, spread.worst_20, spread.worst]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(chain))
    assert spread.best - 1e-9 <= spread.weighted_mean <= spread.worst + 1e-9
    k = -(-len(loss) // 5)
    assert spread.worst_20 == pytest.approx(sum(sorted(loss)[-k:]) / k)
    assert spread.best_20 == pytest.approx(sum(sorted(loss)[:k]) / k)
