"""FLARE on this machine: a server and one process tree per silo on loopback, with FLARE's own mutual TLS.

The modules that the startup kits' scripts start are started directly: the scripts would start them again for ever.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from scaffpd.deploy.flare import client, server
from scaffpd.deploy.flare.admin import AdminSession, FlareJob
from scaffpd.deploy.flare.provision import FlareProject, write_project
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


class FlareEngine:
    """Server and silos as processes on loopback.

    Args:
        federation: federation.toml.
        silos: silo.toml of every silo, by name.
        work: an empty folder for everything that FLARE writes.
        tls: must stay true.
        quorum: FLARE does not start the job with fewer sites.
    """

    def __init__(
        self, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True, quorum: int = 1
    ) -> None:
        if not tls:
            raise InputError("FLARE runs with mutual TLS here: leave it on.")
        self.federation, self.work = federation.resolve(), work.resolve()
        self.silos = {name: file.resolve() for name, file in silos.items()}
        self.quorum = quorum
        self._processes = Processes()
        self._deployment: FlareJob | None = None
        self._project = FlareProject(NAME, sorted(silos), HOST, 8002, 8003)
        self._job = self.work / "job" / NAME

    @property
    def port(self) -> int:
        """Where the server listens, on loopback."""
        return self._project.port

    # --- up and down

    def start(self) -> None:
        """Provision, start everything, and wait until all silos are connected."""
        port, admin_port = free_ports(2)
        store = self.work / "store"
        rules: dict[str, float | str] = {"dead_after": DEAD_AFTER, "schedule_every": 0.5, "patience": 3.0}
        rules["store"] = str(store)
        self._project = FlareProject(NAME, sorted(self.silos), HOST, port, admin_port, self.quorum, rules=rules)
        self.work.mkdir(parents=True, exist_ok=True)
        for old in (self.work / "kits", self.work / "job", store):  # of an earlier start, with other ports
            shutil.rmtree(old, ignore_errors=True)
        self._job = write_project(self._project, self.work).job
        self._provision()
        try:
            self.start_server()
            for name in self.silos:
                self.start_silo(name)
            self._wait(set(self.silos))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Take everything down at once; nothing is lost, since every round has its checkpoint."""
        if self._deployment:
            self._deployment.admin.close()
            self._deployment = None
        self._processes.kill()

    def _provision(self) -> None:
        command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits"]
        done = subprocess.run(
            command, cwd=self.work, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        (self.work / "provision.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode or not self._kit(HOST).is_dir():
            raise InputError(f"FLARE could not be provisioned: {self.work / 'provision.log'} says why.")

    def _kit(self, name: str) -> Path:
        return self.work / "kits" / NAME / "prod_00" / name

    def _wait(self, wanted: set[str]) -> None:
        deadline = time.monotonic() + PATIENCE
        while missing := wanted - self.connected():
            dead = [role for role in (SERVER, *wanted) if not self._processes.alive(role)]
            if dead or time.monotonic() > deadline:
                who, log = (dead or sorted(missing))[0], self.logs()
                raise InputError(f"FLARE did not come up: {who!r} is not there, and {log[who]} says why.")
            time.sleep(0.2)

    # --- server and silos

    def start_server(self) -> None:
        """Start the server's process, and an administrator's session for the engine's own use."""
        kit = self._kit(HOST)
        self._start(SERVER, "server.server_train", kit, "fed_server.json", TOGETHER, {server.VARIABLE: self.federation})
        if self._deployment is None:
            admin = AdminSession(self._kit(self._project.admin), self.logs()[ADMIN], self._processes.environment(ADMIN))
            self._deployment = FlareJob(admin, self._job)
        self._deployment.current = None  # a server that was killed has lost its job

    def start_silo(self, name: str) -> None:
        """Start a site's process with its silo's file."""
        options = TOGETHER | {"uid": name, "heart_beat_interval": str(BEAT)}
        extra = {client.VARIABLE: self.silos[name]}
        self._start(name, "client.client_train", self._kit(name), "fed_client.json", options, extra)

    def _start(
        self, role: str, module: str, kit: Path, file: str, options: Mapping[str, str], extra: Mapping[str, Path]
    ) -> None:
        if self._processes.pids(role):
            raise InputError(f"{role!r} is running already: stop it first.")
        self._processes.kill(role)  # what has ended by itself is forgotten
        arguments = [f"nvflare.private.fed.app.{module}", "-m", str(kit), "-s", file, "--set"]
        arguments += [f"{key}={value}" for key, value in options.items()]
        environment = os.environ | QUICK | {key: str(path) for key, path in extra.items()}
        self._processes.start(role, arguments, self.logs()[role], environment, kit)

    def kill_silo(self, name: str) -> None:
        """End a site's processes at once."""
        self._processes.kill(name)

    def kill_job(self, name: str) -> None:
        """End the process that a site has for the job, not the site itself."""
        self._processes.signal(name, signal.SIGKILL, spare=self._processes.main(name))

    def kill_server(self) -> None:
        """End the server's processes at once."""
        self._processes.kill(SERVER)

    def pause_silo(self, name: str) -> None:
        """Let a site hang."""
        self._processes.signal(name, signal.SIGSTOP)

    def wake_silo(self, name: str) -> None:
        """Let it go on."""
        self._processes.signal(name, signal.SIGCONT)

    def connected(self) -> set[str]:
        """The silos that the server takes for connected and that have a process; none when it does not answer."""
        if not self._processes.alive(SERVER):
            return set()
        alive = {name for name in self.silos if self._processes.alive(name)}
        return self._deployed().connected() & alive

    def outside(self) -> set[str]:
        """The connected silos that have no part in the running job."""
        return self._deployed().outside() & self.connected()

    # --- the job

    def submit(self) -> None:
        """Hand in the federation's job."""
        self._deployed().submit()

    def running(self) -> bool:
        """Whether the job that was handed in last is still going; not so when the server is down."""
        return self._processes.alive(SERVER) and self._deployed().running()

    def abort(self) -> None:
        """End the job and leave the processes."""
        if self.running():
            self._deployed().abort()

    def _deployed(self) -> FlareJob:
        if self._deployment is None:
            raise InputError("The engine has not been started: call start() first.")
        return self._deployment

    # --- what there is to see

    def logs(self) -> dict[str, Path]:
        """Every process's log."""
        return {role: self.work / f"{role}.log" for role in (SERVER, ADMIN, *self.silos)}

    def pids(self) -> set[int]:
        """Everything alive that belongs to this engine."""
        return self._processes.pids()
