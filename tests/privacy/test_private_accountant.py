"""ε of what clients release: by closed forms, by another accountant, back from ε to noise, and the
budget."""

import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

import scaffpd as sp
from cases.private import Recorded, clients, linear
from cases.refusals import refuses
from experiments.central import Extragradient, GradientDescentAscent
from scaffpd.federation.plans import ReleaseCounts
from scaffpd.privacy.accountant import Account, ReleaseEntry, epsilon, least_noise

dp = pytest.importorskip("dp_accounting")
DELTA = 1e-5


@pytest.mark.parametrize("z", [0.7, 2.0, 9.0])
def test_one_release_costs_what_the_gaussian_mechanism_costs(z):
    """Balle and Wang's δ(ε), solved for ε."""

    def short(e):
        right = norm.cdf(0.5 / z - e * z) - np.exp(e) * norm.cdf(-0.5 / z - e * z)
        return right - DELTA

    assert epsilon(z**-2, DELTA) == pytest.approx(brentq(short, 0, 200), rel=1e-9)
    assert least_noise(epsilon(z**-2, DELTA), DELTA) == pytest.approx(z, rel=1e-6)


def test_releases_compose_as_privacy_loss_distributions_do():
    reference = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
    reference.compose(dp.GaussianDpEvent(7.0), 40)
    reference.compose(dp.GaussianDpEvent(15.0), 11)
    found = epsilon(40 / 7.0**2 + 11 / 15.0**2, DELTA)
    assert found == pytest.approx(reference.get_epsilon(DELTA), rel=1e-4)
    assert epsilon(0.0, DELTA) == 0


@pytest.mark.parametrize("target", [0.5, 4.0])
def test_solved_noise_gives_the_target_back(target):
    method = sp.ScaffPD(sp.ChiSquare(rho=0.1), local_steps=3)
    model = sp.Private.solved(linear(), target, method, 20, loss_share=0.2)
    parts = (21 + 20 * 2) / model.noise**2, 21 / model.loss_noise**2
    assert epsilon(sum(parts), DELTA) == pytest.approx(target)
    assert parts[1] / sum(parts) == pytest.approx(0.2)
    assert model.budget == target
    only = sp.Private.solved(linear(), target, sp.FedAvg(local_steps=2), 10)
    assert epsilon(20 / only.noise**2, DELTA) == pytest.approx(target)


def test_methods_in_a_row_share_a_budget():
    methods = [sp.FedAvg(local_steps=2, local_rate=0.1), sp.fair(sp.ChiSquare(0.1), local_steps=3)]
    model = sp.Private.solved(linear(), 2, methods, rounds=4, radius=2, secret=1)
    cohort = sp.Cohort(clients(), model)
    first, last = (sp.train(method, cohort, rounds=4).privacy for method in methods)
    assert first.worst < last.worst <= 2
    assert last.worst == pytest.approx(2, abs=1e-6)
    assert "(ε, δ) = (2.00, 1e-05)" in str(last)
    with refuses("privacy-budget"):
        sp.train(methods[0], cohort, rounds=5)


def test_an_answer_beyond_the_budget_is_refused_and_costs_nothing():
    model = sp.Private(linear(), noise=5.0, radius=2.0, budget=1.5, secret=1)
    cohort = sp.Cohort(clients(), model)
    x = cohort.start()
    answered = 0
    with refuses("privacy-budget"):
        for answered in range(1000):
            cohort.gradients(x + answered)
    spent = epsilon(2 * answered / 25, DELTA)
    assert spent <= 1.5 < epsilon((2 * answered + 2) / 25, DELTA)
    assert cohort.privacy.worst == spent
    cohort.gradients(x)  # answered before: the same answer, for nothing


def test_neither_of_two_accounts_counts_what_the_other_cannot_afford():
    wide = Account(["a"], DELTA, 1.0)
    own = Account(["a"], DELTA, None, wide)
    noise = least_noise(1.0, DELTA) * 1.01
    own.charge([ReleaseEntry(0, b"0" * 16, noise)])
    with refuses("privacy-budget"):
        own.charge([ReleaseEntry(0, b"1" * 16, noise)])
    own.charge([ReleaseEntry(0, b"0" * 16, noise)])
    assert own.total == wide.total == 1
    again = Account(["a"], DELTA, 1.0)
    again.merge(own.pack())
    again.merge(own.pack())
    assert again.sums.tolist() == own.sums.tolist()


@pytest.mark.parametrize("package", ["dp_accounting", "cryptography"])
def test_a_missing_package_is_a_sentence(package, monkeypatch):
    epsilon.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)

    def run():
        model = sp.Private(linear(), noise=2.0, radius=1.0)
        sp.train(sp.FedAvg(), sp.Cohort(clients(), model), 1)

    with pytest.raises(sp.InputError, match=r"is not installed: pip install 'scaffpd\[privacy\]'"):
        run()


