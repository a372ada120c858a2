"""ε of what clients release: by hand-built events, by closed forms, by another accountant, and back from ε to noise."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from private_cases import clients, linear
from scipy.optimize import brentq
from scipy.stats import norm

import scaffpd as sp
from scaffpd.privacy.accountant import Account, Release, ReleaseCounts, ReleaseEntry, epsilon

dp = pytest.importorskip("dp_accounting")
SPECIAL = dp.NeighboringRelation.REPLACE_SPECIAL
DELTA = 1e-5


def closed_form(sigma, delta=DELTA):
    """Balle and Wang's δ(ε), solved for ε."""

    def short(e):
        return (
            norm.cdf(0.5 / sigma - e * sigma)
            - np.exp(e) * norm.cdf(-0.5 / sigma - e * sigma)
            - delta
        )

    return brentq(short, 0, 200)


@pytest.mark.parametrize("z", [0.7, 2.0, 9.0])
def test_one_release_costs_what_the_gaussian_mechanism_costs(z):
    assert epsilon({Release(z): 1}, DELTA) == pytest.approx(closed_form(z), rel=1e-9)


def test_releases_over_all_records_agree_with_privacy_loss_distributions():
    made = {Release(7.0): 40, Release(15.0): 11}
    reference = dp.pld.PLDAccountant(SPECIAL)
    reference.compose(dp.GaussianDpEvent(7.0), 40)
    reference.compose(dp.GaussianDpEvent(15.0), 11)
    found = epsilon(made, DELTA)
    assert found == pytest.approx(reference.get_epsilon(DELTA), rel=1e-4)
    assert found == pytest.approx(closed_form((40 / 7**2 + 11 / 15**2) ** -0.5), rel=1e-9)


@pytest.mark.parametrize(("z", "q", "n"), [(3.0, 0.3, 60), (1.5, 0.1, 40), (20.0, 0.2, 300)])
def test_sampled_releases_agree_with_dp_accounting(z, q, n):
    made = {Release(z, q): n, Release(25.0): 10}
    whole = dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)), n),
            dp.SelfComposedDpEvent(dp.GaussianDpEvent(25.0), 10),
        ]
    )
    found = epsilon(made, DELTA)
    reference = dp.pld.PLDAccountant(SPECIAL).compose(whole).get_epsilon(DELTA)
    assert reference - 1e-9 <= found <= reference * 1.002
    orders = [*range(2, 64), 128, 256]
    assert found <= dp.rdp.RdpAccountant(orders, SPECIAL).compose(whole).get_epsilon(DELTA)
    assert found < epsilon({Release(z): n, Release(25.0): 10}, DELTA)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    assert epsilon({}, DELTA) == 0
    assert epsilon({Release(3.0): 0}, DELTA) == 0
    assert epsilon({Release(3.0): 1, Release(0.0): 1}, DELTA) == np.inf


@pytest.mark.parametrize("target", [0.5, 4.0])
def test_solved_noise_gives_the_target_back(target):
    method = sp.ScaffPD(sp.ChiSquare(rho=0.1), local_steps=3)
    model = sp.Private.solved(linear(), target, method, 20, loss_share=0.2)
    gradients = 21 + 20 * 2
    losses = 21
    parts = gradients / model.noise**2, losses / model.loss_noise**2
    assert epsilon(
        {Release(model.noise): gradients, Release(model.loss_noise): losses}, DELTA
    ) == pytest.approx(target)
    assert parts[1] / sum(parts) == pytest.approx(0.2)
    assert model.budget == target


def test_solved_noise_of_samples_is_every_clients_own():
    method = sp.FedAvg(local_steps=2, batch_size=8)
    sizes = (8, 40)
    model = sp.Private.solved(linear(), 2.0, method, 10, sizes)
    for z, m in zip(model.noise, sizes, strict=True):
        found = epsilon({Release(z, min(1.0, 8 / m)): 20}, DELTA)
        assert 1.995 < found <= 2.0
    assert model.noise[0] > model.noise[1]


def test_counts_add_up():
    both = ReleaseCounts(1, 2, 3, 4, 5) + ReleaseCounts(10, 20)
    assert both == ReleaseCounts(11, 22, 3, 4, 5)
    assert both.releases(6.0, 7.0, 10) == {
        Release(6.0): 11,
        Release(6.0, 0.5): 3,
        Release(7.0): 22,
        Release(7.0, 0.5): 4,
    }
    assert both.releases(6.0, 6.0, 5) == {Release(6.0): 40}


def until_refused(ask):
    """How many questions are answered, and what is said then."""
    for k in range(10_000):
        try:
            ask(k)
        except sp.InputError as refusal:
            return k, str(refusal)
    raise AssertionError("never refused")


def test_an_answer_beyond_the_budget_is_refused_and_costs_nothing():
    cohort = sp.Cohort(clients(), sp.Private(linear(), noise=5.0, radius=2.0, budget=1.5, secret=1))
    x = cohort.start()
    answered, refusal = until_refused(lambda k: cohort.gradients(x + k))
    assert "budget of ε = 1.5" in refusal
    assert "does not answer" in refusal
    assert (
        epsilon({Release(5.0): 2 * answered}, DELTA)
        <= 1.5
        < epsilon({Release(5.0): 2 * answered + 2}, DELTA)
    )
    assert cohort.privacy.worst == epsilon({Release(5.0): 2 * answered}, DELTA)
    cohort.gradients(x)  # answered before: the same answer, for nothing


def test_looking_ahead_refuses_at_the_same_place():
    """The account looks at more releases than asked for; that must not change which ones are refused."""
    release = Release(2.0, 0.25)
    account = Account(["a"], DELTA, 2.0)
    made, _ = until_refused(
        lambda k: account.charge([ReleaseEntry(0, k.to_bytes(16, "big"), release)])
    )
    assert epsilon({release: made}, DELTA) <= 2.0 < epsilon({release: made + 1}, DELTA)


def test_a_solved_run_fits_its_budget_and_one_more_round_does_not():
    method = sp.FedAvg(local_steps=2, local_rate=0.1)
    model = sp.Private.solved(linear(), 3.0, method, 6, secret=1)
    result = sp.train(method, sp.Cohort(clients(), model), rounds=6, progress=False)
    assert result.privacy.worst == pytest.approx(3.0)
    assert result.privacy.worst <= 3.0
    assert "(ε, δ) = (3.00, 1e-05)" in str(result)
    with pytest.raises(sp.InputError, match="budget"):
        sp.train(method, sp.Cohort(clients(), model), rounds=7, progress=False)


@pytest.mark.parametrize("package", ["dp_accounting", "cryptography"])
def test_a_missing_package_is_a_sentence(package, monkeypatch):
    from scaffpd.privacy import accountant

    accountant._epsilon.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(sp.InputError, match=r"is not installed: pip install 'scaffpd\[privacy\]'"):
        sp.train(
            sp.FedAvg(),
            sp.Cohort(clients(), sp.Private(linear(), noise=2.0, radius=1.0)),
            1,
            progress=False,
        )
