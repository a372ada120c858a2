"""Hospitals as silos behind bytes: faults on demand, and the cohort that must agree."""

import functools
import shutil
import tempfile
import threading
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import scaffpd as sp
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.dataset import Dataset
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.local import write_hospitals
from scaffpd.deploy.messages import Failure, InProcess
from scaffpd.deploy.records import GRANTED
from scaffpd.deploy.silo import Silo
from scaffpd.deploy.tables import Wanted
from scaffpd.files import JsonLines
from scaffpd.report.record import RunRecord
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import linear, read_model
from scaffpd.settings.silo import SiloFile

MODEL = '[model]\nkind = "logistic"\nl2 = 0.03\n'
OBJECTIVE = '[objective]\nkind = "ChiSquare"\nrho = 0.1\n'
# what the four count for where silos count by their rows
ROWS = "\n[rows]\ncleveland = 150\nhungarian = 150\nswitzerland = 60\nva = 100\n"
ROUGH = {"tol = 1e-6": "tol = 1e-3"}
FIRST_LINE = 'folder = "run"'
QUICK = {FIRST_LINE: f"{FIRST_LINE}\ntimeout = 3.0"}


@functools.cache
def _hospitals(silos: int) -> tuple[list[str], dict[str, bytes]]:
    """The silos' names and all files that `write_hospitals` writes; va is always one of them."""
    with tempfile.TemporaryDirectory() as folder:
        path, places = write_hospitals(Path(folder))
        for name in [*places][silos - 1 : -1]:
            path.write_text(path.read_text().replace(f'"{name}", ', ""))
            shutil.rmtree(places.pop(name).parent)
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        return [*places], {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


RANGES = {
    'age = "number"': "age = [20, 90]",
    'sex = "number"': "sex = [0, 1]",
    'trestbps = "number"': "trestbps = [80, 200]",
    'chol = "number"': "chol = [0, 600]",
    'fbs = "number"': "fbs = [0, 1]",
    'thalach = "number"': "thalach = [60, 210]",
    'exang = "number"': "exang = [0, 1]",
    'oldpeak = "number"': "oldpeak = [-3, 7]",
    'ca = "number"': "ca = [0, 3]",
}


def federation(folder: Path, silos: int = 4, replacing=(), more: str = "", granted: bool = True):
    """The hospitals' files; texts of federation.toml replaced, and more of it appended.

    Everybody agrees to the run, unless it is not to be `granted`.
    """
    names, files = _hospitals(silos)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    path = folder / "federation.toml"
    places = {name: folder / name / "silo.toml" for name in names}
    text = path.read_text()
    for old, new in dict(replacing).items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text + more)
    for number, place in enumerate(places.values()):  # the split into rows is the same every time
        for key in ("identity.key", "split.key"):
            (place.parent / key).write_text(f"{number:064x}\n")
            (place.parent / key).chmod(0o600)
    if granted:
        agree(path, places)
    return path, places


def patients_who_die(folder, silo="", replacing=(), **options):
    """The hospitals with days until death in place of a diagnosis; `va` has entries, too."""
    model = {MODEL: f'[model]\nkind = "cox"\n{options.pop("model", "l2 = 0.03")}\n'}
    replacing = dict(replacing) | model | {"labels = [0, 1]\n": ""}
    path, places = federation(folder, granted=False, replacing=replacing)
    random = np.random.default_rng(7)
    for name, place in places.items():
        table = place.parent / "patients.csv"
        head, *lines = table.read_text().splitlines()
        found = [f"{head.replace('disease', 'died')},days,begun"]
        for line in lines:
            *values, ill = line.split(",")
            days = 1 + int(random.exponential(40 if ill == "1" else 90))
            died = ("alive", "died")[random.random() < 0.6]
            found.append(",".join([*values, died, f"{days},{random.integers(days)}"]))
        table.write_text("\n".join(found) + "\n")
        entry = ', "begun"' if name == "va" else ""
        text = place.read_text().replace('"disease"', f'["days", "died"{entry}]')
        place.write_text(text + silo)
    agree(path, places)
    return path, places


def agreement(path, places):
    file = FederationFile.read(path)
    return Agreement.made(file, {n: Silo.open(p).identity.card for n, p in places.items()})


def agree(path, places):
    digest = agreement(path, places).digest.hex()
    for place in places.values():
        Silo.open(place).records.note(GRANTED, digest, by="test")


def opened(places):
    return {name: Silo.open(path) for name, path in places.items()}


