"""Sums with masks are sums without, whoever leaves and whenever; or there is no sum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masking_cases import exchange, parties

from scaffpd.errors import InputError
from scaffpd.masking import FixedPoint, Incomplete, Terms, keys
from scaffpd.masking.terms import OutOfRange, exponent_of

NAMES = [f"c{i:02d}" for i in range(12)]


@pytest.fixture(scope="module")
def clients():
    return parties(NAMES)


@pytest.mark.parametrize("rounds", [250, pytest.param(2000, marks=pytest.mark.long)])
def test_many_rounds_with_clients_that_leave(clients, rounds):
    """Exchanges of 3 to 9 clients; up to D of them leave, before their vectors or before their shares."""
    rng, left, worst = np.random.default_rng(0), 0, 0.0
    for _ in range(rounds):
        n = int(rng.integers(3, 10))
        t = int(rng.integers(1, max(2, n - 2)))
        d = int(rng.integers(0, min(t, n - 2 - t) + 1))
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[:n]]
        away = list(rng.permutation(names)[: rng.integers(0, d + 1)])
        cut = int(rng.integers(0, len(away) + 1))
        scale = 2.0 ** rng.integers(-30, 10)
        vectors = {name: scale * rng.uniform(-1, 1, 5) for name in names}
        numbers = FixedPoint.finest(n, exponent_of(np.stack(list(vectors.values()))))
        view = exchange(clients, vectors, numbers, t, d, away[:cut], away[cut:])
        plain = np.sum([vectors[name] for name in view.survivors], axis=0)
        assert set(view.survivors) == set(names) - set(away[:cut])
        error = np.abs(numbers.decode(view.total) - plain)
        assert np.all(error <= numbers.error + 1e-15 * n * scale)
        worst, left = max(worst, float(error.max() / scale)), left + len(away)
    assert worst <= 1e-12
    assert left > rounds / 4


def test_every_way_to_leave_a_small_exchange(clients):
    """N = 5, t = 2, D = 1: whoever leaves at whatever stage, the sum is exactly that of the others' whole numbers."""
    vectors = {name: np.random.default_rng(i).normal(size=7) for i, name in enumerate(NAMES[:5])}
    numbers = FixedPoint.finest(5, 3)
    for who, stage in itertools.product([*NAMES[:5], None], ["unmasked", "unrevealed"]):
        view = exchange(clients, vectors, numbers, 2, 1, **{stage: [] if who is None else [who]})
        there = [name for name in vectors if stage == "unrevealed" or name != who]
        assert np.array_equal(view.total, sum(numbers.encode(vectors[name]) for name in there))


def test_more_leave_than_was_agreed_and_nothing_is_opened(clients):
    vectors = {name: np.ones(3) for name in NAMES[:6]}
    with pytest.raises(InputError, match="it stays closed"):
        exchange(clients, vectors, None, 2, 1, unmasked=NAMES[:2])
    with pytest.raises(Incomplete, match="are needed: the sum stays closed"):
        exchange(clients, vectors, None, 2, 2, unrevealed=NAMES[:3])


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
        with pytest.raises(OutOfRange):
            exchange(parties(NAMES[:n]), vectors, numbers)
        return
    view = exchange(parties(NAMES[:n]), vectors, numbers)
    plain = np.sum(list(vectors.values()), axis=0)
    assert np.allclose(numbers.decode(view.total), plain, rtol=1e-15 * n, atol=numbers.error)


@pytest.mark.parametrize("n", [1, 2, 3, 100, 1000, 2**20])
@pytest.mark.parametrize("exponent", [-60, 0, 40])
def test_no_sum_can_wrap_around(n, exponent):
    """N times the largest number that the format takes is below 2⁶³, and one more digit would be refused."""
    numbers = FixedPoint.finest(n, exponent)
    largest = int(numbers.encode(np.array([2.0**exponent])).view(np.int64)[0])
    assert n * (largest + 1) < 2**63
    assert numbers.decode(np.array([(n * largest) % 2**64], dtype=np.uint64))[0] == n * 2.0**exponent
    with pytest.raises(InputError, match="may not fit into 64 bits"):
        FixedPoint(n, exponent, numbers.bits + 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_number_no_sum(clients, bad):
    vectors = {name: np.array([0.0, bad]) for name in NAMES[:3]}
    with pytest.raises(InputError, match="NaN or infinite"):
        exchange(clients, vectors)


def test_clip_is_checked_before_anything_is_masked(clients):
    vectors = {name: np.array([2.0]) for name in NAMES[:3]}
    with pytest.raises(OutOfRange) as refused:
        exchange(clients, vectors, FixedPoint.finest(3, 0))
    assert refused.value.exponent == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, keys.PRIME - 1), st.integers(1, 8), st.integers(0, 5), st.randoms())
