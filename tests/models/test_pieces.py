"""Scores piece by piece, rows of some clients, and vectors that clients keep: what does not depend on N."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.models import layout as module
from scaffpd.models.layout import Ragged

SIZES = [3, 1, 12, 2, 2, 7, 1]


def clients(loss):
    random = np.random.default_rng(0)
    targets = {
        "squared": lambda m: random.standard_normal(m),
        "logistic": lambda m: random.integers(0, 2, m),
        "softmax": lambda m: random.integers(0, 3, m),
        "columns": lambda m: random.standard_normal((m, 2)),
    }
    return [(random.standard_normal((m, 4)), targets[loss](m)) for m in SIZES]


@pytest.mark.parametrize("piece", [1, 4, 5, 28, 100])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax", "columns"])
def test_pieces_score_like_the_whole(loss, piece, monkeypatch):
    pairs = clients(loss)
    model = sp.Linear(
        {"columns": "squared"}.get(loss, loss), classes=3 if loss == "softmax" else None
    )
    whole = sp.Cohort(pairs, model)
    x = torch.randn(
        whole.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    expected = whole.evaluate(x)
    monkeypatch.setattr(module, "PIECE", piece)
    cohort = sp.Cohort(pairs, model)
    parts = cohort._oracle.rows.pieces
    assert [i for cut, _ in parts for i in range(len(SIZES))[cut]] == list(range(len(SIZES)))
    assert (len(parts) == 1) == (piece >= sum(SIZES))
    found = cohort.evaluate(x)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-13)
    np.testing.assert_array_equal(found.accuracy, expected.accuracy)


def test_one_piece_without_labels_is_enough_for_no_accuracy(monkeypatch):
    """The first client's targets look like classes, the second one's do not."""
    monkeypatch.setattr(module, "PIECE", 1)
    cohort = sp.Cohort([(np.eye(2), np.eye(2)), (np.eye(2), np.full((2, 2), 0.3))], sp.Linear())
    assert np.isnan(cohort.evaluate(np.zeros(4)).accuracy).all()


def test_squared_losses_from_fewer_rows_are_the_same():
    cohort = sp.Cohort(clients("squared"), sp.Linear())
    x = np.linspace(-1, 1, 4)
    before = cohort.evaluate(x)
    cohort.constants()
    after = cohort.evaluate(x)
    np.testing.assert_allclose(after.loss, before.loss, rtol=1e-13)
    assert np.isnan(after.accuracy).all()


@pytest.mark.parametrize("chosen", [[0], [2, 5], [6, 0, 3], list(range(7))])
def test_rows_of_some_clients(chosen):
    starts = np.cumsum([0, *SIZES])
    expected = [row for i in chosen for row in range(starts[i], starts[i + 1])]
    assert Ragged(SIZES, torch.device("cpu"), torch.float64).rows_of(chosen).tolist() == expected


def test_kept_vectors_of_some_clients():
    cohort = sp.Cohort(
        [(np.ones((1, 2)), np.ones(1))] * 4, sp.Linear("squared", l2=1.0), dtype=torch.float32
    )
    kept = cohort.memory()
    other = replace(kept, vectors=torch.arange(8.0).view(4, 2))
    assert kept.plus(2.0, other).vectors.equal(2 * other.vectors)
    assert kept.replaced(other, [3, 1]).vectors.tolist() == [[0, 0], [2, 3], [0, 0], [6, 7]]
    assert kept.plus(1.0, torch.ones(2)).vectors.equal(torch.ones(4, 2))
    assert kept.vectors.equal(torch.zeros(4, 2))
