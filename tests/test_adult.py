"""Adult: clients by a column, from files that are not part of the package."""

from __future__ import annotations

import gzip
import os
from importlib import import_module

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.errors import InputError

HEADER = (
    "age, workclass, fnlwgt, education, education-num, marital-status, occupation, relationship, race, sex, "
    "capital-gain, capital-loss, hours-per-week, native-country, classification"
)


def row(age, occupation, sex, income):
    country = "Peru" if age < 45 else "?"
    about = f"{age}, Private, 1, HS-grad, 9, Never-married, {occupation}, Own-child, White, {sex}"
    return f"{about}, 0, 0, 40, {country}, {income}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("scaffpd.data.datasets"), "FEWEST", 2)
    rows = [
        row(20, "Sales", "Male", "<=50K"),
        row(60, "Sales", "Female", ">50K"),
        row(30, "Tech", "Male", ">50K"),
        row(40, "Tech", "Male", "<=50K"),
        row(50, "Army", "Male", ">50K"),
        row(50, "?", "Male", ">50K"),
        row(50, "?", "Male", ">50K"),
    ]
    (tmp_path / "adult").mkdir()
    for part, lines in (
        ("data", rows),
        ("test", [row(70, "Tech", "Female", ">50K."), row(20, "Sales", "Male", "<=50K.")]),
    ):
        with gzip.open(tmp_path / "adult" / f"adult.{part}.csv.gz", "wt") as file:
            file.write("\n".join([HEADER, *lines, ""]))
    return tmp_path


def test_clients_are_the_values_of_a_column(folder, monkeypatch):
    silos = sp.data.adult(folder=folder)
    assert silos.names == ("Sales", "Tech")  # unknown values and small groups are left out
    assert [y.tolist() for _, y in silos.train] == [[0, 1], [1, 0]]
    assert [y.tolist() for _, y in silos.test] == [[0], [1]]
    assert not any("occupation" in name for name in silos.features)
    ages = np.concatenate([X[:, 0] for X, _ in silos.train])
    assert ages.mean() == pytest.approx(0)
    assert ages.std() == pytest.approx(1)
    female = silos.features.index("sex=Female")
    assert silos.test[1][0][0, female] > 0 > silos.test[0][0][0, female]
    monkeypatch.setenv("SCAFFPD_DATA", str(folder))
    assert sp.data.adult(by="sex").names == ("Male",)


def test_countries_are_clients_but_no_feature(folder):
    silos = sp.data.adult(by="native-country", folder=folder)
    assert silos.names == ("Peru",)
    assert [y.tolist() for _, y in silos.train] == [[0, 1, 0]]
    assert [y.tolist() for _, y in silos.test] == [[0]]
    for by in ("native-country", "occupation"):
        assert not any("country" in name for name in sp.data.adult(by=by, folder=folder).features)


def test_mistakes_get_a_sentence(folder, monkeypatch):
    monkeypatch.delenv("SCAFFPD_DATA", raising=False)
    with pytest.raises(InputError, match="SCAFFPD_DATA"):
        sp.data.adult()
    with pytest.raises(InputError, match="did you mean 'occupation'"):
        sp.data.adult(by="ocupation", folder=folder)
    with pytest.raises(InputError, match="no folder 'adult'"):
        sp.data.adult(folder=folder / "adult")
    (folder / "adult" / "adult.test.csv.gz").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        sp.data.adult(folder=folder)


@pytest.mark.skipif("SCAFFPD_DATA" not in os.environ, reason="SCAFFPD_DATA names no data folder")
def test_the_real_data():
    silos = sp.data.adult()
    assert len(silos.names) == 13
    assert sum(len(y) for _, y in silos.train) == 30709
    assert silos.train[0][0].shape[1] == len(silos.features)
    cohort = sp.Cohort(
        silos.train,
        sp.Linear("logistic", l2=1e-3, intercept=True),
        names=silos.names,
        test=silos.test,
    )
    result = sp.train(sp.fair(sp.ChiSquare(rho=0.05)), cohort, rounds=60, tol=1e-7)
    assert result.status is sp.Status.CONVERGED
    assert cohort.evaluate(result.x, "test").accuracy.mean() > 0.82


@pytest.mark.skipif("SCAFFPD_DATA" not in os.environ, reason="SCAFFPD_DATA names no data folder")
def test_the_real_countries():
    silos = sp.data.adult(by="native-country")
    sizes = dict(zip(silos.names, (len(y) for _, y in silos.train), strict=True))
    assert len(sizes) == 8
    assert (sizes["United-States"], sizes["Mexico"], sizes["India"]) == (29170, 643, 100)
    assert all(len(y) for _, y in silos.test)