def test_any_threshold_of_shares_gives_the_secret_back(secret, threshold, more, random):
    places = random.sample(range(1, 200), threshold + more)
    shares = dict(zip(places, keys.split_secret(secret, threshold, places), strict=True))
    chosen = random.sample(places, threshold)
    assert keys.join_shares({place: shares[place] for place in chosen}) == secret


def test_fewer_shares_say_nothing():
    """With τ − 1 shares fixed, every secret is as likely: there is a last share for each of them."""
    shares = dict(zip([1, 2, 3], keys.split_secret(77, 3, [1, 2, 3]), strict=True))
    seen = {keys.join_shares({1: shares[1], 2: shares[2], 3: last}) for last in range(50)}
    assert len(seen) == 50
    firsts = np.array([float(keys.split_secret(0, 2, [1])[0]) / keys.PRIME for _ in range(2000)])
    assert abs(firsts.mean() - 0.5) < 6 * np.sqrt(1 / 12 / 2000)


def test_the_modulus_is_prime():
    """A strong probable prime to forty bases (Miller and Rabin)."""
    p = keys.PRIME
    odd, twos = p - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 42):
        powers = [pow(base, odd * 2**k, p) for k in range(twos)]
        assert powers[0] == 1 or p - 1 in powers


@pytest.mark.parametrize(("n", "t", "d"), [(6, 1, 0), (7, 2, 1), (8, 2, 2), (9, 3, 2), (10, 2, 1)])
def test_masks_stay_connected_whoever_colludes_or_leaves(n, t, d):
    """Brute force: take any t + D clients out of the graph, and the others still reach each other."""
    terms = Terms("e", tuple(NAMES[:n]), t, d)
    assert terms.degree >= t + d + 1
    assert t < terms.threshold <= terms.degree - d
    assert 2 * terms.threshold > terms.degree
    for name in terms.names:
        assert len(set(terms.neighbours(name))) == terms.degree
        assert all(name in terms.neighbours(other) for other in terms.neighbours(name))
    for out in itertools.combinations(terms.names, t + d):
        rest = set(terms.names) - set(out)
        reached, fresh = set(), {next(iter(rest))}
        while fresh:
            reached |= fresh
            fresh = {o for name in fresh for o in terms.neighbours(name) if o in rest} - reached
        assert reached == rest


@pytest.mark.parametrize("n", [3, 4, 5, 10, 33, 100, 500])
def test_usual_terms_hold_for_every_number_of_clients(n):
    terms = Terms.usual("e", [f"n{i}" for i in range(n)], None, None)
    assert 1 <= terms.colluding <= max(1, n // 3)
    assert terms.degree <= 22
    assert Terms.of(terms.values()) == terms


@pytest.mark.parametrize(
    ("names", "t", "d", "match"),
    [
        (("a", "b"), 1, 0, "at least 3 clients"), (("a", "a", "b"), 1, 0, "different names"),
        (("a", "b", "c"), 0, 0, "colluding >= 1"), (("a", "b", "c", "d"), 1, 2, "leaving <= colluding"),
        (("a", "b", "c"), 2, 0, "may be at most 1"), (("a", "b", "c"), 1, 1, "may be at most 1"),
    ],
)  # fmt: skip
def test_terms_that_protect_nobody_are_refused(names, t, d, match):
    with pytest.raises(InputError, match=match):
        Terms("e", names, t, d)


@pytest.mark.parametrize("broken", [None, {}, {"exchange": 1, "names": ["a"], "colluding": 1, "leaving": 0}])
def test_terms_from_the_wire_are_checked(broken):
    with pytest.raises(InputError, match="not complete"):
        Terms.of(broken)
