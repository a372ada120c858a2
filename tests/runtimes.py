"""One problem in four runtimes: a cohort or silos behind bytes, with plain or masked sums."""

from __future__ import annotations

import numpy as np
import torch

import scaffpd as sp
from scaffpd.data.tabular.agree import PREPARED, VERSION
from scaffpd.deploy.agreement import settle
from scaffpd.deploy.messages import InProcess
from scaffpd.deploy.remote import Remote, Session
from scaffpd.deploy.silo.silo import Silo
from scaffpd.run.settings.model_file import Setup

NAMES = ("a", "b", "c", "d")
SIZES = (8, 13, 21, 10)
FEATURES = 3
MODELS = ("squared", "logistic", "softmax", "module")
RUNTIMES = ("cohort", "remote", "masked cohort", "masked remote")
EVERYTHING = """
from scaffpd.algorithms.base import (
    CURVATURE,
    DIAGONAL,
    GRADIENTS,
    LOSSES,
    PROXIMAL,
    UPDATES,
    Algorithm,
)

class Everything(Algorithm):
    questions = frozenset({CURVATURE, DIAGONAL, GRADIENTS, LOSSES, PROXIMAL, UPDATES})
"""
SILO = """
name = "{name}"
[data]
entry = "entry:client"
[limits]
algorithms = ["everything:Everything"]
rows = 1
[secure]
share = 1.0
projections = {projections}
"""


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


def federation_of(runtime, model, folder, projections=True, algorithm=EVERYTHING):
    """The four clients of that model; silos have their files in the folder, and the algorithm's."""
    federation = cohort_of(model)
    if "remote" in runtime:
        federation = remote_of(model, folder, runtime, projections, algorithm)
    return (
        sp.SecureAggregation(federation, share=1.0, projections=projections)
        if "masked" in runtime
        else federation
    )


def remote_of(model, folder, runtime, projections, algorithm):
    silos = {}
    for name in NAMES:
        place = folder / f"{runtime}-{model}-{name}".replace(" ", "-")
        place.mkdir()
        (place / "everything.py").write_text(algorithm)
        (place / "entry.py").write_text(
            f"import sys; sys.path.insert(0, {__file__.rsplit('/', 1)[0]!r})\nfrom runtimes "
            "import cohort_of\n"
            f"client = lambda: cohort_of({model!r}, [{name!r}])\n"
        )
        (place / "silo.toml").write_text(
            SILO.format(name=name, projections=str(projections).lower())
        )
        silos[name] = Silo.open(place / "silo.toml")
    session = Session(InProcess(silos))
    nothing = np.zeros(0)
    session.greet(60.0)
    secure = {"projections": projections} if "masked" in runtime else {}
    schema = {"version": VERSION, "task": PREPARED, "standardise": False, "dimension": 1}
    setup = Setup("everything:Everything", {}, schema, nothing, nothing, secure)
    facts = settle(session, NAMES, setup)
    if "masked" not in runtime:
        return Remote(session, facts)
    from scaffpd.deploy.secure import MaskedRemote  # needs cryptography

    return Remote(session, facts, MaskedRemote)
