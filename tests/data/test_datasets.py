"""Data sets: what they contain, that seeds fix them, and that nothing is learnt from test rows."""

import csv
import gzip
import os
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from cases.refusals import refuses
from experiments.datasets import adult, school
from scaffpd.data import beijing_air, breast_cancer, digits, heart_disease, synthetic
from scaffpd.data.hospitals import (
    COLUMNS,
    HOSPITALS,
    NAMES,
    encode,
    fill_values,
    prepare,
    read,
)
from scaffpd.data.silos import held_out, standardiser
from scaffpd.data.tabular.agree import scale_of


def pooled(part):
    return (np.concatenate(rows) for rows in zip(*part, strict=True))


# --- synthetic


def test_the_papers_problem_has_its_statistics():
    clients = synthetic(N=40, d=10, m=500, c=2.0, sigma=0.3, seed=1)
    X = np.vstack([X for X, _ in clients])
    np.testing.assert_allclose(X.T @ X / len(X), np.eye(10), atol=0.05)
    # y = ⟨a, x̂ + δ_i⟩ exactly: least squares finds x̂ + δ_i, with the stated spread around x̂
    solutions = np.array([np.linalg.lstsq(X, y, rcond=None)[0] for X, y in clients])
    for (X, y), solution in zip(clients, solutions, strict=True):
        np.testing.assert_allclose(X @ solution, y, atol=1e-10)
    assert solutions.std(0).mean() == pytest.approx(0.3, rel=0.1)
    truths = [synthetic(N=1, m=30, c=2.0, sigma=0.0, seed=s)[0] for s in range(60)]
    spread = np.std([np.linalg.lstsq(X, y, rcond=None)[0] for X, y in truths])
    assert spread == pytest.approx(2.0, rel=0.1)


def test_scaling_rank_and_sizes():
    clients = synthetic(sigma=0.0, scaling=1.0)
    X, y = pooled(clients)
    scale = X.std(0)
    assert 10**-1.1 < scale.min() < scale.max() / 10 < 10**0.1
    np.testing.assert_allclose(X @ np.linalg.lstsq(X, y, rcond=None)[0], y, atol=1e-9)
    assert all(np.linalg.matrix_rank(X) == 30 < X.shape[1] for X, _ in synthetic(d=200, m=30))
    assert [len(y) for _, y in synthetic(N=3, sizes=[4, 1, 9])] == [4, 1, 9]


# --- splits and scales


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 99)
)
def test_a_split_always_leaves_rows_on_both_sides(labels, fraction, seed):
    gone = held_out(np.array(labels), fraction, np.random.default_rng(seed))
    assert 0 < gone.sum() < len(labels)


