"""Coefficients of a run in the columns' own units, and columns that may differ."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

import scaffpd as sp
from cases.refusals import refuses
from cases.runs import asked, patients, prepared
from scaffpd import cli
from scaffpd.pipeline.judging import effects
from scaffpd.program.train import check_asked
from scaffpd.report import page as report

statsmodels = pytest.importorskip("statsmodels.api")


@pytest.mark.parametrize("number", [True, False])
def test_effects_are_those_of_the_raw_columns(tmp_path, number):
    """Against `coefficients` of raw columns with one category left out."""
    file = patients(tmp_path / "patients.csv", number=number)
    personal = {"personal": ["age", "intercept"]}
    config = asked(file, training={"splits": 1}, model=personal)
    rows = prepared(config)
    found = effects(rows, config.model)
    assert found.names == ("age", "sex=f", "sex=m", "pressure", "intercept")
    columns = list(rows.columns)
    kept = [columns.index(name) for name in ("age", "sex=m", "pressure")]
    scale, mean = rows.encoding.deviation, rows.encoding.mean
    raw = []
    for X, y in rows.train:
        lines = X[:, kept] * scale[kept] + mean[kept]
        lines = lines - mean[kept]  # the intercept is that of a row with mean columns
        raw.append((lines, y * rows.unit + rows.centre if number else y))
    model = sp.Linear("squared" if number else "logistic", intercept=True)
    peer = sp.coefficients(sp.Cohort(raw, sp.Personal(model, columns=[0, "intercept"])))
    age, male, pressure, intercept = peer.estimate
    share = mean[columns.index("sex=m")]
    wanted = [age, -share * male, (1 - share) * male, pressure, intercept]
    np.testing.assert_allclose(found.estimate, wanted, rtol=0.01, atol=0.01 * np.abs(male))
    np.testing.assert_allclose(found.error[[0, 3, 4]], peer.error[[0, 2, 3]], rtol=0.02)
    np.testing.assert_allclose(found.between[[0, 4]], peer.between[[0, 3]], rtol=0.03)
    assert list(found.between[1:4]) == [0, 0, 0]
    assert (found.share is None) == (not number)


def test_the_folder_and_the_terminal_have_them(tmp_path, capsys):
    file = patients(tmp_path / "patients.csv", number=True)
    out = tmp_path / "run"
    words = "--client hospital --target outcome --splits 1 --personal sex,intercept --no-report"
    words += " --word hospital"
    assert cli.run(["train", str(file), *words.split(), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "hospitals" in shown
    page = report.write(out).read_text(encoding="utf-8")
    assert "deviation between hospitals" in page
    assert "of the variance that they leave open lies between hospitals" in page
    rows = list(csv.DictReader((out / "effects.csv").read_text().splitlines()))
    run = json.loads((out / "run.json").read_text())
    assert [row["column"] for row in rows] == [row["column"] for row in run["effects"]]
    assert [float(row["between"]) for row in rows if row["column"] == "age"] == [0.0]


def test_columns_that_are_not_there_are_refused(tmp_path):
    file = patients(tmp_path / "patients.csv")
    config = asked(file, training={"splits": 1}, model={"personal": ["agee"]})
    with refuses("unknown-name"):
        check_asked(config, prepared(config))
    config = asked(file, model={"personal": ["age"]})  # without personal models
    with refuses("no-personal-models"):
        check_asked(config, prepared(config))


def test_effects_are_those_that_one_asks_for(tmp_path):
    """Fixed effects against one category, robust errors; the page says which model it is."""
    file = patients(tmp_path / "patients.csv", number=False)
    out = tmp_path / "run"
    words = "--client hospital --target outcome --splits 1 --effects fixed --errors robust"
    words += " --reference sex=f"
    assert cli.run(["train", str(file), *words.split(), "--out", str(out)]) == 0
    run = json.loads((out / "run.json").read_text())
    said = "One model for all clients (fixed effects); robust errors, clustered by client."
    assert run["effects_said"] == said
    assert said in (out / "report.html").read_text(encoding="utf-8")
    rows = {row["column"]: row["values"] for row in run["effects"]}
    assert rows["sex=f"]["estimate"] == rows["sex=f"]["error"] == 0.0
    found = prepared(asked(file, training={"splits": 1}))
    columns = list(found.columns)
    kept = [columns.index(name) for name in ("age", "sex=m", "pressure")]
    X = np.concatenate([X for X, _ in found.train])[:, kept]
    scale = found.encoding.deviation[kept]
    peer = statsmodels.GLM(
        np.concatenate([y for _, y in found.train]),
        np.column_stack([X, np.ones(len(X))]),
        family=statsmodels.families.Binomial(),
    ).fit(
        cov_type="cluster",
        cov_kwds={"groups": np.repeat(range(len(found.train)), [len(y) for _, y in found.train])},
    )
    for k, name in enumerate(("age", "sex=m", "pressure")):
        assert rows[name]["estimate"] == pytest.approx(peer.params[k] / scale[k], rel=1e-3)
        assert rows[name]["error"] == pytest.approx(peer.bse[k] / scale[k], rel=0.02)
    with refuses("unknown-name"):
        check_asked(asked(file, model={"reference": ["sex=x"]}), found)
