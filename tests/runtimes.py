"""One problem in three runtimes: a cohort, one with masked sums, and silos that run it all."""

import numpy as np
import torch

import scaffpd as sp
from cases.boards import lockstep, singles

NAMES = ("a", "b", "c", "d")
SIZES = (8, 13, 21, 10)
FEATURES = 3
MODELS = ("squared", "logistic", "softmax", "module")
RUNTIMES = ("cohort", "masked cohort", "masked silos")


def data_of(model):
    """Training and test pairs by the clients' names."""
    random = np.random.default_rng(3)
    splits = ({}, {})
    for name, m in zip(NAMES, SIZES, strict=True):
        X = random.standard_normal((m + 6, FEATURES)) + 0.5 * random.standard_normal(FEATURES)
        y = X @ random.standard_normal(FEATURES) + 0.3 * random.standard_normal(m + 6)
        y = y if model == "squared" else random.integers(0, 3 if model == "softmax" else 2, m + 6)
        splits[0][name], splits[1][name] = (X[:m], y[:m]), (X[m:], y[m:])
    return splits


def model_of(model):
    if model != "module":
        return sp.Linear(model, l2=0.05, classes=3 if model == "softmax" else None)
    torch.manual_seed(0)
    return sp.Module(torch.nn.Sequential(torch.nn.Linear(FEATURES, 2)).double(), l2=0.01)


def cohort_of(model, names=NAMES):
    train, test = data_of(model)
    return sp.Cohort(
        {n: train[n] for n in names}, model_of(model), test={n: test[n] for n in names}
    )


def federation_of(runtime, model, projections=True):
    """The four clients of that model."""
    if runtime == "masked silos":
        return lockstep(singles(lambda names: cohort_of(model, names), NAMES))
    cohort = cohort_of(model)
    masked = runtime.startswith("masked")
    return sp.SecureAggregation(cohort, projections=projections) if masked else cohort


def point_of(federation, seed=1):
    """A point that is nobody's start."""
    start = federation.start()
    return start + 0.3 * torch.from_numpy(np.random.default_rng(seed).standard_normal(len(start)))
