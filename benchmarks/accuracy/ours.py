"""Ours: tables are read, encoded and trained on as `scaffpd train` does, with its defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from peers import Method
from tables import Array, Rows, Split

import scaffpd as sp
from scaffpd.objectives.base import Objective
from scaffpd.pipeline.prepared import Prepared
from scaffpd.program.prepare import Source
from scaffpd.settings.run import RunConfig
from scaffpd.study.joining import start_of

CLIENT, TARGET = "(client)", "(target)"


def read(split: Split, curves: str) -> Prepared:
    """Write the split into two files and read them as a run does; clients are c00000, …"""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / "train.csv", Path(folder) / "test.csv"]
        parts = (split.train, split.owner, split.y), (split.test, split.owner_test, split.y_test)
        for file, (frame, owner, y) in zip(files, parts, strict=True):
            names = [f"c{i:05d}" for i in owner]
            target = np.where(y > 0.5, "yes", "no") if split.labels else y
            frame.assign(**{CLIENT: names, TARGET: target}).to_csv(file, index=False)
        data = {
            "file": str(files[0]),
            "test": str(files[1]),
            "target": TARGET,
            "client": CLIENT,
            "task": "classification" if split.labels else "regression",
            "curves": curves,
        }
        texts = [str(c) for c in split.train if split.train[c].dtype == "category"]
        data |= {"categories": texts} if texts else {}
        config = RunConfig.of({"data": data}, Path(folder) / "config.toml")
        return Source(config).prepared()


def ours(personal: bool, objective: Callable[[Rows], Objective], curves: str = "auto") -> Method:
    """Return a method; `objective` is made from the clients' numbers of rows."""

    def method(split: Split) -> Array:
        prepared = read(split, curves)
        model = prepared.model
        cohort = sp.Cohort(
            prepared.train, sp.Personal(model) if personal else model, prepared.names
        )
        sizes = np.array([len(y) for _, y in prepared.train], dtype=float)
        fair = sp.fair(objective(sizes))
        result = sp.train(fair, cohort, tol=1e-6, x0=start_of(cohort), progress=False)
        found = np.empty(len(split.y_test))
        for k, (X, _) in enumerate(prepared.test):
            u = result.personal[k] if personal else result.x
            tested = split.owner_test == int(prepared.names[k][1:])
            found[tested] = model.outputs(u, np.asarray(X))[:, 0]
        if split.labels:
            p = 1 / (1 + np.exp(-found))
            return p if prepared.labels[1] == "yes" else 1 - p
        return prepared.centre + prepared.unit * found

    return method


OURS: dict[str, Method] = {
    "ours: average": ours(False, sp.Average),
    "ours: fair": ours(False, lambda n: sp.ChiSquare(0.1, prior=n)),
    "ours: personal lines": ours(True, sp.Average, "off"),
    "ours: personal": ours(True, sp.Average),
}
