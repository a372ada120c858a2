"""Small tables of rows with owners, for the tests of the estimators."""

import numpy as np


def table(N=4, d=5, rows=40, seed=0, classes=2):
    """Rows X in odd units, labels, real targets and the clients' names; every client has its own
    way.
    """
    random = np.random.default_rng(seed)
    owner = random.permutation(np.repeat(np.arange(N), rows))
    X = random.normal(size=(N * rows, d)) * 10.0 ** np.arange(-2, d - 2) + np.arange(d)
    Z = (X - X.mean(0)) / X.std(0)
    own = random.normal(size=(d, classes)) + 0.7 * random.normal(size=(N, d, classes))
    scores = np.einsum("jd,jdk->jk", Z, own[owner]) + 0.5 * random.normal(size=(len(X), classes))
    labels = np.array(["ash", "birch", "cedar", "date"])[:classes][scores.argmax(1)]
    targets = 300 + 50 * (scores[:, 0] + owner)
    return X, labels, targets, np.array(["oslo", "bonn", "lima", "pisa", "kiev"])[:N][owner]
