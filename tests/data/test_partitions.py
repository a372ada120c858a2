"""Partitions: every sample once, sorted, fixed by the seed, and with the sizes and labels that were promised."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from scaffpd.errors import InputError

seeds = st.integers(0, 10_000)
quick = settings(max_examples=60, deadline=None)


def labels(seed, n=200, classes=5):
    return np.random.default_rng(seed).integers(0, classes, size=n)


def cut_of(parts, n):
    """Whether each of n samples is in exactly one of `parts`, each ascending."""
    assert all((np.diff(rows) > 0).all() and rows.dtype == np.int64 for rows in parts)
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------ shards


@quick
@given(seeds, st.integers(1, 12), st.integers(1, 5))
def test_shards_are_equal_pieces_of_the_sorted_labels(seed, clients, each):
    y = labels(seed)
    parts = sp.data.shards(y, clients, each, seed)
    assert cut_of(parts, 200)
    assert len(parts) == clients
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= each  # each shard has one sample more or less
    # a client's rows, in the order of the sorted labels, are at most `each` runs
    place = np.argsort(np.argsort(y, kind="stable"))
    assert all((np.diff(np.sort(place[rows])) > 1).sum() < each for rows in parts)
    assert same(parts, sp.data.shards(y, clients, each, seed))


def test_two_shards_are_about_two_labels():
    y = np.tile(np.arange(10), 500)
    parts = sp.data.shards(y, 100)
    assert [len(rows) for rows in parts] == [50] * 100
    assert all(len(np.unique(y[rows])) <= 2 for rows in parts)
    assert not same(parts, sp.data.shards(y, 100, seed=1))
    with pytest.raises(InputError, match="cannot cut 10 samples into 6 · 2 shards"):
        sp.data.shards(np.arange(10), 6)
    with pytest.raises(InputError, match="shards_per_client >= 1"):
        sp.data.shards(y, 6, 0)
    with pytest.raises(InputError, match="vector with one entry per sample"):
        sp.data.shards([], 6)


# ------------------------------------------------------------------ sizes


@quick
@given(seeds, st.integers(1, 20), st.floats(0.01, 100), st.integers(1, 10))
def test_quantity_skew_keeps_the_minimum_whatever_alpha(seed, clients, alpha, minimum):
    parts = sp.data.quantity_skew(200, clients, alpha, seed, minimum)
    assert cut_of(parts, 200)
    assert len(parts) == clients
    assert min(map(len, parts)) >= minimum
    assert same(parts, sp.data.quantity_skew(labels(seed), clients, alpha, seed, minimum))


def test_alpha_sets_the_skew_of_sizes_and_labels_stay_alike():
    y = np.repeat(np.arange(4), 5000)
    even = sp.data.quantity_skew(y, 10, 1e4)
    skewed = sp.data.quantity_skew(y, 10, 0.3)
    assert max(map(len, even)) < 1.1 * min(map(len, even))
    assert max(map(len, skewed)) > 5 * min(map(len, skewed))
    for rows in (rows for rows in skewed if len(rows) > 500):
        np.testing.assert_allclose(np.bincount(y[rows]) / len(rows), 0.25, atol=0.08)
    with pytest.raises(InputError, match="cannot give 11 clients 2 samples each out of 20"):
        sp.data.quantity_skew(20, 11, 1.0)
    for wrong in (0, 2.5, "many"):
        with pytest.raises(InputError, match="whole number n >= 1"):
            sp.data.quantity_skew(wrong, 2, 1.0)


@quick
@given(seeds, st.integers(1, 12), st.floats(0, 1), st.floats(0, 1), st.integers(1, 30))
def test_thinning_takes_the_stated_numbers(seed, N, clients, samples, minimum):
    parts = sp.data.quantity_skew(200, N, 1.0, seed, minimum=1)
    kept = sp.data.thinned(parts, clients, samples, seed, minimum)
    assert all(
        np.isin(after, before).all() and (np.diff(after) > 0).all()
        for before, after in zip(parts, kept, strict=True)
    )
    assert all(
        len(after) >= min(minimum, len(before)) for before, after in zip(parts, kept, strict=True)
    )

    def expected(m):
        return max(m - round(samples * m), min(m, minimum))

    thin = [
        (len(before), len(after))
        for before, after in zip(parts, kept, strict=True)
        if len(after) < len(before)
    ]
    assert all(after == expected(before) for before, after in thin)
    assert len(thin) <= round(clients * N)
    if all(expected(len(rows)) < len(rows) for rows in parts):
        assert len(thin) == round(clients * N)
    assert same(kept, sp.data.thinned(parts, clients, samples, seed, minimum))


def test_thirty_percent_of_the_clients_lose_seventy_percent():
    parts = [np.arange(100 * i, 100 * i + 100) for i in range(20)]
    first = sp.data.thinned(parts)
    other = sp.data.thinned(parts, seed=1)
    assert sorted(map(len, first)) == [30] * 6 + [100] * 14
    assert [len(rows) for rows in first] != [len(rows) for rows in other]
    assert [len(rows) for rows in parts] == [100] * 20  # what was handed over is left alone
    assert [len(rows) for rows in sp.data.thinned([[3, 1, 2]], 1.0, 1.0)] == [1]
    with pytest.raises(InputError, match="0 <= samples <= 1"):
        sp.data.thinned(parts, samples=70)
    with pytest.raises(InputError, match="0 <= clients <= 1"):
        sp.data.thinned(parts, clients=-0.1)
    with pytest.raises(InputError, match="client 1 has none"):
        sp.data.thinned([[0], []])
    with pytest.raises(InputError, match="at least one client"):
        sp.data.thinned([])
    with pytest.raises(InputError, match="client 0 has float64"):
        sp.data.thinned([[0.5]])
    with pytest.raises(InputError, match="of at least 0, but client 0 has -1"):
        sp.data.thinned([[-1, 3]])


# ------------------------------------------------------------------ labels


@quick
@given(seeds, st.integers(1, 6), st.floats(1e-3, 10), st.integers(12, 20))
def test_balanced_clients_have_at_most_their_part_and_one_label(seed, clients, alpha, classes):
    y = labels(seed, classes=classes)
    parts = sp.data.dirichlet(y, y, clients, alpha, seed, minimum=1, balanced=True)
    assert cut_of(parts, 200)
    assert len(parts) == clients
    assert max(map(len, parts)) < 200 / clients + np.bincount(y).max()
    assert same(parts, sp.data.dirichlet(y, y, clients, alpha, seed, minimum=1, balanced=True))


def test_balanced_sizes_spread_much_less():
    y = np.repeat(np.arange(100), 50)

    def spread(balanced):
        cuts = [sp.data.dirichlet(y, y, 20, 0.01, seed, balanced=balanced) for seed in range(10)]
        return np.mean([np.std([len(rows) for rows in parts]) for parts in cuts])

    assert spread(True) < spread(False) / 2


def test_full_clients_that_had_all_the_shares():
    """α so small that shares are zeros and ones: label after label would go to one client, full or not."""
    y = np.repeat(np.arange(10), 10)
    for seed in range(20):
        parts = sp.data.dirichlet(y, y, 5, 1e-300, seed, balanced=True)
        assert [len(rows) for rows in parts] == [20] * 5
    with pytest.raises(InputError, match="True or False for balanced"):
        sp.data.dirichlet(y, y, 5, 1.0, balanced="yes")


def test_the_unbalanced_numbers_stay():
    y = np.random.default_rng(5).integers(0, 7, 500)
    parts = sp.data.dirichlet(y, y, 6, 0.3, 1)
    digest = hashlib.sha256(
        np.concatenate([*parts, [len(rows) for rows in parts]]).tobytes()
    ).hexdigest()
    assert digest.startswith("c72e873143b86746")


ODD = {
    "NaN": [0.0, 1.0, np.nan, 1.0],
    "all NaN": [np.nan] * 4,
    "None": ["a", "b", None, "a"],
    "NaN among text": ["a", "b", float("nan"), "a"],
    "masked": np.ma.masked_array([0, 1, 0, 1], [False, False, True, False]),
    "no date": np.array(["2020", "2021", "NaT", "2020"], dtype="M8[D]"),
}
PARTITIONERS = {
    "dirichlet": lambda y, seed=0: sp.data.dirichlet(np.zeros(len(y)), y, 2, 1.0, seed, minimum=1),
    "shards": lambda y, seed=0: sp.data.shards(y, 2, 1, seed),
    "like_training": lambda y, seed=0: sp.data.like_training([[0, 1]], y, y, seed),
    "thinned": lambda y, seed=0: sp.data.thinned([[0, 1], [2]], seed=seed),
    "quantity_skew": lambda y, seed=0: sp.data.quantity_skew(y, 2, 1.0, seed, minimum=1),
    "natural": lambda y: sp.data.natural(y),
}


@pytest.mark.parametrize("partitioner", ["dirichlet", "shards", "like_training", "natural"])
@pytest.mark.parametrize("kind", ODD)
def test_missing_labels_are_refused(kind, partitioner):
    number = 0 if kind == "all NaN" else 2
    with pytest.raises(
        InputError, match=f"{partitioner} needs a .* for every sample, but sample {number} has none"
    ):
        PARTITIONERS[partitioner](ODD[kind])


@pytest.mark.parametrize("partitioner", ["dirichlet", "shards", "like_training", "natural"])
@pytest.mark.parametrize(
    "y", [np.array(["a", 1, "b", 2], dtype=object), ["a", 1, "b", 2], [b"a", "a", "b", "b"]]
)
def test_labels_of_several_types_are_refused(y, partitioner):
    with pytest.raises(
        InputError, match=f"{partitioner} needs .* of one type that can be sorted, got a mixture"
    ):
        PARTITIONERS[partitioner](y)


def test_missing_labels_of_pandas():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InputError, match="sample 2 has none"):
        PARTITIONERS["shards"](pandas.Series([1, 2, None, 1], dtype="Int64"))


@pytest.mark.parametrize(
    "partitioner", ["dirichlet", "shards", "like_training", "thinned", "quantity_skew"]
)
@pytest.mark.parametrize("seed", [-1, "a", 1.5, None, True])
def test_seeds_that_are_none(seed, partitioner):
    with pytest.raises(InputError, match=f"{partitioner} needs a whole number seed >= 0"):
        PARTITIONERS[partitioner]([0, 1, 0, 1], seed)


@pytest.mark.parametrize("X", [3, "abc", None, [[1], [1, 2], [3], [4]]])
def test_samples_that_cannot_be_counted(X):
    with pytest.raises(InputError, match="dirichlet needs X as an array with one entry per sample"):
        sp.data.dirichlet(X, [0, 1, 0, 1], 2, 1.0)


# ------------------------------------------------------------------ natural


@quick
@given(
    st.lists(st.sampled_from(["rome", "oslo", "lima", "bern"]), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_clients_that_the_data_names(groups, minimum):
    kept = sorted(g for g in set(groups) if groups.count(g) >= minimum)
    if not kept:
        with pytest.raises(InputError, match=f"no group of {minimum} samples: the largest has"):
            sp.data.natural(groups, minimum)
        return
    names, parts = sp.data.natural(groups, minimum)
    assert names == tuple(kept)
    assert [rows.tolist() for rows in parts] == [
        [i for i, g in enumerate(groups) if g == name] for name in names
    ]


def test_groups_of_other_types_and_none_at_all():
    assert sp.data.natural(np.array([10, 9, 10]))[0] == ("9", "10")
    assert sp.data.natural(np.array(["b", "a"], dtype=object))[0] == ("a", "b")
    for groups in ([1.0, float("nan")], ["a", None]):
        with pytest.raises(InputError, match="sample 1 has none"):
            sp.data.natural(groups)
    with pytest.raises(InputError, match="a mixture"):
        sp.data.natural(np.array(["a", 1], dtype=object))


# ------------------------------------------------------------------ test rows


@quick
@given(seeds, st.integers(1, 10), st.floats(0.2, 10), st.none() | st.integers(1, 60))
def test_test_rows_have_the_proportions_of_training(seed, clients, alpha, limit):
    y = labels(seed)
    y_test = labels(seed + 1, n=90, classes=5)
    parts = sp.data.dirichlet(y, y, clients, alpha, seed)
    there = np.bincount(y_test, minlength=5)
    rows = sp.data.like_training(parts, y, y_test, seed, limit)
    for own, drawn in zip(parts, rows, strict=True):
        assert (np.diff(drawn) > 0).all()  # ascending, nothing twice
        counts = np.where(there > 0, np.bincount(y[own], minlength=5), 0)
        p = counts / counts.sum()
        most = min(there[k] / p[k] for k in range(5) if p[k])
        n = min(most, limit or np.inf)
        assert len(drawn) in (int(n), int(n + 1e-9))
        assert len(drawn) >= 1
        assert np.abs(np.bincount(y_test[drawn], minlength=5) - len(drawn) * p).max() < 1
    assert same(rows, sp.data.like_training(parts, y, y_test, seed, limit))


def test_one_client_alone_gets_everything_and_clients_may_share():
    y_test = np.repeat([0, 1, 2], 30)
    rows = sp.data.like_training([np.arange(6), np.arange(3)], np.tile([0, 1, 2], 2), y_test)
    assert [len(drawn) for drawn in rows] == [90, 90]
    names = np.array(["cat", "dog"])
    # three cats to a dog
    y = names[[0, 0, 0, 1]]
    y_test = names[np.repeat([0, 1], 30)]
    for limit, expected in ((None, (30, 10)), (20, (15, 5)), (1, (1, 0))):
        (drawn,) = sp.data.like_training([[0, 1, 2, 3]], y, y_test, limit=limit)
        assert ((drawn < 30).sum(), (drawn >= 30).sum()) == expected


def test_a_class_without_test_rows_is_left_out_unless_it_is_all():
    y = np.array([0, 0, 1, 2])
    y_test = np.array([0, 0, 0, 0, 1, 1, 1])
    drawn = sp.data.like_training([[0, 1, 2, 3]], y, y_test)[0]
    assert np.bincount(y_test[drawn]).tolist() == [4, 2]
    with pytest.raises(InputError, match="no test row of any class that client 1 trains on"):
        sp.data.like_training([[0, 1, 2], [3]], y, y_test)
    with pytest.raises(InputError, match="client 0 has none"):
        sp.data.like_training([[]], y, y_test)
    with pytest.raises(InputError, match="row numbers below 4, but client 0 has 4"):
        sp.data.like_training([[4]], y, y_test)
    with pytest.raises(InputError, match="whole number limit >= 1"):
        sp.data.like_training([[0]], y, y_test, limit=0)
    with pytest.raises(InputError, match="y_test as a vector"):
        sp.data.like_training([[0]], y, [])


# ------------------------------------------------------------------ diabetes


def test_diabetes_by_its_own_columns():
    silos = sp.data.diabetes(test_fraction=0.25)
    assert silos.names == ("to 29", "30 to 39", "40 to 49", "50 to 59", "60 and more")
    assert "age" not in silos.features
    assert sum(len(y) for _, y in [*silos.train, *silos.test]) == 442
    assert sum(int(y.sum()) for _, y in [*silos.train, *silos.test]) == 221
    np.testing.assert_allclose(np.vstack([X for X, _ in silos.train]).mean(0), 0, atol=1e-12)
    sexes = sp.data.diabetes("sex")
    assert [len(y) for _, y in sexes.train] == [235, 207]
    assert sexes.test == []
    assert sexes.features == ("age", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
    with pytest.raises(InputError, match="Unknown column 'bmi'"):
        sp.data.diabetes("bmi")
