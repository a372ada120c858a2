"""Cohorts that most tests need: random clients of any loss, a small network, the four hospitals."""

import numpy as np
import torch

from scaffpd.data.hospitals import heart_disease
from scaffpd.models import Linear, Module
from scaffpd.training.cohort import Cohort

SIZES = (8, 13, 21, 10)
CLASSES = 3


def pairs(loss="squared", sizes=SIZES, features=3, *, spread=1.0, noise=0.5, seed=0):
    """Rows (X, y) of clients of unequal sizes; their coefficients differ by `spread`, means too."""
    random = np.random.default_rng(seed)
    common = random.standard_normal((features, CLASSES))
    made = []
    for m in sizes:
        X = random.standard_normal((m, features)) + 0.3 * random.standard_normal(features)
        own = common + spread * random.standard_normal((features, CLASSES))
        Z = X @ own + noise * random.standard_normal((m, CLASSES))
        made.append((X, targets(loss, Z)))
    return made


def targets(loss, Z):
    """Targets of a loss from scores Z (m, 3): the first score, its sign, or the largest."""
    if loss == "squared":
        return Z[:, 0]
    return (Z[:, 0] > 0).astype(int) if loss == "logistic" else Z.argmax(1)


def linear(loss="squared", l2=0.05, **options):
    """The linear model of a loss, with three classes for softmax."""
    if loss == "softmax":
        options.setdefault("classes", CLASSES)
    return Linear(loss, l2=l2, **options)


def cohort(loss="squared", sizes=SIZES, features=3, *, l2=0.05, tests=0, model=None, **options):
    """A cohort of such clients, each with `tests` rows held out.

    `spread`, `noise` and `seed` are those of `pairs`, `intercept` that of the model; other options
    (`names`, `dtype`, `device`, …) are the cohort's. A `model` takes the linear one's place.
    """
    made = {name: options.pop(name) for name in ("spread", "noise", "seed") if name in options}
    chosen = {name: options.pop(name) for name in ("intercept",) if name in options}
    rows = pairs(loss, [m + tests for m in sizes], features, **made)
    if tests:
        options["test"] = [(X[-tests:], y[-tests:]) for X, y in rows]
        rows = [(X[:-tests], y[:-tests]) for X, y in rows]
    return Cohort(rows, linear(loss, l2, **chosen) if model is None else model, **options)


def net(features=3, hidden=4, classes=2, seed=0):
    """A small network with a smooth activation, always from the same start."""
    torch.manual_seed(seed)
    first = torch.nn.Linear(features, hidden)
    return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(hidden, classes)).double()


def network(sizes=SIZES, features=3, *, l2=0.01, seed=0, **model):
    """A cohort whose losses are not convex: softmax over a small network."""
    rows = pairs("softmax", sizes, features, seed=seed)
    return Cohort(rows, Module(net(features, classes=CLASSES, seed=seed), l2=l2, **model))


def hospitals(l2=0.03, model=None, **options):
    """Heart disease at four hospitals, with their test rows."""
    silos = heart_disease()
    model = Linear("logistic", l2=l2, intercept=True) if model is None else model
    return Cohort(silos.train, model, silos.names, test=silos.test, **options)
