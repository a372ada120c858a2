"""The history of many clients: its ends by default, every row on request."""

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.training import history as table


def cohort(clients=40):
    random = np.random.default_rng(0)
    pairs = [(random.standard_normal((5, 3)), random.standard_normal(5)) for _ in range(clients)]
    return sp.Cohort(pairs, sp.Linear("squared", l2=1e-2))


FEW = sp.FedAvg(local_steps=2, clients_per_round=4, local_rate=0.05)


def test_single_clients_are_those_of_the_start_and_of_the_end():
    whole = sp.train(FEW, cohort(), rounds=12, every_client=True).history
    ends = sp.train(FEW, cohort(), rounds=12, every_client=False).history
    np.testing.assert_array_equal(ends.first_losses, whole.losses[0])
    np.testing.assert_array_equal(ends.last_losses, whole.losses[-1])
    np.testing.assert_array_equal(ends["exchanges"], whole["exchanges"])


def test_methods_that_need_losses_have_them_in_every_round():
    seen: list[bool] = []
    sp.train(
        sp.ScaffPD(sp.ChiSquare(0.1)),
        cohort(),
        rounds=5,
        every_client=False,
        callbacks=[lambda info: seen.append(bool(np.isfinite(info.state.losses).all()))],
    )
    assert seen == [True] * 5


def test_beyond_many_clients_the_ends_are_the_default(monkeypatch):
    monkeypatch.setattr("scaffpd.training.loop.MANY", 30)
    assert not sp.train(FEW, cohort(), rounds=1).history.every_client
    assert sp.train(FEW, cohort(30), rounds=1).history.every_client
    assert table.MANY == 10_000


def test_single_clients_are_refused_in_a_sentence():
    history = sp.train(FEW, cohort(), rounds=3, every_client=False).history
    for ask in (lambda: history.losses, lambda: history.weights, lambda: history["loss[client-3]"]):
        with pytest.raises(sp.InputError, match="every_client=True"):
            ask()


def test_memory_does_not_grow_with_rounds_times_clients():
    history = sp.train(FEW, cohort(), rounds=30, every_client=False).history
    assert len(history) == 31
    assert len(history._clients) == 3


def test_a_resumed_run_has_the_same_history(tmp_path):
    file = tmp_path / "run.npz"
    sp.train(FEW, cohort(), rounds=7, checkpoint=file, every_client=False)
    parts = sp.train(FEW, cohort(), rounds=12, checkpoint=file, every_client=False)
    whole = sp.train(FEW, cohort(), rounds=12, every_client=False)
    np.testing.assert_array_equal(parts.x, whole.x)
    np.testing.assert_array_equal(parts.history["exchanges"], whole.history["exchanges"])
    np.testing.assert_array_equal(parts.history.first_losses, whole.history.first_losses)
    np.testing.assert_array_equal(parts.history.last_losses, whole.history.last_losses)


def test_divergence_is_seen_where_losses_are_not_looked_up():
    steep = sp.FedAvg(local_steps=1, clients_per_round=4, local_rate=1e30)
    result = sp.train(steep, cohort(), rounds=100, every_client=False)
    assert result.status == "diverged"
    assert np.isfinite(result.x).all()


def test_truncated_rows_are_gone():
    result = sp.train(FEW, cohort(), rounds=4, every_client=False)
    history = result.history
    history.truncate(4)
    assert len(history) == 4 == len(history["exchanges"])
    assert history.last_losses.shape == (40,)
