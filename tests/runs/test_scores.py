"""What people ask of a model: scores as scikit-learn computes them, probabilities that hold, groups, coefficients."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import check_grad
from scipy.special import expit, softmax
from sklearn import metrics
from test_runs import Nobody, asked, patients

import scaffpd as sp
from scaffpd.data.tabular.clients import TableFile, read_clients
from scaffpd.errors import InputError
from scaffpd.run import scores
from scaffpd.run.folder import RunFolder
from scaffpd.run.page.read import read
from scaffpd.run.page.verdict import cautions
from scaffpd.run.predict import predict
from scaffpd.run.prepare import prepare
from scaffpd.run.scores import (
    adjusted,
    calibration,
    check_recalibration,
    held_out_scores,
    label_scores,
    number_scores,
    reliability,
    slope_and_intercept,
)
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import carry_out, joining_of, reseeded, settled


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
            "mean_prediction": x.mean(),
            "mean_truth": y.mean(),
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
    assert sum(b["rows"] for b in bins) == n
    assert len(bins) <= max(1, min(scores.BINS, n // scores.PER_BIN))
    means = [b["mean_probability"] for b in bins]
    assert means == sorted(means)
    assert all(0 <= b["base_rate_low"] <= b["base_rate"] <= b["base_rate_high"] <= 1 for b in bins)
    assert sum(b["rows"] * b["base_rate"] for b in bins) == pytest.approx(true.sum())
    by_hand = 0.0
    start = 0
    order = np.sort(p)
    for b in bins:  # a bin is a range of values: no value is in two
        inside = (p >= order[start]) & (p <= order[start + b["rows"] - 1])
        assert inside.sum() == b["rows"]
        by_hand += abs((p[inside] - true[inside]).sum()) / n
        start += b["rows"]
    assert calibration(p, true)["calibration_error"] == pytest.approx(by_hand)


def test_the_interval_of_the_gap_covers_the_truth_19_times_of_20():
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        p = random.uniform(0, 1, 80)
        found = calibration(p + 0.05, random.uniform(0, 1, 80) < p)
        hits += found["calibration_gap_low"] <= 0.05 <= found["calibration_gap_high"]
    assert 365 <= hits <= 395


def test_slope_and_intercept_undo_a_known_distortion_and_stay_put_without_rows():
    random = np.random.default_rng(3)
    z = random.normal(0, 2, (4000, 1))
    y = (random.uniform(size=4000) < expit(0.5 * z[:, 0] + 1)).astype(int)
    b, a = slope_and_intercept(z, y)
    assert (b, a) == (pytest.approx(0.5, abs=0.06), pytest.approx(1.0, abs=0.12))
    few = slope_and_intercept(z[:3], np.ones(3, int))
    assert abs(few[0] - 1) < 1
    assert 0 < few[1] < 1.5
    scale = 0.4
    shift = np.array([0.5, -1.0, 0.5])
    w = random.normal(0, 2, (6000, 3))
    many = np.array([random.choice(3, p=row) for row in softmax(scale * w + shift, axis=1)])
    found = np.array(slope_and_intercept(w, many))
    assert found[0] == pytest.approx(scale, abs=0.05)
    np.testing.assert_allclose(found[1:] - found[1:].mean(), shift, atol=0.15)


def trained(tmp_path, **training):
    config = asked(
        patients(tmp_path / "p.csv", 400), data_test=0.4, training={"splits": 1, **training}
    )
    prepared = prepare(config)
    cohort = prepared.cohort(config)
    folder = RunFolder(tmp_path / "run")
    config = settled(config, cohort)
    with folder.opened("train", config, False):
        models = carry_out(config, prepared, cohort, folder.path, Nobody())
        joining = joining_of(config, prepared, models)
        found = held_out_scores(config, prepared, models, joining)
        folder.write("train", config, prepared, models, joining=joining, scored=found)
    return config, prepared, models, found


def test_the_folder_scores_what_predict_predicts(tmp_path):
    """Clients and groups of all three models, recalibrated or not, by way of the file that `predict` reads."""
    config, prepared, _, found = trained(tmp_path, groups=["sex"], recalibrate=True)
    table = pd.read_csv(
        tmp_path / "run" / "scores.csv", index_col=["model", "by", "group"]
    ).sort_index()
    held = tmp_path / "held.csv"
    frame = pd.read_csv(tmp_path / "p.csv")
    frame["held"] = False
    for own in read_clients(TableFile(tmp_path / "p.csv", "hospital", "outcome", test=0.4)).rows:
        mine = frame.index[frame.hospital == own.name]
        frame.loc[mine[own.held], "held"] = True
    frame[frame.held].drop(columns="held").to_csv(held, index=False)
    for model in ("average", "fair", "personal"):
        for raw in (True, False):
            answers = predict(tmp_path / "run", held, model, ["sex"], raw)
            for by in (None, "sex"):
                for row in answers.scores(by):
                    key = (
                        model if raw else f"{model} recalibrated",
                        by or "client",
                        row.pop(by or "client"),
                    )
                    assert table.loc[key].to_dict() == pytest.approx(row, rel=1e-6), key
    assert set(table.loc[("fair", "sex")].index) == {"f", "m", "all rows"}
    assert json.loads((tmp_path / "run" / "calibration.json").read_text()) == found.calibrations
    stranger = predict(tmp_path / "run", held, "fair")
    assert not np.allclose(
        stranger.shares, predict(tmp_path / "run", held, "fair", raw=True).shares
    )
    report = read(tmp_path / "run")
    assert report.predictions.of("fair", "sex")["f"]["rows"] == (frame[frame.held].sex == "f").sum()
    assert check_recalibration(config, prepared).remarks == prepared.remarks


def test_recalibration_is_by_rows_that_the_model_has_not_seen(tmp_path):
    _, prepared, _, found = trained(tmp_path, recalibrate=True)
    folds = scores.Folds.of(prepared.train, prepared.model, prepared.names, scores.FOLDS, 0)
    parts = []
    for k in range(scores.FOLDS):
        cohort = sp.Cohort(folds.rows(k, False), prepared.model, prepared.names)
        x = sp.train(sp.fair(sp.Average()), cohort, tol=1e-6, progress=False).x
        X, y = folds.rows(k, True)[1]
        parts.append((prepared.model.outputs(x, X), y))
    z, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    b, a = found.calibrations["average"][prepared.names[1]]
    assert [b, a] == pytest.approx(slope_and_intercept(z, y), abs=1e-4)

    def loss(v):
        w = adjusted(z, v)[:, 0]
        return np.logaddexp(0, w).sum() - y @ w + ((v[0] - 1) ** 2 + v[1] ** 2) / 2

    assert all(
        loss(np.array([b + s, a + t])) > loss(np.array([b, a]))
        for s, t in ((0.01, 0), (-0.01, 0), (0, 0.01))
    )
    assert check_grad(loss, lambda v: np.zeros(2), np.array([b, a])) < 0.05


def test_what_cannot_be_recalibrated_is_refused(tmp_path):
    number = asked(patients(tmp_path / "n.csv", number=True), training={"recalibrate": True})
    with pytest.raises(InputError, match="probabilities of labels"):
        check_recalibration(number, prepare(number))
    private = asked(
        patients(tmp_path / "p.csv"), training={"recalibrate": True}, privacy={"epsilon": 4.0}
    )
    with pytest.raises(InputError, match="would spend ε"):
        check_recalibration(private, prepare(private))


def test_coefficients_are_standardised_and_groups_need_not_be_learnt_from(tmp_path):
    file = patients(tmp_path / "n.csv", number=True)
    data = {
        "file": str(file),
        "client": "hospital",
        "target": "outcome",
        "columns": ["age", "pressure"],
    }
    config = RunConfig.of({"data": data, "training": {"groups": ["sex"]}}, file.name)
    prepared = prepare(config)
    cohort = prepared.cohort(config)
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    models = carry_out(settled(config, cohort), prepared, cohort, tmp_path / "run", Nobody())
    found = held_out_scores(config, prepared, models)
    assert {row["group"] for row in found.scores if row["by"] == "sex"} == {"f", "m", "all rows"}
    (age, _) = found.coefficients
    assert age["column"] == "age"
    X = np.concatenate([X for X, _ in prepared.train])
    assert age["fair"] == pytest.approx(models[-1].result.x[0] * X[:, 0].std() * prepared.unit)
    again = prepare(config)
    other = prepare(reseeded(config, 1))
    assert again.held == prepared.held != other.held
    with pytest.raises(InputError, match="did you mean 'sex'"):
        prepare(asked(file, training={"groups": ["sx"]}))
    with pytest.raises(InputError, match="--groups takes up to 50"):
        prepare(asked(file, training={"groups": ["age"]}))


def test_a_model_that_expects_too_much_is_called_so(tmp_path):
    """Rows whose outcome is rarer than trained on: every model expects too much, and the page says by how much."""
    _, _, _, found = trained(tmp_path)
    place = tmp_path / "run"
    table = pd.read_csv(place / "scores.csv")
    before = [sentence for sentence in cautions(read(place)) if "recalibrate" in sentence]
    table.loc[
        table.model != "average",
        ["mean_probability", "calibration_gap", "calibration_gap_low", "calibration_gap_high"],
    ] += 0.3
    table.to_csv(place / "scores.csv", index=False)
    after = [sentence for sentence in cautions(read(place)) if "recalibrate" in sentence]
    assert len(after) == 1
    assert "points too many (95 % interval" in after[0]
    assert before != after
    assert found.calibrations == {}


def test_groups_of_long_numbers_and_of_dates_are_told_apart(tmp_path):
    frame = pd.read_csv(patients(tmp_path / "p.csv"))
    frame["code"] = [1000001.0, 1000002.5, None] * 80
    frame["day"] = ["2024-01-01", "2024-01-02 12:30:01", ""] * 80
    frame.to_csv(tmp_path / "p.csv", index=False)
    found = read_clients(
        TableFile(tmp_path / "p.csv", "hospital", "outcome", groups=("code", "day"))
    ).groups
    assert {cell for own in found["code"] for cell in own} == {"1000001", "1000002.5", "(missing)"}
    assert {cell for own in found["day"] for cell in own} == {
        "2024-01-01",
        "2024-01-02T12:30:01",
        "(missing)",
    }


def test_clients_with_too_few_rows_for_folds_are_not_recalibrated(tmp_path):
    file = patients(tmp_path / "p.csv")
    file.write_text(file.read_text() + "small,50,f,120,1\nsmall,60,m,130,0\n")
    config = asked(file, training={"recalibrate": True})
    plain = prepare(config)
    prepared = check_recalibration(config, plain)
    said = "1 client with too few training rows for 3 folds not recalibrated."
    assert prepared.remarks == (*plain.remarks, said)
    config = settled(config, prepared.cohort(config))
    found = scores.calibrated(config, prepared)
    assert set(found) == {"average", "fair"}
    for own in found.values():
        assert own["small"] == [1.0, 0.0]
        assert own["north"] != [1.0, 0.0]


def test_three_labels_without_probabilities_are_scored_alike_where_a_client_has_two_of_them():
    guess = np.array([0, 1, 2, 0, 1, 1])
    who = np.array(["a"] * 3 + ["b"] * 3, dtype=object)
    y = np.array([0, 2, 2, 0, 1, 0])
    found = dict(scores.by_group(y, guess, np.empty((6, 0)), who, ["a", "b"]))
    assert found["a"].keys() == found["b"].keys() == found["all rows"].keys()
    assert found["b"]["recall"] == pytest.approx((1 / 2 + 1) / 2)
    two = dict(scores.by_group(y % 2, guess % 2, np.empty((6, 0)), who, ["a", "b"]))
    assert two["b"]["recall"] == 1.0
    assert two["b"]["selection_rate"] == pytest.approx(2 / 3)
