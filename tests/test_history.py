"""The history of many clients: their spread by default, every one of them on request."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.training import history as table
from scaffpd.training.history import LEVELS, SPREAD


def cohort(clients: int = 40) -> sp.Cohort:
    random = np.random.default_rng(0)
    pairs = [(random.standard_normal((5, 3)), random.standard_normal(5)) for _ in range(clients)]
    return sp.Cohort(pairs, sp.Linear("squared", l2=1e-2))


FEW = sp.FedAvg(local_steps=2, clients_per_round=4, local_rate=0.05)


def test_the_spread_is_that_of_the_losses_and_weights() -> None:
    whole = sp.train(FEW, cohort(), rounds=12, every_client=True).history
    spread = sp.train(FEW, cohort(), rounds=12, every_client=False).history
    known = np.isfinite(spread["loss max"])
    assert known[[0, 10, 12]].all()  # every 10 = 2 · 40/(4 · 2) rounds, and the end
    assert known.sum() == 3
    for name, level in LEVELS.items():
        np.testing.assert_allclose(
            spread[f"loss {name}"][known], np.quantile(whole.losses, level, 1)[known]
        )
        np.testing.assert_allclose(spread[f"weight {name}"], np.quantile(whole.weights, level, 1))
    np.testing.assert_allclose(spread["loss mean"][known], whole.losses.mean(1)[known])
    np.testing.assert_array_equal(spread.first_losses, whole.losses[0])
    np.testing.assert_array_equal(spread.last_losses, whole.losses[-1])


def test_looking_up_less_often_changes_no_model() -> None:
    whole, spread = (
        sp.train(FEW, cohort(), rounds=12, every_client=kept) for kept in (True, False)
    )
    np.testing.assert_array_equal(whole.x, spread.x)
    np.testing.assert_array_equal(whole.weights, spread.weights)


def test_methods_that_need_losses_have_them_in_every_round() -> None:
    history = sp.train(
        sp.ScaffPD(sp.ChiSquare(0.1)), cohort(), rounds=5, every_client=False
    ).history
    assert np.isfinite(history["loss max"]).all()


def test_beyond_many_clients_the_spread_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaffpd.training.loop.MANY", 30)
    assert not sp.train(FEW, cohort(), rounds=1).history.every_client
    assert sp.train(FEW, cohort(30), rounds=1).history.every_client
    assert table.MANY == 10_000


def test_single_clients_are_refused_in_a_sentence() -> None:
    history = sp.train(FEW, cohort(), rounds=3, every_client=False).history
    for ask in (lambda: history.losses, lambda: history.weights, lambda: history["loss[client-3]"]):
        with pytest.raises(sp.InputError, match="every_client=True"):
            ask()


def test_memory_does_not_grow_with_rounds_times_clients() -> None:
    history = sp.train(FEW, cohort(), rounds=30, every_client=False).history
    assert len(history) == 31
    assert len(history._clients) == 3


def test_csv_has_the_spread(tmp_path: Path) -> None:
    history = sp.train(FEW, cohort(), rounds=3, every_client=False).history
    history.to_csv(tmp_path / "rounds.csv")
    with (tmp_path / "rounds.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == history.columns
    assert set(SPREAD) < set(rows[0])
    assert float(rows[0]["loss 95 %"]) == history["loss 95 %"][0]


def test_a_resumed_run_has_the_same_history(tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    sp.train(FEW, cohort(), rounds=7, checkpoint=file, every_client=False)
    parts = sp.train(FEW, cohort(), rounds=12, checkpoint=file, every_client=False)
    whole = sp.train(FEW, cohort(), rounds=12, every_client=False)
    np.testing.assert_array_equal(parts.x, whole.x)
    np.testing.assert_array_equal(parts.history["weight max"], whole.history["weight max"])
    np.testing.assert_array_equal(
        parts.history["loss max"][[0, 10, 12]], whole.history["loss max"][[0, 10, 12]]
    )
    np.testing.assert_array_equal(parts.history.last_losses, whole.history.last_losses)


def test_divergence_is_seen_where_losses_are_not_looked_up() -> None:
    steep = sp.FedAvg(local_steps=1, clients_per_round=4, local_rate=1e30)
    result = sp.train(steep, cohort(), rounds=100, every_client=False)
    assert result.status == "diverged"
    assert np.isfinite(result.x).all()


def test_truncated_rows_are_gone() -> None:
    result = sp.train(FEW, cohort(), rounds=4, every_client=False)
    history = result.history
    history.truncate(4)
    assert len(history) == 4 == len(history["loss max"])
    assert history.last_losses.shape == (40,)
