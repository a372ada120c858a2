"""Noise that clients share: its size in sums, what a sum costs everybody, masks, and bounds by
direct sums."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import scaffpd as sp
from cases.private import SIZES, clients, linear, network, oracle
from cases.refusals import refuses
from scaffpd.federation import LocalPlan
from scaffpd.privacy.accountant import epsilon

pytest.importorskip("dp_accounting")
WEIGHTS = np.array([0.5, 0.2, 0.3])
FIXED = sp.Fixed(tau=0.5, sigma=0.25, theta=0.0, local_rate=0.5)
METHOD = sp.ScaffPD(sp.ChiSquare(rho=10.0), local_steps=1, steps=FIXED)


def private(noise=3.0, colluding=0, **more):
    rest = {"radius": 2.0, "clip": 0.5, "secret": 7, "loss_noise": 3.0, "colluding": colluding}
    return sp.Private(linear(), noise=noise, **rest | more)


def points(n, d=5):
    return [torch.full((d,), 0.001 * k, dtype=torch.float64) for k in range(n)]


@pytest.mark.parametrize("colluding", [0, 1, 2])
def test_a_sum_carries_the_noise_of_one_client_and_is_not_biased(colluding):
    """z C max_j |w_j|/m_j in all, and that much again without any t of the clients.

    Of 600 numbers a deviation is off by 1/√1200 and a mean by 1/√600; five of these are allowed.
    """
    made = oracle(private(colluding=colluding), clients())
    w = torch.from_numpy(WEIGHTS)
    share = WEIGHTS / SIZES
    s = share.max()
    noise = []
    rest = []
    for x in points(120):
        shared = made.shared(x, w)
        exact = made.sums.gradients(x) * made.clips[0].unit * torch.from_numpy(share)[:, None]
        whole = exact.sum(0) + 0.02 * w.sum() * x
        noise.append((shared.total() - whole) / (3.0 * 0.5 * s))
        honest = shared.parts[colluding:].sum(0).double() * shared.unit
        rest.append((honest - exact[colluding:].sum(0)) / (3.0 * 0.5 * s))
    expected = (3 / (3 - colluding)) ** 0.5
    within = 5 / 1200**0.5
    assert float(torch.stack(noise).std()) == pytest.approx(expected, rel=within)
    assert float(torch.stack(rest).std()) == pytest.approx(1, rel=within)  # the others' is enough
    assert abs(float(torch.stack(noise).mean())) < 5 * expected / 600**0.5


def test_every_client_pays_by_its_own_part_and_only_once():
    cohort = sp.Cohort(clients(), private(colluding=1))
    at = cohort.gradients(cohort.start() + 0.1)
    losses = cohort.account.total
    first = at.sum(WEIGHTS)
    share = WEIGHTS / SIZES
    costs = {e.client: e.noise for e in cohort.account.entries.values() if e.noise != 3.0}
    for i, cost in costs.items():
        assert cost == pytest.approx(3.0 * share.max() / share[i], rel=1e-6)
        assert cost >= 3.0 * (1 - 1e-9)
    assert len(costs) == 3
    again = cohort.gradients(cohort.start() + 0.1)
    assert torch.equal(again.sum(WEIGHTS), first)
    assert cohort.account.total == losses + 3
    other = at.sum(WEIGHTS[::-1])  # another weighting is another release, with fresh noise
    assert cohort.account.total == losses + 6
    assert not torch.equal(other, first)
    at.sum(np.array([1.0, 0.0, 0.0]))  # who has no part in a sum pays nothing
    assert cohort.account.total == losses + 7


def test_single_gradients_stay_with_the_clients():
    cohort = sp.Cohort(clients(), private(colluding=1))
    x = cohort.start()
    at = cohort.gradients(x)
    other = cohort.gradients(x + 1)
    plan = LocalPlan(1, 0.1)
    for ask in (
        at.each,
        at.norms,
        lambda: cohort.local_updates(x, None, None, LocalPlan(2, 0.1)),
        lambda: cohort.local_updates(x, other, x, plan),
        lambda: cohort.local_updates(x, None, None, plan).norms(),
    ):
        with refuses("shared-noise-visible"):
            ask()


def test_a_single_local_step_is_made_of_the_sum():
    cohort = sp.Cohort(clients(), private(colluding=1))
    x = cohort.start() + 0.1
    c = torch.ones(5, dtype=torch.float64)
    plan = LocalPlan(1, 0.1)
    at = cohort.gradients(x)
    d = cohort.local_updates(
        x, at, c, plan
    )  # Scaff-PD's: every client moves along c, and nothing is released
    before = cohort.account.total
    torch.testing.assert_close(d.sum(WEIGHTS), 0.1 * c)
    assert cohort.account.total == before
    moved = cohort.local_updates(x, None, None, plan).sum(WEIGHTS)  # FedAvg's
    torch.testing.assert_close(moved, at.sum(0.1 * WEIGHTS))
    assert cohort.account.total == before + 3


@pytest.mark.parametrize(
    "method", [METHOD, sp.FedAvg(local_steps=1, local_rate=0.3)], ids=["fair", "FedAvg"]
)
def test_a_solved_run_fits_its_budget_and_masked_sums_are_the_same_sums(method):
    """Bit for bit: whole numbers are added, with masks or without."""
    pytest.importorskip("cryptography")
    model = sp.Private.solved(linear(), 3.0, method, 5, radius=2.0, secret=1, colluding=1)
    plain = sp.train(method, sp.Cohort(clients(), model), 5)
    assert 1.5 < plain.privacy.worst <= 3.0
    masked = sp.train(method, sp.SecureAggregation(sp.Cohort(clients(), model)), 5)
    assert np.array_equal(plain.x, masked.x)


def test_networks_share_noise_as_well():
    model = sp.Private(network(outputs=2), noise=2.0, smoothness=1.0, secret=1, colluding=0)
    cohort = sp.Cohort(clients(), model)
    assert torch.isfinite(cohort.gradients(cohort.start()).sum(WEIGHTS)).all()


def test_noise_is_not_shared_among_too_few():
    with refuses("too-few-to-share-noise"):
        sp.Cohort(clients(), private(colluding=3))


# --- by direct summation


def discrete(sigma2, y):
    weights = np.exp(-(y**2) / (2 * sigma2))
    return weights / weights.sum()


@pytest.mark.parametrize(("sigma", "n", "shift"), [(10, 4, 20), (8, 9, 12), (6, 3, 4)])
def test_what_a_sum_of_shares_costs(sigma, n, shift):
    """ε of a sum that a record moves by `shift` units, under n shares of noise σ each: that of √n
    σ."""
    y = np.arange(-14 * n * sigma, 14 * n * sigma + 1)
    one = discrete(sigma**2, np.arange(-14 * sigma, 14 * sigma + 1))
    whole = one
    for _ in range(n - 1):
        whole = np.convolve(whole, one)
    moved = np.roll(whole, shift)
    moved[:shift] = 0
    assert len(y) == len(whole)

    def short(e):
        return float(np.maximum(0, whole - np.exp(e) * moved)[shift:].sum()) - 1e-5

    accounted = epsilon(shift**2 / (n * sigma**2), 1e-5)
    assert brentq(short, 0, 50) == pytest.approx(accounted, abs=1 / sigma**2)
