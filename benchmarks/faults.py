"""What happens when a part of a deployed federation is lost: every fault, by the documented path.

    python benchmarks/faults.py [FAULT ...] [--times 3] [--noise | --both] [--jobs 12]
                                [--seconds 540] [--write]

Four hospitals are provisioned; server and silos are the processes of `deploy run` and `silo start`.
A fault is injected once the run has made some rounds. A run that does not end by itself is
*wedged*; one whose model is not, bit for bit, the model of the same run in one process (with
noise: not the same at all silos) is *wrong*. Where it stops, its last line is noted, the cause is
removed, and the same command goes on. Clocks are shifted by `faketime`, small disks are tmpfs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.local import agree_for_all, write_hospitals
from scaffpd.deploy.messages import InProcess
from scaffpd.deploy.processes import Processes, free_port
from scaffpd.deploy.silo import Silo
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.model_file import read_model

sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.tables import markdown_table

HERE = Path(__file__).parent
TABLE = HERE / "FAULTS.md"
FOUND = Path(os.environ.get("FAULTS_FOUND", HERE / "faults.jsonl"))
SCAFFPD = [sys.executable, "-m", "scaffpd"]
SLOWLY = {
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 2\n\n[objective]',
    "tol = 1e-6": "tol = 1e-9",
}
NOISE = "\n[privacy]\nepsilon = 4\n"
PORT = 20000  # below those that systems give to clients; a federation has ten
PATIENCE = 240.0  # seconds for a command to end, after which it is wedged
# Python runs this in every process of a part that is started with FAULT in its environment: it
# ends the process where a crash would be worst, and is no part of the package.
CUSTOM = """\
import os, sys
kind, _, about = os.environ.get("FAULT", "").partition(":")
if kind == "replace":  # a crash between the draft of a file and its name
    real = os.replace
    def replace(source, target, **more):
        if os.path.basename(target) == about:
            os._exit(137)
        real(source, target, **more)
    os.replace = replace
if kind == "withhold" and "runner_process" in " ".join(sys.orig_argv):
    from scaffpd.deploy.board import Mailbox
    show = Mailbox.show
    def shown(self, start, news):  # all have posted, and nobody has been shown it
        if start >= int(about) and len(news[0]) > 1:
            os._exit(137)
        show(self, start, news)
    Mailbox.show = shown
