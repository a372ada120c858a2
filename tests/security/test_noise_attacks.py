"""Attack the noise of honest runs, and audit what is claimed: no attack may show more than ε.

Bounds on rates of guesses are wrong with probability 1e-6 each (`noise_attacks.DOUBT`), so a
correct mechanism fails these tests once in 10⁵ draws of its secrets. The numbers of clients are
such that an audit that has to find something finds it with the same certainty: its margin is at
least five standard errors.
"""

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

from scaffpd.privacy.accountant import epsilon, least_noise

DELTA = 1e-5
ATTACKS = [by_residues, by_losses, by_likelihood]
pytest.importorskip("dp_accounting")


@pytest.fixture(scope="module")
def run():
    """An honest run of 200 clients, half of which have the record, at a claimed ε = 1."""
    model = private(1.0, rounds=10)
    return model, watched(model, 200, rounds=10)


def test_the_attack_sees_through_floating_point_noise(run):
    """Without this the tests below would prove nothing: every guess is right, at a claimed ε =
    1."""
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
    # ε = 1 and δ = 1e-5 are a shift μ of 0.25: 55 % of the guesses are right, and 70 % once in 10⁵
    assert found.right <= 140


def test_the_audit_stays_below_what_is_claimed_and_notices_noise_that_is_too_small():
    """The best test shows a third of the shift that ε allows, and all of it where noise is half.

    ε = 6 is a shift μ of 1.31. Guesses are right with probability Φ(μ/2) or a little less, because
    losses that are cut off at 0 or B say nothing; the bounds of 2,000 guesses are 4.8 standard
    errors away. So μ is shown to be above 0.80 ± 0.06, and above 1.98 ± 0.07 where noise is half.
    """
    claimed = 6.0
    allowed = 1 / least_noise(claimed, DELTA)
    model = private(claimed, 2)
    seen = watched(model, 2000, 2)
    for attack in ATTACKS:
        found = judged(attack, model, seen)
        assert max(found.epsilon(DELTA), found.sharper(DELTA)) <= claimed
    assert judged(by_likelihood, model, seen).shift() > 0.35 * allowed
    less = private(claimed, 2, weaker=2.0)
    assert judged(by_likelihood, less, watched(less, 2000, 2)).sharper(DELTA) > claimed


@pytest.mark.long
def test_sums_with_shared_noise_hide_a_record_from_a_server_with_helpers():
    """One helper, where one was allowed for, learns no more than ε; three, where none was, learn
    more.

    z = 0.7 is a shift of 1.43, of which 600 sums show 0.93 ± 0.08; three helpers leave the victim
    half of the noise, which shows a shift of 2.2 ± 0.11.
    """
    z = 0.7
    claimed = epsilon(z**-2, DELTA)
    found = from_sums(z, 600, colluding=1, helpers=1)
    assert found.sharper(DELTA) <= claimed
    assert found.shift() > 0.3 / z
    assert from_sums(z, 600, colluding=0, helpers=3).sharper(DELTA) > claimed
