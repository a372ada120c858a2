"""Features in bfloat16: all else is computed in float32, and certificates are of what is kept."""

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.errors import InputError


def pairs(loss):
    random = np.random.default_rng(0)
    for m in (5, 30, 60, 100):
        X = random.standard_normal((m, 40)).astype(np.float32)
        z = X[:, :3].sum(1)
        y = {
            "squared": (z + random.standard_normal(m)).astype(np.float32),
            "logistic": z > 0,
            "softmax": np.digitize(z, [-1, 1]),
            "poisson": random.poisson(np.exp(z / 3)),
        }
        yield X, y[loss]


def cohorts(loss):
    """Clients in bfloat16, and those same numbers in double precision."""
    model = sp.Linear(loss, l2=0.05, intercept=True, classes=3 if loss == "softmax" else None)
    given = list(pairs(loss))
    kept = [(torch.from_numpy(X).bfloat16().double().numpy(), y) for X, y in given]
    return sp.Cohort(given, model, dtype=torch.bfloat16), sp.Cohort(kept, model)


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax", "poisson"])
@pytest.mark.parametrize(
    "method",
    [
        sp.fair(sp.ChiSquare(0.1)),
        sp.ScaffPD(sp.ChiSquare(0.1), local_steps=20),
        sp.SubspaceSaddle(sp.ChiSquare(0.1)),
    ],
    ids=lambda method: type(method).__name__,
)
def test_certificates_hold_for_the_rounded_features(loss, method):
    half, exact = cohorts(loss)
    found = sp.train(method, half, rounds=200, tol=1e-4)
    assert found.status == "converged"
    best = sp.train(sp.fair(sp.ChiSquare(0.1)), exact, tol=1e-10)
    value = [sp.ChiSquare(0.1).support(exact.evaluate(one.x).loss) for one in (found, best)]
    assert value[0] - value[1] <= found.certificate


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax", "poisson"])
def test_answers_err_less_than_their_bounds(loss):
    half, exact = cohorts(loss)
    x = 0.1 * torch.randn(half.dimension, generator=torch.Generator().manual_seed(1))
    ours, theirs = half.gradients(x), exact.gradients(x.double())
    room = [sum(bounds) for bounds in zip(ours.rounding(), theirs.rounding(), strict=True)]
    assert np.all(np.abs(ours.losses - theirs.losses) <= room[0])
    for i, weights in enumerate(np.eye(4)):
        assert (ours.sum(weights) - theirs.sum(weights)).norm() <= room[1][i]
    assert half.start().dtype == torch.float32


@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_minibatches_take_the_same_steps(loss):
    method = sp.FedAvg(local_steps=5, batch_size=8, local_rate=0.01)
    half, exact = (sp.train(method, cohort, rounds=20).x for cohort in cohorts(loss))
    np.testing.assert_allclose(half, exact, atol=1e-5)


def test_other_formats_are_refused():
    with pytest.raises(InputError, match="bfloat16"):
        sp.Cohort(list(pairs("squared")), sp.Linear(), dtype=torch.float16)
