"""Clipping of records at the ends of the number format: no record counts for more than C."""

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.privacy.mechanism import directions, floored

SIZES = [5e-324, 1e-310, 1e-200, 1e-167, 1e-162, 1e-154, 1e-30, 1.0, 1e30, 1e154, 1e200, 1e308]


@pytest.mark.parametrize("size", SIZES)
def test_directions_have_length_one_at_any_size(size):
    rows = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (50, 4)) * size)
    unit, sizes = directions(rows)
    norms = unit.norm(dim=1)
    assert torch.all(norms <= 1 + 1e-15)
    assert torch.all(norms[rows.abs().amax(1) > 0] > 0.99)
    assert torch.all(torch.isfinite(sizes))
    for bits in (10, 20, 40):
        whole = floored(unit, 1.0, bits)
        assert torch.all(whole.double().norm(dim=1) <= 2.0**bits)
    zero, none = directions(torch.zeros(2, 3).double())
    assert not zero.any()
    assert not none.any()


@pytest.mark.parametrize("clip", [1e-167, 1e-100, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("loss", ["softmax", "logistic", "squared"])
def test_no_record_moves_a_sum_by_more_than_its_clip(loss, clip):
    """With residuals that underflow, 1/‖r‖ overflowed, and a record could count for anything."""
    random = np.random.default_rng(1)
    X = random.standard_normal((30, 3))
    y = random.integers(0, 3 if loss == "softmax" else 2, 30)
    classes = 3 if loss == "softmax" else None
    model = sp.Private(sp.Linear(loss, classes=classes, l2=0.0), clip=clip, radius=3.0, secret=1)
    for far in (1.0, 50.0, 360.0, 370.0, 1e4):
        points = []
        for rows in (slice(None), slice(1, None)):
            cohort = sp.Cohort([(X[rows], y[rows])], model)
            oracle = cohort.channel.train.oracle
            x = torch.full((cohort.dimension,), far).double() * torch.sign(
                torch.from_numpy(np.random.default_rng(2).standard_normal(cohort.dimension))
            )
            points.append(oracle.sums.gradients(x)[0].double())
        bits = oracle.clips[0].bits
        assert float((points[0] - points[1]).norm()) <= 2.0**bits * (1 + 1e-12)
