"""FLARE on this machine: a server and one process tree per silo on loopback, with FLARE's own mutual TLS.

The modules that the startup kits' scripts start are started directly: the scripts would start them again for ever.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from scaffpd.deploy.flare import client, server
from scaffpd.deploy.flare.admin import AdminSession, FlareJob
from scaffpd.deploy.flare.provision import FlareProject, provision, write_project
from scaffpd.deploy.processes import Processes, free_ports
from scaffpd.errors import InputError

HOST, NAME, SERVER, ADMIN = "localhost", "scaffpd", "server", "admin"
BEAT = 2  # seconds between a site's heartbeats; FLARE counts them in twos
DEAD_AFTER = 8.0  # seconds without one
PATIENCE = 60.0  # seconds for server and sites to find each other
TOGETHER = {"secure_train": "true", "org": "scaffpd", "config_folder": "config"}
# How long FLARE waits for this and that, where it does not read it from the kit.
QUICK = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",
    "NVFLARE_END_RUN_READINESS_TIMEOUT": "1",
    "NVFLARE_END_RUN_READINESS_CHECK_INTERVAL": "0.1",
    "NVFLARE_DEAD_CLIENT_GRACE_PERIOD": "5",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


def command(kit: Path, options: Mapping[str, str]) -> list[str]:
    """Return the module that a kit's scripts would start, and its arguments: the server's, or with `uid` a site's."""
    part = "client" if "uid" in options else "server"
    settings = [f"{key}={value}" for key, value in (TOGETHER | dict(options)).items()]
    module = f"nvflare.private.fed.app.{part}.{part}_train"
    return [module, "-m", str(kit.resolve()), "-s", f"fed_{part}.json", "--set", *settings]


def serve(kit: Path, options: Mapping[str, str], file: Path, variable: str) -> int:
    """Run a server or a site from its kit until it ends; whatever ends us takes all of its processes along."""
    processes = Processes()
    try:
        processes.start(SERVER, command(kit, options), None, os.environ | {variable: str(file.resolve())}, kit)
        return processes.wait(SERVER)
    finally:
        processes.kill()


class FlareEngine:
    """Server and silos as processes on loopback, by federation.toml and every silo.toml; FLARE writes into `work`."""

    def __init__(self, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True) -> None:
        if not tls:
            raise InputError("FLARE runs with mutual TLS here: leave it on.")
        self.federation, self.work = federation.resolve(), work.resolve()
        self.silos = {name: file.resolve() for name, file in silos.items()}
        self.processes = Processes()
        self.port, admin_port = free_ports(2)
        rules: dict[str, float | str] = {"dead_after": DEAD_AFTER, "schedule_every": 0.5, "patience": 3.0}
        rules["store"] = str(self.work / "store")
        self._project = FlareProject(NAME, sorted(silos), HOST, self.port, admin_port, rules=rules)
        self._job: FlareJob | None = None

    # --- up and down

    def start(self) -> None:
        """Provision, start everything, and wait until all silos are connected."""
        self.work.mkdir(parents=True, exist_ok=True)
        for old in ("kits", "job", "store"):  # of an earlier start
            shutil.rmtree(self.work / old, ignore_errors=True)
        write_project(self._project, self.work)
        provision(self.work)
        try:
            self.start_server()
            for name in self.silos:
                self.start_silo(name)
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Take everything down at once; nothing is lost, since every round has its checkpoint."""
        if self._job:
            self._job.session.close()
            self._job = None
        self.processes.kill()

    def kit(self, name: str) -> Path:
        """Return the startup kit of the server, a silo or the administrator."""
        return self.work / "kits" / NAME / "prod_00" / name

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while missing := set(self.silos) - self.connected():
            dead = [role for role in (SERVER, *self.silos) if not self.processes.alive(role)]
            if dead or time.monotonic() > deadline:
                who, log = (dead or sorted(missing))[0], self.logs()
                raise InputError(f"FLARE did not come up: {who!r} is not there, and {log[who]} says why.")
            time.sleep(0.2)

    # --- server and silos

    def start_server(self) -> None:
        """Start the server's process, and an administrator's session for the engine's own use."""
        self._start(SERVER, self.kit(HOST), {}, {server.VARIABLE: self.federation})
        if self._job is None:
            log, environment = self.logs()[ADMIN], self.processes.environment(ADMIN)
            session = AdminSession(self.kit(self._project.admin), log, environment)
            self._job = FlareJob(session, self.work / "job" / NAME)

    def start_silo(self, name: str) -> None:
        """Start a site's process with its silo's file."""
        options = {"uid": name, "heart_beat_interval": str(BEAT)}
        self._start(name, self.kit(name), options, {client.VARIABLE: self.silos[name]})

    def _start(self, role: str, kit: Path, options: Mapping[str, str], extra: Mapping[str, Path]) -> None:
        if self.processes.pids(role):
            raise InputError(f"{role!r} is running already: stop it first.")
        self.processes.kill(role)  # forget what has ended by itself
        environment = os.environ | QUICK | {key: str(path) for key, path in extra.items()}
        self.processes.start(role, command(kit, options), self.logs()[role], environment, kit)

    def connected(self) -> set[str]:
        """Return the silos that the server takes for connected and that have a process; none when it is down."""
        if not self.processes.alive(SERVER):
            return set()
        return self._started().connected() & {name for name in self.silos if self.processes.alive(name)}

    def outside(self) -> set[str]:
        """Return the connected silos that have no part in the running job."""
        return self._started().outside() & self.connected()

    # --- the job

    def submit(self) -> None:
        """Hand in the federation's job."""
        self._started().submit()

    def running(self) -> bool:
        """Tell whether the job that was handed in last is still going; not so when the server is down."""
        return self.processes.alive(SERVER) and self._started().running()

    def abort(self) -> None:
        """End the job and leave the processes."""
        if self.running():
            self._started().abort()

    def _started(self) -> FlareJob:
        if self._job is None:
            raise InputError("The engine has not been started: call start() first.")
        return self._job

    def logs(self) -> dict[str, Path]:
        """Return the log file of every process."""
        return {role: self.work / f"{role}.log" for role in (SERVER, ADMIN, *self.silos)}
