"""Hospitals as silos behind bytes: faults on demand, masks, and the cohort that must agree."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

import scaffpd as sp
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.hospitals import write_hospitals
from scaffpd.deploy.messages import Failure, InProcess, Message, decode, encode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.files import JsonLines
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.model_file import linear
from scaffpd.secure.masking import Identity

MODEL = '[model]\nloss = "logistic"\nl2 = 0.03\n'


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


def federation(
    folder: Path,
    silos: int = 4,
    run: str = "run",
    replacing: dict[str, str] | None = None,
    more: str = "",
):
    """The hospitals' files; texts of federation.toml replaced, and more of it appended."""
    names, files = _hospitals(silos)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    path = folder / "federation.toml"
    places = {name: folder / name / "silo.toml" for name in names}
    text = path.read_text()
    for old, new in (replacing or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text.replace('folder = "run"', f'folder = "{run}"') + more)
    return path, places


def rough(folder: Path, *what, **more):
    """A federation whose certificate may be 1,000 times as large: four rounds in place of six."""
    path, places = federation(folder, *what, **more)
    path.write_text(path.read_text().replace("tol = 1e-6", "tol = 1e-3"))
    return path, places


def opened(places):
    return {name: Silo.open(path) for name, path in places.items()}


class Faulty(InProcess):
    """Silos that die, hang, restart, lie: `script[n]` is carried out before the n-th exchange."""

    def __init__(self, places, script=None):
        super().__init__(opened(places))
        self.places, self.script, self.count = places, defaultdict(list, script or {}), 0
        self.looks = 0
        self.dead = set()
        self.liars = {}
        self.log = []

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
                replies[site] = Failure("nobody answers")
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


@pytest.fixture(scope="module", autouse=True)
def no_locks():
    """A silo of the tests is one process; two locks are a fifth of the time of an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            import_module("scaffpd.deploy.silo.privacy"), "lock_file", lambda path: nullcontext()
        )
        patch.setattr(JsonLines, "lock", lambda self: nullcontext())
        yield


def locks(patch, lock, of_lines=JsonLines.lock):
    """Lock files after all, with this function."""
    patch.setattr(JsonLines, "lock", of_lines)
    for place in ("scaffpd.files", "scaffpd.deploy.silo.privacy"):
        patch.setattr(import_module(place), "lock_file", lock)


class FakeClock:
    """`time` for a coordinator: nothing passes but what it sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        """Return the seconds so far."""
        return self.now

    def sleep(self, seconds):
        """Let them pass."""
        self.now += seconds


@pytest.fixture
def fake_clock(monkeypatch):
    """A coordinator that waits on a clock of its own: an hour takes no time."""
    clock = FakeClock()
    monkeypatch.setattr(import_module("scaffpd.deploy.coordinate"), "time", clock)
    return clock


class Killed(BaseException):
    """The coordinator's process is gone."""


def changed(**arrays):
    """A lie: some arrays of an answer replaced."""

    def lie(answer):
        message = decode(answer, 2**31)
        if message.kind != "answer" or not set(arrays) & set(message.arrays):
            return answer
        new = {
            name: (arrays[name](value) if name in arrays else value)
            for name, value in message.arrays.items()
        }
        return encode(Message(message.kind, message.values, new))

    return lie


def mostly_long(every, *short):
    """All of these values as parameters; those that are not in `short` only repeat, and take `make
    test-all`.
    """
    values = list(every)
    marks = [() if value in short else pytest.mark.long for value in values]
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=m)
        for v, m in zip(values, marks, strict=True)
    ]


_ENCODED = {}
_COHORTS = {}
_BEST = {}


def _same_data(path, places):
    """What makes two federations one problem: the agreement, and every silo's rows."""
    setup = DeployedRun(FederationFile.read(path).folder).setup()
    rows = ((place.parent / "patients.csv").read_bytes() for place in places.values())
    return setup, (setup.digest, tuple(places), *rows)


def encoded(path, places):
    """Every silo's rows as the run's agreement has them, and the model: what a cohort needs."""
    setup, key = _same_data(path, places)
    if key not in _ENCODED:
        silos = opened(places)
        _ENCODED[key] = {
            n: silos[n].data.encoded(dict(setup.schema), setup.mean, setup.deviation)
            for n in places
        }
    return _ENCODED[key], linear(setup.model)


def asking_for_sums(method):
    """What `Fair` is across organisations."""
    return sp.SubspaceSaddle(method.objective) if isinstance(method, sp.algorithms.Fair) else method


