"""`newcomers`: leave-one-out by numpy, the nested choice by a naive loop, and simulated truth."""

import json

import numpy as np
import pytest

import scaffpd as sp
from cases.refusals import refuses
from cases.runs import asked, patients, prepared
from scaffpd import cli
from scaffpd.report.page.figures import figures
from scaffpd.report.record import RunRecord
from scaffpd.study.newcomers import LeftOut, Newcomers
from scaffpd.study.verdict import Gain
from scaffpd.training.metrics import Spread

L2 = [0.05] * 3 + [1e-6]
MODEL = sp.Linear("squared", L2, True)
GOALS = {"average": sp.Average(), "fair": sp.ChiSquare(0.2), "worst": sp.Agnostic()}


def drawn(rng, clients, rows=25, apart=0.6):
    common = rng.normal(size=3)
    found = []
    for _ in range(clients):
        X = rng.normal(size=(rows, 3))
        found.append((X, X @ (common + apart * rng.normal(size=3)) + rng.normal(size=rows)))
    return found


def losses(pairs, goal, left, test):
    """Train anew on all but some, and return the losses of others."""
    rest = [pair for i, pair in enumerate(pairs) if i not in left]
    x = sp.train(sp.fair(goal), sp.Cohort(rest, MODEL), tol=1e-7, progress=False).x
    return [((X @ x[:-1] + x[-1] - y) ** 2).mean() for X, y in (pairs[i] for i in test)]


def ridge(pairs):
    """min_x Σ (1/N) mean (⟨a, x⟩ − y)² + ½ Σ l2_j x_j² by its normal equations."""
    H, b = np.diag(L2), 0.0
    for X, y in pairs:
        A = np.column_stack([X, np.ones(len(X))])
        H = H + 2 * A.T @ A / len(y) / len(pairs)
        b = b + 2 * A.T @ y / len(y) / len(pairs)
    return np.linalg.solve(H, b)


def test_every_client_is_judged_by_models_that_do_not_know_it():
    pairs = drawn(np.random.default_rng(0), 5)
    found = sp.newcomers(sp.Cohort(pairs, MODEL), GOALS)
    for i, (X, y) in enumerate(pairs):
        x = ridge([pair for k, pair in enumerate(pairs) if k != i])
        wanted = ((X @ x[:-1] + x[-1] - y) ** 2).mean()
        assert found.points[0].losses[i] == pytest.approx(wanted, rel=1e-3)
    # the choice for i: every other client left out beside it, a knee of means and worst fifths
    own = []
    for i in range(5):
        others = [j for j in range(5) if j != i]
        table = [
            np.array([losses(pairs, goal, {i, j}, [j])[0] for j in others])
            for goal in GOALS.values()
        ]
        spreads = [Spread.of([""] * 4, one, upwards=False) for one in table]
        gain = [
            spreads[0].worst_20 - s.worst_20 - max(s.mean - spreads[0].mean, 0) for s in spreads
        ]
        best = int(np.argmax(gain)) if max(gain) > 0.002 * spreads[0].worst_20 else 0
        own.append(found.points[best].losses[i])
    base = np.array(found.points[0].losses)
    assert found.mean.value == pytest.approx(1 - np.mean(own) / base.mean())
    worst = [np.sort(one)[-1:].mean() for one in (np.array(own), base)]
    assert found.gain.value == pytest.approx(1 - worst[0] / worst[1])
    assert found.gain.low <= found.gain.value <= found.gain.high


def test_the_ridge_does_not_know_the_client_either():
    """A client whose rows would shrink everything changes nothing for itself."""
    pairs = drawn(np.random.default_rng(1), 5)
    model = sp.Linear("squared", "auto", True)
    goals = {"average": sp.Average()}
    found = sp.newcomers(sp.Cohort(pairs, model), goals)
    rest = sp.Cohort(pairs[1:], model)
    x = sp.train(sp.fair(sp.Average()), rest, tol=1e-9, progress=False).x
    X, y = pairs[0]
    assert found.points[0].losses[0] == pytest.approx(
        ((X @ x[:-1] + x[-1] - y) ** 2).mean(), rel=1e-3
    )
    assert found.recommendation == "average"
    assert "15 are needed" in str(found)


def test_several_clients_at_once_where_there_are_many(monkeypatch):
    monkeypatch.setattr("scaffpd.study.newcomers.FOLDS", 3)
    pairs = drawn(np.random.default_rng(2), 5, rows=12)
    found = sp.newcomers(sp.Cohort(pairs, MODEL), sp.CVaR(0.5), seed=4)
    assert found.clients == 5
    assert [len(one.losses) for one in found.points] == [5] * 5
    assert found.points[0].name == "average"
    assert found.points[-1].name == "worst case"
    again = sp.newcomers(sp.Cohort(pairs, MODEL), sp.CVaR(0.5), seed=4)
    assert again == found


