"""What the tests of deployments share: hospitals as silos, faults on demand, and the cohort that must agree."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

import scaffpd as sp
from scaffpd.config.federation import FederationFile
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.local import write_hospitals
from scaffpd.deploy.messages import Failure, InProcess, Message, decode, encode, linear
from scaffpd.deploy.silo.silo import Silo

MODEL = '[model]\nloss = "logistic"\nl2 = 0.03\nintercept = true\n'


def federation(folder: Path, silos: int = 4, run: str = "run", replacing: dict[str, str] | None = None, more: str = ""):
    """The hospitals' files; texts of federation.toml replaced, and more of it appended."""
    path, places = write_hospitals(folder, silos)
    text = path.read_text()
    for old, new in (replacing or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text.replace('folder = "run"', f'folder = "{run}"') + more)
    return path, places


def opened(places):
    return {name: Silo.open(path) for name, path in places.items()}


class Faulty(InProcess):
    """Silos that die, hang, restart, lie: `script[n]` is carried out before the n-th exchange."""

    def __init__(self, places, script=None):
        super().__init__(opened(places))
        self.places, self.script, self.count = places, defaultdict(list, script or {}), 0
        self.looks = 0
        self.dead, self.liars, self.log = set(), {}, []

    def sites(self):
        self.looks += 1
        for action, *who in self.script[f"look {self.looks}"]:
            getattr(self, action)(*who)
        return tuple(sorted(set(self.silos) - self.dead))

    def ask(self, questions, timeout):
        self.count += 1
        for action, *who in self.script[self.count]:
            getattr(self, action)(*who)
        replies = {}
        for site, question in questions.items():
            if site in self.dead:
                replies[site] = Failure("nobody answers", gone=True)
                continue
            answer = self.silos[site].answer(question)
            self.log.append((site, question, answer))
            replies[site] = self.liars[site](answer) if site in self.liars else answer
        return replies

    def kill(self, site):
        self.dead.add(site)

    def restart(self, site):
        self.dead.discard(site)
        self.silos[site] = Silo.open(self.places[site])

    def lie(self, site, how):
        self.liars[site] = how

    def honest(self, site):
        self.liars.pop(site, None)

    def crash(self):
        raise Killed


class Killed(BaseException):
    """The coordinator's process is gone."""


def changed(**arrays):
    """A lie: some arrays of an answer replaced."""

    def lie(answer):
        message = decode(answer, 2**31)
        if message.kind != "answer" or not set(arrays) & set(message.arrays):
            return answer
        new = {name: (arrays[name](value) if name in arrays else value) for name, value in message.arrays.items()}
        return encode(Message(message.kind, message.values, new))

    return lie


def encoded(path, places):
    """Every silo's rows as the run's agreement has them, and the model: what a cohort needs."""
    setup = DeployedRun(FederationFile.read(path).folder).setup()
    silos = opened(places)
    rows = {n: silos[n].data.encoded(dict(setup.schema), setup.mean, setup.deviation) for n in places}
    return rows, linear(setup.model)


def cohort(path, places, members=None):
    rows, model = encoded(path, places)
    chosen = members or list(places)
    return sp.Cohort({n: rows[n].train for n in chosen}, model, test={n: rows[n].test for n in chosen})


def model_of(path):
    from safetensors.numpy import load_file

    return load_file(FederationFile.read(path).folder / "model.safetensors")["x"]


def events(path):
    import csv

    file = FederationFile.read(path).folder / "events.csv"
    return list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []


def progress(path):
    lines = (FederationFile.read(path).folder / "progress.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run(path, places, script=None):
    transport = Faulty(places, script)
    return coordinate(path, transport), transport


QUICK = "\n[faults]\nquorum = 2\nstart_timeout = 0.2\nprobe = 0.1\ntimeout = 5.0\n"
nan = np.nan
