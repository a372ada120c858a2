"""Another strength changes the strength and nothing else: the prior, the cap and the clients'
shares of it stay.
"""

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from scaffpd.errors import InputError
from scaffpd.objectives import (
    OBJECTIVES,
    Agnostic,
    Average,
    named,
)

STRONG = [name for name, kind in OBJECTIVES.items() if kind.parameter]
OTHERS = {
    "prior": [1.0, 2.0, 3.0, 5.0],
    "cap": 0.6,
}  # a value for every other argument of an objective


def complete(kind, strength):
    """The objective with every argument given; an argument without a value above fails the test."""
    names = [name for name in inspect.signature(kind).parameters if name != kind.parameter]
    return kind(**{kind.parameter: strength}, **{name: OTHERS[name] for name in names})


@pytest.mark.parametrize("name", STRONG)
@given(old=st.floats(0.01, 1.0), new=st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=10, derandomize=True)
def test_every_other_setting_survives(name, old, new):
    before = complete(OBJECTIVES[name], old)
    after = before.with_strength(new)
    fresh = complete(OBJECTIVES[name], new)
    assert type(after) is type(before)
    assert (before.strength, after.strength) == (old, new)
    others = {key: value for key, value in vars(before).items() if key != before.parameter}
    assert set(vars(after)) == set(vars(before))
    for key, value in others.items():
        assert_array_equal(getattr(after, key), value)  # to the last digit
    assert repr(after) == repr(fresh)
    assert_array_equal(
        after.prox(np.arange(4.0), np.full(4, 0.25), 0.3),
        fresh.prox(np.arange(4.0), np.full(4, 0.25), 0.3),
    )


@pytest.mark.parametrize("name", STRONG)
def test_a_strength_is_checked_as_in_the_constructor(name):
    kind = OBJECTIVES[name]
    for wrong in (
        np.nan,
        np.inf,
        "much",
        *([] if name == "Nash" else [0.0, -1.0]),
        *([1.5] if name == "CVaR" else []),
    ):
        with pytest.raises(InputError) as expected:
            kind(**{kind.parameter: wrong})
        with pytest.raises(InputError) as found:
            complete(kind, 0.5).with_strength(wrong)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("objective", [Average(), Agnostic([1, 2])], ids=str)
def test_what_has_no_strength_says_so(objective):
    assert objective.strength is None
    with pytest.raises(InputError, match=f"{type(objective).__name__} has no strength"):
        objective.with_strength(1.0)


@pytest.mark.parametrize("name", STRONG)
def test_a_class_says_what_its_strength_is(name):
    kind = OBJECTIVES[name]
    assert kind.parameter in inspect.signature(kind).parameters
    assert kind.meaning.startswith(f"{kind.symbol or kind.parameter} ")
    if name == "Nash":  # its b is a loss, which has no usual value
        assert (kind.usual, kind.strengths) == (None, None)
        return
    assert named(name).strength == kind.usual
    assert kind.strengths is not None
    values = kind.strengths(np.array([0.1, 0.5, 0.9]), 6)
    assert len(set(values.tolist())) == 6
    tails = [named(name).with_strength(value).maximizer([0.1, 0.5, 0.9]) for value in values]
    shares = [weights[-1] / weights.sum() for weights in tails]
    assert shares == sorted(shares)  # fairer and fairer
    assert shares[0] < shares[-1]
