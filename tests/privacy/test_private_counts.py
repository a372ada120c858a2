"""Noised counts for thresholds: what a record moves, what they cost, and what they are good for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from cases.refusals import refuses
from cases.runs import Nobody, asked, trained
from scaffpd.data.curves import counted, thresholds
from scaffpd.privacy.accountant import Account, epsilon
from scaffpd.privacy.counts import (
    BITS,
    SHARE,
    SUMS,
    CountNoise,
    PrivateCounting,
    PrivateCounts,
    spent_on_counts,
)
from scaffpd.program.prepare import prepare
from scaffpd.report.record import RunRecord
from scaffpd.settings.run import RunConfig
from scaffpd.program.train import noise_secret

SECRET = bytes(range(32))
numbers = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -0.5, 37.0, float("nan")])


def sorted_columns(rows):
    """Columns of numbers without their gaps, as clients count them."""
    return [np.sort(column[~np.isnan(column)]) for column in np.asarray(rows, float).T]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), columns=st.integers(1, 5), rows=st.integers(1, 12))
def test_a_record_moves_all_counts_by_the_root_of_the_columns_at_most(data, columns, rows):
    """Whatever it holds and whatever the edges are, gaps and ties among them."""
    table = data.draw(
        st.lists(
            st.lists(numbers, min_size=columns, max_size=columns), min_size=rows, max_size=rows
        )
    )
    gone = data.draw(st.integers(0, rows - 1))
    edges = [
        np.unique(data.draw(st.lists(numbers.filter(lambda v: v == v), max_size=6)))
        for _ in range(columns)
    ]
    whole, rest = (
        counted(sorted_columns(part), edges)[0]
        for part in (table, np.delete(np.reshape(table, (rows, columns)), gone, axis=0))
    )
    moved = np.linalg.norm(whole - rest)
    assert moved <= np.sqrt(columns) + 1e-12
    noise = CountNoise(3.0, columns, 4)
    assert noise.sigma >= noise.z * np.sqrt(columns) * 2**BITS  # z times the most it can move


def test_noise_has_its_size_is_repeated_with_the_question_and_changes_with_the_rows():
    noise = CountNoise(3.0, 2, 1)
    edges = [np.arange(2000.0), np.arange(1000.0, 1500)]
    rows = [np.array([5.0, 700.5]), np.array([1200.0])]
    counts = PrivateCounts(rows, noise, SECRET, "a")
    seen = counts(edges)
    np.testing.assert_array_equal(counts(edges), seen)
    left = seen / 2**BITS - counted(rows, edges)[0]
    # 2502 draws: the deviation is off by 1.4 % a sigma, the mean by 0.085
    assert left.std() == pytest.approx(3 * np.sqrt(2), rel=0.1)
    assert abs(left.mean()) < 0.5
    for other in (
        PrivateCounts([rows[0][:1], rows[1]], noise, SECRET, "a"),
        PrivateCounts(rows, noise, SECRET[::-1], "a"),
        PrivateCounts(rows, noise, SECRET, "b"),
    ):
        assert np.mean(other(edges) == seen) < 0.01
        assert other.releases[0].mark != counts.releases[0].mark
    account = Account(("a",), 1e-5, None)
    account.charge(counts.releases)
    assert account.sums[0] == pytest.approx(1 / 9)  # one question, asked twice
    counts([edges[0], edges[1][:5]])
    account.charge(counts.releases)
    assert account.sums[0] == pytest.approx(2 / 9)


def test_counts_cost_their_share_and_training_the_rest():
    counting = PrivateCounting(4.0, 1e-5, SECRET)
    random = np.random.default_rng(0)
    columns = [sorted_columns(random.normal(size=(50, 3))) for _ in range(2)]
    total, limits = counting(["a", "b"], columns)
    thresholds(3, total, limits)
    account = Account(("a", "b"), 1e-5, 4.0)
    account.charge(counting.releases)
    cost = spent_on_counts(4.0, 1e-5)
    assert len(counting.releases) == 2 * SUMS
    assert account.sums == pytest.approx([cost, cost])
    assert epsilon(cost / SHARE, 1e-5) == pytest.approx(4.0, rel=1e-6)
    method = sp.fair(sp.ChiSquare(0.1), local_steps=1)
    private = sp.Private.solved(sp.Linear("squared"), 4.0, method, 30, before=cost)
    asked = method.releases(30)
    left = asked.gradients / private.noise**2 + asked.losses / private.loss_noise**2
    assert epsilon(cost + left, 1e-5) == pytest.approx(4.0, rel=1e-6)
    with refuses("privacy-budget"):
        sp.Private.solved(sp.Linear("squared"), 4.0, method, 30, before=10.0)


def table(path, n=6000):
    """Two hospitals, and a risk that bends: high for the young and the old."""
    random = np.random.default_rng(1)
    lines = ["hospital,age,dose,outcome"]
    for k in range(n):
        age = random.integers(20, 80)
        risk = 0.85 if abs(age - 50) > 15 else 0.15
        lines.append(f"h{k % 2},{age},{random.normal():.2f},{int(random.random() < risk)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def curved(file):
    data = {"file": str(file), "client": "hospital", "target": "outcome", "curves": "on"}
    values = {"data": data, "privacy": {"epsilon": 4}, "training": {"splits": 0}}
    return RunConfig.of(values, file.name)


def test_a_private_run_with_curves_says_what_it_has_cost(tmp_path):
    file = table(tmp_path / "p.csv")
    config = curved(file)
    models, prepared, _ = trained(config, tmp_path / "run")
    found = RunRecord.read(tmp_path / "run").privacy
    assert 3.99 < found.epsilon <= 4
    assert any("noised counts" in remark for remark in prepared.remarks)
    assert any("l2 is 0.1:" in remark for remark in prepared.remarks)
    steps = [len(column.get("steps", ())) for column in prepared.schema["columns"]]
    assert all(2 <= number <= 7 for number in steps)
    assert models[0].test.score.min() > 0.7  # lines: .55
    # the same secret finds the same thresholds, another one others
    secret = noise_secret(tmp_path / "run")
    assert prepare(config, secret=secret).schema == prepared.schema
    plain, *_ = trained(asked(file, privacy={"epsilon": 4}), tmp_path / "lines")
    assert plain[0].test.score.min() < 0.65


def test_an_interrupted_run_goes_on_with_its_thresholds_and_its_account(tmp_path):
    config = curved(table(tmp_path / "p.csv", 1500))
    trained(config, tmp_path / "run", Nobody(after=5))
    early = RunRecord.read(tmp_path / "run").privacy.epsilon
    models, *_ = trained(config, tmp_path / "run")
    assert models[0].result.rounds == 30
    assert early < RunRecord.read(tmp_path / "run").privacy.epsilon <= 4


def test_an_estimator_with_curves_and_noise_pays_for_both():
    pytest.importorskip("sklearn")
    random = np.random.default_rng(2)
    X = random.uniform(-3, 3, size=(8000, 2))
    y = (np.abs(X[:, 0]) > 1.5).astype(int)
    clients = np.repeat(["a", "b"], 4000)
    options = {"epsilon": 3.0, "noise_seed": 5}
    line, curved = (
        sp.FairFederatedClassifier(curves=curves, **options).fit(X, y, clients=clients)
        for curves in (False, True)
    )
    for model in (line, curved):
        assert 2.99 < model.privacy_.worst <= 3.0
    assert curved.score(X, y) > 0.75 > line.score(X, y)
    with refuses("pairs-with-noise"):
        sp.FairFederatedClassifier(curves=True, pairs=2, **options).fit(X, y, clients=clients)