@pytest.mark.parametrize("weighted", [False, True])
def test_units_decide_nothing_and_constants_count_as_constant(weighted):
    """Also where a sum of many equal numbers has rounded; the same by sums of silos."""
    random = np.random.default_rng(0)
    n = 50_000
    same = np.array([0.1, 1e9 + 0.1, 1e-13 / 3, 0.0])
    units = np.array([1e-13, 1.0, 1e13])
    X = np.column_stack([np.tile(same, (2 * n, 1)), random.standard_normal((2 * n, 1)) * units])
    parts = np.split(X, 2)
    mean, deviation = standardiser(parts, [np.full(n, 0.3)] * 2 if weighted else None)
    assert deviation[:4].tolist() == [1.0] * 4
    np.testing.assert_allclose(mean, X.mean(0), rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(deviation[4:], np.std(X[:, 5]) * units, rtol=1e-12)

    def total(mean):
        sums = [own.sum(0) if mean is None else ((own - mean) ** 2).sum(0) for own in parts]
        return np.stack([np.full(7, 2 * n), np.sum(sums, axis=0)])

    columns = [{"name": str(k), "kind": "number"} for k in range(7)]
    schema = {"task": "regression", "labels": [], "columns": columns, "shape": None}
    np.testing.assert_allclose(scale_of(schema, total)[1], deviation, rtol=1e-12)


@pytest.mark.parametrize(
    ("load", "shape", "classes", "factor"),
    [(breast_cancer, (569, 30), 2, 1.0), (digits, (1797, 64), 10, 0.25)],
)
def test_bundled_sets_are_complete_and_standardised(load, shape, classes, factor):
    silos = load()
    X, y = pooled(silos.train)
    assert X.shape == shape
    assert len(silos.features) == shape[1]
    assert silos.test == []
    assert classes == len(np.unique(y))
    deviation = X.std(0)
    np.testing.assert_allclose(X.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(deviation[deviation > 0], factor)
    assert np.array_equal(silos.train[0][0], load().train[0][0])
    assert [len(y) for _, y in silos.train] != [len(y) for _, y in load(seed=1).train]


def test_held_out_rows_are_stratified_and_do_not_scale_the_columns():
    silos = digits(alpha=1.0, test_fraction=0.25, minimum=10)
    assert sum(len(y) for _, y in [*silos.train, *silos.test]) == 1797
    for (_, train), (_, test) in zip(silos.train, silos.test, strict=True):
        assert len(train) + len(test) >= 10
        gone = np.bincount(test, minlength=10)
        whole = np.bincount(train, minlength=10) + gone
        assert np.abs(gone - 0.25 * whole).max() <= 0.5
    np.testing.assert_allclose(np.vstack([X for X, _ in silos.train]).mean(0), 0, atol=1e-12)
    assert np.abs(np.vstack([X for X, _ in silos.test]).mean(0)).max() > 1e-3


# --- hospitals

# rows, diagnosis > 0, cells written NaN, cholesterol 0, blood pressure 0: counted with other tools
COUNTS = {
    "cleveland": (303, 139, 6, 0, 0),
    "hungarian": (294, 106, 782, 0, 0),
    "switzerland": (123, 115, 273, 123, 0),
    "va": (200, 149, 698, 49, 1),
}


@pytest.mark.parametrize("hospital", HOSPITALS)
def test_each_hospital_is_read_as_it_was_donated(hospital):
    rows, ill, missing, chol, trestbps = COUNTS[hospital]
    raw, y = read(hospital)
    assert raw.shape == (rows, 13)
    assert y.sum() == ill
    assert np.isnan(raw).sum() == missing + chol + trestbps


def test_hospitals_are_split_by_label_and_scaled_by_training_rows():
    silos = heart_disease(test_fraction=0.3, seed=5)
    assert (silos.names, silos.features, len(silos.features)) == (HOSPITALS, NAMES, 28)
    for name, (X, y), (A, b) in zip(HOSPITALS, silos.train, silos.test, strict=True):
        rows, ill = COUNTS[name][:2]
        assert (len(X) + len(A), y.sum() + b.sum(), b.sum()) == (rows, ill, round(0.3 * ill))
    train = np.vstack([X for X, _ in silos.train])
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(train.std(0), 1)
    assert not np.array_equal(silos.train[0][0], heart_disease(seed=6).train[0][0])
    assert heart_disease(test_fraction=0.0).test == []


def test_missing_values_take_the_hospitals_own_median_or_most_frequent_value():
    parts = [read(name)[0] for name in HOSPITALS]
    fills = dict(zip(HOSPITALS, fill_values(parts), strict=True))
    # counted in the files: medians of observed cells, most frequent categories
    for hospital, column, value in (
        ("hungarian", "chol", 243),
        ("va", "trestbps", 130),
        ("hungarian", "slope", 2),
        ("hungarian", "thal", 7),
        ("cleveland", "thal", 3),
        ("va", "exang", 1),
        ("switzerland", "ca", 2),
    ):
        assert fills[hospital][COLUMNS.index(column)] == value
    # Switzerland has no cholesterol: Σ x / Σ n over the other three
    chol = np.concatenate([part[:, COLUMNS.index("chol")] for part in parts])
    expected = np.nanmean(chol)
    assert fills["switzerland"][COLUMNS.index("chol")] == pytest.approx(expected, rel=1e-14)
    # a category nobody recorded comes from the added counts: 3 is the most frequent elsewhere
    parts[3][:, COLUMNS.index("thal")] = np.nan
    assert fill_values(parts)[3][COLUMNS.index("thal")] == 3


def test_encoding_of_one_patient():
    raw = np.array([[63.0, 1, 4, np.nan, 233, 1, 2, 150, 0, 2.3, np.nan, 0, 6]])
    fill = np.array([0.0, 0, 0, 131, 0, 0, 0, 0, 0, 0, 2, 0, 0])
    row = dict(zip(NAMES, encode(raw, fill)[0], strict=True))
    expected = dict.fromkeys(NAMES, 0.0)
    expected |= {"age": 63, "sex": 1, "cp=4": 1, "trestbps": 131, "chol": 233, "fbs": 1}
    expected |= {"restecg=2": 1, "thalach": 150, "oldpeak": 2.3, "slope=2": 1, "thal=6": 1}
    assert row == expected | {"slope missing": 1}


def test_nothing_is_learnt_from_held_out_rows():
    whole = [read(name) for name in HOSPITALS]
    train = [(raw[::2], y[::2]) for raw, y in whole]
    test = [(raw[1::2], y[1::2]) for raw, y in whole]
    expected = prepare(train, test)
    changed = prepare(train, [(raw * 100 + 7, y) for raw, y in test])
    single = prepare(train, [(raw[:1], y[:1]) for raw, y in test])
    for i in range(4):
        assert np.array_equal(expected.train[i][0], changed.train[i][0])
        assert np.array_equal(expected.test[i][0][:1], single.test[i][0])


def test_stations_have_three_years_and_are_tested_on_the_next():
    air = beijing_air()
    assert len(air.names) == 12
    assert sum(len(y) for _, y in [*air.train, *air.test]) == 17_467
    X, y = pooled(air.train)
    np.testing.assert_allclose(X.mean(0), 0, atol=1e-10)
    np.testing.assert_allclose(X.std(0), 1)
    assert y.mean() == pytest.approx(0, abs=1e-12)
    assert abs(np.concatenate([b for _, b in air.test]).mean()) > 0.01


def test_columns_and_target_are_what_their_names_say():
    import lzma

    packed = resources.files("scaffpd.data") / "files" / "beijing_air" / "daily.csv.xz"
    rows = csv.DictReader(lzma.decompress(packed.read_bytes()).decode().splitlines())
    days = [row for row in rows if row["station"] == "Gucheng" and row["pm25"]]
    own = [row for row in days if row["date"] < "2016-03-01"]
    air = beijing_air()
    X, y = air.train[air.names.index("Gucheng")]
    raw = dict(zip(air.features, X.T, strict=True))
    for name in ("temperature", "pressure", "northerly"):
        assert np.corrcoef(raw[name], [float(row[name]) for row in own])[0, 1] == pytest.approx(1)
    target = np.log1p([float(row["pm25"]) for row in own])
    assert np.ptp(y - target) < 1e-12  # shifted, not scaled
    dates = np.array([row["date"] for row in own])
    weekend = raw["weekend"][np.isin(dates, ["2015-08-01", "2015-08-02"])]  # Saturday and Sunday
    assert set(weekend) == {raw["weekend"].max()}
    assert dates[raw["season_cosine"].argmin()][5:] in ("07-01", "07-02")
    np.testing.assert_array_equal(raw["calm"] > 0, [float(row["wind"]) < 1 for row in own])


def test_new_stations_have_few_days_and_the_same_test_year():
    air = beijing_air(new=4, seed=1)
    few = [len(y) == 40 for _, y in air.train]
    assert sum(few) == 4
    assert [len(y) for _, y in air.test] == [len(y) for _, y in beijing_air().test]
    assert few != [len(y) == 40 for _, y in beijing_air(new=4, seed=2).train]


def test_a_school_is_a_client(tmp_path):
    random = np.random.default_rng(0)
    X = np.empty((1, 3), object)
    Y = np.empty((1, 3), object)
    for k, n in enumerate((10, 20, 31)):
        X[0, k] = np.hstack([random.normal(3, 2, (n, 4)), np.ones((n, 1))])
        Y[0, k] = random.normal(20, 5, (n, 1))
    (tmp_path / "school").mkdir()
    savemat(tmp_path / "school" / "school.mat", {"X": X, "Y": Y})
    silos = school(folder=tmp_path)
    assert silos.features == tuple(f"column {k}" for k in range(1, 5))  # not the constant one
    sizes = [(len(y), len(b)) for (_, y), (_, b) in zip(silos.train, silos.test, strict=True)]
    assert sizes == [(7, 3), (14, 6), (22, 9)]
    X, y = pooled(silos.train)
    np.testing.assert_allclose([X.mean(), y.mean(), X.std(), y.std()], [0, 0, 1, 1], atol=1e-12)


@pytest.mark.skipif("SCAFFPD_DATA" not in os.environ, reason="SCAFFPD_DATA names no folder")
def test_the_real_schools_and_people():
    silos = school()
    assert (len(silos.names), len(silos.features)) == (139, 27)
    assert sum(len(y) for _, y in [*silos.train, *silos.test]) == 15_362
    people = adult()
    assert (len(people.names), sum(len(y) for _, y in people.train)) == (13, 30709)
    assert len(adult(by="native-country").names) == 8


# --- Adult

HEADER = (
    "age, workclass, fnlwgt, education, education-num, marital-status, occupation, relationship, "
    "race, sex, capital-gain, capital-loss, hours-per-week, native-country, classification"
)


def person(age, occupation, sex, income):
    country = "Peru" if age < 45 else "?"
    about = f"{age}, Private, 1, HS-grad, 9, Never-married, {occupation}, Own-child, White, {sex}"
    return f"{about}, 0, 0, 40, {country}, {income}"


@pytest.fixture
def people(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.datasets.FEWEST", 2)
    train = [
        *(person(20, "Sales", "Male", "<=50K"), person(60, "Sales", "Female", ">50K")),
        *(person(30, "Tech", "Male", ">50K"), person(40, "Tech", "Male", "<=50K")),
        *(person(50, "Army", "Male", ">50K"), *[person(50, "?", "Male", ">50K")] * 2),
    ]
    test = [person(70, "Tech", "Female", ">50K."), person(20, "Sales", "Male", "<=50K.")]
    (tmp_path / "adult").mkdir()
    for part, lines in (("data", train), ("test", test)):
        with gzip.open(tmp_path / "adult" / f"adult.{part}.csv.gz", "wt") as file:
            file.write("\n".join([HEADER, *lines, ""]))
    return tmp_path


def test_clients_are_the_values_of_a_column(people, monkeypatch):
    silos = adult(folder=people)
    assert silos.names == ("Sales", "Tech")  # unknown values and small groups are left out
    assert [y.tolist() for _, y in silos.train] == [[0, 1], [1, 0]]
    assert [y.tolist() for _, y in silos.test] == [[0], [1]]
    assert not any("occupation" in name or "country" in name for name in silos.features)
    ages = np.concatenate([X[:, 0] for X, _ in silos.train])
    assert (ages.mean(), ages.std()) == (pytest.approx(0), pytest.approx(1))
    female = silos.features.index("sex=Female")
    assert silos.test[1][0][0, female] > 0 > silos.test[0][0][0, female]
    monkeypatch.setenv("SCAFFPD_DATA", str(people))
    assert adult(by="native-country").names == ("Peru",)


# --- refusals


@pytest.mark.parametrize(
    ("code", "load"),
    [
        ("sizes-length", lambda place: synthetic(sizes=[3])),
        ("spread-out-of-range", lambda place: synthetic(sigma=-1)),
        ("seed-out-of-range", lambda place: synthetic(seed=0.5)),
        ("client-of-one-row", lambda place: held_out(np.ones(1), 0.5, None)),
        ("no-such-stations", lambda place: beijing_air(new=13)),
        ("data-folder-not-named", lambda place: school()),
        ("data-folder-missing", lambda place: school(folder=place / "nowhere")),
        ("data-file-missing", lambda place: adult(folder=place)),
        ("data-file-damaged", lambda place: school(folder=place)),
    ],
)
def test_what_cannot_be_loaded(code, load, tmp_path, monkeypatch):
    monkeypatch.delenv("SCAFFPD_DATA", raising=False)
    (tmp_path / "school").mkdir()
    savemat(tmp_path / "school" / "school.mat", {"X": np.ones((2, 2))})
    with refuses(code):
        load(tmp_path)
