"""Trackers show what private clients have spent, round by round."""

from __future__ import annotations

import numpy as np
from tracked import cohort

import scaffpd as sp
from scaffpd.training.trackers import Tracker


class Notes(Tracker):
    """Stores what it is shown."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def open(self, first):
        pass

    def write(self, step, values):
        self.rows[step] = values

    def close(self, failed=False):
        pass


def private():
    random = np.random.default_rng(0)
    pairs = [(random.normal(size=(30, 4)), random.integers(0, 2, size=30)) for _ in range(3)]
    return sp.Cohort(
        pairs,
        sp.Private(sp.Linear("logistic", 0.05), noise=9.0, radius=2, secret=1),
        names=list("abc"),
    )


def test_epsilon_grows_to_what_the_result_says():
    notes = Notes()
    result = sp.train(
        sp.fair(sp.ChiSquare(0.1), 1), private(), rounds=4, progress=False, callbacks=[notes]
    )
    shown = {
        step: row["privacy/epsilon"] for step, row in notes.rows.items() if "privacy/epsilon" in row
    }
    assert list(shown) == list(range(1, 5))
    assert sorted(shown.values()) == list(shown.values())
    assert shown[4] == result.privacy.worst
    assert notes.rows[4]["epsilon by client/b"] == result.privacy.epsilon[1]
    assert notes.rows[4]["privacy/delta"] == 1e-5


def test_nothing_is_shown_where_nothing_is_private():
    notes = Notes()
    sp.train(sp.fair(sp.ChiSquare(0.1)), cohort(), rounds=2, progress=False, callbacks=[notes])
    assert notes.rows
    assert not any(
        "epsilon" in name or "privacy" in name for row in notes.rows.values() for name in row
    )
