"""A run that is resumed has the same digits and forgets nothing of what was spent."""

from __future__ import annotations

import numpy as np
import pytest
from private_cases import clients, linear

import scaffpd as sp

CHI = sp.ChiSquare(rho=0.5)
METHODS = [
    sp.ScaffPD(CHI, local_steps=3),
    sp.ScaffPD(CHI, local_steps=2, batch_size=4),
    sp.Scaffold(local_steps=2, batch_size=4, clients_per_round=2),
    sp.DRFA(CHI, local_steps=3),
    sp.fair(CHI, local_steps=2),
]


def cohort(secret, budget=None):
    return sp.Cohort(
        clients(), sp.Private(linear(), noise=5.0, radius=2.0, secret=secret, budget=budget)
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: repr(method)[:40])
def test_a_resumed_run_is_the_same_run_at_the_same_price(method, tmp_path):
    whole = sp.train(method, cohort(1), rounds=9, progress=False)
    sp.train(method, cohort(1), rounds=4, progress=False, checkpoint=tmp_path / "run")
    resumed = sp.train(method, cohort(1), rounds=9, progress=False, checkpoint=tmp_path / "run")
    assert np.array_equal(whole.x, resumed.x)
    assert np.array_equal(whole.history.losses, resumed.history.losses)
    assert np.array_equal(whole.privacy.epsilon, resumed.privacy.epsilon)


def test_with_another_secret_the_questions_that_are_asked_again_are_paid_again(tmp_path):
    """x⁰ and the last point are asked about anew: two gradients and two losses more, by other noise.

    Fixed steps are taken whatever the noise is, so that the last point is another one than x⁰.
    """
    method = sp.ScaffPD(CHI, local_steps=3, steps=sp.Fixed(tau=0.3, sigma=0.1))
    first = cohort(1)
    before = sp.train(method, first, rounds=4, progress=False, checkpoint=tmp_path / "run")
    assert np.any(before.x != first.start().numpy())
    second = cohort(2)
    result = sp.train(method, second, rounds=4, progress=False, checkpoint=tmp_path / "run")
    assert first.account.total == 3 * (2 * 5 + 2 * 4)
    assert second.account.total == first.account.total + 3 * 4
    assert result.privacy.worst > first.privacy.worst


class Rejecting(sp.Fixed):
    """No step is taken."""

    def judge(self, state, trial):
        return state, False


def test_one_question_with_another_secret_is_paid_again_once(tmp_path):
    """Of a run that has stayed at x⁰ that is the last point: one gradient and one loss more."""
    method = sp.ScaffPD(CHI, local_steps=3, steps=Rejecting(tau=0.3, sigma=0.1))
    first = cohort(1)
    second = cohort(2)
    for asked in (first, second):
        result = sp.train(method, asked, rounds=4, progress=False, checkpoint=tmp_path / "run")
        assert np.array_equal(result.x, first.start().numpy())
    assert second.account.total == first.account.total + 3 * 2
    assert second.privacy.worst > first.privacy.worst


def test_what_was_spent_before_a_budget_ran_out_is_in_the_checkpoint(tmp_path):
    """The refused round is not finished, but what it had released by then counts."""
    method = sp.ScaffPD(CHI, local_steps=4)
    limited = cohort(1, budget=2.0)
    with pytest.raises(sp.InputError, match="budget"):
        sp.train(method, limited, rounds=100, progress=False, checkpoint=tmp_path / "run")
    again = cohort(1, budget=2.0)
    with pytest.raises(sp.InputError, match="budget"):
        sp.train(method, again, rounds=100, progress=False, checkpoint=tmp_path / "run")
    assert again.account.total == limited.account.total
    assert 1.5 < again.privacy.worst <= 2.0
    assert np.array_equal(again.privacy.epsilon, limited.privacy.epsilon)


def test_two_runs_on_one_cohort_add_up():
    method = sp.FedAvg(local_steps=2, local_rate=0.1)
    both = cohort(1)
    one = sp.train(method, both, rounds=3, progress=False).privacy.worst
    same = sp.train(method, both, rounds=3, progress=False).privacy.worst
    more = sp.train(method, both, rounds=3, progress=False, x0=both.start() + 1).privacy.worst
    assert one == same < more
