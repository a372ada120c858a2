"""What rows and clients count for: weights, exposures, clients by rows; pairs of a run."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from scipy.optimize import minimize

import scaffpd as sp
from cases.commands import ran
from cases.refusals import refuses
from cases.runs import cohort, prepared
from scaffpd.report.predict import predict
from scaffpd.settings.run import RunConfig

HEADER = ("site", "x", "z", "w", "log_e", "y")
PLAIN = {"curves": "off", "test": 0.0, "client": "site", "target": "y"}


def written(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(rows)
    return str(path)


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    made = []
    for k in range(240):
        x, z = random.normal(size=2)
        exposure = random.uniform(0.2, 6)
        mean = exposure * np.exp(0.4 + 0.8 * x - 0.3 * z)
        site = "a" if k % 3 else "b"
        made.append((site, x, z, k % 4 + 1, np.log(exposure), random.poisson(mean)))
    return made


def config(path, objective="Average", training=None, more=None, **data):
    return RunConfig.of(
        {
            "data": {**PLAIN, "file": [path], **data},
            "model": {"l2": 1e-10},
            "objective": {"kind": objective, **(more or {})},
            "training": training or {},
        },
        path,
    )


def coefficients(config):
    """Intercept and slopes of the one model, in units of the table."""
    found = prepared(config)
    config = config.counting([len(y) for _, y in found.train])
    result = sp.train(config.method, cohort(found), 300, 1e-12)
    slopes = found.in_units(result.x.copy())
    scaled = slopes[:-1] / found.encoding.deviation
    return np.array([slopes[-1] - found.encoding.mean @ scaled, *scaled]), found


def test_a_weight_counts_as_so_many_rows(tmp_path, rows):
    """Of a client's rows: clients still count alike."""
    many = [row for row in rows for _ in range(row[3])]
    once = {"columns": ["x", "z"], "task": "regression"}
    found, _ = coefficients(config(written(tmp_path / "a.csv", rows), weight="w", **once))
    naive, _ = coefficients(config(written(tmp_path / "b.csv", many), **once))
    plain, _ = coefficients(config(written(tmp_path / "a.csv", rows), **once))
    assert found == pytest.approx(naive, abs=1e-5)
    assert np.abs(found - plain).max() > 1e-3


def test_clients_counted_by_rows_are_pooled(tmp_path, rows):
    table = written(tmp_path / "a.csv", rows)
    asked = {"columns": ["x", "z"], "task": "regression"}
    found, _ = coefficients(config(table, training={"count_clients": "rows"}, **asked))
    A = np.column_stack([np.ones(240), [row[1:3] for row in rows]])
    pooled = np.linalg.lstsq(A, np.array([row[5] for row in rows], float), rcond=None)[0]
    assert found == pytest.approx(pooled, abs=1e-5)
    alike, _ = coefficients(config(table, **asked))
    assert np.abs(alike - pooled).max() > 1e-3
    made = config(table, "ChiSquare", {"count_clients": "rows"}, **asked)
    assert made.counting([160, 80]).goal.prior == pytest.approx([2 / 3, 1 / 3])


def test_counts_with_exposures_have_their_likelihood(tmp_path, rows):
    table = written(tmp_path / "a.csv", rows)
    asked = {"columns": ["x", "z"], "task": "counts", "offset": "log_e"}
    found, made = coefficients(config(table, training={"count_clients": "rows"}, **asked))
    name, usual = made.exposure
    A = np.column_stack([np.ones(240), [row[1:3] for row in rows]])
    y = np.array([row[5] for row in rows], float)
    share = np.exp([row[4] for row in rows]) / usual

    def against(x):
        mean = share * np.exp(A @ x)
        return np.mean(mean - y * np.log(mean))

    best = minimize(against, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
    assert name == "log_e"
    assert found == pytest.approx(best, abs=1e-4)
    with refuses("weights-with-noise"):
        private = {"data": {**PLAIN, "file": [table], **asked}, "privacy": {"epsilon": 1.0}}
        prepared(RunConfig.of(private, table))


def test_a_run_with_pairs_weights_and_exposures_predicts(tmp_path, capsys):
    random = np.random.default_rng(1)
    made = []
    for k in range(900):
        x, z = random.integers(0, 40), random.normal()
        e = random.uniform(0.5, 2)
        mean = e * (4.0 if x > 20 and z > 0 else 1.0)
        made.append(("abc"[k % 3], x, z, 1, np.log(e), random.poisson(mean)))
    table = tmp_path / "a.csv"
    written(table, made)
    run = tmp_path / "run"
    asked = f"--client site --target y --columns x,z --task counts --offset log_e --out {run}"
    said = ran(f"train {table} {asked} --no-report", capsys)
    assert "Pairs: x × z." in said.err
    told = predict(run, table)
    truth = np.array([row[5] for row in made], float)
    error = np.mean((np.array(told.predicted) - truth) ** 2)
    known = np.exp([row[4] for row in made]) * np.array(
        [4.0 if row[1] > 20 and row[2] > 0 else 1.0 for row in made]
    )
    assert error < 1.15 * np.mean((known - truth) ** 2)
    shorter = tmp_path / "b.csv"
    shorter.write_text("x,z\n1,2\n30,2\n")
    usual = predict(run, shorter)
    assert any("exposure" in remark for remark in usual.remarks)
    assert usual.predicted[1] > 2 * usual.predicted[0]


@pytest.mark.long
def test_alike_sites_with_exposures_are_predicted_as_by_a_generalised_linear_model(
    tmp_path, capsys
):
    """The defaults, with curves and pairs: they had 5.25 a row where statsmodels has 0.99, an
    effect of "16.29 events", and a deviation of 2.7 between alike sites.
    """
    sm = pytest.importorskip("statsmodels.api")
    random = np.random.default_rng(0)

    def drawn(n):
        x, z = random.normal(size=(2, n))
        exposure = random.uniform(5, 63, n)
        mean = exposure * np.exp(-2 + np.log(2.2) * x - 0.3 * z)
        site = np.array(list("abcde"))[np.arange(n) % 5]
        return list(
            zip(site, x, z, np.ones(n), np.log(exposure), random.poisson(mean), strict=True)
        )

    rows, new = drawn(1500), drawn(3000)
    table, others = tmp_path / "a.csv", tmp_path / "b.csv"
    written(table, rows)
    written(others, new)
    run = tmp_path / "run"
    asked = f"--client site --target y --columns x,z --task counts --offset log_e --out {run}"
    ran(f"train {table} {asked} --no-report", capsys)
    numbers = [np.array([row[1:] for row in part], float) for part in (rows, new)]
    designs = [np.column_stack([np.ones(len(part)), part[:, :2]]) for part in numbers]
    peer = sm.GLM(
        numbers[0][:, 4], designs[0], family=sm.families.Poisson(), offset=numbers[0][:, 3]
    ).fit()
    family = sm.families.Poisson()
    y = numbers[1][:, 4]
    theirs = family.deviance(y, peer.predict(designs[1], offset=numbers[1][:, 3])) / len(y)
    ours = family.deviance(y, np.array(predict(run, others).predicted, float)) / len(y)
    assert ours < 1.03 * theirs
    found = {
        row["column"]: row["values"]
        for row in json.loads((run / "run.json").read_text())["effects"]
    }
    assert found["x"]["ratio_low"] < 2.2 < found["x"]["ratio_high"]
    assert found["x"]["estimate"] == pytest.approx(peer.params[1], abs=0.03)
    assert found["x"]["ratio"] == pytest.approx(2.2, rel=0.05)
    for row in found.values():
        assert row["between"] < 0.03
