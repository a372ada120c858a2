"""A table of clients in a few numbers."""

from __future__ import annotations

import numpy as np
import pytest

from scaffpd.federation import ClientScores
from scaffpd.metrics import Summary

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
    assert (accuracy.worst, accuracy.worst_client, accuracy.best, accuracy.best_client) == (0.6, "c", 0.9, "a")
    assert accuracy.mean == pytest.approx(2.2 / 3)
    assert accuracy.weighted_mean == pytest.approx(0.09 + 0.21 + 0.36)


def test_regression_has_no_accuracy():
    scores = ClientScores(SCORES.names, SCORES.loss, np.full(3, np.nan), SCORES.counts)
    assert Summary.of(scores).accuracy is None
