"""Small clients for the tests of privacy, and a model that notes what its clients are asked."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import scaffpd as sp

CLASSES = {"squared": None, "logistic": None, "softmax": 3}


def clients(loss="logistic", sizes=(9, 5, 14), features=4, seed=0):
    """Named clients of unequal size."""
    random = np.random.default_rng(seed)
    made = {}
    for i, m in enumerate(sizes):
        X = random.standard_normal((m, features)) * (1 + i)
        y = {
            "squared": random.standard_normal(m) * 3,
            "logistic": random.integers(0, 2, m),
            "softmax": random.integers(0, 3, m),
        }[loss]
        made[f"silo {i}"] = (X, y)
    return made


def linear(loss="logistic", l2=0.02):
    return sp.Linear(loss, l2=l2, intercept=True, classes=CLASSES[loss])


def network(seed=0, outputs=3):
    torch.manual_seed(seed)
    return sp.Module(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double(), l2=0.02
    )


def oracle(model, data):
    """The oracle that a cohort of these clients has."""
    return sp.Cohort(data, model)._oracle


class Recorded:
    """A model, without privacy, whose oracle notes the most that it is asked: each question once."""

    def __init__(self, model):
        self.model = model
        self.notes = {}

    def oracle(self, *args, **kwargs):
        return RecordingOracle(self.model.oracle(*args, **kwargs), self.notes)

    def count(self, kind, sampled):
        """Questions of a kind, over minibatches or over all rows; local steps one by one."""
        return sum(
            n
            for (k, batch, *_), n in self.notes.items()
            if k == kind and (batch is not None) == sampled
        )


class RecordingOracle:
    def __init__(self, inner, notes):
        self._inner = inner
        self._notes = notes

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def only(self, chosen):
        return RecordingOracle(self._inner.only(chosen), self._notes)

    def losses(self, x, batch_size, key):
        self._note("loss", batch_size, key if batch_size else None, x)
        return self._inner.losses(x, batch_size, key)

    def evaluate(self, x, batch_size, key):
        for kind in ("loss", "gradient"):
            self._note(kind, batch_size, key if batch_size else None, x)
        point = self._inner.evaluate(x, batch_size, key)
        point.asked_at = x if batch_size is None else None
        return point

    def local_updates(self, x, at, correction, plan):
        known = (
            plan.batch_size is None
            and getattr(at, "asked_at", None) is not None
            and torch.equal(at.asked_at, x)
        )
        self._note("gradient", plan.batch_size, ("steps", plan.key), x, plan.steps - known)
        return self._inner.local_updates(x, at, correction, plan)

    def _note(self, kind, batch_size, key, x, times=1):
        mark = (kind, batch_size, key, x.numpy().tobytes())
        self._notes[mark] = max(times, self._notes.get(mark, 0))
