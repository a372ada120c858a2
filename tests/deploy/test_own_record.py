"""What a silo measures on its own rows once the model is trained."""

from __future__ import annotations

import csv
from importlib import import_module

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from cases.silos import MODEL, RANGES, ROUGH, federation, run
from scaffpd.cli import run as cli
from scaffpd.report.page.verdict import verdict
from scaffpd.report.record import RunRecord
from scaffpd.settings.silo import SiloFile

PERSONAL = {MODEL: f"{MODEL}kappa = 5.0\n", **ROUGH}


def record_at(place):
    (folder,) = (SiloFile.read(place).folder / "runs").iterdir()
    return folder, RunRecord.read(folder)


@pytest.mark.parametrize(("replacing", "name"), [(ROUGH, "fair"), (PERSONAL, "personal")])
def test_a_silo_has_the_scores_of_its_own_rows(tmp_path, capsys, replacing, name):
    """AUC is that of what `silo predict` predicts, and joining is against the rows alone."""
    path, places = federation(tmp_path, replacing=replacing)
    outcome, _ = run(path, places)
    assert outcome.status == "converged"
    for own, place in places.items():
        folder, found = record_at(place)
        out = tmp_path / f"{own}.csv"
        model = str(folder / "model.safetensors")
        assert cli(["silo", "predict", str(place), model, "--out", str(out)]) == 0
        rows = [
            row for row in csv.DictReader(out.read_text().splitlines()) if row["held out"] == "True"
        ]
        truth = [row["target"] == "1" for row in rows]
        sure = np.array([float(row["probability"]) for row in rows])
        share = np.where([row["predicted"] == "1" for row in rows], sure, 1 - sure)
        mine = found.score_rows(name)[own]
        assert mine.rows == len(rows)
        assert mine.values["auc"] == pytest.approx(roc_auc_score(truth, share))
        assert found.clients == [*places]  # losses and scores of all are known to all
        assert found.coefficients
        assert list(found.joining.by_client) == [own]
        assert list(found.joining.by_client[own]) == ["constant", "alone", name]
        assert verdict(found)[1].startswith("Right of 100 held-out rows: ")
        assert cli(["report", str(folder)]) == 0
        assert verdict(found)[0] in (folder / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()


def test_a_silo_that_cannot_judge_its_rows_takes_part_all_the_same(tmp_path, monkeypatch, caplog):
    """Whether it can depends on its rows: nobody else may learn of it."""
    path, places = federation(tmp_path, replacing=ROUGH)
    silo = import_module("scaffpd.deploy.silo")
    real = silo.judged

    def fails(data, *more):
        return real(data, *more) if data.name != "va" else 1 / 0

    monkeypatch.setattr(silo, "judged", fails)
    outcome, _ = run(path, places)
    assert outcome.status == "converged"
    assert "could not be judged" in caplog.text
    for name, place in places.items():
        (folder,) = (SiloFile.read(place).folder / "runs").iterdir()
        assert (folder / "model.safetensors").exists()
        assert (folder / "run.json").exists() == (name != "va")


def test_with_noise_a_silo_scores_what_nobody_else_sees(tmp_path):
    noise = "[privacy]\nepsilon = 4.0\n[training]\nrounds = 3"
    replacing = RANGES | {"[training]\nrounds = 500\ntol = 1e-6": noise}
    path, places = federation(tmp_path, replacing=replacing)
    run(path, places)
    for own, place in places.items():
        _, found = record_at(place)
        assert found.score_rows("fair")[own].values["auc"] > 0
        assert all(score.test_score is None for score in found.main.clients)
    assert not RunRecord.read(path.parent / "run").scores
