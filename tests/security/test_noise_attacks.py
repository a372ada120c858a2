"""Attack the noise of honest runs, and audit what is claimed: no attack may show more than ε."""

from __future__ import annotations

import pytest
from noise_attacks import (
    by_likelihood,
    by_losses,
    by_residues,
    from_sums,
    in_floating_point,
    judged,
    private,
    watched,
)

from scaffpd.privacy.accountant import Release, epsilon

DELTA = 1e-5
ATTACKS = [by_residues, by_losses, by_likelihood]
pytest.importorskip("dp_accounting")


@pytest.fixture(scope="module")
def run():
    """An honest run of 200 clients, half of which have the record, at a claimed ε = 1."""
    model = private(1.0, rounds=10)
    return model, watched(model, 200, rounds=10)


def test_the_attack_sees_through_floating_point_noise(run):
    """Without this the tests below would prove nothing: every guess is right, at a claimed ε = 1."""
    model, seen = run
    once = in_floating_point(model, seen, 200)
    assert judged(by_residues, model, once).right == 200
    assert judged(by_losses, model, once).right > 150
    assert judged(by_residues, model, once).epsilon(DELTA) > 1.5


@pytest.mark.parametrize("attack", ATTACKS)
def test_honest_runs_show_no_more_than_the_claimed_epsilon(run, attack):
    model, seen = run
    found = judged(attack, model, seen)
    assert found.epsilon(DELTA) <= 1.0
    assert found.right < 130  # of 200; e/(1 + e) of them, 146, at the very most


CLAIMED = 6.0
AUDITED = 2


@pytest.mark.parametrize(
    ("clients", "least", "weaker"),
    [(300, 0.5, 3.0), pytest.param(6000, 3.5, 2.0, marks=pytest.mark.long)],
    ids=["small", "full"],
)
def test_the_audit_stays_below_what_is_claimed_and_notices_noise_that_is_too_small(
    clients, least, weaker
):
    """The best test there is comes near ε and never above it; with a half or a third of the noise it is above."""
    model = private(CLAIMED, AUDITED)
    seen = watched(model, clients, AUDITED)
    for attack in ATTACKS:
        found = judged(attack, model, seen)
        assert max(found.epsilon(DELTA), found.sharper(DELTA)) <= CLAIMED
    assert judged(by_likelihood, model, seen).sharper(DELTA) > least
    less = private(CLAIMED, AUDITED, weaker=weaker)
    assert judged(by_likelihood, less, watched(less, clients, AUDITED)).sharper(DELTA) > CLAIMED


@pytest.mark.parametrize(
    ("releases", "near"),
    [(400, 1.0), pytest.param(3000, 4.0, marks=pytest.mark.long)],
    ids=["small", "full"],
)
def test_sums_with_shared_noise_hide_a_record_from_a_server_with_helpers(releases, near):
    """One helper, where one was allowed for, learns no more than ε; three, where none was, learn more.

    Which noise is drawn changes with every setting that `Private` has. With 120 sums the attack shows nothing for six
    secrets of twenty; with 400 it shows an ε above 2 for each of them.
    """
    z = 0.7
    claimed = epsilon({Release(z): 1}, DELTA)
    found = from_sums(z, releases, colluding=1, helpers=1)
    assert near < found.sharper(DELTA) <= claimed
    if releases > 1000:
        assert from_sums(z, releases, colluding=0, helpers=3).sharper(DELTA) > claimed


@pytest.mark.long
def test_two_thousand_guesses():
    """The audit's own numbers: 2,000 of 2,000 once, from losses alone nearly as many, and now none that counts."""
    model = private(1.0, rounds=40)
    seen = watched(model, 2000, rounds=40)
    once = in_floating_point(model, seen, 2000)
    assert judged(by_residues, model, once).right == 2000
    assert judged(by_losses, model, once).right > 1900
    for attack in ATTACKS:
        found = judged(attack, model, seen)
        assert max(found.epsilon(DELTA), found.sharper(DELTA)) <= 1.0
        assert found.right < 1200
