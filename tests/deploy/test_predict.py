"""A run's model on a silo's own rows."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from cases.silos import MODEL, ROUGH, federation, run
from scaffpd.cli import run as cli
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile


@pytest.mark.parametrize("loss", ["logistic", "softmax", "squared"])
def test_predictions_have_the_accuracy_that_the_record_has(tmp_path, capsys, loss):
    path, places = federation(tmp_path, replacing={MODEL: MODEL.replace("logistic", loss), **ROUGH})
    outcome, _ = run(path, places)
    assert outcome.status == "converged"
    folder = FederationFile.read(path).folder
    clients = RunRecord.read(folder).main.by_client
    for name, place in places.items():
        out = tmp_path / f"{name}.csv"
        model = str(folder / "model.safetensors")
        assert cli(["silo", "predict", str(place), model, "--out", str(out)]) == 0
        rows = list(csv.DictReader(out.read_text().splitlines()))
        truth = [
            line.rsplit(",", 1)[1]
            for line in (place.parent / "patients.csv").read_text().splitlines()[1:]
        ]
        assert [row["target"] for row in rows] == truth
        for split, held in (("train", "False"), ("test", "True")):
            part = [row for row in rows if row["held out"] == held]
            right = np.mean([row["target"] == row["predicted"] for row in part])
            assert getattr(clients[name], f"{split}_rows") is None  # nobody shows how many
            assert right == pytest.approx(getattr(clients[name], f"{split}_score"), abs=1e-12)
            if loss != "squared":
                assert all(0.5 <= float(row["probability"]) <= 1 for row in part)


def test_what_is_no_model(tmp_path, capsys):
    path, places = federation(tmp_path)
    assert cli(["silo", "predict", str(places["va"]), str(path)]) == 2
    assert "is not a model that a run has written" in capsys.readouterr().err
    assert cli(["silo", "predict", str(places["va"]), str(tmp_path / "none")]) == 2
