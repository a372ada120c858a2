"""Datasets and partitions: what they contain, that seeds fix them, and that no row leaks."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd.data
from scaffpd.data import (
    breast_cancer,
    digits,
    dirichlet,
    heart_disease,
    synthetic,
)
from scaffpd.data.heart_disease import (
    COLUMNS,
    HOSPITALS,
    encode,
    encoded_names,
    fill_values,
    prepare,
    read,
)
from scaffpd.data.silos import held_out, standardiser
from scaffpd.data.tabular.agree import deviation_of
from scaffpd.errors import InputError

FILES = Path(scaffpd.data.__file__).parent / "files" / "heart_disease"


# ------------------------------------------------------------------ synthetic


def test_the_papers_problem_has_its_shape_and_statistics():
    clients = synthetic(N=40, d=10, m=500, c=2.0, sigma=0.3, seed=1)
    X = np.vstack([X for X, _ in clients])
    assert [X.shape for X, _ in clients] == [(500, 10)] * 40
    assert np.abs(X.mean(0)).max() < 0.03
    np.testing.assert_allclose(X.T @ X / len(X), np.eye(10), atol=0.05)
    # y = ⟨a, x̂ + δ_i⟩ exactly: least squares finds x̂ + δ_i, with the stated spread around x̂ and of x̂
    solutions = np.array([np.linalg.lstsq(X, y, rcond=None)[0] for X, y in clients])
    for (X, y), solution in zip(clients, solutions, strict=True):
        np.testing.assert_allclose(X @ solution, y, atol=1e-10)
    assert solutions.std(0).mean() == pytest.approx(0.3, rel=0.1)
    truths = [synthetic(N=1, m=30, c=2.0, sigma=0.0, seed=s)[0] for s in range(60)]
    spread = np.std([np.linalg.lstsq(X, y, rcond=None)[0] for X, y in truths])
    assert spread == pytest.approx(2.0, rel=0.1)


def test_synthetic_is_fixed_by_its_seed():
    first = synthetic(seed=3)
    again = synthetic(seed=3)
    other = synthetic(seed=4)
    assert all(
        np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
        for a, b in zip(first, again, strict=True)
    )
    assert not np.array_equal(first[0][0], other[0][0])


def test_scaling_changes_the_columns_but_not_what_can_be_predicted():
    clients = synthetic(sigma=0.0, scaling=1.0)
    X = np.vstack([X for X, _ in clients])
    scale = X.std(0)
    assert scale.min() > 10**-1.1
    assert scale.max() < 10**1.1
    assert scale.max() / scale.min() > 10
    y = np.concatenate([y for _, y in clients])
    np.testing.assert_allclose(X @ np.linalg.lstsq(X, y, rcond=None)[0], y, atol=1e-9)


def test_rank_deficient_clients_and_unequal_sizes():
    assert all(np.linalg.matrix_rank(X) == 30 < X.shape[1] for X, _ in synthetic(d=200, m=30))
    assert [len(y) for _, y in synthetic(N=3, sizes=[4, 1, 9])] == [4, 1, 9]


@pytest.mark.parametrize(
    "arguments",
    [
        {"N": 0},
        {"d": 1.5},
        {"m": 0},
        {"sigma": -1},
        {"c": float("nan")},
        {"sizes": [3]},
        {"N": 1, "sizes": [0]},
    ],
)
def test_synthetic_refuses_nonsense(arguments):
    with pytest.raises(InputError, match="synthetic needs"):
        synthetic(**arguments)


# ------------------------------------------------------------------ partitions


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.floats(0.3, 100.0), st.integers(1, 4))
def test_every_sample_goes_to_exactly_one_client(seed, clients, alpha, minimum):
    y = np.random.default_rng(seed).integers(0, 4, size=200)
    parts = dirichlet(np.zeros((200, 2)), y, clients, alpha, seed, minimum=minimum)
    assert len(parts) == clients
    assert min(map(len, parts)) >= minimum
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(200))


def test_alpha_sets_the_skew_and_the_seed_fixes_it():
    y = np.repeat(np.arange(5), 400)

    def largest_share(alpha):
        parts = dirichlet(y, y, 10, alpha, seed=2)
        return np.mean([np.bincount(y[rows]).max() / len(rows) for rows in parts])

    assert largest_share(0.1) > 0.6
    assert largest_share(1000.0) < 0.25
    again = zip(dirichlet(y, y, 10, 0.5, seed=2), dirichlet(y, y, 10, 0.5, seed=2), strict=True)
    assert all(np.array_equal(a, b) for a, b in again)


def test_no_client_is_favoured_by_rounding():
    y = np.repeat(np.arange(10), 20)
    sizes = np.mean(
        [[len(rows) for rows in dirichlet(y, y, 5, 0.2, seed=s, minimum=1)] for s in range(200)],
        axis=0,
    )
    np.testing.assert_allclose(sizes, 40.0, atol=4.0)


def test_partitions_that_cannot_be_are_refused():
    y = np.repeat([0, 1], 10)
    with pytest.raises(InputError, match="cannot give 11 clients 2 samples"):
        dirichlet(y, y, 11, 1.0, 0, minimum=2)
    with pytest.raises(InputError, match="raise alpha"):
        dirichlet(y, y, 10, 1e-3, 0, minimum=2)
    with pytest.raises(InputError, match="one label per sample"):
        dirichlet(np.zeros(3), y, 2, 1.0)
    with pytest.raises(InputError, match="alpha > 0"):
        dirichlet(y, y, 2, 0.0)


@pytest.mark.parametrize(
    ("load", "rows", "columns", "classes", "factor"),
    [(breast_cancer, 569, 30, 2, 1.0), (digits, 1797, 64, 10, 0.25)],
)
def test_embedded_sets_are_complete_and_standardised(load, rows, columns, classes, factor):
    silos = load()
    X = np.vstack([X for X, _ in silos.train])
    y = np.concatenate([y for _, y in silos.train])
    assert X.shape == (rows, columns)
    assert len(silos.names) == len(silos.train) == 10
    assert len(silos.features) == columns
    assert silos.test == []
    assert silos.classes == classes == len(np.unique(y))
    deviation = X.std(0)
    np.testing.assert_allclose(X.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(deviation[deviation > 0], factor)
    assert (deviation == 0).sum() == (
        3 if load is digits else 0
    )  # corner pixels that nobody writes on
    again = load()
    other = load(seed=1)
    assert all(
        np.array_equal(a, b) for (a, _), (b, _) in zip(silos.train, again.train, strict=True)
    )
    assert [len(y) for _, y in silos.train] != [len(y) for _, y in other.train]


def test_held_out_rows_are_stratified_and_do_not_scale_the_columns():
    silos = digits(alpha=1.0, test_fraction=0.25)
    assert sum(len(y) for _, y in [*silos.train, *silos.test]) == 1797
    for (_, train), (_, test) in zip(silos.train, silos.test, strict=True):
        kept = np.bincount(train, minlength=10)
        gone = np.bincount(test, minlength=10)
        assert np.abs(gone - 0.25 * (kept + gone)).max() <= 0.5
    np.testing.assert_allclose(np.vstack([X for X, _ in silos.train]).mean(0), 0, atol=1e-12)
    assert np.abs(np.vstack([X for X, _ in silos.test]).mean(0)).max() > 1e-3


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan"), "half"])
def test_impossible_fractions_are_refused(fraction):
    with pytest.raises(InputError, match="test_fraction"):
        breast_cancer(test_fraction=fraction)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 99)
)
def test_a_split_always_leaves_rows_on_both_sides(labels, fraction, seed):
    gone = held_out(np.array(labels), fraction, np.random.default_rng(seed))
    assert 0 < gone.sum() < len(labels)


def test_a_single_row_cannot_be_split():
    with pytest.raises(InputError, match="single row"):
        held_out(np.array([1]), 0.5, np.random.default_rng(0))


def test_sums_of_clients_give_the_pooled_mean_and_deviation():
    random = np.random.default_rng(0)
    parts = [1e6 + random.standard_normal((n, 3)) * [1, 10, 0] for n in (5, 50, 1)]
    mean, deviation = standardiser(parts)
    pooled = np.vstack(parts)
    np.testing.assert_allclose(mean, pooled.mean(0), rtol=1e-14)
    np.testing.assert_allclose(deviation[:2], pooled.std(0)[:2], rtol=1e-12)
    assert deviation[2] == 1.0


@pytest.mark.parametrize("weighted", [False, True])
def test_units_decide_nothing_and_constants_count_as_constant(weighted):
    """Also where a sum of many equal numbers has rounded; the deviation by sums of silos is the same."""
    random = np.random.default_rng(0)
    n = 50_000
    same = np.array([0.1, 1e9 + 0.1, 1e-13 / 3, 0.0])
    units = np.array([1e-13, 1.0, 1e13])
    X = np.column_stack([np.tile(same, (2 * n, 1)), random.standard_normal((2 * n, 1)) * units])
    parts = np.split(X, 2)
    mean, deviation = standardiser(parts, [np.full(n, 0.3)] * 2 if weighted else None)
    assert deviation[:4].tolist() == [1.0] * 4
    np.testing.assert_allclose(deviation[4:], np.std(X[:, 5]) * units, rtol=1e-12)
    squares = {
        str(k): {"n": np.full(7, n), "squares": ((own - mean) ** 2).sum(0)}
        for k, own in enumerate(parts)
    }
    np.testing.assert_allclose(deviation_of(squares, mean), deviation, rtol=1e-12)


# ------------------------------------------------------------------ heart disease


def raw_table(hospital):
    """The file as text, read without the package."""
    with open(FILES / f"processed.{hospital}.data", newline="") as lines:
        return list(csv.reader(lines))


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
    table, (raw, y) = raw_table(hospital), read(hospital)
    assert raw.shape == (rows, 13)
    assert len(table) == rows
    assert y.sum() == ill == sum(int(float(row[-1])) > 0 for row in table)
    assert np.isnan(raw).sum() == missing + chol + trestbps
    for row, cells in zip(raw, table, strict=True):
        for name, value, cell in zip(COLUMNS, row, cells[:13], strict=True):
            unknown = cell in ("NaN", "?") or (name in ("chol", "trestbps") and float(cell) == 0)
            assert np.isnan(value) if unknown else value == float(cell)


def test_the_donors_are_named():
    text = (FILES / "README.md").read_text()
    for word in (
        "Janosi",
        "Steinbrunn",
        "Pfisterer",
        "Detrano",
        "10.24432/C52P4X",
        "Attribution 4.0",
    ):
        assert word in text


def test_hospitals_keep_their_patients_and_their_share_of_ill_ones():
    silos = heart_disease(test_fraction=0.3, seed=5)
    assert silos.names == HOSPITALS
    assert silos.features == encoded_names()
    assert len(silos.features) == 28
    for name, (X, y), (X_test, y_test) in zip(HOSPITALS, silos.train, silos.test, strict=True):
        rows, ill = COUNTS[name][:2]
        assert len(X) + len(X_test) == rows
        assert X.shape[1] == X_test.shape[1] == 28
        assert y.sum() + y_test.sum() == ill
        assert y_test.sum() == round(0.3 * ill)
        assert set(np.unique(y)) == {0, 1}
    train = np.vstack([X for X, _ in silos.train])
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(train.std(0), 1)
    assert heart_disease(test_fraction=0.0).test == []


def test_the_seed_fixes_the_split():
    first = heart_disease(seed=1)
    again = heart_disease(seed=1)
    other = heart_disease(seed=2)
    assert all(
        np.array_equal(a, b) for (a, _), (b, _) in zip(first.train, again.train, strict=True)
    )
    assert not np.array_equal(first.train[0][0], other.train[0][0])


def test_missing_values_take_the_hospitals_own_median_or_most_frequent_value():
    parts = [read(name)[0] for name in HOSPITALS]
    fills = dict(zip(HOSPITALS, fill_values(parts), strict=True))

    def fill(hospital, column):
        return fills[hospital][COLUMNS.index(column)]

    # counted in the files: medians of observed cells, most frequent categories
    assert fill("hungarian", "chol") == 243
    assert fill("va", "trestbps") == 130
    assert fill("hungarian", "slope") == 2
    assert fill("hungarian", "thal") == 7
    assert fill("va", "thal") == 7
    assert fill("cleveland", "thal") == 3
    assert fill("va", "exang") == 1
    assert fill("hungarian", "exang") == 0
    assert fill("switzerland", "ca") == 2
    # Switzerland has no cholesterol: Σ x / Σ n over the other three
    known = [
        float(row[4]) for name in HOSPITALS for row in raw_table(name) if row[4] not in ("NaN", "0")
    ]
    assert len(known) == 920 - 30 - 172
    assert fill("switzerland", "chol") == pytest.approx(sum(known) / len(known), rel=1e-14)


def test_a_category_nobody_recorded_at_one_hospital_comes_from_the_added_counts():
    parts = [read(name)[0] for name in HOSPITALS]
    column = COLUMNS.index("thal")
    parts[3][:, column] = np.nan
    counts = {
        value: sum(int((part[:, column] == value).sum()) for part in parts) for value in (3, 6, 7)
    }
    assert counts == {3: 166 + 7 + 19, 6: 18 + 10 + 10, 7: 117 + 11 + 42}
    assert fill_values(parts)[3][column] == 3


def test_encoding_of_one_patient():
    raw = np.array([[63.0, 1, 4, np.nan, 233, 1, 2, 150, 0, 2.3, np.nan, 0, 6]])
    fill = np.array([0.0, 0, 0, 131, 0, 0, 0, 0, 0, 0, 2, 0, 0])
    row = dict(zip(encoded_names(), encode(raw, fill)[0], strict=True))
    expected = dict.fromkeys(encoded_names(), 0.0)
    expected |= {
        "age": 63,
        "sex": 1,
        "cp=4": 1,
        "trestbps": 131,
        "chol": 233,
        "fbs": 1,
        "restecg=2": 1,
    }
    expected |= {"thalach": 150, "oldpeak": 2.3, "slope=2": 1, "thal=6": 1, "slope missing": 1}
    assert row == expected


def split_hospitals(seed=0):
    random = np.random.default_rng(seed)
    whole = [read(name) for name in HOSPITALS]
    out = [held_out(y, 0.3, random) for _, y in whole]
    train = [(raw[~gone].copy(), y[~gone]) for (raw, y), gone in zip(whole, out, strict=True)]
    test = [(raw[gone].copy(), y[gone]) for (raw, y), gone in zip(whole, out, strict=True)]
    return train, test


def test_nothing_is_learnt_from_held_out_rows():
    train, test = split_hospitals()
    expected = prepare(train, test).train
    changed = [(raw * 100 + 7, y) for raw, y in test]
    found = prepare(train, changed).train
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(expected, found, strict=True))


def test_a_test_row_is_prepared_alone():
    train, test = split_hospitals()
    whole = prepare(train, test).test
    single = prepare(train, [(raw[:1], y[:1]) for raw, y in test]).test
    assert all(np.array_equal(a[:1], b) for (a, _), (b, _) in zip(whole, single, strict=True))


def test_another_hospitals_rows_reach_only_what_was_never_measured_here():
    train, _ = split_hospitals()
    before = fill_values([raw for raw, _ in train])
    va = train[3][0]
    va[:, COLUMNS.index("chol")] += 50
    va[:, COLUMNS.index("trestbps")] *= 2
    va[:, COLUMNS.index("thal")] = 6
    after = fill_values([raw for raw, _ in train])
    for hospital in (0, 1):
        assert np.array_equal(before[hospital], after[hospital])
    observed = ~np.isnan(train[2][0]).all(axis=0)
    assert not observed[COLUMNS.index("chol")]
    assert np.array_equal(before[2][observed], after[2][observed])
    assert after[2][COLUMNS.index("chol")] > before[2][COLUMNS.index("chol")]


def test_only_sums_are_shared_for_the_common_fill():
    train, _ = split_hospitals()
    before = fill_values([raw for raw, _ in train])[2]
    chol = train[0][0][:, COLUMNS.index("chol")]
    chol[0] += 10
    chol[1] -= 10  # other rows, the same sum and count
    np.testing.assert_allclose(fill_values([raw for raw, _ in train])[2], before, rtol=1e-14)


def test_no_client_is_smaller_than_asked():
    silos = digits(clients=20, alpha=0.05, seed=2, test_fraction=0.3, minimum=10)
    sizes = [len(a[1]) + len(b[1]) for a, b in zip(silos.train, silos.test, strict=True)]
    assert min(sizes) >= 10
    assert sum(sizes) == 1797


@pytest.mark.parametrize("load", [synthetic, heart_disease, digits, scaffpd.data.diabetes])
@pytest.mark.parametrize("seed", [-1, "a", 0.5])
def test_seeds_that_are_none(load, seed):
    with pytest.raises(InputError, match="needs a whole number seed >= 0"):
        load(seed=seed)
