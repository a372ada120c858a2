"""The page's table is the benchmark's, and the benchmark's table is made of its file of runs."""

from __future__ import annotations

import csv
from collections import defaultdict

import numpy as np
import pytest

from snippets import ROOT

FOLDER = ROOT / "benchmarks" / "privacy"


def table(path):
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


@pytest.fixture(scope="module")
def runs():
    found = defaultdict(list)
    with (FOLDER / "differential.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            epsilon = "∞" if row["epsilon"] == "inf" else f"{float(row['epsilon']):g}"
            found[row["data"], epsilon, row["method"]].append(
                (
                    float(row["mean"]),
                    float(row["worst_fifth"]),
                    float(row["spent"]),
                    float(row["epsilon"]),
                )
            )
    return found


def test_the_page_has_the_benchmarks_table():
    assert len(table(FOLDER / "DIFFERENTIAL.md")) == 1 + 28 + 2
    assert table(ROOT / "docs" / "differential-privacy.md") == table(FOLDER / "DIFFERENTIAL.md")


def test_the_table_is_made_of_the_runs(runs):
    rows = {row[:3]: row[3:5] for row in table(FOLDER / "DIFFERENTIAL.md")[1:]}
    assert len(runs) == 28
    for about, found in runs.items():
        values = 100 * np.array(found)[:, :2]
        assert len(values) >= 5
        cells = [
            f"{m:.1f} ± {s:.1f}" for m, s in zip(values.mean(0), values.std(0, ddof=1), strict=True)
        ]
        assert tuple(cells) == rows[about]


def test_no_run_has_spent_more_than_its_epsilon(runs):
    spent = np.array([row[2:] for found in runs.values() for row in found])
    assert np.all(spent[:, 0] <= spent[:, 1])
