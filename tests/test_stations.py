"""The demo's twelve stations: numbers by numpy alone, intervals by hand, words that follow from
them.
"""

from __future__ import annotations

import csv
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import scaffpd as sp
from scaffpd import cli
from scaffpd.data import beijing_air
from scaffpd.run import demo
from scaffpd.run import train as pipeline
from scaffpd.run.page.figures import figures
from scaffpd.run.page.verdict import QUESTIONS, answers
from scaffpd.run.record import RunRecord
from scaffpd.study.gains import ALONE, AVERAGE, FAIR, PERSONAL


@pytest.fixture(scope="module")
def study():
    return demo.stations(draws=2)


def test_the_average_model_is_numpys(study):
    """min_x Σ_i (1/N) mean (⟨a, x⟩ − y)² + ½ Σ_j l2_j x_j² solved by its normal equations."""
    for seed, one in zip(study.seeds, study.found, strict=True):
        silos = beijing_air(4, 40, seed)
        train, test = (
            [(np.hstack([X, np.ones((len(X), 1))]), y) for X, y in part]
            for part in (silos.train, silos.test)
        )
        l2 = sp.Cohort(silos.train, sp.Linear("squared", "auto", intercept=True)).model.l2
        H = sum(2 * A.T @ A / len(y) for A, y in train) / 12 + np.diag(l2)
        x = np.linalg.solve(H, sum(2 * A.T @ y / len(y) for A, y in train) / 12)
        errors = [((A @ x - y) ** 2).mean() for A, y in test]
        np.testing.assert_allclose(one.loss[one.models.index(AVERAGE)], errors, rtol=2e-3)
        assert sorted(trained for trained, _ in one.rows)[:4] == [40] * 4
        assert sum(name.endswith("(new)") for name in one.names) == 4


def test_gains_are_means_over_draws_with_both_sources_of_doubt(study):
    new = [np.array([n == 40 for n, _ in one.rows]) for one in study.found]
    values = []
    halves = []
    for own, one in zip(new, study.found, strict=True):
        C = one.evidence.covariances[own]
        weeks = np.array([-(-held // 7) for _, held in one.rows])[own]
        assert (one.evidence.blocks[own] == weeks).all()
        base = one.loss[1, own].mean()
        share = 1 - one.loss[4, own].mean() / base
        r = 1 - share
        errors = (r**2 * C[:, 1, 1] + C[:, 4, 4] - 2 * r * C[:, 1, 4]) / 16 / weeks
        freedom = errors.sum() ** 2 / (errors**2 / (weeks - 1)).sum()
        half = stats.t.ppf(0.975, freedom) * np.sqrt(errors.sum()) / base
        values.append(share)
        # the low end is that of the logarithm of the ratio
        halves.append((half + share - (1 - r * np.exp(half / r))) / 2)
    draws = stats.t.ppf(0.975, 1) * np.std(values, ddof=1) / np.sqrt(2)
    reach = np.sqrt(draws**2 + np.mean(np.square(halves)))
    found = study.gain(PERSONAL, ALONE, True)
    assert found == pytest.approx(
        (np.mean(values), np.mean(values) - reach, np.mean(values) + reach)
    )


def test_models_of_their_own_cost_the_least(study):
    costs = [study.cost(model) for model in (AVERAGE, FAIR, PERSONAL)]
    assert costs[2] < min(costs[:2])
    assert study.gain(PERSONAL, ALONE, True).value > 0.2


def test_the_folder_and_the_words(study, tmp_path):
    demo.write_stations(study, tmp_path, "scaffpd demo")
    run = RunRecord.read(tmp_path)
    assert (run.joining.sentence, *run.joining.details) == study.verdict
    assert run.joining.recommendation == study.recommendation
    said = answers(run)
    assert list(said) == [QUESTIONS[key] for key in ("who", "cost", "sure")]
    new = study.gain(study.shown, ALONE, True).pays == "yes"
    named = "The 4 new stations, clearly" if new else "Nobody clearly."
    assert said[QUESTIONS["who"]].startswith(named)
    assert study.gain(study.shown, ALONE, True).range in study.verdict[2]
    errors = [study.error(m, True) for m in (study.shown, ALONE)]
    assert errors[0] < errors[1]
    assert run.joining.shown == study.shown
    assert study.shown == study.recommendation or study.recommendation in ("alone", "constant")
    assert {figure.name for figure in figures(run)} > {"joining", "certificate"}
    assert "2 draws" in study.verdict[3]
    with (tmp_path / "draws.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 12 * 5
    assert {row["seed"] for row in rows} == {"0", "1"}
    assert (run.kind, run.verdict) == ("demo", list(study.verdict))


def test_the_command_prints_the_sentence_and_fits_a_narrow_terminal(
    monkeypatch, tmp_path, capsys, study
):
    monkeypatch.setattr(demo, "stations", lambda *_: study)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["demo", "--splits", "2", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out[: out.index("Report:")].splitlines())) <= 80
    assert study.verdict[0] in " ".join(out.split())
    page = (tmp_path / "report.html").read_text(encoding="utf-8").replace(" ", " ")
    assert page.index(study.verdict[0]) < page.index('id="figure-joining"')
    assert page.count(study.verdict[0]) == 1
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert cli.run(["demo", "--splits", "2", "--quiet", "--out", str(tmp_path / "again")]) == 0
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert {file.name for file in (tmp_path / "again").iterdir()} == {
        file.name for file in tmp_path.iterdir() if file.is_file()
    }
    for name in ("clients.csv", "draws.csv"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_progress_threads_and_interruptions(monkeypatch):
    seen = []
    threads = torch.get_num_threads()
    done = []
    monkeypatch.setattr(
        torch, "set_num_threads", lambda n, real=torch.set_num_threads: (seen.append(n), real(n))
    )
    found = types.SimpleNamespace(strength=1.0, models=("alone",), loss=np.ones((1, 12)))
    monkeypatch.setattr(demo, "joining", lambda *_, **__: found)
    demo.stations(draws=2, progress=done.append)
    assert done == [1, 2]
    assert seen == [1, threads]
    real = pipeline.train
    monkeypatch.setattr(
        pipeline,
        "train",
        lambda *a, **k: replace(real(*a[:2], 1, *a[3:], **k), status=sp.Status.INTERRUPTED),
    )
    with pytest.raises(KeyboardInterrupt):
        demo.stations(draws=2)
    assert torch.get_num_threads() == threads


def test_one_draw_is_refused():
    with pytest.raises(sp.InputError, match="stations needs at least two draws, got 1"):
        demo.stations(draws=1)
