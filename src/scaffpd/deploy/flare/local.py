"""Run FLARE's processes: a server or a site from its kit, or all of them on this machine.

Modules are started directly: the startup kits' scripts would restart them for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from scaffpd.deploy.flare import client, server
from scaffpd.deploy.flare.admin import AdminSession, FlareJob, LostError
from scaffpd.deploy.flare.provision import FlareProject, provision
from scaffpd.deploy.processes import Processes, free_ports
from scaffpd.errors import InputError

HOST = "localhost"
NAME = "scaffpd"
SERVER = "server"
ADMIN = "admin"
BEAT = 2  # seconds between a site's heartbeats; FLARE counts them in twos
QUICK_RULES = {"dead_after": 8.0, "schedule_every": 0.5, "patience": 3.0}  # of `SiteRules`
PATIENCE = 60.0  # seconds for server and sites to connect
TOGETHER = {"secure_train": "true", "org": "scaffpd", "config_folder": "config"}
# Timeouts that FLARE does not read from the kit.
QUICK = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",
    "NVFLARE_END_RUN_READINESS_TIMEOUT": "1",
    "NVFLARE_END_RUN_READINESS_CHECK_INTERVAL": "0.1",
    "NVFLARE_DEAD_CLIENT_GRACE_PERIOD": "5",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


def command(kit: Path, options: Mapping[str, str]) -> list[str]:
    """Return module and arguments of a kit's scripts: the server's, or with `uid` a site's."""
    part = "client" if "uid" in options else "server"
    settings = [f"{key}={value}" for key, value in (TOGETHER | dict(options)).items()]
    module = f"nvflare.private.fed.app.{part}.{part}_train"
    return [module, "-m", str(kit.resolve()), "-s", f"fed_{part}.json", "--set", *settings]


def serve(kit: Path, options: Mapping[str, str], file: Path, variable: str) -> int:
    """Run a server or a site from its kit until it ends; all its processes end with this one."""
    if "uid" not in options:
        place_store(kit)
    processes = Processes()
    try:
        processes.start(
            SERVER, command(kit, options), None, os.environ | {variable: str(file.resolve())}, kit
        )
        return processes.wait(SERVER)
    finally:
        processes.kill()


def place_store(kit: Path) -> None:
    """Let the server store its jobs in its own kit.

    FLARE's choice is the system's temporary folder, which systemd's PrivateTmp and a container's
    tmpfs empty when the server restarts, and which two federations on one machine would share.
    """
    file = kit.resolve() / "local" / "resources.json"
    store = kit.resolve() / "store"
    resources = json.loads(file.read_text(encoding="utf-8"))
    storage = resources["snapshot_persistor"]["args"]["storage"]
    storage["args"]["root_dir"] = str(store / "snapshots")
    for part in resources["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(store / "jobs")
    file.write_text(json.dumps(resources, indent=2), encoding="utf-8")


class FlareEngine(FlareJob):
    """FLARE's server, a process tree per silo on loopback, and the administrator."""

    def __init__(self, federation: Path, silos: Mapping[str, Path], work: Path) -> None:
        self.federation = federation.resolve()
        self.silos = {name: path.resolve() for name, path in silos.items()}
        self.work = work.resolve()
        self.processes = Processes()
        self.parts = (SERVER, ADMIN, *self.silos)
        self.port, admin_port = free_ports(2)
        self._project = FlareProject(
            NAME, sorted(silos), HOST, self.port, admin_port, rules=QUICK_RULES
        )
        self.folder = self.work / "job" / NAME
        self.current = None
        self._listed = 0.0

    @cached_property
    def session(self) -> AdminSession:  # type: ignore[override]
        """The administrator's session."""
        return AdminSession(
            self.kit(self._project.admin), self.log(ADMIN), self.processes.environment(ADMIN)
        )

    def start(self) -> None:
        """Provision, start everything, and wait until all silos are connected."""
        for old in ("kits", "job"):  # left by an earlier start
            shutil.rmtree(self.work / old, ignore_errors=True)
        provision(self._project, self.work)
        place_store(self.kit(HOST))
        try:
            self.start_server()
            for name in self.silos:
                self.start_silo(name)
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        """Wait until all silos are connected; name a part that has ended or is missing."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                missing = sorted(set(self.silos) - self.connected())
            except LostError:
                missing = [SERVER]
            ended = [part for part in self.processes.started if not self.processes.alive(part)]
            if ended or (missing and time.monotonic() > end):
                part = (ended or missing)[0]
                raise InputError(
                    "flare-did-not-start",
                    f"FLARE did not start: {part!r} is missing, and {self.log(part)} says why.",
                )
            if not missing:
                return
            time.sleep(0.2)

    def stop(self) -> None:
        """End the session and all processes; every round has its checkpoint, so nothing is lost."""
        session = vars(self).pop("session", None)
        if session is not None:
            session.close()
        self.current = None
        self.processes.kill()

    def log(self, part: str) -> Path:
        """Return the log file of the server, the administrator or a silo."""
        return self.work / f"{part}.log"

    def kit(self, name: str) -> Path:
        """Return the startup kit of the server, a silo or the administrator."""
        return self.work / "kits" / NAME / "prod_00" / name

    def start_server(self) -> None:
        """Start the server's process."""
        self._start(SERVER, self.kit(HOST), {}, {server.VARIABLE: self.federation})

    def start_silo(self, name: str) -> None:
        """Start a site's process with its silo's file."""
        options = {"uid": name, "heart_beat_interval": str(BEAT)}
        self._start(name, self.kit(name), options, {client.VARIABLE: self.silos[name]})

    def _start(
        self, part: str, kit: Path, options: Mapping[str, str], extra: Mapping[str, Path]
    ) -> None:
        self.processes.kill(part)  # forget processes that have ended
        environment = os.environ | QUICK | {key: str(path) for key, path in extra.items()}
        self.processes.start(part, command(kit, options), self.log(part), environment, kit)
