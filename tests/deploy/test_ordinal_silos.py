"""Ordered categories across organisations: the agreement has their order."""

import numpy as np
import pytest

from cases.silos import MODEL, agree, federation, run
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import read_model

LABELS = '["well", "ill", "dire"]'
SHORT = "rounds = 500\ntol = 1e-6"


def graded(folder, l2="0.03"):
    """The hospitals with a grade in place of a diagnosis."""
    model = {
        MODEL: f'[model]\nkind = "ordinal"\nl2 = {l2}\n',
        "labels = [0, 1]": f"labels = {LABELS}",
    }
    path, places = federation(folder, granted=False, replacing=model)
    random = np.random.default_rng(3)
    for place in places.values():
        table = place.parent / "patients.csv"
        head, *lines = table.read_text().splitlines()
        found = [head]
        for line in lines:
            *values, ill = line.split(",")
            grade = int(np.searchsorted([0.5, 2.5], 2 * int(ill) + random.logistic()))
            found.append(",".join([*values, ["well", "ill", "dire"][grade]]))
        table.write_text("\n".join(found) + "\n")
    agree(path, places)
    return path, places


@pytest.mark.parametrize("l2", ["0.03", '"auto"'])
def test_silos_train_proportional_odds(tmp_path, l2):
    path, places = graded(tmp_path, l2)
    outcome, _ = run(path, places)
    assert outcome.final
    assert outcome.certificate < 1e-3
    _, setup = read_model(FederationFile.read(path).folder / "model.safetensors")
    assert setup.task.name == "ordinal"
    assert list(setup.schema["labels"]) == ["well", "ill", "dire"]
    record = RunRecord.read(FederationFile.read(path).folder)
    assert all(0.3 < one.test_score < 1 for one in record.main.clients)