# --- what methods ask

CHI = sp.ChiSquare(rho=0.5)
RATE = {"local_steps": 3, "local_rate": 0.05}
METHODS = [
    sp.ScaffPD(CHI, local_steps=3),
    sp.ScaffPD(CHI, local_steps=1, steps=sp.Fixed(tau=0.05, sigma=0.1, local_rate=0.02)),
    sp.FedAvg(**RATE),
    sp.FedProx(mu=0.1, **RATE),
    sp.Scaffold(**RATE),
    sp.QFFL(q=1.0, **RATE),
    sp.DeltaFL(tail=1.0, **RATE),
    sp.AFL(CHI, **RATE),
    sp.AFL(CHI, dual_rate=0.1, **RATE),
    sp.DRFA(CHI, **RATE),
    GradientDescentAscent(CHI),
    Extragradient(CHI),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: repr(method)[:60])
def test_releases_are_as_foreseen(method):
    """The most that a client is asked, against what an oracle notes; and the account never counts
    more."""
    model = Recorded(linear())
    assert sp.train(method, sp.Cohort(clients(), model), rounds=6).rounds == 6
    foreseen = method.releases(6)
    assert foreseen == ReleaseCounts(model.count("gradient"), model.count("loss"))
    private = sp.Private(linear(), noise=6.0, loss_noise=9.0, radius=2.0, secret=2)
    cohort = sp.Cohort(clients(), private)
    result = sp.train(method, cohort, rounds=6)
    most = foreseen.gradients / 36 + foreseen.losses / 81
    assert np.all(cohort.account.sums <= most * (1 + 1e-12))
    if not isinstance(method, sp.DRFA) and "Auto" not in repr(method):
        np.testing.assert_allclose(cohort.account.sums, most)
    assert np.isfinite(result.x).all()
    assert 0 < result.privacy.worst < np.inf


def test_fair_is_scaff_pd_with_public_rates():
    L = 0.25 * 2.0**2 + linear().l2  # public, of "logistic" on rows of the length 2
    steps = sp.Fixed(tau=3 * (1 / L), sigma=1 / 3, theta=0.0, local_rate=1 / L)
    methods = sp.fair(CHI, 3), sp.ScaffPD(CHI, 3, None, steps)
    assert methods[0].releases(5) == methods[1].releases(5)
    model = sp.Private(linear(), noise=6.0, radius=2.0, secret=2)
    one, same = (sp.train(method, sp.Cohort(clients(), model), 5) for method in methods)
    assert np.array_equal(one.x, same.x)
    assert np.array_equal(one.privacy.epsilon, same.privacy.epsilon)
    assert one.certificate == np.inf


@pytest.mark.parametrize(
    "method",
    [METHODS[0], sp.Scaffold(local_steps=2, clients_per_round=2), sp.DRFA(CHI, local_steps=3)],
    ids=lambda method: type(method).__name__,
)
def test_a_resumed_run_is_the_same_run_at_the_same_price(method, tmp_path):
    def run(rounds, secret=1, **more):
        model = sp.Private(linear(), noise=5.0, radius=2.0, secret=secret)
        cohort = sp.Cohort(clients(), model)
        return sp.train(method, cohort, rounds=rounds, **more), cohort

    whole, _ = run(9)
    run(4, checkpoint=tmp_path / "run")
    resumed, first = run(9, checkpoint=tmp_path / "run")
    assert np.array_equal(whole.x, resumed.x)
    assert np.array_equal(whole.history.losses, resumed.history.losses)
    assert np.array_equal(whole.privacy.epsilon, resumed.privacy.epsilon)
    if isinstance(method, sp.ScaffPD):  # with another secret, questions asked again are paid again
        other, second = run(9, secret=2, checkpoint=tmp_path / "run")
        assert second.account.total > first.account.total
        assert other.privacy.worst > resumed.privacy.worst


def test_what_was_spent_before_a_budget_ran_out_is_in_the_checkpoint(tmp_path):
    """The refused round is not finished, but what it had released by then counts."""
    spent = []
    for _ in range(2):
        model = sp.Private(linear(), noise=5.0, radius=2.0, secret=1, budget=2.0)
        cohort = sp.Cohort(clients(), model)
        with refuses("privacy-budget"):
            sp.train(METHODS[0], cohort, rounds=100, checkpoint=tmp_path / "run")
        spent.append((cohort.account.total, cohort.privacy.worst))
    assert spent[0] == spent[1]
    assert 1.5 < spent[0][1] <= 2.0
