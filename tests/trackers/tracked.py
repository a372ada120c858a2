"""A small federation with held-out rows and names that no tracker takes as they are."""

from __future__ import annotations

import numpy as np

import scaffpd as sp

NAMES = ["St. Mary's / north", "St. Mary's : north", "ward #7", "Ärzte|<b>&", "../..", "x" * 400]


def cohort(names=NAMES, loss="logistic"):
    random = np.random.default_rng(0)
    pairs = [
        (random.normal(size=(30, 4)) + i / 3, random.integers(0, 2, size=30).astype(float))
        for i in range(len(names))
    ]
    train = [(X[:20], y[:20]) for X, y in pairs]
    test = [(X[20:], y[20:]) for X, y in pairs]
    return sp.Cohort(train, sp.Linear(loss, l2=0.05), names=names, test=test)


def minibatches():
    """A run whose numbers hang on every random draw."""
    return sp.ScaffPD(sp.ChiSquare(rho=0.1), local_steps=3, batch_size=4)
