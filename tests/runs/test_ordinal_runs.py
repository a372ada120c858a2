"""Ordered categories, from a table to the page: orders of texts, scores, effects, predictions."""

import csv

import numpy as np
import pytest

from cases.commands import ran, refusal
from scaffpd.report.predict import predict
from scaffpd.report.record import RunRecord
from scaffpd.tasks import named
from scaffpd.tasks.base import EVERYONE

ORDER = "mild,fair,poor"
LINE = "train visits.csv --client site --target state --task ordinal --curves off --splits 1 -q"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(2)
    with open("visits.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "age", "state", "grade"])
        for k in range(360):
            age = random.normal(60, 10)
            place = np.searchsorted([-0.7, 1.0], 0.1 * (age - 60) + random.logistic())
            writer.writerow(["NSW"[k % 3], f"{age:.1f}", ORDER.split(",")[place], place + 1])
    return tmp_path


def read(name):
    with open(name, newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_becomes_models_scores_and_odds_ratios(place, capsys):
    ran(f"{LINE} --order {ORDER} --drop grade --effects fixed --out run", capsys)
    run = RunRecord.read(place / "run")
    assert run.task.name == "ordinal"
    assert run.labels == ORDER.split(",")
    assert run.main.certificate < 1e-5
    scores = run.score_rows("average")[EVERYONE].values
    assert scores["accuracy"] > 0.4
    assert 0 < scores["rps"] < scores["mae"] < 1
    effects = {row["column"]: row for row in read("run/effects.csv")}
    assert 1.05 < float(effects["age"]["ratio"]) < 1.16  # e^.1
    assert "odds" in (place / "run/report.html").read_text()
    found = predict(place / "run", place / "visits.csv", "average")
    assert found.shares.shape == (360, 3)
    np.testing.assert_allclose(found.shares.sum(1), 1)
    old = np.argsort([float(row["age"]) for row in read("visits.csv")])
    assert np.all(np.diff(found.shares[old, 2]) >= -1e-12)  # the older, the poorer


def test_numbers_have_their_order(place, capsys):
    line = LINE.replace("state", "grade").replace(" --curves off", "")
    ran(f"{line} --drop state --out run", capsys)
    run = RunRecord.read(place / "run")
    assert run.labels == ["1", "2", "3"]
    (shape,) = run.shapes  # one curve, not one for every label
    assert shape.column == "age"
    assert shape.shared[-1] - shape.shared[0] > 1
    assert "of a higher category" in (place / "run/report.html").read_text()
    assert refusal(f"{line} --drop state --order 1,2,3 --out other") == "order-of-texts"


@pytest.mark.parametrize("order", ["", "--order mild,fair", "--order mild,fair,worse"])
def test_texts_need_all_of_their_order(place, order):
    assert refusal(f"{LINE} {order}") == "order-of-texts"


def test_scores_are_those_of_a_loop():
    shares = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    y = np.array([2, 0, 1])
    found = named("ordinal").row_scores(y, shares.argmax(1), shares, 3)
    rps = [
        sum((sum(p[k + 1 :]) - (own > k)) ** 2 for k in range(2))
        for p, own in zip(shares.tolist(), y, strict=True)
    ]
    assert found["rps"] == pytest.approx(np.mean(rps))
    assert found["mae"] == pytest.approx(2 / 3)
    assert found["log_loss"] == pytest.approx(-np.log([0.3, 0.6, 0.1]).mean())