"""


def slow_hospitals(folder: Path) -> tuple[Path, dict[str, Path]]:
    """Write four hospitals whose run takes enough rounds to be disturbed."""
    path, places = write_hospitals(folder)
    text = path.read_text()
    for old, new in SLOWLY.items():
        text = text.replace(old, new)
    path.write_text(text)
    return path, places


class Parts:
    """A provisioned federation and its processes, each started by the command of the docs."""

    def __init__(
        self,
        folder: Path,
        noise: bool = False,
        port: int = 0,
        write: Callable[[Path], tuple[Path, dict[str, Path]]] = slow_hospitals,
    ) -> None:
        self.home = folder
        self.noise = noise
        self.path, self.places = write(folder)
        self.text = self.path.read_text()
        if noise:
            self.text = _noisy(self.text)
        self.port = port or free_port()
        self.text = f'server = "localhost:{self.port}"\n{self.text}'
        self.runs = 0
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "custom").mkdir()
        (folder / "custom" / "sitecustomize.py").write_text(CUSTOM)
        self.write()
        # an hour ago, so that certificates hold where clocks are half an hour behind
        clock = "-3600s" if shutil.which("faketime") else ""
        self.command("deploy", "provision", str(self.path), clock=clock)

    def write(self, timeout: float = 20.0, agreed: bool = True) -> DeployedRun:
        """Write a new run; its terms are those of the one before if operators agree to them."""
        self.runs += 1
        name = f"run-{self.runs}"
        text = self.text.replace('folder = "run"', f'folder = "{name}"\ntimeout = {timeout}')
        if not agreed:
            text = text.replace("[training]", f"[training]\nseed = {self.runs}")
        self.path.write_text(text)
        self.file = FederationFile.read(self.path)
        if agreed:
            self.agree()
        return DeployedRun(self.file.folder)

    def agree(self) -> None:
        """Agree to the run for all operators, as `silo agree --grant` does for one."""
        agree_for_all(self.file, self.places)

    def environment(self, more: dict[str, str] | None) -> dict[str, str]:
        """Return the environment of a command."""
        custom = os.pathsep.join([str(self.home / "custom"), os.environ.get("PYTHONPATH", "")])
        return os.environ | {"PYTHONPATH": custom, "COLUMNS": "200"} | (more or {})

    def command(self, *words: str, clock: str = "") -> str:
        """Run a command to its end and return what it prints."""
        shifted = ["faketime", "-f", clock] if clock else []
        done = subprocess.run(
            [*shifted, *SCAFFPD, *words],
            env=self.environment(None),
            capture_output=True,
            text=True,
            check=False,
        )
        return f"{done.stdout}{done.stderr}"

    def start(
        self, name: str, clock: str = "", seconds: float = PATIENCE, **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a silo, or with the name `run` the coordinator, which waits so many seconds."""
        words = ["silo", "start", name] if name != "run" else ["deploy", "run", self.path.name]
        words += ["--seconds", str(seconds)] if name == "run" else []
        shifted = ["faketime", "-f", clock] if clock else []
        with (self.home / f"{name}.out").open("wb") as out:
            self.started[name] = subprocess.Popen(
                [*shifted, *SCAFFPD, *words],
                cwd=self.home,
                env=self.environment(more),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.started[name]

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of FLARE's for a part."""
        kit = (self.home if name == "run" else self.home / name) / "kit"
        return Processes(str(kit.resolve())).members()

    def kill(self, name: str) -> None:
        """End all processes of a part at once, as a power failure does."""
        own = self.started.pop(name)
        found = self.processes(name)
        for process in [psutil.Process(own.pid), *found] if own.poll() is None else found:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        own.wait()
        psutil.wait_procs(found, timeout=10)

    def job(self, name: str) -> psutil.Process:
        """Return the process that has the current job."""
        return next(p for p in self.processes(name) if "_process" in " ".join(p.cmdline()))

    def said(self, name: str) -> str:
        """Return the last line of a part."""
        lines = (self.home / f"{name}.out").read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def ensure(self) -> None:
        """Start the silos that do not run."""
        for name in self.places:
            if name not in self.started or self.started[name].poll() is not None:
                self.start(name)

    def stop(self) -> None:
        """End everything."""
        for name in list(self.started):
            self.kill(name)

    def models(self) -> dict[str, np.ndarray]:
        """Return the coordinator's model and every silo's."""
        found = {"": read_model(self.file.folder / "model.safetensors")[0]}
        for name, place in self.places.items():
            runs = sorted((place.parent / "runs").glob("*/model.safetensors"), key=os.path.getmtime)
            found[name] = read_model(runs[-1])[0]
        return found

    def right(self) -> bool:
        """Return whether all have one model, that of a run in one process."""
        found = self.models()
        same = all(np.array_equal(x, found[""]) for x in found.values())
        if self.noise or not same:
            return same
        name = f"{self.file.folder.name}-here"
        text = self.path.read_text().replace(f'"{self.file.folder.name}"', f'"{name}"')
        path = self.home / "here.toml"
        path.write_text(text)
        with tempfile.TemporaryDirectory() as folder:
            places = {}
            for silo, place in self.places.items():
                memory = shutil.ignore_patterns(
                    "runs", "kit", "records.*", "ledger.*", ".*.scaffpd"
                )
                shutil.copytree(place.parent, Path(folder) / silo, ignore=memory)
                places[silo] = Path(folder) / silo / "silo.toml"
            agree_for_all(FederationFile.read(path), places)
            silos = {silo: Silo.open(place) for silo, place in places.items()}
            outcome = coordinate(path, InProcess(silos))
        expected = read_model(self.home / name / "model.safetensors")[0]
        return outcome.final and np.array_equal(expected, found[""])


def _noisy(text: str) -> str:
    """Return terms with ε = 4, ranges of all columns, and few rounds."""
    ranges = {"age": [20, 90], "trestbps": [80, 220], "chol": [80, 620], "thalach": [50, 220]}
    ranges |= {"oldpeak": [-3, 7], "ca": [0, 3]}
    lines = []
    for line in text.splitlines():
        name = line.partition(" = ")[0]
        number = line.endswith('= "number"')
        lines.append(f"{name} = {ranges.get(name, [0, 1])}" if number else line)
    kept = [line for line in lines if not line.startswith(("tol", "rounds"))]
    return "\n".join(kept) + "\nrounds = 12\n" + NOISE


@dataclass
class Trial:
    """One fault, from the start of a run to its model."""

    parts: Parts
    folder: DeployedRun
    ended: list[str] = field(default_factory=list)  # how every start of the coordinator ended
    notes: list[str] = field(default_factory=list)

    def run(self, at: int = -1, act: Callable[[], object] = lambda: None, **more: Any) -> int:
        """Start the coordinator, act once so many rounds are made, and wait for its end."""
        coordinator = self.parts.start("run", **more)
        deadline = time.monotonic() + PATIENCE
        waiting = at >= 0
        while coordinator.poll() is None and time.monotonic() < deadline:
            if waiting and self.rounds() >= at:
                act()
                waiting = False
            time.sleep(0.1)
        code = coordinator.poll()
        if code is None:
            self.parts.kill("run")
            self.ended.append("wedged")
            return -1
        words = {0: "done", 1: "failed", 2: "refused", 3: "paused"}
        self.ended.append(words.get(code, f"code {code}"))
        if code:
            self.notes.append(self.parts.said("run"))
        if waiting:
            self.notes.append("the fault came too late")
        return code

    def rounds(self) -> int:
        """Return the rounds made so far."""
        with suppress(Exception):
            return self.folder.rounds()
        return 0


FAULTS: dict[str, Callable[[Trial], object]] = {}


def fault(act: Callable[[Trial], object]) -> Callable[[Trial], object]:
    """Register a fault; its docstring says how one goes on."""
    FAULTS[act.__name__.replace("_", " ")] = act
    return act


@fault
def none(trial: Trial) -> None:
    """Nothing to do"""
    trial.run()


@fault
def server_killed(trial: Trial) -> None:
    """`deploy run` again"""
    trial.run(4, lambda: trial.parts.kill("run"))
    trial.run()


@fault
def server_killed_and_its_temporary_folder_emptied(trial: Trial) -> None:
    """`deploy run` again"""
    place = trial.parts.home / "tmp"
    place.mkdir(exist_ok=True)
    trial.run(4, lambda: trial.parts.kill("run"), TMPDIR=str(place))
    shutil.rmtree(place)
    place.mkdir()
    trial.run(TMPDIR=str(place))


@fault
def server_clock_30_minutes_behind(trial: Trial) -> None:
    """`deploy run` again"""
    trial.run(4, lambda: trial.parts.kill("run"))
    trial.run(clock="-1800s")


@fault
def server_clock_30_minutes_ahead(trial: Trial) -> None:
    """`deploy run` again"""
    trial.run(4, lambda: trial.parts.kill("run"))
    trial.run(clock="+1800s")


@fault
def servers_job_process_killed(trial: Trial) -> None:
    """`deploy run` again"""
    trial.run(4, lambda: trial.parts.job("run").kill())
    trial.run()


@fault
def command_killed(trial: Trial) -> None:
    """`deploy run` again; FLARE's processes have ended with it"""
    trial.run(4, lambda: trial.parts.started["run"].kill())
    deadline = time.monotonic() + 20
    while trial.parts.processes("run") and time.monotonic() < deadline:
        time.sleep(0.5)
    if trial.parts.processes("run"):
        trial.ended.append("left processes")
    trial.run()


@fault
def site_killed_and_restarted(trial: Trial) -> None:
    """`deploy run` again"""

    def strike() -> None:
        trial.parts.kill("va")
        trial.parts.start("va")

    trial.run(4, strike)
    trial.run()


@fault
def sites_job_process_killed(trial: Trial) -> None:
    """`deploy run` again"""
    trial.run(4, lambda: trial.parts.job("va").kill())
    trial.run()


@fault
def site_killed_for_good(trial: Trial) -> None:
    """`silo start va`, then `deploy run` again"""
    trial.run(4, lambda: trial.parts.kill("va"))
    trial.parts.ensure()
    trial.run()


@fault
def two_sites_killed(trial: Trial) -> None:
    """`silo start` at both, then `deploy run` again"""

    def strike() -> None:
        trial.parts.kill("va")
        trial.parts.kill("cleveland")

    trial.run(4, strike)
    trial.parts.ensure()
    trial.run()


@fault
def delivery_withheld_after_all_have_posted(trial: Trial) -> None:
    """`deploy run` again"""
    trial.run(FAULT="withhold:40")
    trial.run()


@fault
def silo_restored_from_an_older_snapshot(trial: Trial) -> None:
    """`silo start va`, then `deploy run` again"""
    home = trial.parts.home / "va"
    copy = trial.parts.home / "snapshot"

    def snapshot() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(home / "runs", copy)
        deadline = time.monotonic() + 60
        while trial.rounds() < 8 and time.monotonic() < deadline:
            time.sleep(0.1)
        trial.parts.kill("va")
        shutil.rmtree(home / "runs")
        shutil.copytree(copy, home / "runs")

    trial.run(3, snapshot)
    trial.parts.ensure()
    trial.run()


@fault
def site_stopped_for_60_seconds(trial: Trial) -> None:
    """Nothing where `timeout` is longer; else `deploy run` again"""

    def stop() -> None:
        members = trial.parts.processes("va")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in members:
                with suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(60.0 if number == signal.SIGSTOP else 0.0)

    if trial.run(4, stop):
        trial.run()


@fault
def file_changed_at_a_silo(trial: Trial) -> None:
    """Put the file back, then `deploy run` again"""
    table = trial.parts.home / "va" / "patients.csv"
    before = table.read_text()

    def strike() -> None:
        trial.parts.kill("va")
        table.write_text("\n".join(before.splitlines()[:-1]) + "\n")
        trial.parts.start("va")

    trial.run(4, strike)
    trial.run()
    table.write_text(before)
    trial.run()


@contextmanager
def small_disk(place: Path, kilobytes: int):
    """Mount a small disk over a folder."""
    place.mkdir(exist_ok=True)
    options = f"size={kilobytes}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield place / "filler"
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), file.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(1024))


