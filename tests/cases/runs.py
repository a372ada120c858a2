"""Runs of `scaffpd train` without its terminal: tables of patients, settings, folders."""

import csv

import numpy as np

import scaffpd as sp
from scaffpd.program.prepare import Source
from scaffpd.program.running import one_run
from scaffpd.settings.run import RunConfig


class Nobody:
    """Looks on, and may stop a run after so many rounds."""

    def __init__(self, after=None):
        self.after = after
        self.seen = 0
        self.models = []

    def begin(self, model, names, rounds, tol):
        self.models.append(model)

    def phase(self, what, share=0.0):
        """Nothing."""

    def say(self, *lines):
        """Nothing."""

    def show(self, moment):
        self.seen += 1
        if self.after is not None and self.seen >= self.after:
            raise KeyboardInterrupt


def patients(path, n=240, number=False):
    """A table of three hospitals, of which one has a rule of its own."""
    random = np.random.default_rng(3)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hospital", "age", "sex", "pressure", "outcome"])
        for _ in range(n):
            site = random.choice(["north", "south", "west"])
            age = random.normal(55 + 8 * (site == "west"), 10)
            sex = random.choice(["f", "m"])
            pressure = "" if random.random() < 0.1 else round(random.normal(130, 15), 1)
            signal = 0.08 * (age - 55) * (1 if site != "west" else -1) + (sex == "m")
            outcome = int(signal + random.normal() > 0)
            if number:
                outcome = round(1000 + 50 * signal + random.normal(0, 20), 2)
            writer.writerow([site, round(age, 1), sex, pressure, outcome])
    return path


def asked(file, data_test=0.2, data_groups=(), **tables):
    """Settings of a run on such a table; what joining brings and pairs of columns are for tests
    that ask for them.
    """
    data = {"file": str(file), "client": "hospital", "target": "outcome", "test": data_test}
    data["pairs"] = 0
    data |= {"groups": list(data_groups)} if data_groups else {}
    tables["training"] = {"splits": 0} | tables.get("training", {})
    return RunConfig.of({"data": data, **tables}, file.name)


def prepared(config, **given):
    return Source(config).prepared(**given)


def cohort(rows, model=None):
    """Such rows with their model, its strengths settled, or with another."""
    return sp.Cohort(
        rows.train, rows.model if model is None else model, rows.names, test=rows.test or None
    )


def trained(config, place, watcher=None, fresh=False):
    """Train, score and write a run; return its models, its data and what joining brings."""
    done = one_run("train", config, place, fresh, watcher or Nobody())
    return done.models, done.own.rows, done.own.joining
