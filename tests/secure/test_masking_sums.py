"""Sums with masks are sums without; or there is no sum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masking_cases import exchange, parties

from scaffpd.errors import InputError
from scaffpd.secure.masking import FixedPoint, Terms
from scaffpd.secure.terms import exponent_of

NAMES = [f"c{i:02d}" for i in range(12)]


@pytest.fixture(scope="module")
def clients():
    return parties(NAMES)


@pytest.mark.parametrize("rounds", [250, pytest.param(2000, marks=pytest.mark.long)])
def test_many_sums(clients, rounds):
    """Sums of 3 to 9 clients with vectors of any size, each with a question of its own."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for number in range(rounds):
        n = int(rng.integers(3, 10))
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[:n]]
        scale = 2.0 ** rng.integers(-30, 10)
        vectors = {name: scale * rng.uniform(-1, 1, 5) for name in names}
        numbers = FixedPoint.finest(n, exponent_of(np.stack(list(vectors.values()))))
        view = exchange(
            clients, vectors, numbers, int(rng.integers(1, n - 1)), bytes([number % 256])
        )
        assert np.array_equal(
            view.total, np.sum([numbers.encode(v) for v in vectors.values()], axis=0)
        )
        error = np.abs(numbers.decode(view.total) - np.sum(list(vectors.values()), axis=0))
        assert np.all(error <= numbers.error + 1e-15 * n * scale)
        worst = max(worst, float(error.max() / scale))
    assert worst <= 1e-12


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8, allow_subnormal=False), min_size=1, max_size=6),
    st.integers(3, 12),
    st.integers(-20, 60),
)
def test_any_numbers_within_the_clip(values, n, extra):
    numbers = FixedPoint.finest(n, 3 + extra)
    vectors = {name: np.array(values) * (1 if i % 2 else -0.5) for i, name in enumerate(NAMES[:n])}
    if exponent_of(np.stack(list(vectors.values()))) > numbers.exponent:
        with pytest.raises(InputError, match="more than the clip"):
            exchange(parties(NAMES[:n]), vectors, numbers)
        return
    view = exchange(parties(NAMES[:n]), vectors, numbers)
    plain = np.sum(list(vectors.values()), axis=0)
    assert np.allclose(numbers.decode(view.total), plain, rtol=1e-15 * n, atol=numbers.error)


@pytest.mark.parametrize("n", [1, 2, 3, 100, 1000, 2**20])
@pytest.mark.parametrize("exponent", [-60, 0, 40])
def test_no_sum_can_wrap_around(n, exponent):
    """N times the largest number that the format takes is below 2⁶³, and one more digit would be
    refused.
    """
    numbers = FixedPoint.finest(n, exponent)
    largest = int(numbers.encode(np.array([2.0**exponent])).view(np.int64)[0])
    assert n * (largest + 1) < 2**63
    assert (
        numbers.decode(np.array([(n * largest) % 2**64], dtype=np.uint64))[0] == n * 2.0**exponent
    )
    with pytest.raises(InputError, match="may not fit into 64 bits"):
        FixedPoint(n, exponent, numbers.bits + 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_number_no_sum(clients, bad):
    vectors = {name: np.array([0.0, bad]) for name in NAMES[:3]}
    with pytest.raises(InputError, match="NaN or infinite"):
        exchange(clients, vectors)


def test_clip_is_checked_before_anything_is_masked(clients):
    vectors = {name: np.array([2.0]) for name in NAMES[:3]}
    with pytest.raises(InputError, match=r"up to 2\^1, more than the clip"):
        exchange(clients, vectors, FixedPoint.finest(3, 0))


@pytest.mark.parametrize(("n", "t"), [(3, 1), (6, 1), (7, 2), (8, 4), (9, 5), (10, 3)])
def test_masks_stay_connected_whoever_colludes(n, t):
    """Brute force: take any t clients out of the graph, and the others still reach each other."""
    terms = Terms(tuple(NAMES[:n]), t)
    assert terms.degree >= t + 1
    for name in terms.names:
        assert len(set(terms.neighbours(name))) == terms.degree
        assert all(name in terms.neighbours(other) for other in terms.neighbours(name))
    for out in itertools.combinations(terms.names, t):
        rest = set(terms.names) - set(out)
        reached = set()
        fresh = {next(iter(rest))}
        while fresh:
            reached |= fresh
            fresh = {o for name in fresh for o in terms.neighbours(name) if o in rest} - reached
        assert reached == rest


@pytest.mark.parametrize("n", [3, 4, 5, 10, 33, 100, 500])
def test_usual_terms_hold_for_every_number_of_clients(n):
    terms = Terms.usual([f"n{i}" for i in range(n)], None)
    assert 1 <= terms.colluding <= max(1, n // 3)
    assert terms.colluding < terms.degree <= 12


@pytest.mark.parametrize(
    ("names", "t", "match"),
    [
        (("a", "b"), 1, "at least 3 clients"),
        (("a", "a", "b"), 1, "different names"),
        (("a", "b", "c"), 0, "1 <= colluding <= 1"),
        (("a", "b", "c", "d"), 3, "1 <= colluding <= 2"),
    ],
)
def test_terms_that_protect_nobody_are_refused(names, t, match):
    with pytest.raises(InputError, match=match):
        Terms(names, t)


@pytest.mark.parametrize("broken", [{}, [], 3, {"clients": 1.0, "exponent": 1, "bits": 1}])
def test_number_formats_from_the_wire_are_checked(broken):
    with pytest.raises(InputError, match="cannot be read"):
        FixedPoint.of(broken)
    assert FixedPoint.of(FixedPoint.finest(3, 1).values()) == FixedPoint.finest(3, 1)
