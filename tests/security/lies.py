"""Silos that lie about their loss: what each lie gains, and when it is noticed.

`python benchmarks/privacy/lying_silos.py` prints the tables of docs/deploy/hostile-silos.md. Every lie is a function of
a silo's file that returns the silo that tells it; `attack` returns what came of it. A lie about the loss is told by an
honest silo of another function: all of its answers, constants included, are the truth about a·f + b and the like.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from deploy_cases import QUICK, cohort, events, federation, model_of, opened

import scaffpd as sp
from scaffpd.deploy import byzantine
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import InProcess
from scaffpd.deploy.silo.silo import Silo
from scaffpd.models.oracle import StackedDisplacements, StackedPoint, shift

LIAR = "switzerland"  # who is served best
LOG2 = float(np.log(2))
OBJECTIVES = {
    "Average": 'kind = "Average"',
    "χ²": 'kind = "ChiSquare"\nrho = 0.1',
    "χ², cap .4": 'kind = "ChiSquare"\nrho = 0.1\ncap = 0.4',
    "CVaR ½": 'kind = "CVaR"\nalpha = 0.5',
}
METHOD = '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 10\n\n[objective]\n'
SOON = {"rounds = 500\ntol = 1e-6": "rounds = 100\ntol = 1e-4"}
REGRESSION = {'"logistic"': '"squared"', "l2 = 0.03": "l2 = 0.3"}


@dataclass(frozen=True)
class Lying:
    """A model whose loss is a·f + b + s(√(1 + ‖x‖²) − 1) in the place of f."""

    model: sp.Linear
    a: float = 1.0
    b: float = 0.0
    s: float = 0.0

    def oracle(self, data, like=None):
        inner = self.model.oracle(data, like)
        return inner if like is not None else LyingOracle(inner, self)


class LyingPoint(StackedPoint):
    """A point with the lengths of its gradients."""

    def norms(self):
        return self.gradients.square().sum(1)


class LyingOracle:
    """One client that answers every question of first order for the other function."""

    def __init__(self, inner, lie):
        self.inner = inner
        self.lie = lie
        self.dimension = inner.dimension
        self.most_rows = inner.most_rows
        self.start = inner.start
        self.contents = inner.contents

    def constants(self):
        known = self.inner.constants()
        lie = self.lie
        smooth = {name: lie.a * getattr(known, name) + lie.s for name in ("smoothness", "steepest")}
        return replace(known, **smooth)

    def losses(self, x, batch_size, key):
        far = torch.sqrt(1 + x @ x) - 1
        return self.lie.a * self.inner.losses(x, batch_size, key) + self.lie.b + self.lie.s * far

    def evaluate(self, x, batch_size, key):
        gradient = self.lie.a * self.inner.evaluate(x, batch_size, key).each()
        return LyingPoint(
            x, self.losses(x, batch_size, key), gradient + self.lie.s * x / torch.sqrt(1 + x @ x)
        )

    def local_updates(self, x, at, correction, plan):
        rate = (
            plan.rate
            if plan.rate is not None
            else plan.scale / float(self.constants().smoothness[0])
        )
        pull = shift(at, correction)
        each = torch.zeros(1, len(x), dtype=x.dtype)
        for _ in range(plan.steps):
            each = each + rate * (self.evaluate((x - each)[0], None, ()).each() + pull)
        return StackedDisplacements(each)

    def scores(self, x):
        loss, accuracy = self.inner.scores(x)
        return self.losses(x, None, ()).numpy() + 0 * loss, accuracy


class LyingSilo(Silo):
    """A silo with another function than its rows have."""

    lie: dict[str, float]

    def _model(self, setup):
        return Lying(super()._model(setup), **self.lie)


def tells(**lie):
    """A lie about the loss."""

    def silo(place):
        found = LyingSilo.open(place)
        found.lie = lie
        return found

    return silo


def rewrites(change):
    """Made-up rows: `change` takes a row of the file, as numbers or texts by column, and its place."""

    def silo(place):
        file = place.parent / "patients.csv"
        with file.open(newline="") as text:
            rows = list(csv.DictReader(text))
        for k, row in enumerate(rows):
            change(row, k)
        with file.open("w", newline="") as text:
            writer = csv.DictWriter(text, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        return Silo.open(place)

    return silo


def flip(row, k):
    row["disease"] = str(1 - int(row["disease"]))


def stretch(row, k):
    """Numbers ten times as far from a middle."""
    for name, middle in (
        ("age", 54),
        ("trestbps", 130),
        ("chol", 200),
        ("thalach", 140),
        ("oldpeak", 1),
    ):
        if row[name]:
            row[name] = str(middle + 10 * (float(row[name]) - middle))


def older(factor):
    def change(row, k):
        row["age"] = str(factor * float(row["age"]))

    return change


LIES = {
    "nobody lies": Silo.open,
    "100 f": tells(a=100.0),
    "2 f": tells(a=2.0),
    "1.1 f": tells(a=1.1),
    "f + 5": tells(b=5.0),
    "f + 0.1": tells(b=0.1),
    "log 2 + 100 (f − log 2)": tells(a=100.0, b=-99 * LOG2),
    "log 2 + 1.5 (f − log 2)": tells(a=1.5, b=-0.5 * LOG2),
    "f + √(1 + ‖x‖²) − 1": tells(s=1.0),
    "f + 10 (√(1 + ‖x‖²) − 1)": tells(s=10.0),
    "labels flipped": rewrites(flip),
    "rows ten times as long": rewrites(stretch),
}
REGRESSION_LIES = {
    "nobody lies": Silo.open,
    "100 f": tells(a=100.0),
    "2 f": tells(a=2.0),
    "f + 5": tells(b=5.0),
    "targets ten times as large": rewrites(older(10)),
    "targets a hundred times as large": rewrites(older(100)),
}


class Gain(NamedTuple):
    """What came of a lie.

    Attributes:
        own: the liar's loss, on its true rows.
        worst: the worst loss of another.
        round: in which round it was noticed; `None` where it was not, 0 where before the first.
        why: the test by which.
    """

    own: float
    worst: float
    round: int | None
    why: str = ""


def attack(
    folder: Path, lie, objective: str, anchored: bool = True, more: str = "", age: bool = False
) -> Gain:
    """Run a federation of four hospitals one of which lies, and return what it has of it."""
    kind = OBJECTIVES[objective]
    change = {
        '[objective]\nkind = "ChiSquare"\nrho = 0.1\n': f"{METHOD}{kind}\n",
        **SOON,
        **(REGRESSION if age else {}),
    }
    path, places = federation(folder / "lied", replacing=change, more=QUICK + more)
    true, others = federation(folder / "true", replacing=change, more=QUICK + more)
    for place in (
        *places.values(),
        *others.values(),
    ):  # a hundred times a loss may lead x far out, where silos refuse
        text = place.read_text() + "\n[limits]\nradius = 1e6\npath = 1e9\n"
        place.write_text(text.replace('"disease"', '"age"\ntask = "regression"') if age else text)
    silos = opened(places)
    silos[LIAR] = lie(places[LIAR])
    with mock.patch.object(byzantine, "anchors", byzantine.anchors if anchored else _none):
        outcome = coordinate(path, InProcess(silos))
    if not outcome.final or outcome.status == "failed":
        raise RuntimeError(outcome.sentence)
    (true.parent / "run").mkdir()
    for name in ("setup.json", "model.safetensors"):
        (true.parent / "run" / name).write_bytes((path.parent / "run" / name).read_bytes())
    losses = dict(zip(others, cohort(true, others).evaluate(model_of(true)).loss, strict=True))
    found = next(
        (e for e in events(path) if e["what"] == "quarantined" and e["client"] == LIAR), None
    )
    own = float(losses.pop(LIAR))
    worst = float(max(losses.values()))
    if found is None:
        return Gain(own, worst, None)
    return Gain(own, worst, int(found["round"]), found["sentence"].split("(")[-1].rstrip(")."))


def _none(facts, setup):
    return [None] * len(facts.probes)
