"""Partitions: every sample once, sorted, fixed by the seed, with the promised sizes and labels."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from cases.refusals import refuses

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


@quick
@given(seeds, st.integers(1, 8), st.floats(0.3, 100.0), st.integers(1, 4))
def test_dirichlet_gives_every_sample_to_one_client(seed, clients, alpha, minimum):
    y = labels(seed, classes=4)
    parts = sp.data.dirichlet(np.zeros((200, 2)), y, clients, alpha, seed, minimum)
    assert len(parts) == clients
    assert min(map(len, parts)) >= minimum
    assert cut_of(parts, 200)


def test_alpha_sets_the_skew_of_labels():
    y = np.repeat(np.arange(5), 400)

    def largest_share(alpha):
        parts = sp.data.dirichlet(y, y, 10, alpha, seed=2)
        return np.mean([np.bincount(y[rows]).max() / len(rows) for rows in parts])

    assert largest_share(0.1) > 0.6
    assert largest_share(1000.0) < 0.25


def test_no_client_is_favoured_by_rounding():
    """Means over 200 seeds: standard error below 1 around 40, so 4 is beyond chance (p < 1e-4)."""
    y = np.repeat(np.arange(10), 20)
    cuts = [sp.data.dirichlet(y, y, 5, 0.2, seed=s, minimum=1) for s in range(200)]
    sizes = np.mean([[len(rows) for rows in parts] for parts in cuts], axis=0)
    np.testing.assert_allclose(sizes, 40.0, atol=4.0)


def test_the_numbers_stay():
    y = np.random.default_rng(5).integers(0, 7, 500)
    parts = sp.data.dirichlet(y, y, 6, 0.3, 1)
    whole = np.concatenate([*parts, [len(rows) for rows in parts]])
    assert hashlib.sha256(whole.tobytes()).hexdigest().startswith("c72e873143b86746")


@quick
@given(seeds, st.integers(1, 12), st.integers(1, 5))
def test_shards_are_equal_pieces_of_the_sorted_labels(seed, clients, each):
    y = labels(seed)
    parts = sp.data.shards(y, clients, each, seed)
    assert cut_of(parts, 200)
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= each  # each shard has one sample more or less
    # a client's rows, in the order of the sorted labels, are at most `each` runs
    place = np.argsort(np.argsort(y, kind="stable"))
    assert all((np.diff(np.sort(place[rows])) > 1).sum() < each for rows in parts)
    assert same(parts, sp.data.shards(y, clients, each, seed))


@quick
@given(
    st.lists(st.sampled_from(["rome", "oslo", "lima", "bern"]), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_clients_that_the_data_names(groups, minimum):
    large = sorted(g for g in set(groups) if groups.count(g) >= minimum)
    if not large:
        with refuses("no-large-group"):
            sp.data.natural(groups, minimum)
        return
    names, parts = sp.data.natural(groups, minimum)
    assert names == tuple(large)
    expected = [[i for i, g in enumerate(groups) if g == name] for name in names]
    assert [rows.tolist() for rows in parts] == expected


def test_groups_of_other_types():
    assert sp.data.natural(np.array([10, 9, 10]))[0] == ("9", "10")
    assert sp.data.natural(np.array(["b", "a"], dtype=object))[0] == ("a", "b")


@pytest.mark.parametrize(
    "y", [[0.0, np.nan], ["a", None], ["a", float("nan")], np.array(["2020", "NaT"], dtype="M8[D]")]
)
def test_missing_labels_are_refused(y):
    for partitioner in (sp.data.natural, lambda y: sp.data.shards(y, 1, 1)):
        with refuses("label-missing"):
            partitioner(y)


@pytest.mark.parametrize(
    ("code", "cut"),
    [
        ("labels-of-several-types", lambda y: sp.data.natural(["a", 1, "b"])),
        ("labels-not-a-vector", lambda y: sp.data.shards([], 2)),
        ("labels-of-other-samples", lambda y: sp.data.dirichlet(y[1:], y, 2, 1.0)),
        ("too-few-samples", lambda y: sp.data.dirichlet(y, y, 11, 1.0)),
        ("too-few-samples", lambda y: sp.data.shards(y, 11)),
        ("no-partition", lambda y: sp.data.dirichlet(y, y, 10, 1e-3)),
        ("whole-number-seed", lambda y: sp.data.shards(y, 2, seed=-1)),
    ],
)
def test_what_cannot_be_cut(code, cut):
    with refuses(code):
        cut(np.repeat([0, 1], 10))
