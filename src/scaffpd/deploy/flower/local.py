"""Flower on one machine: a SuperLink and one SuperNode per silo as real processes, with TLS and node keys."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import psutil

import scaffpd
from scaffpd.deploy.flower.certificates import write_certificates, write_node_key, write_private
from scaffpd.deploy.flower.client_app import SETTING
from scaffpd.deploy.flower.control import Control
from scaffpd.deploy.flower.processes import Processes, free_port
from scaffpd.deploy.flower.project import write_files
from scaffpd.deploy.flower.server_app import FEDERATION
from scaffpd.errors import InputError

_SERVER = "server"
_PATIENCE = 120.0
_NEXT = 10.0
_LOOK = 1.0  # seconds between two questions to the SuperLink whether a run has ended
_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}


class FlowerEngine:
    """A federation of real processes on loopback.

    Args:
        federation: the coordinator's federation.toml.
        silos: name of a silo -> its silo.toml.
        work: an empty folder for everything that the engine writes.
        tls: certificates and authenticated nodes; plaintext without.
        warm: ClientApps are forks of a process that has loaded torch already (`scaffpd.deploy.flower.warm`); without,
            Flower's own SuperExec starts a new Python for every message.
    """

    def __init__(
        self, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True, warm: bool = True
    ) -> None:
        self._federation = Path(federation).resolve()
        self._silos = {name: Path(path).resolve() for name, path in silos.items()}
        self._work = Path(work).resolve()
        self._tls = tls
        self._warm = warm
        self._processes = Processes()
        self._keys = self._work / "keys"
        self._ports = {part: free_port() for part in (_SERVER, *map(_part, self._silos))}
        authority = self._keys / "ca.pem" if tls else None
        self._control = Control(f"127.0.0.1:{self._ports[_SERVER]}", authority)
        self._run: int | None = None
        self._going, self._looked = False, 0.0
        self._nodes: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    @property
    def port(self) -> int:
        """Where the SuperLink listens, on loopback."""
        return self._ports[_SERVER]

    def start(self) -> None:
        """Bring everything up and wait until all silos are connected."""
        write_files(self._work / "app", self._federation)
        self._keys.mkdir(parents=True, exist_ok=True)
        if self._tls:
            write_certificates(self._keys)
        for name in self._silos:
            write_node_key(self._keys, _part(name))
            write_private(self._keys / f"{_part(name)}.secret", secrets.token_bytes(32))
        self.start_server()
        if self._tls:
            for name in self._silos:
                self._control.register(name, self._keys / f"{_part(name)}.pub")
        for name in self._silos:
            self.start_silo(name)
        self._wait(lambda: self.connected() == set(self._silos), "The silos do not connect to the SuperLink")

    def submit(self) -> None:
        """Start the federation's run."""
        self._run = self._control.start(self._work / "app", {FEDERATION: str(self._federation)})
        self._going, self._looked = True, time.monotonic()

    def running(self) -> bool:
        """Whether the run that was submitted last is still going."""
        if self._run is None or not self._processes.alive(_SERVER):
            return False
        if time.monotonic() - self._looked > _LOOK:
            try:
                self._going = not self._control.finished(self._run)
            except httpx.HTTPError:
                return False
            self._looked = time.monotonic()
        return self._going

    def abort(self) -> None:
        """End the run; the SuperLink and the SuperNodes stay."""
        if self._run is not None and self.running():
            self._control.stop(self._run)
            self._looked = 0.0
        for process in self._processes.members(_SERVER):
            with contextlib.suppress(psutil.Error):
                if "flwr-serverapp" in " ".join(process.cmdline()):
                    process.kill()

    def start_server(self) -> None:
        """Start the SuperLink and wait until it answers; SuperNodes that are up find it again by themselves.

        A run that a killed SuperLink has left behind is ended: Flower does not go on with it, `submit` does.
        """
        self._processes.kill(_SERVER)
        port = str(self._ports[_SERVER])
        command = [_program("flower-superlink"), "--host", "127.0.0.1", "--port", port]
        command += ["--database", str(self._work / "superlink.db"), "--disable-runtime-dependency-installation"]
        command += ["--enable-supernode-auth", *self._certificates()] if self._tls else ["--insecure"]
        self._start(_SERVER, command)
        self._wait(self._control.ready, "The SuperLink does not start")
        if self._run is not None:
            self._control.stop(self._run)
            self._run = None

    def start_silo(self, name: str) -> None:
        """Start a silo's SuperNode, under the same key as ever and with the same node id."""
        part = _part(name)
        self._processes.kill(part)
        if self._tls and self._nodes.get(name):
            with contextlib.suppress(httpx.HTTPError):
                self._control.release(self._nodes[name], self._keys / f"{part}.key")
        self._starts[part] = self._log(part).stat().st_size if self._log(part).exists() else 0
        port = str(self._ports[part])
        command = [_program("flower-supernode"), "--superlink", f"127.0.0.1:{self._ports[_SERVER]}"]
        command += ["--host", "127.0.0.1", "--port", port]
        command += ["--node-config", f'{SETTING}="{self._silos[name]}"']
        if self._tls:
            command += ["--root-certificates", str(self._keys / "ca.pem")]
            command += ["--auth-supernode-private-key", str(self._keys / f"{part}.key")]
        else:
            command += ["--insecure"]
        secret = str(self._keys / f"{part}.secret")
        if self._warm:
            command += ["--isolation", "process", "--superexec-auth-secret-file", secret]
        parent = self._start(part, command)
        if self._warm:
            warm = [sys.executable, "-m", "scaffpd.deploy.flower.warm", "--runtime-api-address", f"127.0.0.1:{port}"]
            warm += ["--insecure", "--superexec-auth-secret-file", secret, "--parent-pid", str(parent)]
            self._start(part, warm)

    def kill_server(self) -> None:
        """SIGKILL the SuperLink and all that it has started."""
        self._processes.kill(_SERVER)

    def kill_silo(self, name: str) -> None:
        """SIGKILL a silo's SuperNode and all that belongs to it."""
        self._processes.kill(_part(name))

    def kill_job(self, name: str) -> None:
        """SIGKILL the ClientApp that a silo is running; there is one only while it answers, so wait for the next."""
        end = time.monotonic() + _NEXT
        while not (jobs := self._jobs(name)) and time.monotonic() < end:
            time.sleep(0.02)
        for process in jobs:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def pause_silo(self, name: str) -> None:
        """SIGSTOP all of a silo: it hangs."""
        self._processes.signal(_part(name), signal.SIGSTOP)

    def wake_silo(self, name: str) -> None:
        """SIGCONT all of a silo."""
        self._processes.signal(_part(name), signal.SIGCONT)

    def connected(self) -> set[str]:
        """The silos whose processes are alive and whose nodes the SuperLink holds for online."""
        try:
            online = self._control.online()
        except httpx.HTTPError:
            return set()
        return {name for name in self._silos if self._processes.alive(_part(name)) and self._node(name) in online}

    def logs(self) -> dict[str, Path]:
        """Where the output of each part goes."""
        return {part: self._log(part) for part in (_SERVER, *map(_part, self._silos))}

    def pids(self) -> set[int]:
        """Everything alive that belongs to us."""
        return {process.pid for process in self._processes.members()}

    def stop(self) -> None:
        """Everything down, whatever state it is in."""
        self._processes.kill()

    def _start(self, part: str, command: list[str]) -> int:
        return self._processes.start(part, command, self._log(part), self._environment(part))

    def _environment(self, part: str) -> dict[str, str]:
        """Ours, with Flower's home inside the part's folder and our programs and modules first."""
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        modules = os.pathsep.join(filter(None, [str(Path(scaffpd.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        own = {} if part == _SERVER else {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
        home = {"FLWR_HOME": str(self._work / part / "flwr"), "PATH": programs, "PYTHONPATH": modules}
        return {**os.environ, **_SETTINGS, **own, **home}

    def _certificates(self) -> list[str]:
        files = {"--ssl-ca-certfile": "ca.pem", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
        return [word for option, file in files.items() for word in (option, str(self._keys / file))]

    def _jobs(self, name: str) -> list[psutil.Process]:
        """The ClientApps of a silo: forks of the warm process, or Flower's own command."""
        jobs = []
        for process in self._processes.members(_part(name)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                parent = process.parent()
                fork = parent is not None and "deploy.flower.warm" in " ".join(parent.cmdline())
                if "flwr-clientapp" in words or ("deploy.flower.warm" in words and fork):
                    jobs.append(process)
        return jobs

    def _node(self, name: str) -> int | None:
        """The node id that the silo's SuperNode has reported since it was started."""
        log = self._log(_part(name))
        text = log.read_bytes()[self._starts.get(_part(name), 0) :] if log.exists() else b""
        found = re.search(rb"SuperNode ID: (\d+)", text)
        if found:
            self._nodes[name] = int(found[1])
        return int(found[1]) if found else None

    def _log(self, part: str) -> Path:
        return self._work / part / "log.txt"

    def _wait(self, done: Callable[[], bool], sentence: str) -> None:
        end = time.monotonic() + _PATIENCE
        while not done():
            dead = [part for part in self._processes.parts() if not self._processes.alive(part)]
            if dead:
                raise InputError(f"{sentence}: {dead[0]} has ended at once, see {self._log(dead[0])}.")
            if time.monotonic() > end:
                raise InputError(f"{sentence} within {_PATIENCE:g} seconds: see the logs in {self._work}.")
            time.sleep(0.2)


def _part(silo: str) -> str:
    return f"silo-{silo}"


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)
