"""Run FLARE on this machine: a server and one process tree per silo on loopback, with FLARE's mutual TLS.

The modules are started directly, since the startup kits' scripts would restart them for ever.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from scaffpd.deploy.flare import client, server
from scaffpd.deploy.flare.admin import AdminSession, FlareJob
from scaffpd.deploy.flare.provision import FlareProject, provision, write_project
from scaffpd.deploy.processes import LocalEngine, Processes, free_ports
from scaffpd.errors import InputError

HOST = "localhost"
NAME = "scaffpd"
SERVER = "server"
ADMIN = "admin"
BEAT = 2  # seconds between a site's heartbeats; FLARE counts them in twos
DEAD_AFTER = 8.0  # seconds without one
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
    """Return the module and arguments that a kit's scripts start: the server's, or with `uid` a site's."""
    part = "client" if "uid" in options else "server"
    settings = [f"{key}={value}" for key, value in (TOGETHER | dict(options)).items()]
    module = f"nvflare.private.fed.app.{part}.{part}_train"
    return [module, "-m", str(kit.resolve()), "-s", f"fed_{part}.json", "--set", *settings]


def serve(kit: Path, options: Mapping[str, str], file: Path, variable: str) -> int:
    """Run a server or a site from its kit until it ends; all its processes end with this one."""
    processes = Processes()
    try:
        processes.start(
            SERVER, command(kit, options), None, os.environ | {variable: str(file.resolve())}, kit
        )
        return processes.wait(SERVER)
    finally:
        processes.kill()


class FlareEngine(FlareJob, LocalEngine):
    """FLARE's server and sites, and the administrator who submits the job."""

    def __init__(
        self, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True
    ) -> None:
        if not tls:
            raise InputError("flare-runs-mutual", "FLARE runs with mutual TLS here: leave it on.")
        LocalEngine.__init__(self, federation, silos, work)
        self.folder = self.work / "job" / NAME
        self.current = None
        self.parts = (SERVER, ADMIN, *self.silos)
        self.port, admin_port = free_ports(2)
        rules: dict[str, float | str] = {
            "dead_after": DEAD_AFTER,
            "schedule_every": 0.5,
            "patience": 3.0,
        }
        rules["store"] = str(self.work / "store")
        self._project = FlareProject(NAME, sorted(silos), HOST, self.port, admin_port, rules=rules)

    @cached_property
    def session(self) -> AdminSession:  # type: ignore[override]
        """The administrator's session."""
        return AdminSession(
            self.kit(self._project.admin), self.log(ADMIN), self.processes.environment(ADMIN)
        )

    # --- up and down

    def start(self) -> None:
        """Provision, start everything, and wait until all silos are connected."""
        self.work.mkdir(parents=True, exist_ok=True)
        for old in ("kits", "job", "store"):  # left by an earlier start
            shutil.rmtree(self.work / old, ignore_errors=True)
        write_project(self._project, self.work)
        provision(self.work)
        try:
            self.start_server()
            for name in self.silos:
                self.start_silo(name)
            self.wait(lambda: set(self.silos) - self.connected(), "FLARE did not come up", PATIENCE)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the session and all processes."""
        if (session := vars(self).pop("session", None)) is not None:
            session.close()
        self.current = None
        super().stop()

    def kit(self, name: str) -> Path:
        """Return the startup kit of the server, a silo or the administrator."""
        return self.work / "kits" / NAME / "prod_00" / name

    # --- server and silos

    def start_server(self) -> None:
        """Start the server's process."""
        self._start(SERVER, self.kit(HOST), {}, {server.VARIABLE: self.federation})

    def start_silo(self, name: str) -> None:
        """Start a site's process with its silo's file."""
        options = {"uid": name, "heart_beat_interval": str(BEAT)}
        self._start(name, self.kit(name), options, {client.VARIABLE: self.silos[name]})

    def _start(
        self, role: str, kit: Path, options: Mapping[str, str], extra: Mapping[str, Path]
    ) -> None:
        if self.processes.pids(role):
            raise InputError("running-already-stop", f"{role!r} is running already: stop it first.")
        self.processes.kill(role)  # forget processes that have ended
        environment = os.environ | QUICK | {key: str(path) for key, path in extra.items()}
        self.processes.start(role, command(kit, options), self.log(role), environment, kit)

    def connected(self) -> set[str]:
        """Return the connected silos that have a process; none if the server is down."""
        if not self.processes.alive(SERVER):
            return set()
        return super().connected() & {name for name in self.silos if self.processes.alive(name)}

    def outside(self) -> set[str]:
        """Return the connected silos outside the running job."""
        return super().outside() & self.connected()

    def running(self) -> bool:
        """Return whether the last submitted job is running; false if the server is down."""
        return self.processes.alive(SERVER) and super().running()
