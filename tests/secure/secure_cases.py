"""What the tests of secure federations share: small problems, each as plain and as masked sums."""

from __future__ import annotations

import numpy as np
import torch

import scaffpd as sp

L2 = 0.1
CLASSES = {"squared": {}, "logistic": {}, "softmax": {"classes": 3}}
SIZES = (12, 20, 9, 30, 16)


def clients(loss="squared", sizes=SIZES, d=4, seed=1):
    """Clients that differ, and none of whom can do for all."""
    random = np.random.default_rng(seed)
    data = []
    for m in sizes:
        X = random.standard_normal((m, d)) + random.standard_normal(d)
        y = X @ random.standard_normal(d) + random.standard_normal(m)
        if loss != "squared":
            y = random.integers(0, 2 if loss == "logistic" else 3, m)
        data.append((X, y))
    return data


def cohort(loss="squared", dtype=torch.float64, **how):
    return sp.Cohort(clients(loss, **how), sp.Linear(loss, l2=L2, **CLASSES[loss]), dtype=dtype)


def network():
    """Losses that are not convex."""
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()
    data = [(random.standard_normal((m, 3)), random.integers(0, 2, m)) for m in (4, 9, 13, 6)]
    return sp.Cohort(data, sp.Module(net, l2=0.01))


def secure(federation, **how):
    """Masked sums; a client may be all of a sum where the worst client is all that counts."""
    return sp.SecureAggregation(federation, **{"share": 1.0, **how})


def off(seen, expected):
    """The largest difference, relative to the largest entry."""
    seen = np.asarray(seen)
    expected = np.asarray(expected)
    return float(np.abs(seen - expected).max() / (np.abs(expected).max() or 1.0))
