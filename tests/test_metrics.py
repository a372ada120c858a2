"""A table of clients in a few numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaffpd.federation import ClientScores
from scaffpd.training.metrics import Summary

SCORES = ClientScores(
    names=("a", "b", "c"),
    loss=np.array([0.2, 0.9, 0.4]),
    score=np.array([0.9, 0.7, 0.6]),
    counts=np.array([10, 30, 60]),
)


def test_the_worst_loss_is_the_largest():
    loss = Summary.of(SCORES).loss
    assert (loss.worst, loss.worst_client, loss.best, loss.best_client) == (0.9, "b", 0.2, "a")
    assert loss.mean == pytest.approx(0.5)
    assert loss.weighted_mean == pytest.approx(0.2 * 0.1 + 0.9 * 0.3 + 0.4 * 0.6)
    assert loss.deviation == pytest.approx(np.sqrt((0.09 + 0.16 + 0.01) / 3))


def test_regression_has_no_accuracy():
    scores = ClientScores(SCORES.names, SCORES.loss, np.full(3, np.nan), SCORES.counts)
    assert Summary.of(scores).score is None


def scores(loss, accuracy=None, counts=None):
    N = len(loss)
    accuracy = np.full(N, np.nan) if accuracy is None else np.array(accuracy, dtype=float)
    counts = np.ones(N, dtype=int) if counts is None else np.array(counts)
    return ClientScores(
        tuple(f"c{i}" for i in range(N)), np.array(loss, dtype=float), accuracy, counts
    )


# --- Gini and Jain

SIZES = st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=30)


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
