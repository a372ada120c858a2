"""Several methods on one budget, and `fair` with rates that look at no answer."""

from __future__ import annotations

import numpy as np
import pytest

import scaffpd as sp

CHI = sp.ChiSquare(rho=0.1)


def clients(rows=40):
    random = np.random.default_rng(4)
    return [(random.normal(size=(rows, 3)), random.integers(0, 2, rows)) for _ in range(3)]


def test_methods_in_a_row_spend_what_was_foreseen():
    methods = [sp.FedAvg(local_steps=2, local_rate=0.1), sp.fair(CHI, local_steps=3)]
    private = sp.Private.solved(
        sp.Linear("logistic", 0.01), 2, methods, rounds=4, radius=2, secret=1
    )
    cohort = sp.Cohort(clients(), private)
    first, last = (sp.train(method, cohort, rounds=4, progress=False).privacy for method in methods)
    assert first.worst < last.worst <= 2
    assert last.worst == pytest.approx(2, abs=1e-6)


def test_batches_of_two_sizes_share_no_budget():
    methods = [sp.ScaffPD(CHI, 2, 4), sp.ScaffPD(CHI, 2, 5)]
    with pytest.raises(sp.InputError, match="Batches of 4 and of 5 rows"):
        sp.Private.solved(sp.Linear("logistic"), 2, methods, rounds=4, samples=[9, 9], radius=2)


@pytest.mark.parametrize(("steps", "batch_size"), [(1, None), (3, None), (2, 8)])
def test_fair_is_scaff_pd_with_public_rates(steps, batch_size):
    private = sp.Private(sp.Linear("logistic", 0.01), noise=2, radius=2, secret=1)
    L = 0.25 * 2**2 + 0.01
    rule = sp.Fixed(tau=steps / L, sigma=1 / 3, theta=0.0, local_rate=1 / L)
    one, same = (
        sp.train(method, sp.Cohort(clients(), private), rounds=5, progress=False)
        for method in (sp.fair(CHI, steps, batch_size), sp.ScaffPD(CHI, steps, batch_size, rule))
    )
    assert np.array_equal(one.x, same.x)
    assert one.history["accepted"].all()
