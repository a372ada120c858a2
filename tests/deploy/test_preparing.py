"""Curves, pairs and strengths of deployed runs, against the same clients in one process."""

from __future__ import annotations

import csv

import numpy as np
import pytest

import scaffpd as sp
from cases.posts import small_federation
from cases.refusals import refuses
from cases.silos import (
    MODEL,
    agree,
    agreement,
    ended_alike,
    epsilon_of,
    federation,
    models_of,
    mostly_long,
    released,
    run,
    wanted,
)
from scaffpd.cli import run as cli
from scaffpd.data.tabular.agree import (
    features,
)
from scaffpd.deploy.agreement import leaves
from scaffpd.deploy.dataset import Dataset
from scaffpd.deploy.program import BESIDE
from scaffpd.pipeline.columns import agreed
from scaffpd.pipeline.sites import SitesHere
from scaffpd.privacy.accountant import least_noise
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import read_model
from scaffpd.settings.silo import SiloFile

COLUMNS = 'age = "number"\nsex = "number"\nthalach = "number"\ncp = ["1", "2", "*"]\n'
NAMED = 'folder = "run"'
WAYS = {
    "one": (8, 'kind = "logistic"\n'),
    "personal": (8, 'kind = "logistic"\nkappa = "auto"\n'),
    "numbers": (0, 'kind = "squared"\nl2 = 0.02\nkappa = "auto"\n'),
}


