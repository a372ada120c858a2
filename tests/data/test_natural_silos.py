"""Stations and schools: what the rows are, what is held out, and that nothing is learnt from test rows."""

from __future__ import annotations

import csv
import lzma
import os
from importlib import resources

import numpy as np
import pytest
from scipy.io import savemat

import scaffpd as sp
from scaffpd.errors import InputError


@pytest.fixture(scope="module")
def rows():
    packed = resources.files("scaffpd.data") / "files" / "beijing_air" / "daily.csv.xz"
    return list(csv.DictReader(lzma.decompress(packed.read_bytes()).decode().splitlines()))


def test_a_station_has_three_years_and_is_tested_on_the_next(rows):
    air = sp.data.beijing_air()
    assert len(air.names) == 12
    assert air.names[:2] == ("Aotizhongxin", "Changping")
    for name, (X, y), (A, b) in zip(air.names, air.train, air.test, strict=True):
        own = [row for row in rows if row["station"] == name and row["pm25"]]
        early = [row for row in own if row["date"] < "2016-03-01"]
        assert (X.shape, len(y)) == ((len(early), 15), len(early))
        assert (A.shape, len(b)) == ((len(own) - len(early), 15), len(own) - len(early))
    assert sum(len(y) for _, y in [*air.train, *air.test]) == 17_467


def test_columns_and_target_are_what_their_names_say(rows):
    air = sp.data.beijing_air()
    own = [
        row
        for row in rows
        if row["station"] == "Gucheng" and row["pm25"] and row["date"] < "2016-03-01"
    ]
    X, y = air.train[air.names.index("Gucheng")]
    raw = dict(zip(air.features, X.T, strict=True))
    for name in ("temperature", "pressure", "northerly"):
        assert np.corrcoef(raw[name], [float(row[name]) for row in own])[0, 1] == pytest.approx(1)
    assert np.corrcoef(y, np.log1p([float(row["pm25"]) for row in own]))[0, 1] == pytest.approx(1)
    assert np.ptp(y - np.log1p([float(row["pm25"]) for row in own])) < 1e-12  # shifted, not scaled
    dates = np.array([row["date"] for row in own])
    assert set(raw["weekend"][np.isin(dates, ["2015-08-01", "2015-08-02"])]) == {
        raw["weekend"].max()
    }  # Sat and Sun
    assert set(raw["weekend"][np.isin(dates, ["2015-08-03", "2015-07-31"])]) == {
        raw["weekend"].min()
    }
    assert dates[raw["season_cosine"].argmin()][5:] in ("07-01", "07-02")
    windless = np.array([float(row["wind"]) < 1 for row in own])
    np.testing.assert_array_equal(raw["calm"] > 0, windless)


def test_scaling_knows_training_rows_only():
    for air in (sp.data.beijing_air(), sp.data.beijing_air(new=4, seed=2)):
        X, y = (np.concatenate(part) for part in zip(*air.train, strict=True))
        np.testing.assert_allclose(X.mean(0), 0, atol=1e-10)
        np.testing.assert_allclose(X.std(0), 1)
        assert y.mean() == pytest.approx(0, abs=1e-12)
        assert abs(np.concatenate([b for _, b in air.test]).mean()) > 0.01


def test_new_stations_have_few_days_and_the_same_test_year():
    full, air, again, other = (
        sp.data.beijing_air(),
        *(sp.data.beijing_air(new=4, seed=s) for s in (1, 1, 2)),
    )
    few = [len(y) == 40 for _, y in air.train]
    assert sum(few) == 4
    assert [len(y) for _, y in air.test] == [len(y) for _, y in full.test]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(air.train, again.train, strict=True))
    assert few != [len(y) == 40 for _, y in other.train]
    assert {len(y) for _, y in sp.data.beijing_air(new=12, days=7).train} == {7}


@pytest.mark.parametrize(
    "wrong", [{"new": 13}, {"new": -1}, {"new": 1.5}, {"days": 0}, {"seed": -1}]
)
def test_stations_refuse_nonsense(wrong):
    with pytest.raises(InputError, match="beijing_air needs a whole number"):
        sp.data.beijing_air(**wrong)


@pytest.fixture
def schools(tmp_path):
    random = np.random.default_rng(0)
    X = np.empty((1, 3), object)
    Y = np.empty((1, 3), object)
    for k, n in enumerate((10, 20, 31)):
        X[0, k] = np.hstack([random.normal(3, 2, (n, 4)), np.ones((n, 1))])
        Y[0, k] = random.normal(20, 5, (n, 1))
    (tmp_path / "school").mkdir()
    savemat(tmp_path / "school" / "school.mat", {"X": X, "Y": Y})
    return tmp_path


def test_a_school_is_a_client(schools, monkeypatch):
    silos = sp.data.school(folder=schools)
    assert silos.names == ("school 1", "school 2", "school 3")
    assert silos.features == (
        "column 1",
        "column 2",
        "column 3",
        "column 4",
    )  # the constant one is left out
    assert [(len(y), len(b)) for (_, y), (_, b) in zip(silos.train, silos.test, strict=True)] == [
        (7, 3),
        (14, 6),
        (22, 9),
    ]
    X, y = (np.concatenate(part) for part in zip(*silos.train, strict=True))
    np.testing.assert_allclose([X.mean(), y.mean(), X.std(), y.std()], [0, 0, 1, 1], atol=1e-12)
    monkeypatch.setenv("SCAFFPD_DATA", str(schools))
    assert sp.data.school(test_fraction=0).test == []
    assert not np.array_equal(sp.data.school(seed=1).train[0][1], silos.train[0][1])


def test_mistakes_get_a_sentence(schools, monkeypatch):
    monkeypatch.delenv("SCAFFPD_DATA", raising=False)
    with pytest.raises(InputError, match="SCAFFPD_DATA"):
        sp.data.school()
    with pytest.raises(InputError, match="test_fraction"):
        sp.data.school(1.0, folder=schools)
    savemat(schools / "school" / "school.mat", {"X": np.ones((2, 2))})
    with pytest.raises(InputError, match="a cell of X and Y per school"):
        sp.data.school(folder=schools)
    (schools / "school" / "school.mat").write_bytes(b"no such thing" * 100)
    with pytest.raises(InputError, match="damaged"):
        sp.data.school(folder=schools)
    (schools / "school" / "school.mat").unlink()
    with pytest.raises(InputError, match="is missing"):
        sp.data.school(folder=schools)


@pytest.mark.skipif("SCAFFPD_DATA" not in os.environ, reason="SCAFFPD_DATA names no data folder")
def test_the_real_schools():
    silos = sp.data.school()
    assert (len(silos.names), len(silos.features)) == (139, 27)
    assert sum(len(y) for _, y in [*silos.train, *silos.test]) == 15_362