@fault
def disk_full_at_a_silo(trial: Trial) -> None:
    """Make room, then `deploy run` again"""
    with small_disk(trial.parts.home / "va" / "runs", 2000) as filler:
        trial.run(4, lambda: fill(filler))
        filler.unlink()
        trial.run()
        trial.ended.append("right" if trial.ended[-1] == "done" and trial.parts.right() else "")


@fault
def disk_full_at_the_coordinator(trial: Trial) -> None:
    """Make room, then `deploy run` again"""
    with small_disk(trial.folder.path, 2000) as filler:
        trial.run(4, lambda: fill(filler))
        filler.unlink()
        trial.run()
        trial.ended.append("right" if trial.ended[-1] == "done" and trial.parts.right() else "")


@fault
def truncated_checkpoints_at_the_coordinator_and_a_silo(trial: Trial) -> None:
    """Remove what the last line names, then `deploy run` again"""
    trial.run(6, lambda: trial.parts.kill("run"))
    for place in (trial.folder.path, *(trial.parts.home / "va" / "runs").iterdir()):
        for file in place.glob("*.npz"):
            os.truncate(file, 100)
    if trial.run():
        for file in trial.folder.path.glob("*.npz"):
            file.unlink()
        (trial.folder.path / "states.json").unlink(missing_ok=True)
        if trial.run():
            for place in (trial.parts.home / "va" / "runs").iterdir():
                shutil.rmtree(place)
            trial.run()


