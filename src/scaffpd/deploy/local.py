"""Deploy a federation as real processes on this machine: start them, supervise them, and keep only the results.

federation.toml, NAME/silo.toml, NAME/patients.csv    what was deployed (by default the hospitals)
deployment.json                                       how, to resume it
run/                                                  the coordinator's folder, see `deployed_run`
engine/                                               the engine's own files; removed at the end
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaffpd.data.heart_disease import COLUMNS, HOSPITALS, read
from scaffpd.data.silos import Client
from scaffpd.deploy.coordinate import reopen
from scaffpd.deploy.deployed_run import FAILED, PROGRESS, DeployedRun, Outcome
from scaffpd.deploy.supervise import ended_before, supervise
from scaffpd.errors import InputError, not_installed, unknown
from scaffpd.files import JsonLines
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.silo import SiloFile

if TYPE_CHECKING:  # engines need an optional package
    from scaffpd.deploy.processes import LocalEngine

ENGINES = {"flare": "FlareEngine", "flower": "FlowerEngine"}


def engine_named(
    kind: str, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True
) -> LocalEngine:
    """Return an engine by its name, or refuse if it is not installed."""
    if kind not in ENGINES:
        raise unknown("engine", kind, ENGINES)
    made: LocalEngine = getattr(engine_module(kind, "local"), ENGINES[kind])(
        federation, silos, work, tls
    )
    return made


def engine_module(kind: str, name: str) -> Any:
    """Import a module of an engine, or refuse if the engine is not installed."""
    try:
        return import_module(f"scaffpd.deploy.{kind}.{name}")
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name).partition(".")[0], kind) from None


HOSPITAL_SILO = """\
name = "{name}"

[data]
file = "patients.csv"
target = "disease"
categories = ["cp", "restecg", "slope", "thal"]

[split]
test = 0.3
"""
HOSPITALS_FEDERATION = """\
name = "hospitals"
silos = [{silos}]
folder = "run"

[model]
loss = "logistic"
l2 = 0.03
intercept = true

[objective]
kind = "ChiSquare"
rho = 0.1

