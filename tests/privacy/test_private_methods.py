"""Private clients under the methods: releases are as foreseen, and without noise nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from private_cases import CLASSES, Recorded, clients, linear, network

import scaffpd as sp
from scaffpd.algorithms import ALGORITHMS, Algorithm, Fair, ProxSkip

FREE = {"noise": 0.0, "clip": float("inf"), "loss_clip": float("inf")}
CHI = sp.ChiSquare(rho=0.5)
FIXED = sp.Fixed(tau=0.05, sigma=0.1, local_rate=0.02)
RATE = {"local_steps": 3, "local_rate": 0.05}
METHODS = [
    sp.ScaffPD(CHI, local_steps=3),
    sp.ScaffPD(CHI, local_steps=1, steps=FIXED),
    sp.ScaffPD(CHI, local_steps=3, batch_size=4, steps=FIXED),
    sp.ScaffPD(CHI, local_steps=2, batch_size=4, full_gradients=False, steps=FIXED),
    sp.ScaffPD(CHI, local_steps=1),
    sp.FedAvg(**RATE),
    sp.FedAvg(batch_size=4, **RATE),
    sp.FedProx(mu=0.1, **RATE),
    sp.Scaffold(**RATE),
    sp.Scaffold(option="I", batch_size=4, **RATE),
    sp.QFFL(q=1.0, batch_size=4, **RATE),
    sp.DeltaFL(tail=1.0, **RATE),
    sp.AFL(CHI, **RATE),
    sp.AFL(CHI, batch_size=4, dual_rate=0.1, **RATE),
    sp.DRFA(CHI, **RATE),
    sp.DRFA(CHI, batch_size=4, dual_rate=0.1, **RATE),
    sp.GradientDescentAscent(CHI),
    sp.Extragradient(CHI),
]


def named(method):
    return repr(method)[:60]


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_releases_are_as_foreseen(method):
    """The most that a client is asked, against what an oracle notes on a run without privacy."""
    rounds = 6
    model = Recorded(linear())
    result = sp.train(method, sp.Cohort(clients(), model), rounds=rounds, progress=False)
    assert result.rounds == rounds
    foreseen = method.releases(rounds)
    noted = [
        model.count(kind, sampled) for sampled in (False, True) for kind in ("gradient", "loss")
    ]
    most = [
        foreseen.gradients,
        foreseen.losses,
        foreseen.sampled_gradients,
        foreseen.sampled_losses,
    ]
    assert noted == most
    assert (foreseen.batch_size is None) == (sum(most[2:]) == 0)


@pytest.mark.sample(10)
@pytest.mark.parametrize("method", METHODS, ids=named)
def test_the_account_never_counts_more_than_foreseen(method):
    sizes = (9, 5, 14)
    cohort = sp.Cohort(
        clients(), sp.Private(linear(), noise=6.0, loss_noise=9.0, radius=2.0, secret=2)
    )
    result = sp.train(method, cohort, rounds=4, progress=False)
    for made, m in zip(cohort.account.releases, sizes, strict=True):
        most = method.releases(4).releases(6.0, 9.0, m)
        assert set(made) <= set(most)
        assert all(n <= most[release] for release, n in made.items())
        if not isinstance(method, sp.DRFA) and "Auto" not in repr(method):
            assert made == most
    assert np.isfinite(result.x).all()
    assert 0 < result.privacy.worst < np.inf
    assert result.privacy.names == tuple(cohort.names)


def test_every_method_that_is_foreseen_is_tested():
    foreseen = {kind for kind in ALGORITHMS.values() if kind.releases is not Algorithm.releases} - {
        ProxSkip
    }
    assert {type(method) for method in METHODS} | {Fair} == foreseen


@pytest.mark.parametrize("batch_size", [None, 4])
def test_fair_is_foreseen_as_the_method_that_it_takes(batch_size):
    L = 0.25 * 2.0**2 + linear().l2  # public, of "logistic" on rows of the length 2
    steps = sp.Fixed(tau=3 * (1 / L), sigma=1 / 3, theta=0.0, local_rate=1 / L)
    method = sp.fair(CHI, 3, batch_size)
    same = sp.ScaffPD(CHI, 3, batch_size, steps)
    assert method.releases(5) == same.releases(5)
    runs = [
        sp.train(
            one,
            sp.Cohort(clients(), sp.Private(linear(), noise=6.0, radius=2.0, secret=2)),
            5,
            progress=False,
        )
        for one in (method, same)
    ]
    assert np.array_equal(runs[0].x, runs[1].x)
    assert np.array_equal(runs[0].privacy.epsilon, runs[1].privacy.epsilon)


@pytest.mark.parametrize("loss", ["squared", "softmax", "network"])
def test_single_precision_is_as_private(loss):
    model = network() if loss == "network" else linear(loss)
    data = clients("softmax" if loss == "network" else loss)
    made = sp.Private(model, noise=4.0, smoothness=2.0, secret=2)
    results = [
        sp.train(
            sp.ScaffPD(CHI, 2, steps=FIXED), sp.Cohort(data, made, dtype=dtype), 3, progress=False
        )
        for dtype in (torch.float32, torch.float64)
    ]
    assert results[0].x.dtype == np.float32
    assert np.array_equal(results[0].privacy.epsilon, results[1].privacy.epsilon)
    assert np.isfinite(results[0].x).all()


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "method", [METHODS[0], METHODS[2], METHODS[6], METHODS[8], METHODS[11]], ids=named
)
@pytest.mark.parametrize("loss", [*CLASSES, "network"])
def test_without_noise_and_clips_every_bit_is_the_models(loss, method):
    data = clients("softmax" if loss == "network" else loss)
    model = network() if loss == "network" else linear(loss)
    plain, private = (
        sp.train(method, sp.Cohort(data, made), rounds=4, progress=False)
        for made in (model, sp.Private(model, **FREE))
    )
    assert np.array_equal(plain.x, private.x)
    assert np.array_equal(plain.history.losses, private.history.losses)
    assert plain.certificate == private.certificate
    assert private.privacy is None


@pytest.mark.parametrize("loss", ["logistic", "network"])
def test_clips_that_never_bind_change_nothing_but_rounding(loss):
    """The private path itself, not a shortcut: no noise, and clips far above every record."""
    data = clients("softmax" if loss == "network" else loss)
    model = network() if loss == "network" else linear(loss)
    for method in (
        sp.ScaffPD(CHI, local_steps=3, steps=FIXED),
        sp.Scaffold(**RATE),
        sp.QFFL(**RATE),
    ):
        loose = sp.Private(model, noise=0.0, clip=1e9, loss_clip=1e9, smoothness=1.0)
        plain, private = (
            sp.train(method, sp.Cohort(data, made), rounds=4, progress=False)
            for made in (model, loose)
        )
        np.testing.assert_allclose(private.x, plain.x, rtol=1e-9, atol=1e-12)
        assert private.privacy.worst == np.inf
        assert "∞" in str(private)
