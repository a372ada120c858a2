"""Partitions: every sample once, sorted, fixed by the seed, with the promised sizes and labels."""

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


@quick
@given(seeds, st.integers(1, 8), st.floats(0.3, 100.0), st.integers(1, 4))
def test_dirichlet_gives_every_sample_to_one_client(seed, clients, alpha, minimum):
    y = labels(seed, classes=4)
    parts = sp.data.dirichlet(y, clients, alpha, seed, minimum)
    assert len(parts) == clients
    assert min(map(len, parts)) >= minimum
    assert cut_of(parts, 200)


def test_alpha_sets_the_skew_of_labels():
    y = np.repeat(np.arange(5), 400)

    def largest_share(alpha):
        parts = sp.data.dirichlet(y, 10, alpha, seed=2)
        return np.mean([np.bincount(y[rows]).max() / len(rows) for rows in parts])

    assert largest_share(0.1) > 0.6
    assert largest_share(1000.0) < 0.25


def test_no_client_is_favoured_by_rounding():
    """Means over 200 seeds: standard error below 1 around 40, so 4 is beyond chance (p < 1e-4)."""
    y = np.repeat(np.arange(10), 20)
    cuts = [sp.data.dirichlet(y, 5, 0.2, seed=s, minimum=1) for s in range(200)]
    sizes = np.mean([[len(rows) for rows in parts] for parts in cuts], axis=0)
    np.testing.assert_allclose(sizes, 40.0, atol=4.0)


def test_the_numbers_stay():
    y = np.random.default_rng(5).integers(0, 7, 500)
    parts = sp.data.dirichlet(y, 6, 0.3, 1)
    whole = np.concatenate([*parts, [len(rows) for rows in parts]])
    assert hashlib.sha256(whole.tobytes()).hexdigest().startswith("c72e873143b86746")


@pytest.mark.parametrize(
    "y",
    [
        [0.0, np.nan],
        ["a", None],
        ["a", float("nan")],
        np.array(["2020", "NaT"], dtype="M8[D]"),
        np.ones((2, 2)),
    ],
)
def test_every_sample_needs_a_label(y):
    with refuses("labels-shape"):
        sp.data.dirichlet(y, 1, 1.0)


@pytest.mark.parametrize(
    ("code", "setting"),
    [
        ("too-few-samples", {"clients": 11, "alpha": 1.0}),
        ("no-partition", {"clients": 10, "alpha": 1e-3}),
        ("seed-out-of-range", {"clients": 2, "alpha": 1.0, "seed": -1}),
    ],
)
def test_what_cannot_be_cut(code, setting):
    with refuses(code):
        sp.data.dirichlet(np.repeat([0, 1], 10), **setting)
