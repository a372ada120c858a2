"""A covering has what it promises, and few rows."""

from itertools import combinations, pairwise, product

import pytest

from covering import covering, spaced


@pytest.mark.parametrize(
    ("sizes", "strength", "most"), [((8, 2), 1, 8), ((3, 6, 2), 2, 18), ((3, 2, 3, 2), 2, 11)]
)
def test_every_combination_of_so_many_values_is_there(sizes, strength, most):
    rows = [tuple(enumerate(values)) for values in product(*map(range, sizes))]
    kept = covering(rows, strength)
    assert {c for k in kept for c in combinations(rows[k], strength)} == {
        c for row in rows for c in combinations(row, strength)
    }
    assert len(kept) <= most


@pytest.mark.parametrize(("number", "few"), [(25, 8), (8, 3), (5, 1), (3, 3), (2, 9), (1, 1)])
def test_a_sample_is_spread_evenly(number, few):
    kept = sorted(spaced(number, few))
    assert len(kept) == min(number, few)
    assert kept[0] == 0
    assert kept[-1] == number - 1 or few == 1
    steps = {b - a for a, b in pairwise(kept)}
    assert not steps or max(steps) - min(steps) <= 1
