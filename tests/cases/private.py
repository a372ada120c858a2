"""Small clients for the tests of privacy, and a model that notes what its clients are asked."""

import numpy as np
import torch
from torch import nn

from scaffpd.models import Linear, Module
from scaffpd.training.cohort import Cohort

SIZES = (9, 5, 14)


def clients(loss="logistic", sizes=SIZES, features=4, seed=0):
    random = np.random.default_rng(seed)
    made = {}
    for i, m in enumerate(sizes):
        X = random.standard_normal((m, features)) * (1 + i)
        classes = 3 if loss == "softmax" else 2
        y = 3 * random.standard_normal(m) if loss == "squared" else random.integers(0, classes, m)
        made[f"silo {i}"] = (X, y)
    return made


def linear(loss="logistic", l2=0.02):
    return Linear(loss, l2=l2, intercept=True, classes=3 if loss == "softmax" else None)


def network(seed=0, outputs=3):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))
    return Module(layers.double(), l2=0.02)


def oracle(model, data):
    """The oracle that a cohort of these clients has."""
    return Cohort(data, model)._oracle


class Recorded:
    """A model, without privacy, whose oracle notes the most that it is asked: each question
    once."""

    def __init__(self, model):
        self.model = model
        self.notes = {}

    def oracle(self, *args, **kwargs):
        return RecordingOracle(self.model.oracle(*args, **kwargs), self.notes)

    def count(self, kind):
        return sum(n for (k, *_), n in self.notes.items() if k == kind)


class RecordingOracle:
    def __init__(self, inner, notes):
        self._inner = inner
        self._notes = notes

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def only(self, chosen):
        return RecordingOracle(self._inner.only(chosen), self._notes)

    def losses(self, x, batch_size, key):
        self._note("loss", None, x)
        return self._inner.losses(x, batch_size, key)

    def evaluate(self, x, batch_size, key):
        for kind in ("loss", "gradient"):
            self._note(kind, None, x)
        point = self._inner.evaluate(x, batch_size, key)
        point.asked_at = x
        return point

    def local_updates(self, x, at, correction, plan):
        known = getattr(at, "asked_at", None) is not None and torch.equal(at.asked_at, x)
        self._note("gradient", ("steps", plan.key), x, plan.steps - known)
        return self._inner.local_updates(x, at, correction, plan)

    def _note(self, kind, key, x, times=1):
        mark = (kind, key, x.numpy().tobytes())
        self._notes[mark] = max(times, self._notes.get(mark, 0))
