"""The demo's twelve stations: numbers by numpy alone, and words that follow from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd import cli
from scaffpd.data import beijing_air
from scaffpd.program import demo
from scaffpd.report.page.figures import figures
from scaffpd.report.page.verdict import QUESTIONS, answers, verdict
from scaffpd.report.record import RunRecord
from scaffpd.study import path
from scaffpd.study.verdict import ALONE, AVERAGE, PERSONAL


@pytest.fixture(scope="module")
def study():
    return demo.stations()


def test_the_average_model_is_numpys(study):
    """min_x Σ_i (1/N) mean (⟨a, x⟩ − y)² + ½ Σ_j l2_j x_j² solved by its normal equations."""
    one = study.own.joining
    silos = beijing_air(4, 30, 0)
    mine = [name != "rain" for name in silos.features]
    train, test = (
        [(np.hstack([X[:, mine], np.ones((len(X), 1))]), y) for X, y in part]
        for part in (silos.train, silos.test)
    )
    pairs = [(A[:, :-1], y) for A, y in train]
    l2 = sp.Cohort(pairs, sp.Linear("squared", "auto", intercept=True)).model.l2
    H = sum(2 * A.T @ A / len(y) for A, y in train) / 12 + np.diag(l2)
    x = np.linalg.solve(H, sum(2 * A.T @ y / len(y) for A, y in train) / 12)
    errors = [((A @ x - y) ** 2).mean() for A, y in test]
    np.testing.assert_allclose(one.loss[one.models.index(AVERAGE)], errors, rtol=2e-3)
    assert sorted(trained for trained, _ in one.rows)[:4] == [30] * 4
    assert sum(name.endswith("(new)") for name in one.names) == 4


def test_weeks_of_the_test_year_count_once(study):
    weeks = [-(-held // 7) for _, held in study.own.joining.rows]
    assert (study.own.joining.evidence.blocks == weeks).all()
    assert "blocks of 7 held-out rows" in study.own.joining.method


def test_new_stations_gain_from_the_others(study):
    loss = dict(zip(study.own.joining.models, study.own.joining.loss, strict=True))
    new = np.array([trained == 30 for trained, _ in study.own.joining.rows])
    for model in (AVERAGE, PERSONAL):
        assert loss[model][new].mean() < 0.8 * loss[ALONE][new].mean()


def test_the_folder_and_the_words(study, tmp_path):
    demo.write_stations(study, tmp_path, "scaffpd demo")
    run = RunRecord.read(tmp_path)
    assert (run.kind, run.word) == ("demo", "station")
    late = study.own.newcomers
    assert late.points[1].worst_20 > late.points[0].worst_20  # a table where it does not matter
    assert " ".join(verdict(run)) == f"{study.own.joining} {' '.join(late.sentences('station'))}"
    said = answers(run)
    assert list(said) == [QUESTIONS[key] for key in ("who", "much", "fair", "late", "sure")]
    drawn = {figure.name: figure for figure in figures(run)}
    assert drawn.keys() >= {"joining", "certificate"}
    assert (tmp_path / "joining.csv").exists()


def test_what_is_claimed_is_what_the_chart_shows(study, tmp_path):
    """All new stations clearly gain, and no other does."""
    demo.write_stations(study, tmp_path, "scaffpd demo")
    run = RunRecord.read(tmp_path)
    changes = next(f for f in figures(run) if f.name == "joining").data["joining-changes"]
    new = {name for name in run.clients if name.endswith("(new)")}
    assert {row["client"] for row in changes if row["tone"] == "gain"} == new
    assert not [row for row in changes if row["tone"] == "loss"]
    assert run.joining.recommendation == run.joining.shown
    assert "4 of 12 stations clearly gain, none clearly loses" in run.joining.compared(
        run.task, run.word
    )
    said = answers(run)
    assert all(name in said[QUESTIONS["who"]] for name in new)
    assert "Clear losses: nobody. Within noise: 8 of 12." in said[QUESTIONS["who"]]
    assert said[QUESTIONS["sure"]].startswith(f"“{run.joining.recommendation}” is the best")


def test_the_command_prints_the_sentence_and_fits_a_narrow_terminal(
    monkeypatch, tmp_path, capsys, study
):
    monkeypatch.setattr(demo, "stations", lambda *_: study)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["demo", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = out[: out.index("Report:")].splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 25
    first = "Use personal models: joining pays (shown)."
    assert first in " ".join(out.split())
    page = (tmp_path / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert page.index(first) < page.index('id="figure-joining"')
    assert page.count(first) == 1
    assert cli.run(["demo", "--quiet", "--out", str(tmp_path / "again")]) == 0
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert {file.name for file in (tmp_path / "again").iterdir()} == {
        file.name for file in tmp_path.iterdir() if file.is_file()
    }
    for name in ("clients.csv", "joining.csv"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_phases_threads_and_interruptions(monkeypatch):
    seen = []
    threads = torch.get_num_threads()
    phases = []
    monkeypatch.setattr(demo, "newcomers", lambda *_, phase, **__: phase(0.0))
    monkeypatch.setattr(
        torch, "set_num_threads", lambda n, real=torch.set_num_threads: (seen.append(n), real(n))
    )
    monkeypatch.setattr(demo, "joining", lambda *_, **__: None)
    demo.stations(phase=lambda *said: phases.append(said[0]))
    assert len(set(phases)) == 5
    assert seen == [1, threads]
    real = path.train
    monkeypatch.setattr(
        path,
        "train",
        lambda *a, **k: replace(real(*a[:2], 1, *a[3:], **k), status=sp.Status.INTERRUPTED),
    )
    with pytest.raises(KeyboardInterrupt):
        demo.stations()
    assert torch.get_num_threads() == threads
