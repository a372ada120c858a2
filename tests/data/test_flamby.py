"""FLamby's sites: its own splits, fresh ones, and its preparation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from cases.runs import prepared
from scaffpd.settings.run import RunConfig

RESULTS = Path(__file__).parents[2] / "results" / "flamby" / "README.md"


def test_regions_are_as_flamby_has_them():
    found = sp.data.tcga_brca()
    assert [len(y) for _, y in found.train] == [248, 156, 164, 129, 129, 40]
    assert [len(y) for _, y in found.test] == [63, 40, 42, 33, 33, 11]
    assert [int(y[:, 1].sum()) for _, y in found.test] == [14, 4, 8, 3, 2, 1]
    assert len(found.features) == 39
    np.testing.assert_allclose(np.concatenate([X for X, _ in found.train]).mean(0), 0, atol=1e-12)
    assert min(y[:, 0].min() for _, y in [*found.train, *found.test]) > 0


@pytest.mark.parametrize("data", [sp.data.tcga_brca, sp.data.flamby_heart])
def test_fresh_splits_have_the_same_rows(data):
    """Of every site as many, in other places, and the same for the same seed."""
    own, again, other = data(1), data(1), data(2)
    for a, b, c, d in zip(data().train, own.train, again.train, other.train, strict=True):
        assert abs(len(a[1]) - len(b[1])) <= 5
        np.testing.assert_array_equal(b[0], c[0])
        assert b[0].shape != d[0].shape or not np.array_equal(b[0], d[0])


def test_hospitals_are_as_flamby_has_them():
    found = sp.data.flamby_heart()
    assert [len(y) for _, y in found.train] == [199, 172, 30, 85]
    assert [len(y) for _, y in found.test] == [104, 89, 16, 45]
    assert found.features[2:5] == ("cp=2", "cp=3", "cp=4")
    for X, _ in found.train:
        np.testing.assert_allclose(X.mean(0), 0, atol=1e-12)


def test_runs_on_the_hospitals_say_how_the_benchmark_compares():
    """The remark, which stands on the page, has the numbers of results/flamby."""
    remark = prepared(RunConfig.of({"data": {"source": "hospitals"}}, "hospitals")).remarks[0]
    part = RESULTS.read_text().partition("## heart")[2].partition("95 % intervals")[0]
    means = {
        row.split("|")[1].strip(): float(row.split("**")[1])
        for row in part.splitlines()
        if "**" in row
    }
    alone = "each site alone, published"
    best = max(v for name, v in means.items() if name.endswith("published") and name != alone)
    ours = [means[f"{name}, ours"] for name in ("average", "fair", "personal", "alone")]
    said = re.findall(r"(\d+\.\d) %", remark)
    assert said == [f"{100 * value:.1f}" for value in (best, means[alone], *ours)]