@fault
def killed_during_the_final_write(trial: Trial) -> None:
    """`deploy run` again"""
    for name in ("model.safetensors", "run.json", "outcome.json"):
        trial.run(FAULT=f"replace:{name}")
    trial.run()


@fault
def silo_killed_during_its_final_write(trial: Trial) -> None:
    """`silo start va`, then `deploy run` again"""
    trial.parts.kill("va")
    trial.parts.start("va", FAULT="replace:model.safetensors")
    trial.run()
    trial.parts.kill("va")
    trial.parts.ensure()
    trial.run()


@fault
def two_federations_on_one_host(trial: Trial) -> None:
    """nothing; on one port the second is refused, and needs another"""
    with tempfile.TemporaryDirectory(prefix="scaffpd-faults-") as folder, ExitStack() as stack:
        other = Parts(Path(folder) / "other", trial.parts.noise, trial.parts.port + 4)
        stack.callback(other.stop)
        other.ensure()
        second = other.start("run")
        trial.run()
        with suppress(subprocess.TimeoutExpired):
            second.wait(PATIENCE)
        if second.poll() != 0 or not other.right():
            trial.ended.append("wrong at the other")


@fault
def silo_late_at_the_start(trial: Trial) -> None:
    """`silo start va`"""
    trial.parts.kill("va")
    begun = time.monotonic()

    def late() -> None:
        time.sleep(max(0.0, 40.0 - (time.monotonic() - begun)))
        trial.parts.start("va")

    trial.run(0, late)