@pytest.mark.long
def test_clients_that_are_alike_need_no_fair_model():
    """Of exchangeable clients what is claimed is what holds for new ones, within noise."""
    gaps = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        common = rng.normal(size=3)
        some = [(X, X @ common + rng.normal(size=20)) for X in rng.normal(size=(8, 20, 3))]
        new = [(X, X @ common + rng.normal(size=20)) for X in rng.normal(size=(400, 20, 3))]
        found = sp.newcomers(sp.Cohort(some, MODEL), GOALS)
        x, y = (
            sp.train(sp.fair(GOALS[name]), sp.Cohort(some, MODEL), tol=1e-6, progress=False).x
            for name in ("average", found.best)
        )
        level = [
            np.sort([((X @ w[:-1] + w[-1] - t) ** 2).mean() for X, t in new])[-80:].mean()
            for w in (x, y)
        ]
        gaps.append(found.gain.value - (1 - level[1] / level[0]))
    assert abs(np.mean(gaps)) < 0.05


def test_refusals():
    pairs = drawn(np.random.default_rng(3), 4)
    with refuses("newcomers-not-linear"):
        sp.newcomers(sp.Cohort(pairs, sp.Personal(MODEL, 1.0)))
    with refuses("newcomers-too-few"):
        sp.newcomers(sp.Cohort(pairs[:2], MODEL))
    times = [(X, np.column_stack([np.exp(y), np.ones(len(y))])) for X, y in pairs]
    with refuses("newcomers-cox"):
        sp.newcomers(sp.Cohort(times, sp.Linear("cox")))


@pytest.mark.long
def test_losses_of_zero_are_no_gain():
    goals = {"average": sp.Average(), "fair": sp.ChiSquare(0.2)}
    found = sp.newcomers(sp.Cohort([(np.eye(3), np.zeros(3))] * 3, MODEL), goals)
    assert found.gain == found.mean == Gain(0.0, 0.0, 0.0)


def test_sentences_where_fields_disagree():
    """The first objective is the average's by any name; others are chosen in single folds."""
    points = [LeftOut("mean", 1.0, 2.0), LeftOut("fair", 1.0, 2.0)]
    none = Gain(0.0, 0.0, 0.0)
    for mean, same in ((none, True), (Gain(0.01, 0.0, 0.03), False)):
        said = str(Newcomers(points, "mean", none, mean, 20))
        assert ("every time" in said) is same
    for best in ("mean", "fair"):
        found = Newcomers(points, best, Gain(0.1, 0.05, 0.2), none, 20)
        assert found.recommendation == best
        assert ("no fair one is shown" in str(found)) is False
        assert ("use the fair model" in str(found)) is (best == "fair")


def test_a_table_is_encoded_without_the_clients_that_are_left_out(tmp_path):
    file = patients(tmp_path / "t.csv")
    whole, less = (prepared(asked(file), left=left) for left in ((), (1,)))
    gone = whole.names[1]
    assert less.names == whole.names
    assert not np.array_equal(whole.encoding.mean, less.encoding.mean)
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if not line.startswith(f"{gone},")))
    alone = prepared(asked(file))
    # the thresholds and scales of the others, as if the client had never been there
    assert less.columns == alone.columns
    np.testing.assert_allclose(less.encoding.mean, alone.encoding.mean)
    np.testing.assert_allclose(less.encoding.deviation, alone.encoding.deviation)


def test_a_path_asks_for_new_sites(tmp_path, capsys):
    file = patients(tmp_path / "t.csv")
    words = f"path {file} --client hospital --target outcome --curves off --pairs 0 --points 1"
    folder = tmp_path / "run"
    assert cli.run([*words.split(), "--new-sites", "--out", str(folder), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert "joins later cannot be said from 3 clients" in " ".join(values["verdict"])
    run = RunRecord.read(folder)
    assert run.newcomers.clients == 3
    (figure,) = [one for one in figures(run) if one.name == "newcomers"]
    points = figure.data["newcomers"]
    assert [row["model"] for row in points] == [one.name for one in run.newcomers.points]
    assert not any(row["knee"] for row in points)  # nothing is told
    assert (folder / "newcomers.csv").exists()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert 'id="figure-newcomers"' in page
    assert "15 are needed" in page
