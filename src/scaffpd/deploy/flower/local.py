"""Flower on one machine: a SuperLink and one SuperNode per silo as real processes, with TLS and node keys.

What happens on Flower 1.41.0 (measured here, four silos):

- A killed SuperNode: the SuperLink holds it for online until 60 seconds after its last heartbeat (so 38 to 60 seconds
  from now) and then answers for it with error 5, in its own name. The interval (30 seconds, two may be missed) is a
  constant of Flower; what bounds the wait is the timeout of the question. A stopped (hanging) SuperNode looks the same.
- A killed SuperNode that starts again at once, with the same key, is refused ("Failed to activate", exit code 305) as
  long as the SuperLink holds the old one for online. `start_silo` says goodbye for it first, signed with its key; an
  operator lets a supervisor start it until it stays. Its node id is the same, what `Context.state` held is lost.
- A killed ClientApp: its SuperNode answers with error 8 after 60 seconds without the ClientApp's heartbeat, and takes
  no other question before that.
- A killed SuperLink: with `--database` nodes, keys and runs are there when it comes back (without, by its source, it
  knows none of its nodes and they end). SuperNodes try again by themselves, with pauses of up to 20 seconds, and keep
  their ids. The run is not gone on with (its ServerApp is dead): `start_server` ends it and `submit` starts the next.
- A dead ServerApp: its run counts as running until 60 seconds after its last heartbeat (by its source).
- A SuperNode that has nothing to do looks for questions every 3 seconds, a constant of Flower: the least that an
  exchange costs. On top of that come, for every message and silo, 0.1 seconds of a core for a warm ClientApp with
  nothing to do (Flower's own imports Flower and torch first: 2 to 5) and 0.5 for the SuperLink and its being asked.
  41 MB in either direction add some 6 seconds and are 1.002 times as much on the wire.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import httpx
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

import scaffpd
from scaffpd.deploy.flower.apps import FEDERATION, SETTING
from scaffpd.deploy.flower.project import write_certificates, write_files, write_node_key, write_private
from scaffpd.deploy.processes import Processes, free_ports
from scaffpd.errors import InputError

SERVER = "server"
_SETTINGS = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
_SILO_SETTINGS = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}  # seconds until a ClientApp is started


class Layout:
    """Files, ports and commands; a part is the server or a silo, with a folder of its own and Flower's home in it."""

    def __init__(self, work: Path, silos: Iterable[str], tls: bool, warm: bool) -> None:
        self.work, self._tls, self._warm = work, tls, warm
        self.app, self.keys = work / "app", work / "keys"
        self.authority = self.keys / "ca.pem" if tls else None
        self.parts = [part_of(silo) for silo in silos]
        self.ports = dict(zip((SERVER, *self.parts), free_ports(1 + len(self.parts)), strict=True))
        self.address = f"127.0.0.1:{self.ports[SERVER]}"

    def write(self, federation: Path) -> None:
        """The app, certificates, and a key pair and a secret for every silo."""
        write_files(self.app, federation)
        self.keys.mkdir(parents=True, exist_ok=True)
        if self._tls:
            write_certificates(self.keys)
        for part in self.parts:
            write_node_key(self.keys, part)
            write_private(self.keys / f"{part}.secret", secrets.token_bytes(32))

    def log(self, part: str) -> Path:
        """Where a part's output goes."""
        return self.work / part / "log.txt"

    def environment(self, part: str) -> dict[str, str]:
        """Ours, with Flower's home inside the part's folder and our programs and modules first."""
        programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        modules = [str(Path(scaffpd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        own = {
            "FLWR_HOME": str(self.work / part / "flwr"),
            "PATH": os.pathsep.join(filter(None, programs)),
            "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        }
        return {**os.environ, **_SETTINGS, **({} if part == SERVER else _SILO_SETTINGS), **own}

    def superlink(self) -> list[str]:
        """The SuperLink, with a database, so that it knows its nodes again after a restart."""
        command = [_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.ports[SERVER])]
        command += ["--database", str(self.work / "superlink.db"), "--disable-runtime-dependency-installation"]
        if not self._tls:
            return [*command, "--insecure"]
        files = {"--ssl-ca-certfile": "ca.pem", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
        options = [word for option, file in files.items() for word in (option, str(self.keys / file))]
        return [*command, "--enable-supernode-auth", *options]

    def supernode(self, part: str, silo: Path) -> list[str]:
        """A silo's SuperNode."""
        command = [_program("flower-supernode"), "--superlink", self.address, "--host", "127.0.0.1"]
        command += ["--port", str(self.ports[part]), "--node-config", f'{SETTING}="{silo}"']
        if self.authority:
            command += ["--root-certificates", str(self.authority)]
            command += ["--auth-supernode-private-key", str(self.keys / f"{part}.key")]
        else:
            command += ["--insecure"]
        return [*command, "--isolation", "process", *self._secret(part)] if self._warm else command

    def executor(self, part: str, parent: int) -> list[str]:
        """The warm SuperExec of a silo."""
        command = ["scaffpd.deploy.flower.fork_executor", "--insecure", "--parent-pid", str(parent)]
        return [*command, "--runtime-api-address", f"127.0.0.1:{self.ports[part]}", *self._secret(part)]

    def _secret(self, part: str) -> list[str]:
        return ["--superexec-auth-secret-file", str(self.keys / f"{part}.secret")]


def part_of(silo: str) -> str:
    """A silo's name as a part."""
    return f"silo-{silo}"


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


class Control:
    """A SuperLink's control API; `authority` is the CA's certificate, None for plaintext."""

    def __init__(self, address: str, authority: Path | None) -> None:
        self._address = address
        self._authority = authority

    def ready(self) -> bool:
        """Whether the SuperLink answers."""
        try:
            self.online()
        except httpx.TransportError:
            return False
        return True

    def online(self) -> set[int]:
        """The nodes that the SuperLink has heard from of late."""
        with self._client() as client:
            found = client.ListNodes(ListNodesRequest())
        return {node.node_id for node in found.nodes_info if node.status == NodeStatus.ONLINE}

    def register(self, name: str, public_key: Path) -> int:
        """Admit the site that holds the private key; its node id."""
        key = load_ssh_public_key(public_key.read_bytes())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        with self._client() as client:
            request = RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
            return int(client.RegisterNode(request).node_id)

    def release(self, node: int, private_key: Path) -> None:
        """Say, as the site that holds the key, that its node has ended, so that it may be started again at once.

        A SuperNode says so itself unless it was killed; then the SuperLink holds it for online for up to a minute and
        refuses another one with the same key, which ends with exit code 305.
        """
        key = load_ssh_private_key(private_key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        signature = NodeAuthHttpInterceptor(key, key.public_key())
        with FleetHttpClient.from_server_address(
            self._address, self._authority is None, self._certificate(), interceptors=[version, signature]
        ) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def start(self, app: Path, config: dict[str, str]) -> int:
        """Submit an app; the run's id."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # flwr 1.41 uses a name that pathspec 1 has deprecated
            content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
        with self._client() as client:
            return int(client.StartRun(request).run_id)

    def stop(self, run: int) -> None:
        """End a run."""
        with self._client() as client:
            client.StopRun(StopRunRequest(run_id=run))

    def finished(self, run: int) -> bool:
        """Whether a run has ended, one way or another."""
        with self._client() as client:
            runs = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
        return run not in runs or runs[run].status.status == Status.FINISHED

    def _client(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(
            server_address=self._address,
            insecure=self._authority is None,
            root_certificates=self._certificate(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def _certificate(self) -> bytes | None:
        return self._authority.read_bytes() if self._authority else None


_PATIENCE = 120.0
_NEXT = 10.0
_LOOK = 1.0  # seconds between two questions to the SuperLink whether a run has ended


class FlowerEngine:
    """A federation of real processes on loopback.

    Args:
        federation: the coordinator's federation.toml.
        silos: name of a silo -> its silo.toml.
        work: an empty folder for everything that the engine writes.
        tls: certificates and authenticated nodes; plaintext without.
        warm: ClientApps are forks of a process that has loaded torch already (`fork_executor`); without,
            Flower's own SuperExec starts a new Python for every message.
    """

    def __init__(
        self, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True, warm: bool = True
    ) -> None:
        self._federation = Path(federation).resolve()
        self._silos = {name: Path(path).resolve() for name, path in silos.items()}
        self._tls, self._warm = tls, warm
        self._layout = Layout(Path(work).resolve(), self._silos, tls, warm)
        self._processes = Processes()
        self._control = Control(self._layout.address, self._layout.authority)
        self._run: int | None = None
        self._going, self._looked = False, 0.0
        self._nodes: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    @property
    def port(self) -> int:
        """Where the SuperLink listens, on loopback."""
        return self._layout.ports[SERVER]

    def start(self) -> None:
        """Bring everything up and wait until all silos are connected."""
        self._layout.write(self._federation)
        self.start_server()
        if self._tls:
            for name in self._silos:
                self._control.register(name, self._layout.keys / f"{part_of(name)}.pub")
        for name in self._silos:
            self.start_silo(name)
        self._wait(lambda: self.connected() == set(self._silos), "The silos do not connect to the SuperLink")

    def submit(self) -> None:
        """Start the federation's run."""
        self._run = self._control.start(self._layout.app, {FEDERATION: str(self._federation)})
        self._going, self._looked = True, time.monotonic()

    def running(self) -> bool:
        """Whether the run that was submitted last is still going."""
        if self._run is None or not self._processes.alive(SERVER):
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
        for process in self._processes.members(SERVER):
            with contextlib.suppress(psutil.Error):
                if "flwr-serverapp" in " ".join(process.cmdline()):
                    process.kill()

    def start_server(self) -> None:
        """Start the SuperLink and wait until it answers; SuperNodes that are up find it again by themselves.

        A run that a killed SuperLink has left behind is ended: Flower does not go on with it, `submit` does.
        """
        self._processes.kill(SERVER)
        self._start(SERVER, self._layout.superlink())
        self._wait(self._control.ready, "The SuperLink does not start")
        if self._run is not None:
            self._control.stop(self._run)
            self._run = None

    def start_silo(self, name: str) -> None:
        """Start a silo's SuperNode, under the same key as ever and with the same node id."""
        part = part_of(name)
        self._processes.kill(part)
        if self._tls and self._nodes.get(name):
            with contextlib.suppress(httpx.HTTPError):
                self._control.release(self._nodes[name], self._layout.keys / f"{part}.key")
        log = self._layout.log(part)
        self._starts[part] = log.stat().st_size if log.exists() else 0
        parent = self._start(part, self._layout.supernode(part, self._silos[name]))
        if self._warm:
            self._start(part, self._layout.executor(part, parent))

    def kill_server(self) -> None:
        """SIGKILL the SuperLink and all that it has started."""
        self._processes.kill(SERVER)

    def kill_silo(self, name: str) -> None:
        """SIGKILL a silo's SuperNode and all that belongs to it."""
        self._processes.kill(part_of(name))

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
        self._processes.signal(part_of(name), signal.SIGSTOP)

    def wake_silo(self, name: str) -> None:
        """SIGCONT all of a silo."""
        self._processes.signal(part_of(name), signal.SIGCONT)

    def connected(self) -> set[str]:
        """The silos whose processes are alive and whose nodes the SuperLink holds for online."""
        try:
            online = self._control.online()
        except httpx.HTTPError:
            return set()
        return {name for name in self._silos if self._processes.alive(part_of(name)) and self._node(name) in online}

    def outside(self) -> set[str]:
        """Nobody: a silo that is back is part of the run at once."""
        return set()

    def logs(self) -> dict[str, Path]:
        """Where the output of each part goes."""
        return {part: self._layout.log(part) for part in (SERVER, *map(part_of, self._silos))}

    def pids(self) -> set[int]:
        """Everything alive that belongs to us."""
        return self._processes.pids()

    def stop(self) -> None:
        """Everything down, whatever state it is in."""
        self._processes.kill()

    def _start(self, part: str, command: list[str]) -> int:
        return self._processes.start(part, command, self._layout.log(part), self._layout.environment(part))

    def _jobs(self, name: str) -> list[psutil.Process]:
        """The ClientApps of a silo: forks of the warm process, or Flower's own command."""
        jobs = []
        for process in self._processes.members(part_of(name)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                parent = process.parent()
                fork = parent is not None and "deploy.flower.fork_executor" in " ".join(parent.cmdline())
                if "flwr-clientapp" in words or ("deploy.flower.fork_executor" in words and fork):
                    jobs.append(process)
        return jobs

    def _node(self, name: str) -> int | None:
        """The node id that the silo's SuperNode has reported since it was started."""
        log = self._layout.log(part_of(name))
        text = log.read_bytes()[self._starts.get(part_of(name), 0) :] if log.exists() else b""
        found = re.search(rb"SuperNode ID: (\d+)", text)
        if found:
            self._nodes[name] = int(found[1])
        return int(found[1]) if found else None

    def _wait(self, done: Callable[[], bool], sentence: str) -> None:
        end = time.monotonic() + _PATIENCE
        while not done():
            dead = [part for part in self._processes.parts() if not self._processes.alive(part)]
            if dead:
                raise InputError(f"{sentence}: {dead[0]} has ended at once, see {self._layout.log(dead[0])}.")
            if time.monotonic() > end:
                raise InputError(f"{sentence} within {_PATIENCE:g} seconds: see the logs in {self._layout.work}.")
            time.sleep(0.2)
