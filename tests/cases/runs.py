"""Runs of `scaffpd train` without its terminal: tables of patients, settings, folders."""

import csv

import numpy as np

from scaffpd.run.folder import RunFolder, reading, title
from scaffpd.run.prepare import prepare
from scaffpd.run.recording import record
from scaffpd.run.scores import held_out_scores
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import SECRET, carry_out, joining_of, noise_secret, settled


class Nobody:
    """Looks on, and may stop a run after so many rounds."""

    def __init__(self, after=None):
        self.after = after
        self.seen = 0
        self.models = []

    def begin(self, model, names, rounds, tol):
        self.models.append(model)

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


def trained(config, place, watcher=None, fresh=False, join=False):
    """Train, score and write a run; return its models, its data and what joining brings."""
    going_on = (place / SECRET).exists() and not fresh
    prepared = prepare(config, secret=noise_secret(place) if going_on else None)
    cohort = prepared.cohort(config)
    config = settled(config, cohort)
    folder = RunFolder(place)
    with folder.opened("train", config, fresh):
        models = carry_out(config, prepared, cohort, folder.path, watcher or Nobody())
        joining = joining_of(config, prepared, models) if join else ""
        scored = held_out_scores(prepared, models)
        found = record(
            "train",
            title(config, prepared),
            folder.command("train"),
            prepared,
            models,
            config=folder.settings("train", config),
            reading=reading(config),
            joining=joining,
            scored=scored,
        )
        folder.write(found, prepared, models, joining)
    return models, prepared, joining
