"""Sums modulo 2¹²⁸ against exact fractions; masks that cancel, and that nothing else opens."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.refusals import refuses
from scaffpd.secure.aggregation import check_weightings, colluding_of, most_weightings
from scaffpd.secure.keys import Card, Identity, Masks
from scaffpd.secure.ring import Places, add, narrow, negative, wide

NUMBERS = st.floats(-1e14, 1e14, allow_nan=False)
ANY = st.floats(-1e35, 1e35, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-15)


def total(places, rows):
    found = places.encode(rows[0])
    for row in rows[1:]:
        found = add(found, places.encode(row))
    return places.decode(found)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=40))
def test_sums_are_exact_but_for_the_last_digit(rows):
    places = Places.usual(3, len(rows))
    found = total(places, [np.array(row) for row in rows])
    for k in range(3):
        exact = sum((Fraction(row[k]) for row in rows), Fraction())
        assert abs(Fraction(float(found[k])) - exact) <= Fraction(places.error) + abs(exact) / 2**51


@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.lists(ANY, min_size=2, max_size=2), min_size=1, max_size=9))
def test_numbers_of_any_scale(values):
    rows = [np.array(row) for row in values]
    places, _ = wide(rows[0], len(rows))
    found = narrow(total(places, [wide(row, len(rows))[1] for row in rows]))
    for k in range(2):
        exact = sum((Fraction(row[k]) for row in values), Fraction())
        most = max(abs(Fraction(row[k])) for row in values)
        assert abs(Fraction(float(found[k])) - exact) <= abs(exact) / 2**51 + most / 2**60


@settings(max_examples=50, deadline=None)
@given(numbers=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20))
def test_whole_numbers(numbers):
    places = Places.usual(1, len(numbers), 0)
    found = total(places, [np.array([number]) for number in numbers])
    assert found[0] == pytest.approx(sum(numbers), rel=1e-15)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e20])
def test_what_does_not_fit_is_refused_for_all_and_names_nobody(wrong):
    places = Places.usual(2, 4)
    rows = [np.ones(2)] * 3
    with refuses("sum-clipped") as error:
        total(places, [np.array([1.0, wrong]), *rows])
    with refuses("sum-clipped") as other:
        total(places, [*rows, np.array([wrong, 1.0])])
    assert str(error.value) == str(other.value)


def test_the_order_does_not_matter():
    random = np.random.default_rng(0)
    rows = random.standard_normal((9, 5)) * 10.0 ** random.integers(-12, 12, (9, 5))
    places = Places.usual(5, 9)
    found = total(places, list(rows))
    np.testing.assert_array_equal(found, total(places, list(rows[::-1])))
    one = places.encode(rows[0])
    np.testing.assert_array_equal(add(one, negative(one)), np.zeros((2, 6), np.uint64))


def masked(rows, about=b"step 1", transcript=b"seen", others=None):
    names = [f"silo {k}" for k in range(len(rows))]
    identities = {name: Identity() for name in names}
    masks = {name: Masks(name, identities[name]) for name in names}
    cards = {name: one.card for name, one in identities.items()}
    fresh = {name: one.fresh for name, one in masks.items()}
    places = Places.usual(len(rows[0]), len(rows))
    posts = []
    for name, row in zip(names, rows, strict=True):
        masks[name].meet(cards, fresh)
        seen = transcript if others is None else others.get(name, transcript)
        posts.append(masks[name].add(places.encode(row), seen, about))
    return places, posts


def test_masks_cancel_in_the_sum_over_all_and_in_nothing_else():
    rows = list(np.random.default_rng(1).standard_normal((5, 40)))
    places, posts = masked(rows)
    added = posts[0]
    for k, post in enumerate(posts[1:], 1):
        high = added[1].view(np.int64).astype(float)
        assert np.abs(high).mean() > 2**60, k  # noise, as wide as the ring
        added = add(added, post)
    np.testing.assert_allclose(places.decode(added), np.sum(rows, 0), rtol=0, atol=1e-14)


def test_silos_that_have_seen_different_things_add_up_to_noise():
    rows = list(np.ones((3, 40)))
    places, posts = masked(rows, others={"silo 1": b"another proposal"})
    added = add(add(posts[0], posts[1]), posts[2])
    assert np.abs(added[1].view(np.int64).astype(float)).mean() > 2**60
    with refuses("sum-clipped"):
        places.decode(added)


def test_the_same_vector_is_hidden_anew_in_every_epoch():
    """With keys that stay, the difference of two posts would be the row that has changed."""
    rows = list(np.ones((3, 8)))
    one, two = (masked(rows)[1][0] for _ in range(2))
    other = add(one, negative(two))
    assert np.abs(other[1].view(np.int64).astype(float)).mean() > 2**60


def test_keys_are_stored_for_their_owner_and_read_back(tmp_path):
    one = Identity.stored(tmp_path / "identity.key")
    two = Identity.stored(tmp_path / "identity.key")
    assert one.card == two.card != Identity().card
    assert (tmp_path / "identity.key").stat().st_mode & 0o077 == 0
    assert Card.of(one.card.digits) == one.card
    assert len(one.card.fingerprint) == 64
    signature = one.sign(b"message")
    assert one.card.signed(signature, b"message")
    assert not one.card.signed(signature, b"massage")
    assert not one.card.signed(b"", b"message")
    for wrong in ("", "zz", "00" * 63, None):
        with refuses("key-unreadable"):
            Card.of(wrong)


@pytest.mark.parametrize("n", [3, 4, 5, 12, 40])
def test_two_weightings_are_the_most_that_many_silos_allow(n):
    for t in {colluding_of(n), 1, n - 2}:
        most = most_weightings(n, t)
        assert most == (1 if t == n - 2 else 2)
        check_weightings(most, n, t)
        with refuses("too-many-weightings"):
            check_weightings(most + 1, n, t)