@fault
def consent_late(trial: Trial) -> None:
    """`silo agree --grant` at every silo, then `deploy run` again"""
    trial.folder = trial.parts.write(agreed=False)
    trial.run(seconds=90.0)
    if "has not agreed" not in trial.notes[-1]:
        trial.ended.append("not played")
    for name in trial.parts.places:
        shown = json.loads(trial.parts.command("silo", "agree", _at(trial, name), "--json"))
        (waiting,) = (one["agreement"] for one in shown if one["state"] == "waiting")
        trial.parts.command("silo", "agree", _at(trial, name), "--grant", waiting)
    trial.run()


def _at(trial: Trial, name: str) -> str:
    return str(trial.parts.places[name])


@fault
def certificate_expired(trial: Trial) -> None:
    """`deploy provision --renew`, and send the kits"""
    for words in (["silo", "start", _at(trial, "va")], ["deploy", "run", str(trial.parts.path)]):
        if words[0] == "silo":
            trial.parts.kill("va")
        trial.notes.append(trial.parts.command(*words, clock="+400d").strip().splitlines()[-1])
    trial.ended.append("refused" if "are valid from" in trial.notes[-1] else "wrong")
    trial.parts.command("deploy", "provision", str(trial.parts.path), "--renew", clock="-3600s")
    for name in list(trial.parts.places):
        if name in trial.parts.started:
            trial.parts.kill(name)
    trial.parts.ensure()
    trial.run()


@fault
def certificate_not_yet_valid(trial: Trial) -> None:
    """Set the clock, then start again"""
    trial.parts.kill("va")
    said = trial.parts.command("silo", "start", _at(trial, "va"), clock="-2d").strip()
    trial.notes.append(said.splitlines()[-1])
    trial.ended.append("refused" if "are valid from" in said else "wrong")
    trial.parts.ensure()
    trial.run()