class Faulty(InProcess):
    """Silos that die, restart, or whose posts are changed: `script[n]` before the n-th exchange."""

    def __init__(self, places, script=None):
        super().__init__(opened(places))
        self.places = places
        self.script = defaultdict(list, script or {})
        self.count = 0
        self.dead = set()
        self.liars = {}
        self.log = []

    def ask(self, questions, timeout):
        self.count += 1
        for action, *who in self.script[self.count]:
            getattr(self, action)(*who)
        replies = {}
        for site, question in questions.items():
            if site in self.dead:
                replies[site] = Failure("nobody answers")
                continue
            answer = self.silos[site].answer(question)
            self.log.append((site, question, answer))
            replies[site] = self.liars[site](answer) if site in self.liars else answer
        return replies

    def kill(self, site):
        self.dead.add(site)
        self.silos[site].close()  # as the end of a process does

    def restart(self, site):
        self.dead.discard(site)
        self.silos[site].close()
        self.silos[site] = Silo.open(self.places[site])

    def lie(self, site, how):
        self.liars[site] = how

    def crash(self):
        raise Killed


@pytest.fixture(scope="module", autouse=True)
def locks_of_threads():
    """A silo of the tests is one process with threads; locks of records are a fifth of its time.

    The lock of a table is a real one.
    """
    lock = threading.RLock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonLines, "lock", lambda self: lock)
        yield


class FakeClock:
    """`time` for a coordinator: nothing passes but what it sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def fake_clock(monkeypatch):
    """A coordinator that waits on a clock of its own: an hour takes no time."""
    clock = FakeClock()
    monkeypatch.setattr(import_module("scaffpd.deploy.coordinate"), "time", clock)
    return clock


class Killed(BaseException):
    """The coordinator's process is gone."""


def wanted(file):
    return Wanted.agreed(file)


def rows(path, places):
    file = FederationFile.read(path)
    setup = read_model(file.folder / "model.safetensors")[1]
    found = {}
    for name, place in places.items():
        data = Dataset.read(SiloFile.read(place), wanted(file))
        found[name] = data.encoded(setup.schema, setup.mean, setup.deviation)
    return found, linear(setup.model)


def cohort(path, places):
    encoded, model = rows(path, places)
    train = {name: own.train for name, own in encoded.items()}
    test = {name: own.test for name, own in encoded.items() if own.test is not None}
    return sp.Cohort(train, model, test=test or None)


def in_one_process(path, places):
    """The run of a cohort whose server sees sums alone."""
    file = FederationFile.read(path)
    federation = sp.SecureAggregation(cohort(path, places), colluding=file.colluding)
    federation.channel.here = False  # silos are asked for no reach of their rows
    return sp.train(file.method, federation, file.rounds, file.tol, file.training.seed)


def is_right(path, places, outcome):
    """Every silo has the model of a cohort in this process, and the certificate is the same."""
    assert outcome.final
    ended_alike(path, places, outcome, in_one_process(path, places))


def ended_alike(path, places, outcome, wanted):
    """The outcome and every silo's model are those of a result in this process."""
    assert (outcome.status, outcome.rounds) == (str(wanted.status), wanted.rounds)
    if np.isfinite(wanted.certificate):
        assert outcome.certificate == pytest.approx(wanted.certificate, rel=1e-4)
    else:
        assert outcome.certificate is None
    for x in models_of(path, places).values():
        np.testing.assert_allclose(x, wanted.x, rtol=0, atol=1e-8)


def model_of(path):
    return read_model(FederationFile.read(path).folder / "model.safetensors")[0]


def epsilon_of(path):
    return RunRecord.read(FederationFile.read(path).folder).privacy.epsilon


def models_of(path, places):
    """The coordinator's model, and every silo's; all bits are the same."""
    run = agreement(path, places).digest.hex()
    found = {"": model_of(path)}
    for name, place in places.items():
        found[name] = read_model(SiloFile.read(place).run(run) / "model.safetensors")[0]
        np.testing.assert_array_equal(found[name], found[""])
    return found


def events(path):
    return DeployedRun(FederationFile.read(path).folder).entries()[1]


def run(path, places, script=None):
    transport = Faulty(places, script)
    return coordinate(path, transport), transport


def entries(place):
    return list(JsonLines(SiloFile.read(place).ledger / "ledger.jsonl").read())


def released(place):
    return [one for line in entries(place) for one in line["releases"]]


def mostly_long(every, *short):
    """All of these values as parameters; those that are not in `short` take `make test-all`."""
    values = list(every)
    marks = [() if value in short else pytest.mark.long for value in values]
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=m)
        for v, m in zip(values, marks, strict=True)
    ]