def curved_run(folder, pairs, model, rounds=2):
    """A run of the hospitals, with a product in it that no sum of columns has."""
    path, places = federation(folder, granted=False)
    for place in places.values():
        table = place.parent / "patients.csv"
        head, *rows = csv.reader(table.read_text().splitlines())
        age = head.index("age")
        sex = head.index("sex")
        for k, row in enumerate(rows):
            if row[age] and row[sex] and k % 3:
                row[-1] = str(int((float(row[age]) > 54) != (row[sex] == "1")))
        table.write_text("\n".join(",".join(row) for row in [head, *rows]) + "\n")
    text = path.read_text()
    columns = text[text.index("[columns]") : text.index("[model]")]
    changes = {
        NAMED: f'{NAMED}\ncurves = "on"\npairs = {pairs}',
        columns: f"[columns]\n{COLUMNS}",
        MODEL: f"[model]\n{model}",
        "rounds = 500": f"rounds = {rounds}",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    agree(path, places)
    return path, places


def by_hand(path, places):
    """Columns, scale and clients of the same terms, added up in this process."""
    file = FederationFile.read(path)
    rows = {}
    for name, place in places.items():
        rows[name] = Dataset.read(SiloFile.read(place), wanted(file))

    encoding = agreed(file.encoding(), SitesHere.of(list(rows.values())), file.plan())
    encoded = {name: own.encoded(*encoding) for name, own in rows.items()}
    test = {name: own.test for name, own in encoded.items()}
    train = {name: own.train for name, own in encoded.items()}
    return encoding.schema, sp.Cohort(train, file.modelled(encoding.schema), test=test)


@pytest.mark.parametrize("way", mostly_long(WAYS, "personal"))
def test_four_silos_have_the_cohorts_curves_pairs_strengths_and_model(tmp_path, way):
    path, places = curved_run(tmp_path, *WAYS[way])
    outcome, _ = run(path, places)
    assert outcome.final, outcome.sentence
    schema, cohort = by_hand(path, places)
    file = FederationFile.read(path)
    setup = read_model(file.folder / "model.safetensors")[1]
    assert setup.schema == schema
    assert sum(" > " in name for name in features(schema)) > 10
    assert bool(schema.get("pairs")) == bool(file.pairs)
    found = cohort.strengths
    if file.model.l2 == "auto":
        np.testing.assert_allclose(setup.model["l2"], found.l2, rtol=1e-6)
    if file.model.kappa == "auto":
        kappa = [np.inf if own is None else own for own in setup.model["strength"]]
        np.testing.assert_allclose(kappa, found.strength, rtol=1e-6)
    best = sp.train(
        file.method,
        sp.SecureAggregation(cohort, colluding=file.colluding),
        file.rounds,
        file.tol,
        x0=BESIDE * found.x,
        progress=False,
    )
    ended_alike(path, places, outcome, best)
    # every silo predicts its own rows, by its own model near x
    for name, place in places.items():
        out = tmp_path / f"{name}.csv"
        model = str(file.folder / "model.safetensors")
        assert cli(["silo", "predict", str(place), model, "--out", str(out)]) == 0
        held = [
            row for row in csv.DictReader(out.read_text().splitlines()) if row["held out"] == "True"
        ]
        right = np.mean([row["target"] == row["predicted"] for row in held])
        own = cohort.evaluate(best.x, "test")
        assert right == pytest.approx(own.score[list(places).index(name)], abs=1e-12)


PRIVATE = "[privacy]\nepsilon = 8.0\n"
RANGES = "age = [20, 90]\nsex = [0, 1]\nthalach = [60, 210]\n" + COLUMNS.splitlines()[-1] + "\n"


def private_run(folder):
    path, places = curved_run(folder, 8, 'kind = "logistic"\nkappa = 20.0\n')
    text = path.read_text().replace(f"[columns]\n{COLUMNS}", f"[columns]\n{RANGES}")
    path.write_text(text.replace("tol = 1e-6\n", "") + PRIVATE)
    agree(path, places)
    return path, places


def test_with_noise_silos_pay_for_their_counts_once(tmp_path):
    path, places = private_run(tmp_path / "a")
    outcome, _ = run(path, places, {9: [("restart", "va")], 14: [("restart", "hungarian")]})
    assert outcome.final, outcome.sentence
    models_of(path, places)
    file = FederationFile.read(path)
    setup = read_model(file.folder / "model.safetensors")[1]
    steps = {column["name"]: column.get("steps", []) for column in setup.schema["columns"]}
    assert 2 <= len(steps["age"]) <= 7
    assert "pairs" not in setup.schema
    assert setup.model["l2"] == [0.1] * (len(setup.model["l2"]) - 1) + [1e-3]  # the intercept's
    assert setup.model["strength"] == 20.0
    found = agreement(path, places)
    noise = found.values["noise"]
    releases = 2 * (file.rounds + 1)  # a gradient and a loss at every point
    for place in places.values():
        z = np.array([noise for _, noise, _ in released(place)])
        assert np.sum(z == noise["counts"]) == 2  # of edges of one digit, and of two
        assert len(z) - 2 >= releases
    assert epsilon_of(path) <= 8
    whole = least_noise(8.0, 1e-5) ** -2
    assert 2 / noise["counts"] ** 2 == pytest.approx(0.1 * whole, rel=1e-6)
    planned = file.method.releases(2 * file.rounds)
    rest = planned.gradients / noise["noise"] ** 2 + planned.losses / noise["loss_noise"] ** 2
    assert 2 / noise["counts"] ** 2 + rest == pytest.approx(whole, rel=1e-6)
    assert any("how many rows, with noise" in line for line in leaves(file))
    out = tmp_path / "va.csv"
    model = str(file.folder / "model.safetensors")
    assert cli(["silo", "predict", str(places["va"]), model, "--out", str(out)]) == 0


def test_evidence_is_not_for_runs_with_noise(tmp_path):
    path, _ = private_run(tmp_path)
    path.write_text(path.read_text().replace("kappa = 20.0", 'kappa = "auto"'))
    with refuses("evidence-with-noise"):
        FederationFile.read(path)
    path.write_text(path.read_text().replace('curves = "on"', 'curves = "auto"'))
    path.write_text(path.read_text().replace('kappa = "auto"', "kappa = 1"))
    assert not FederationFile.read(path).curved  # thresholds cost ε: only where they are asked for
    lines = RANGES.splitlines()
    only = path.read_text().replace('curves = "auto"', 'curves = "on"')
    path.write_text(only.replace("\n".join(lines[:3]) + "\n", ""))
    with refuses("curves-without-columns"):
        FederationFile.read(path)


@pytest.mark.parametrize("model", ["l2 = 0.1", "", 'kappa = "auto"'])
@pytest.mark.parametrize("alike", [False, True])
def test_silos_that_are_alike_converge(tmp_path, model, alike):
    """With strengths by evidence the mode is their optimum: no point may be asked about twice."""
    draw = np.random.default_rng(3)
    tables = {}
    for name in "abcde":
        x = draw.normal(size=60)
        rows = [{"x": round(v, 3), "ill": int(v + draw.normal() > 0)} for v in x]
        tables[name] = tables["a"] if alike and tables else rows
    path, places = small_federation(tmp_path, tables, 'x = "number"\n', model=model)
    outcome, _ = run(path, places)
    assert outcome.status == "converged", outcome.sentence