def play(name: str, parts: Parts) -> dict[str, object]:
    """Inject a fault into a new run, go on until it is done, and judge the model."""
    parts.ensure()
    trial = Trial(parts, parts.write(60.0 if "stopped" in name else 20.0))
    begun = time.monotonic()
    try:
        FAULTS[name](trial)
    except Exception as error:  # of this script; a trial that was not played is no good one
        trial.ended.append("not played")
        trial.notes.append(f"{type(error).__name__}: {error}")
    ended = [one for one in trial.ended if one]
    if ended[-1] not in ("right", "done"):
        ended.append("not done")
    elif ended[-1] == "done" and not parts.right():
        ended.append("wrong")
    return {
        "fault": name,
        "noise": parts.noise,
        "ended": ended,
        "said": [note.replace(str(parts.home), "…") for note in trial.notes],
        "seconds": round(time.monotonic() - begun),
    }


def good(found: dict[str, object]) -> bool:
    """Return whether nothing was wedged or wrong, and the model is there."""
    ended = found["ended"]
    assert isinstance(ended, list)
    bad = {"wedged", "left processes", "not played"}
    return ended[-1] in ("done", "right") and not bad & set(ended)


def table() -> str:
    """Return the table of all trials so far, a row per fault."""
    found = [json.loads(line) for line in FOUND.read_text().splitlines()]
    rows = []
    for name, act in FAULTS.items():
        for noise in (False, True):
            own = [one for one in found if one["fault"] == name and one["noise"] is noise]
            if own:
                ended = {" → ".join(e for e in one["ended"] if e != "right") for one in own}
                said = own[-1]["said"][0] if own[-1]["said"] else ""
                label = f"{name}, with noise" if noise else name
                times = f"{sum(map(good, own))} of {len(own)}"
                rows.append([label, times, "; ".join(sorted(ended)), said, act.__doc__ or ""])
    heads = ["fault", "right at the end", "ended how", "last line at the first stop", "to go on"]
    return "\n".join(markdown_table(heads, rows))


def left(trials: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return the trials that `FOUND` does not have yet."""
    lines = FOUND.read_text().splitlines() if FOUND.exists() else []
    played = Counter((one["fault"], one["noise"]) for one in map(json.loads, lines))
    missing = []
    for trial in trials:
        played[trial] -= 1
        if played[trial] < 0:
            missing.append(trial)
    return missing


def own_federation(name: str, noise: bool, port: int, keep: Path | None) -> bool:
    """Play a fault in a federation of its own; keep its folder if that went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="scaffpd-faults-", dir=keep))
    parts = Parts(folder / "federation", noise, port)
    try:
        found = play(name, parts)
    finally:
        parts.stop()
    line = json.dumps(found, ensure_ascii=False)
    print(line, flush=True)
    with FOUND.open("a") as out:
        out.write(f"{line}\n")
    if good(found) or keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return good(found)


def main() -> int:
    """Play faults, note what happened, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], metavar="FAULT")
    parser.add_argument("--times", type=int, default=1, help="with those noted before")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--both", action="store_true", help="without and with noise")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after that")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder where failed trials are kept")
    parser.add_argument("--write", action="store_true", help="FAULTS.md from all trials so far")
    given = parser.parse_args()
    modes = [False, True] if given.both else [given.noise]
    begun = time.monotonic()
    names = given.faults or list(FAULTS)
    if given.port:  # one trial, begun below
        return int(not own_federation(names[0], given.noise, given.port, given.keep))
    trials = [(name, noise) for _ in range(given.times) for noise in modes for name in names]
    trials = [] if given.write and not given.faults else left(trials)
    kept = ["--keep", str(given.keep)] if given.keep else []

    def child(index: int) -> int:
        name, noise = trials[index]
        if time.monotonic() - begun > given.seconds:
            return 0
        words = [sys.executable, __file__, name, "--port", str(PORT + 10 * index), *kept]
        more = ["--noise"] if noise else []
        return subprocess.run([*words, *more], check=False).returncode

    with ThreadPoolExecutor(given.jobs) as pool:
        bad = sum(code != 0 for code in pool.map(child, range(len(trials))))
    if given.write:
        before = TABLE.read_text(encoding="utf-8").split("| fault |")[0]  # what people wrote stays
        TABLE.write_text(f"{before}{table()}\n", encoding="utf-8")
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
