"""Scores as scikit-learn computes them, probabilities that hold, groups, coefficients."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

from cases.runs import Nobody, asked, patients, prepared, trained
from cases.tables import read as read_table
from scaffpd.errors import InputError
from scaffpd.program.train import one_run
from scaffpd.report.predict import predict
from scaffpd.report.record import RunRecord
from scaffpd.settings.run import RunConfig
from scaffpd.tasks.classification import (
    BINS,
    PER_BIN,
    Classification,
    calibration,
    reliability,
)
from scaffpd.tasks.regression import Regression


def label_scores(y, guess, shares):
    return Classification().row_scores(y, guess, shares, 2)


def number_scores(y, x):
    return Regression().row_scores(y, x, np.empty((len(y), 0)), 0)


def test_scores_of_two_labels_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 60)
    p = np.round(np.clip(0.3 * y + random.uniform(0, 0.7, 60), 0.01, 0.99), 1)  # with ties
    shares = np.stack([1 - p, p], axis=1)
    guess = (p > 0.5).astype(int)
    tn, fp, fn, tp = metrics.confusion_matrix(y, guess).ravel()
    truth = {
        "accuracy": metrics.accuracy_score(y, guess),
        "auc": metrics.roc_auc_score(y, p),
        "recall": metrics.recall_score(y, guess),
        "precision": metrics.precision_score(y, guess),
        "false_positive_rate": fp / (fp + tn),
        "false_negative_rate": fn / (fn + tp),
        "selection_rate": guess.mean(),
        "log_loss": metrics.log_loss(y, p),
        "brier": metrics.brier_score_loss(y, p),
        **calibration(p, y == 1),
    }
    assert label_scores(y, guess, shares) == pytest.approx(truth)
    none = label_scores(np.zeros(5, int), np.zeros(5, int), np.tile([0.9, 0.1], (5, 1)))
    assert none["auc"] is none["recall"] is none["precision"] is None
    assert none["accuracy"] == 1
    shares[3] = np.nan
    assert label_scores(y, guess, shares)["auc"] is None


def test_scores_of_more_labels_are_macro_and_one_against_the_rest():
    random = np.random.default_rng(1)
    y = random.integers(0, 4, 90)
    shares = random.dirichlet(np.ones(4), 90)
    shares[:, 3] = 0  # never predicted
    shares /= shares.sum(1, keepdims=True)
    guess = shares.argmax(1)
    found = label_scores(y, guess, shares)
    more = {"average": "macro", "zero_division": np.nan}
    truth = {
        "recall": metrics.recall_score(y, guess, **more),
        "precision": metrics.precision_score(y, guess, **more),
        "auc": metrics.roc_auc_score(y, shares, multi_class="ovr"),
        "brier": ((shares - np.eye(4)[y]) ** 2).sum(1).mean(),
        "mean_probability": shares.max(1).mean(),
        "base_rate": (guess == y).mean(),
    }
    assert {name: found[name] for name in truth} == pytest.approx(truth)
    assert "selection_rate" not in found


def test_numbers_are_scored_as_by_scikit_learn():
    random = np.random.default_rng(2)
    y, x = random.normal(3, 2, (2, 50))
    assert number_scores(y, x) == pytest.approx(
        {
            "rmse": metrics.root_mean_squared_error(y, x),
            "mae": metrics.mean_absolute_error(y, x),
            "r2": metrics.r2_score(y, x),
        }
    )
    assert number_scores(np.ones(3), np.zeros(3))["r2"] is None


@pytest.mark.parametrize("n", [1, 29, 60, 1000])
@pytest.mark.parametrize("digits", [1, 9])
def test_bins_hold_every_row_once_and_equal_probabilities_together(n, digits):
    random = np.random.default_rng(n)
    p = np.round(random.uniform(0, 1, n), digits)
    true = random.uniform(0, 1, n) < p
    bins = reliability(p, true)
    assert sum(b.rows for b in bins) == n
    assert len(bins) <= max(1, min(BINS, n // PER_BIN))
    means = [b.mean_probability for b in bins]
    assert means == sorted(means)
    assert all(0 <= b.low <= b.base_rate <= b.high <= 1 for b in bins)
    assert sum(b.rows * b.base_rate for b in bins) == pytest.approx(true.sum())
    by_hand = 0.0
    start = 0
    order = np.sort(p)
    for b in bins:  # a bin is a range of values: no value is in two
        inside = (p >= order[start]) & (p <= order[start + b.rows - 1])
        assert inside.sum() == b.rows
        by_hand += abs((p[inside] - true[inside]).sum()) / n
        start += b.rows
    assert calibration(p, true)["calibration_error"] == pytest.approx(by_hand)


def test_the_folder_scores_what_predict_predicts(tmp_path):
    """Clients of all three models, by way of the file that `predict` reads."""
    file = patients(tmp_path / "p.csv", 400)
    config = asked(file, data_test=0.4, data_groups=["sex"], training={"splits": 1})
    trained(config, tmp_path / "run")
    found = RunRecord.read(tmp_path / "run")
    known = {(row.model, row.by, row.group): row for row in found.scores}
    frame = pd.read_csv(file)
    frame["held"] = False
    for own in read_table(file, client="hospital", target="outcome", test=0.4).rows:
        mine = frame.index[frame.hospital == own.name]
        frame.loc[mine[own.held], "held"] = True
    held = tmp_path / "held.csv"
    frame[frame.held].drop(columns="held").to_csv(held, index=False)
    for model in ("average", "fair", "personal"):
        answers = predict(tmp_path / "run", held, model)
        for row in answers.scores():
            own = known[model, row.by, row.group]
            assert (own.rows, own.values) == (row.rows, pytest.approx(row.values, rel=1e-6))
    assert list(found.score_rows("fair", "sex")) == ["f", "m", "all rows"]
    assert known["fair", "sex", "f"].rows == (frame[frame.held].sex == "f").sum()


def test_coefficients_are_standardised_and_groups_need_not_be_learnt_from(tmp_path):
    file = patients(tmp_path / "n.csv", number=True)
    data = {
        "file": str(file),
        "client": "hospital",
        "target": "outcome",
        "columns": ["age", "pressure"],
        "curves": "off",
    }
    config = RunConfig.of({"data": data | {"groups": ["sex"]}}, file.name)
    done = one_run("train", config, tmp_path / "run", False, Nobody())
    models, rows, found = done.models, done.own.rows, done.own.scores
    assert {row.group for row in found.scores if row.by == "sex"} == {"f", "m", "all rows"}
    (age, _) = found.coefficients
    assert age.column == "age"
    X = np.concatenate([X for X, _ in rows.train])
    assert age.values["fair"] == pytest.approx(models[1].result.x[0] * X[:, 0].std() * rows.unit)
    with pytest.raises(InputError, match="did you mean 'sex'"):
        prepared(asked(file, data_groups=["sx"]))
    with pytest.raises(InputError, match="--groups takes up to 50"):
        prepared(asked(file, data_groups=["age"]))


def test_groups_of_long_numbers_and_of_dates_are_told_apart(tmp_path):
    frame = pd.read_csv(patients(tmp_path / "p.csv"))
    frame["code"] = [1000001.0, 1000002.5, None] * 80
    frame["day"] = ["2024-01-01", "2024-01-02 12:30:01", ""] * 80
    frame.to_csv(tmp_path / "p.csv", index=False)
    found = read_table(
        tmp_path / "p.csv", client="hospital", target="outcome", groups=("code", "day")
    ).groups
    assert {cell for own in found["code"] for cell in own} == {"1000001", "1000002.5", "(missing)"}
    assert {cell for own in found["day"] for cell in own} == {
        "2024-01-01",
        "2024-01-02T12:30:01",
        "(missing)",
    }


def by_group(y, guess, shares, who):
    groups = Classification().by_group(y, guess, shares, who, ["a", "b"])
    return {row.group: row.values for row in groups}


def test_three_labels_without_probabilities_are_scored_alike_where_a_client_has_two_of_them():
    guess = np.array([0, 1, 2, 0, 1, 1])
    who = np.array(["a"] * 3 + ["b"] * 3, dtype=object)
    y = np.array([0, 2, 2, 0, 1, 0])
    found = by_group(y, guess, np.empty((6, 0)), who)
    assert found["a"].keys() == found["b"].keys() == found["all rows"].keys()
    assert found["b"]["recall"] == pytest.approx((1 / 2 + 1) / 2)
    two = by_group(y % 2, guess % 2, np.empty((6, 0)), who)
    assert two["b"]["recall"] == 1.0
    assert two["b"]["selection_rate"] == pytest.approx(2 / 3)