[training]
rounds = 500
tol = 1e-6
"""
LEAST = 40  # patients of a silo


def write_hospitals(folder: Path, silos: int = 4) -> tuple[Path, dict[str, Path]]:
    """Write the hospitals of the heart-disease data as silos; return federation.toml and every silo.toml.

    Each silo has a folder with its table and its silo.toml. More than four silos are parts (wards) of hospitals.
    """
    places = {}
    for name, (raw, labels) in _wards(silos).items():
        home = folder / name
        home.mkdir(parents=True)
        with (home / "patients.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*COLUMNS, "disease"])
            for row, label in zip(raw.tolist(), labels.tolist(), strict=True):
                writer.writerow([*("" if value != value else f"{value:g}" for value in row), label])
        places[name] = home / "silo.toml"
        places[name].write_text(HOSPITAL_SILO.format(name=name), encoding="utf-8")
    path = folder / "federation.toml"
    path.write_text(
        HOSPITALS_FEDERATION.format(silos=", ".join(f'"{name}"' for name in places)),
        encoding="utf-8",
    )
    return path, places


def _wards(silos: int) -> dict[str, Client]:
    """Return whole hospitals, or nearly equal parts of them."""
    hospitals = {name: read(name) for name in HOSPITALS}
    most = sum(len(labels) // LEAST for _, labels in hospitals.values())
    if not 2 <= silos <= most:
        raise InputError(
            "patients-silos", f"There are patients for 2 to {most} silos, not for {silos}."
        )
    if silos <= len(hospitals):
        return dict(list(hospitals.items())[:silos])
    parts = dict.fromkeys(hospitals, 1)
    while sum(parts.values()) < silos:
        parts[max(parts, key=lambda name: len(hospitals[name][1]) / parts[name])] += 1
    wards = {}
    for name, (raw, labels) in hospitals.items():
        order = np.random.default_rng(0).permutation(len(labels))
        for k, rows in enumerate(np.array_split(order, parts[name])):
            wards[name if parts[name] == 1 else f"{name}-{k + 1}"] = raw[rows], labels[rows]
    return wards


NOTE = "deployment.json"
WORK = "engine"
Watch = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class LocalDeployment:
    """Files and engine of a local deployment."""

    folder: Path  # for everything that is written
    engine: str  # "flare" or "flower"
    federation: Path  # federation.toml
    silos: dict[str, Path]  # silo.toml of every silo
    tls: bool = True  # whether connections are encrypted

    @classmethod
    def hospitals(cls, folder: Path, engine: str, silos: int, tls: bool = True) -> LocalDeployment:
        """Write the heart-disease hospitals to a new folder."""
        checked_folder(folder)
        if folder.exists() and any(folder.iterdir()):
            raise InputError(
                "folder-empty-choose",
                f"The folder {str(folder)!r} is not empty: choose another with --out, or go on with "
                f"`scaffpd deploy resume {folder}`.",
            )
        federation, places = write_hospitals(folder, silos)
        return cls(folder, engine, federation, places, tls)._saved()

    @classmethod
    def of(
        cls, folder: Path, engine: str, federation: Path, silos: list[Path], tls: bool = True
    ) -> LocalDeployment:
        """Deploy a federation's own files; federation.toml names its silos."""
        file = FederationFile.read(federation)
        places = {SiloFile.read(path).name: path for path in silos}
        for name in file.silos:
            if name not in places:
                given = ", ".join(places) or "none"
                raise InputError(
                    "names-silo-give",
                    f"{federation.name!r} names the silo {name!r}: give --silo FILE for each silo (given: {given}).",
                )
        if reopen(file, DeployedRun(file.folder)) is not None:
            raise InputError(
                "run-ended-name",
                f"The run in {str(file.folder)!r} has ended: name a new folder in {federation.name!r}.",
            )
        if (folder / WORK).exists() and not (folder / NOTE).exists():
            raise InputError(
                "folder-removed-choose",
                f"The folder {str(folder / WORK)!r} would be removed: choose another with --out.",
            )
        checked_folder(folder).mkdir(parents=True, exist_ok=True)
        chosen = {name: places[name].resolve() for name in file.silos}
        return cls(folder, engine, federation.resolve(), chosen, tls)._saved()

    @classmethod
    def read(cls, folder: Path) -> LocalDeployment:
        """Read an earlier deployment, to resume it."""
        try:
            note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
            silos = {str(name): Path(path) for name, path in note["silos"].items()}
            return cls(
                folder, str(note["engine"]), Path(note["federation"]), silos, bool(note["tls"])
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                "deployment-scaffpd-deploy",
                f"There is no deployment of `scaffpd deploy local` in {str(folder)!r}: give its --out folder, or, for "
                "FLARE in production, federation.toml with --kit and --job.",
            ) from None

    def _saved(self) -> LocalDeployment:
        silos = {name: str(path.resolve()) for name, path in self.silos.items()}
        note = {
            "engine": self.engine,
            "federation": str(self.federation.resolve()),
            "silos": silos,
            "tls": self.tls,
        }
        (self.folder / NOTE).write_text(json.dumps(note, indent=1), encoding="utf-8")
        return self

    def run(
        self,
        watch: Watch,
        say: Callable[[str], object],
        seconds: float = float("inf"),
        keep: bool = False,
    ) -> Outcome:
        """Start everything, supervise the run to its end, and stop everything."""
        file = FederationFile.read(self.federation)
        work = self.folder / WORK
        if (done := ended_before(file, say)) is not None:
            return done
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        engine = engine_named(self.engine, self.federation, self.silos, work, self.tls)
        follow = follower(file.folder / PROGRESS, watch)
        outcome = None
        try:
            say(f"{self.engine}: starting the server and {len(self.silos)} silos.")
            engine.start()
            say("All silos are connected; the run starts.")
            outcome = supervise(engine, file, seconds, say, follow)
            return outcome
        finally:
            engine.stop()
            if not keep:
                if outcome is None or outcome.status == FAILED:
                    say(f"Logs are in {_copied(engine.logs(), self.folder / 'logs')}.")
                shutil.rmtree(work, ignore_errors=True)  # private keys are in there


def _copied(logs: Mapping[str, Path], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for part, log in logs.items():
        if log.exists():
            shutil.copyfile(log, folder / f"{part}.log")
    return folder


def checked_folder(folder: Path) -> Path:
    """Return the folder, or refuse if it is a file."""
    if folder.exists() and not folder.is_dir():
        raise InputError(
            "file-name-folder", f"{str(folder)!r} is a file: name a folder with --out."
        )
    return folder


def follower(path: Path, watch: Watch) -> Callable[[], None]:
    """Return a function that passes on the new entries of a file of JSON lines."""
    lines = JsonLines(path)
    lines.skip()

    def look() -> None:
        for line in lines.read():
            watch(line)

    return look
