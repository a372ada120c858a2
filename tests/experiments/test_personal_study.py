"""The study of personal models on natural silos: what it computes, what it writes, and the published page."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from experiments import personal

RESULTS = Path(__file__).parents[2] / "results" / "personal"


def test_a_client_alone_is_a_ridge_of_its_own_rows():
    silos = sp.data.beijing_air(new=2, days=30, seed=1)
    losses, kappas = personal.alone(silos, seed=1)
    for i in (0, 5, 11):
        (X, y), (A, b) = silos.train[i], silos.test[i]
        X, A = (np.hstack([part, np.ones((len(part), 1))]) for part in (X, A))
        u = np.linalg.solve(2 * X.T @ X + kappas[i] * np.eye(X.shape[1]), 2 * X.T @ y)
        assert losses[i] == pytest.approx(np.mean((A @ u - b) ** 2), rel=1e-6)


def test_the_study_writes_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(personal, "L2S", (0.01,))
    monkeypatch.setattr(personal, "KAPPAS", (math.inf, 300.0))
    personal.main(["stations", "--seeds", "1", "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "stations.csv").read_text().splitlines()))
    assert len(rows) == 12 * 5
    assert {row["strength"] for row in rows if row["model"].startswith("personal")} == {"300.0"}
    assert "## Twelve stations" in (tmp_path / "README.md").read_text()


def test_intervals_are_students():
    value, low, high = personal.interval(np.array([0.8, 0.9, 0.7]), np.ones(3))
    assert value == pytest.approx(20)
    assert high - value == value - low == pytest.approx(4.302653 * 10 / math.sqrt(3), rel=1e-5)


def test_the_published_page_is_that_of_the_published_losses(tmp_path):
    for name in ("stations.csv", "schools.csv"):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    assert personal.written(tmp_path) == (RESULTS / "README.md").read_text(encoding="utf-8")
