"""Columns of few values as cells: the same products, and the same strengths by evidence."""

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.data.curves import with_steps
from scaffpd.models import samples
from scaffpd.models.cells import Cells


def table(rows, seed=0):
    """Return numbers with steps, categories, two that exclude each other by chance, a constant."""
    rng = np.random.default_rng(seed)
    numbers = np.round(rng.standard_normal((rows, 3)), 2)
    steps = [np.linspace(-1.5, 1.5, k) for k in (24, 9, 13)]
    categories = np.eye(7)[rng.integers(0, 7, rows)]
    crossed = np.eye(40)[rng.integers(0, 40, rows)]
    crossed[:, -1] = rng.random(rows) < 0.3
    X = np.column_stack([with_steps(numbers, steps), categories, crossed, np.ones(rows)])
    return X @ np.diag(rng.uniform(0.5, 3, X.shape[1])) - rng.standard_normal(X.shape[1])


@pytest.mark.parametrize("rows", [1, 2, 9000])
def test_products_are_those_of_the_columns(rows):
    A = torch.from_numpy(table(9000))
    cells = Cells.of(A)
    assert cells is not None
    assert cells.width == A.shape[1] > 90
    assert len(cells.others) == 3
    first = 9000 - rows
    A, part = A[first:], cells.part(first, 9000)
    rng = np.random.default_rng(1)
    scale, x = (
        torch.from_numpy(rng.random(A.shape[1])),
        torch.from_numpy(rng.random((A.shape[1], 2))),
    )
    w, r = torch.from_numpy(rng.random(rows) - 0.2), torch.from_numpy(rng.random((rows, 2)))
    for ours, B in ((part, A), (part.scaled(scale), A * scale)):
        size = float(B.abs().max())
        torch.testing.assert_close(ours.times(x), B @ x, rtol=1e-12, atol=1e-12 * size)
        torch.testing.assert_close(
            ours.transposed(r), B.mT @ r, rtol=1e-12, atol=1e-14 * size * rows
        )
        H = (w[:, None] * B).mT @ B
        torch.testing.assert_close(ours.gram(w), H, rtol=1e-12, atol=1e-14 * size**2 * rows)


def test_columns_of_many_values_have_no_cells():
    assert Cells.of(torch.from_numpy(np.random.default_rng(0).random((500, 40)))) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", ["logistic", "poisson"])
def test_strengths_and_certificates_are_those_without_cells(loss, monkeypatch):
    rng = np.random.default_rng(2)
    X = table(2400, 3)
    z = X[:, :30] @ rng.standard_normal(30) / 10
    y = {"logistic": rng.random(2400) < 1 / (1 + np.exp(-z))}
    y["poisson"] = rng.poisson(np.log1p(np.exp(z)))
    ends = [600, 1500, 1600]
    clients = list(zip(np.split(X, ends), np.split(y[loss].astype(float), ends), strict=True))
    groups = ["a"] * 49 + ["b"] * (X.shape[1] - 49)
    found = []
    grams = []
    gram = Cells.gram
    monkeypatch.setattr(Cells, "gram", lambda self, w: grams.append(len(w)) or gram(self, w))
    for least in (0, 2**60):
        monkeypatch.setattr(samples, "CELLS", least)
        model = sp.Personal(sp.Linear(loss, "auto", intercept=True, groups=groups))
        cohort = sp.Cohort(clients, model)
        assert (len(grams) > 0) == (least == 0)
        grams.clear()
        result = sp.train(sp.fair(sp.Average()), cohort, tol=1e-6)
        assert result.certificate <= 1e-6
        found.append((cohort.strengths, result))
    (one, first), (other, second) = found
    np.testing.assert_allclose(one.tau, other.tau, rtol=1e-6)
    np.testing.assert_allclose(one.evidence, other.evidence, rtol=1e-9)
    losses = [cohort.evaluate(result.x).loss for result in (first, second)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