def cohort(path, places):
    rows, model = encoded(path, places)
    key = _same_data(path, places)[1]
    if key not in _COHORTS:
        train, test = ({n: getattr(rows[n], split) for n in places} for split in ("train", "test"))
        _COHORTS[key] = sp.Cohort(train, model, test=test)
    return _COHORTS[key]


def value(path, places, x):
    """max_λ Σ λ_i f_i(x) − ψ(λ)."""
    objective = FederationFile.read(path).method.objective
    return objective.support(cohort(path, places).evaluate(x).loss)


def best_value(path, places):
    """The least such value, by the cohort's own means."""
    objective = FederationFile.read(path).method.objective
    key = (*_same_data(path, places)[1], repr(objective))
    if key not in _BEST:
        best = sp.train(sp.SubspaceSaddle(objective), cohort(path, places), rounds=200, tol=1e-13)
        _BEST[key] = value(path, places, best.x)
    return _BEST[key]


def is_right(path, places, outcome):
    """The result is the optimum, and its certificate is true."""
    tol = FederationFile.read(path).training.tol
    assert outcome.final
    assert outcome.status == "converged", outcome
    gap = value(path, places, model_of(path)) - best_value(path, places)
    assert -1e-10 <= gap <= outcome.certificate + 1e-12 <= tol + 1e-12


def model_of(path):
    from safetensors.numpy import load_file

    return load_file(FederationFile.read(path).folder / "model.safetensors")["x"]


def events(path):
    """What happened to silos, as (silo, what) and a sentence."""
    return DeployedRun(FederationFile.read(path).folder).entries()[1]


def run(path, places, script=None):
    transport = Faulty(places, script)
    return coordinate(path, transport), transport


QUICK = "\n[faults]\nstart_timeout = 3.0\ntimeout = 5.0\n"


# --- masks

OBJECTIVE = '[objective]\nkind = "ChiSquare"\nrho = 0.1\n'
SCAFF_PD = {
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 5\n\n[objective]',
    "1e-6": "1e-3",
}
SECURE = QUICK + "\n[secure]\n"
REQUIRED = "\n[secure]\nrequired = true\n"


def secured(folder, silos=4, more="", rules="", replacing=SCAFF_PD):
    """A federation with [secure]; `rules` are added to every silo's own file."""
    path, places = federation(folder, silos, replacing=replacing, more=SECURE + more)
    for place in places.values():
        place.write_text(place.read_text() + rules)
    if REQUIRED in rules:
        pinned(places)
    return path, places


def pinned(places):
    """Every silo pins everybody's key."""
    prints = {
        name: Identity.stored(name, place.parent / "identity.key").card.fingerprint
        for name, place in places.items()
    }
    for place in places.values():
        table = "".join(f'{name} = "{key}"\n' for name, key in prints.items())
        place.write_text(f"{place.read_text()}\n[secure.pins]\n{table}")


def uncertified(kind, drawn="", rounds=6):
    """Changes to federation.toml for a method without a certificate."""
    return {
        OBJECTIVE: f'[algorithm]\nkind = "{kind}"\n{drawn}',
        "rounds = 500\ntol = 1e-6": f"rounds = {rounds}",
    }


ALLOWED = {
    "hello": {},
    "describe": {},
    "card": {},
    "meet": {},
    "setup": {"constants"},
    "start": {"x"},
    "masked": {"masked"},
    "sizes": {"scalars"},
    "gradients": {"scalars"},
    "losses": {"scalars"},
    "evaluate": {"scalars"},
}


def uniform(data):
    """The p-value of Pearson's test that these bytes are uniform."""
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    expected = len(data) / 256
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 255))


def leaks(log):
    """Everything in the answers of silos that secure sums do not let out, in words."""
    found = []
    masked = {}
    for site, question, answer in log:
        asked = decode(question, 2**31).kind
        told = decode(answer, 2**31)
        if told.kind != "answer":
            found += [f"{asked} has arrays in a {told.kind}"] * bool(told.arrays)
            continue
        if not set(told.arrays) <= set(ALLOWED.get(asked, ())):
            found.append(f"{asked} has {set(told.arrays)}")
        for name, array in told.arrays.items():
            if array.dtype.kind == "f" and array.size > 4 and (asked, name) != ("start", "x"):
                found.append(f"{asked} has {array.size} numbers {name!r}")
            if name == "masked":
                masked.setdefault(site, []).append(array.tobytes())
    found += [  # the same question again has the same answer
        f"{site}'s masked vectors are not uniform"
        for site, data in masked.items()
        if uniform(b"".join({*data})) < 1e-9
    ]
    if not masked:
        found.append("nothing was masked")
    return found
