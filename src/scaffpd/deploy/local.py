"""Deploy a federation as real processes on this machine, and leave nothing but the results.

federation.toml, NAME/silo.toml, NAME/patients.csv    what is deployed (by default the hospitals)
deployment.json                                       how, to resume it
run/                                                  the coordinator's folder, see `deployed_run`
engine/                                               FLARE's own files; removed at the end
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.deployed_run import FAILED, PROGRESS, DeployedRun, Outcome
from scaffpd.deploy.hospitals import write_hospitals
from scaffpd.deploy.messages import JsonMapping
from scaffpd.deploy.records import GRANTED
from scaffpd.deploy.silo import Silo
from scaffpd.errors import InputError, not_installed
from scaffpd.files import JsonLines
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.silo import SiloFile

NOTE = "deployment.json"
WORK = "engine"
Watch = Callable[[JsonMapping], None]


def flare_module(name: str) -> ModuleType:
    """Import a module of FLARE's folder, or refuse if FLARE is not installed."""
    try:
        return import_module(f"scaffpd.deploy.flare.{name}")
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name).partition(".")[0], "flare") from None


@dataclass(frozen=True)
class LocalDeployment:
    """Files of a local deployment."""

    folder: Path  # for everything that is written
    federation: Path  # federation.toml
    silos: dict[str, Path]  # silo.toml of every silo

    @classmethod
    def hospitals(cls, folder: Path) -> LocalDeployment:
        """Write the heart-disease hospitals to a new folder."""
        checked_folder(folder)
        if folder.exists() and any(folder.iterdir()):
            raise InputError(
                "folder-not-empty",
                f"The folder {str(folder)!r} is not empty: choose another with --out, or continue "
                f"with `scaffpd deploy resume {folder}`.",
            )
        return cls(folder, *write_hospitals(folder))._saved()

    @classmethod
    def of(cls, folder: Path, federation: Path, silos: list[Path]) -> LocalDeployment:
        """Deploy a federation's own files; federation.toml names its silos."""
        file = FederationFile.read(federation)
        places = {SiloFile.read(path).name: path for path in silos}
        missing = [name for name in file.silos if name not in places]
        if missing:
            given = ", ".join(places) or "none"
            raise InputError(
                "silo-file-missing",
                f"{federation.name!r} names the silo {missing[0]!r}: give --silo FILE for each "
                f"silo (given: {given}).",
            )
        if (folder / WORK).exists() and not (folder / NOTE).exists():
            raise InputError(
                "folder-would-be-removed",
                f"The folder {str(folder / WORK)!r} would be removed: choose another with --out.",
            )
        checked_folder(folder).mkdir(parents=True, exist_ok=True)
        chosen = {name: places[name] for name in file.silos}
        return cls(folder, federation, chosen)._saved()

    @classmethod
    def read(cls, folder: Path) -> LocalDeployment:
        """Read an earlier deployment, to resume it."""
        try:
            note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
            silos = {str(name): Path(path) for name, path in note["silos"].items()}
            return cls(folder, Path(note["federation"]), silos)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                "no-deployment",
                f"There is no deployment in {str(folder)!r}: give the --out folder of "
                "`scaffpd deploy local`, or a coordinator's folder of `scaffpd deploy flare`.",
            ) from None

    def _saved(self) -> LocalDeployment:
        silos = {name: str(path.resolve()) for name, path in self.silos.items()}
        note = {"federation": str(self.federation.resolve()), "silos": silos}
        (self.folder / NOTE).write_text(json.dumps(note, indent=1), encoding="utf-8")
        return self

    def agree(self, file: FederationFile) -> None:
        """Agree to the run for all silos: whoever starts them here is the operator of each."""
        opened = {name: Silo.open(path) for name, path in self.silos.items()}
        cards = {name: silo.identity.card for name, silo in opened.items()}
        digest = Agreement.made(file, cards).digest.hex()
        for silo in opened.values():
            if silo.records.granted(digest) is None:
                silo.records.note(GRANTED, digest, by="deploy local")

    def run(
        self,
        watch: Watch,
        say: Callable[[str], object],
        seconds: float = float("inf"),
        keep: bool = False,
    ) -> Outcome:
        """Start everything, follow the run to its end, and stop everything."""
        file = FederationFile.read(self.federation)
        self.agree(file)
        look = follower(DeployedRun(file.folder).path / PROGRESS, watch)
        work = self.folder / WORK
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        engine = flare_module("local").FlareEngine(self.federation, self.silos, work)
        outcome: Outcome | None = None
        try:
            say(f"Starting FLARE's server and {len(self.silos)} silos.")
            engine.start()
            say("All silos are connected; the run starts.")
            outcome = flare_module("admin").follow(engine, file, seconds, say, look)
            return outcome
        finally:
            engine.stop()
            if not keep:
                if outcome is None or outcome.status == FAILED:
                    logs = self.folder / "logs"
                    logs.mkdir(exist_ok=True)
                    for log in work.glob("*.log"):
                        shutil.copy(log, logs)
                    say(f"Logs are in {logs}.")
                shutil.rmtree(work, ignore_errors=True)  # private keys are in there


def checked_folder(folder: Path) -> Path:
    """Return the folder, or refuse if it is a file."""
    if folder.exists() and not folder.is_dir():
        raise InputError("folder-is-file", f"{str(folder)!r} is a file: name a folder with --out.")
    return folder


def follower(path: Path, watch: Watch) -> Callable[[], None]:
    """Return a function that passes on the new entries of a file of JSON lines."""
    lines = JsonLines(path)
    lines.skip()

    def look() -> None:
        for line in lines.read():
            watch(line)

    return look
