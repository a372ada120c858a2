"""The benchmark of the average loss: DANE is what its paper says, and `train` takes it."""

from __future__ import annotations

import numpy as np
import pytest

import average
import scaffpd as sp


def test_a_round_of_dane_is_that_of_its_paper():
    clients = sp.data.synthetic(N=3, d=4, m=9, seed=2)
    l2 = 0.1
    eta = 0.7
    mu = 0.3
    result = sp.train(
        average.Dane(eta, mu),
        sp.Cohort(clients, sp.Linear("squared", l2)),
        rounds=2,
        progress=False,
    )
    x = np.zeros(4)
    for _ in range(2):
        hessians = [2 / len(y) * X.T @ X + l2 * np.eye(4) for X, y in clients]
        slopes = [H @ x - 2 / len(y) * X.T @ y for H, (X, y) in zip(hessians, clients, strict=True)]
        c = np.mean(slopes, axis=0)
        x = x - np.mean([eta * np.linalg.solve(H + mu * np.eye(4), c) for H in hessians], axis=0)
    np.testing.assert_allclose(result.x, x, rtol=1e-9)


@pytest.mark.parametrize("method", average.METHODS)
def test_every_method_is_measured_at_a_point_of_its_grid(method):
    task = average.Task("synthetic", method, average.POINTS[method][-1], 1)
    found, cost = average.measure(task)
    assert found == task
    assert cost is not None
    assert 1 <= cost[0] <= average.cap(*task[:2])
