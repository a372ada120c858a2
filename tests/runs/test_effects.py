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
from scaffpd.program.prepare import Source
from scaffpd.program.train import check_asked
from scaffpd.report import page as report
from scaffpd.settings.run import RunConfig

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


def interacting(path, random, n, columns=3, size=2.0, **data):
    """Three sites with subjects of four rows; of columns of 0 and 1 every two act together."""
    X = random.integers(0, 2, (n, columns))
    y = X.sum(1) + size * (X.sum(1) ** 2 - X.sum(1)) / 2 + random.standard_normal(n)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hospital", *(f"c{j}" for j in range(columns)), "who", "outcome"])
        for i in range(n):
            writer.writerow([i // 4 % 3, *X[i], f"p{i // 4}", round(y[i], 4)])
    data |= {"file": str(path), "client": "hospital", "target": "outcome", "split_by": "who"}
    model = {"effects": "fixed", "split_inference": True}
    return RunConfig.of({"data": data, "model": model, "training": {"splits": 0}}, path.name)


def test_the_half_that_chooses_is_not_the_one_that_is_estimated(tmp_path):
    """Subjects are in one of them, and outcomes of the other have no part in what is chosen."""
    file = tmp_path / "table.csv"
    config = interacting(file, np.random.default_rng(0), 480)
    one, rows = Source(config).halves()
    assert one.encoding.schema["pairs"]
    assert [len(y) for _, y in one.train] == [len(y) for _, y in rows.train] == [80] * 3
    lines = file.read_text().splitlines()
    for site, own in enumerate(one.sites.rows):
        theirs = [k for k, line in enumerate(lines) if line.startswith(f"{site},")]
        subjects = np.array([lines[k].split(",")[-2] for k in theirs])
        assert not set(subjects[own.held]) & set(subjects[~own.held])
        for k in np.array(theirs)[own.held]:
            lines[k] = lines[k].rpartition(",")[0] + f",{k % 7}"
    file.write_text("\n".join(lines))
    again, others = Source(config).halves()
    assert again.encoding.schema == one.encoding.schema
    before, after = (effects(half, config.model, pairs=True) for half in (one, again))
    np.testing.assert_allclose(before.estimate, after.estimate)
    before, after = (effects(half, config.model, pairs=True) for half in (rows, others))
    assert np.abs(before.estimate - after.estimate).max() > 0.5
    assert before.estimate[-2] == pytest.approx(2.0, abs=4 * before.error[-2])  # c1 × c2


def test_the_page_says_which_rows_chose(tmp_path):
    file = patients(tmp_path / "patients.csv", number=False)
    out = tmp_path / "run"
    words = ["train", str(file), "--client", "hospital", "--target", "outcome", "--splits", "0"]
    words += ["--objective", "Average"]
    assert cli.run([*words, "--out", str(out)]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "conditional on curves and pairs chosen by the same rows" in page
    assert "conditional on that choice by the same rows" in page  # of the kind of effects
    assert cli.run([*words, "--out", str(out), "--split-inference", "--fresh"]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "conditional on" not in page
    assert "of rows that chose no curve and no pair" in page
    run = json.loads((out / "run.json").read_text())
    assert run["effects_said"].endswith(
        "Of 120 rows; 120 others chose columns, curves, pairs and which effects."
    )
    assert {sum(one["rows"]) for one in run["shapes"]} == {120}
    assert cli.run(["train", "hospitals", "--split-inference", "--out", str(out)]) == 2


@pytest.mark.long
def test_pairs_are_covered_by_rows_that_have_not_chosen_them(tmp_path):
    """Of rows that choose them they are too large: the winner's curse."""
    random = np.random.default_rng(0)
    naive: list[bool] = []
    split: list[bool] = []
    for _ in range(100):
        for hits, n in ((naive, 1200), (split, 2400)):
            config = interacting(tmp_path / "table.csv", random, n, 10, 0.3, test=0.0)
            source = Source(config)
            rows = source.prepared() if hits is naive else source.halves()[1]
            found = effects(rows, config.model, pairs=True).table()
            pairs = [row for row in found if " × " in str(row["column"])]
            hits += [row["low"] < 0.3 < row["high"] for row in pairs]
    assert min(len(naive), len(split)) >= 8
    assert np.mean(naive) < 0.5
    assert np.mean(split) > 0.75
