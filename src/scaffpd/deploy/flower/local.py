"""Run Flower on one machine: a SuperLink and one SuperNode per silo as real processes, with TLS and node keys.

docs/deploy/what-happens-when.md says what Flower does when a SuperNode, a ClientApp or the SuperLink is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
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
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

import scaffpd
from scaffpd.deploy.flower.apps import FEDERATION, SETTING
from scaffpd.deploy.flower.project import (
    write_certificates,
    write_files,
    write_node_key,
    write_private,
)
from scaffpd.deploy.processes import LocalEngine, free_ports

SERVER = "server"
_PATIENCE = 120.0  # seconds for the parts to connect
_LOOK = 1.0  # seconds between two checks whether a run has ended
_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}
_SILO_SETTINGS = {
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"
}  # seconds until a ClientApp is started


class SuperLinkApi:
    """The control API of a SuperLink, as the `flwr` command uses it; plaintext without a CA certificate."""

    def __init__(self, address: str, authority: Path | None) -> None:
        self._address = address
        self._authority = authority

    def ready(self) -> bool:
        """Return whether the SuperLink answers."""
        try:
            self.online()
        except httpx.TransportError:
            return False
        return True

    def online(self) -> set[int]:
        """Return the nodes that are online."""
        with self._client() as client:
            found = client.ListNodes(ListNodesRequest())
        return {node.node_id for node in found.nodes_info if node.status == NodeStatus.ONLINE}

    def register(self, name: str, public_key: Path) -> None:
        """Admit the site that holds the private key."""
        key = load_ssh_public_key(public_key.read_bytes())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        with self._client() as client:
            client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name))

    def start(self, app: Path, config: dict[str, str]) -> int:
        """Submit an app; return the run's id."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # flwr 1.41 uses a name that pathspec 1 has deprecated
            content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config))
        )
        with self._client() as client:
            return int(client.StartRun(request).run_id)

    def stop(self, run: int) -> None:
        """End a run."""
        with self._client() as client:
            client.StopRun(StopRunRequest(run_id=run))

    def finished(self, run: int) -> bool:
        """Return whether a run has ended, with or without success."""
        with self._client() as client:
            runs = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
        return run not in runs or runs[run].status.status == Status.FINISHED

    def _client(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(
            server_address=self._address,
            insecure=self._authority is None,
            root_certificates=self._authority.read_bytes() if self._authority else None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )


class FlowerEngine(LocalEngine):
    """A SuperLink and SuperNodes, each with its own folder for Flower's home.

    Without `tls` connections are plaintext and nodes are not authenticated.
    """

    def __init__(
        self, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True
    ) -> None:
        super().__init__(federation, silos, work)
        self.parts = (SERVER, *map(part_of, self.silos))
        self._keys = self.work / "keys"
        self._tls = tls
        self.port, *ports = free_ports(1 + len(self.silos))
        self._ports = dict(zip(self.silos, ports, strict=True))
        self._api = SuperLinkApi(f"127.0.0.1:{self.port}", self._keys / "ca.pem" if tls else None)
        self._run: int | None = None
        self._going = False
        self._looked = 0.0

    def log(self, part: str) -> Path:
        """Return the log file of a part, in its own folder."""
        return self.work / part / "log.txt"

    # --- up and down

    def start(self) -> None:
        """Bring everything up and wait until all silos are connected."""
        write_files(self.work / "app", self.federation)
        self._keys.mkdir(parents=True, exist_ok=True)
        if self._tls:
            write_certificates(self._keys)
        for name in self.silos:
            write_node_key(self._keys, part_of(name))
            write_private(self._keys / f"{part_of(name)}.secret", secrets.token_bytes(32))
        self.start_server()
        for name in self.silos:
            if self._tls:
                self._api.register(name, self._keys / f"{part_of(name)}.pub")
            self.start_silo(name)
        sentence = "The silos do not connect to the SuperLink"
        silos = set(self.silos)
        self.wait(lambda: [part_of(name) for name in silos - self.connected()], sentence, _PATIENCE)

    def start_server(self) -> None:
        """Start the SuperLink and wait until it answers; its database keeps the nodes, which connect by themselves."""
        command = [_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += [
            "--database",
            str(self.work / "superlink.db"),
            "--disable-runtime-dependency-installation",
        ]
        if self._tls:
            files = {
                "--ssl-ca-certfile": "ca.pem",
                "--ssl-certfile": "server.pem",
                "--ssl-keyfile": "server.key",
            }
            command += [
                word for option, file in files.items() for word in (option, str(self._keys / file))
            ]
        self._start(SERVER, [*command, "--enable-supernode-auth" if self._tls else "--insecure"])
        self.wait(
            lambda: () if self._api.ready() else (SERVER,),
            "The SuperLink does not start",
            _PATIENCE,
        )

    def start_silo(self, name: str) -> None:
        """Start a silo's SuperNode and the executor of its ClientApps."""
        part = part_of(name)
        key = self._keys / f"{part}.key"
        secret = self._keys / f"{part}.secret"
        port = str(self._ports[name])
        authenticated = ["--superexec-auth-secret-file", str(secret)]
        command = [
            _program("flower-supernode"),
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--host",
            "127.0.0.1",
        ]
        command += [
            "--port",
            port,
            "--node-config",
            f'{SETTING}="{self.silos[name]}"',
            "--isolation",
            "process",
        ]
        safe = [
            "--root-certificates",
            str(self._keys / "ca.pem"),
            "--auth-supernode-private-key",
            str(key),
        ]
        parent = self._start(
            part, [*command, *authenticated, *(safe if self._tls else ["--insecure"])]
        )
        executor = [
            "scaffpd.deploy.flower.fork_executor",
            "--insecure",
            "--parent-pid",
            str(parent),
        ]
        self._start(part, [*executor, "--runtime-api-address", f"127.0.0.1:{port}", *authenticated])

    def connected(self) -> set[str]:
        """Return the silos whose processes are alive and whose nodes are online."""
        try:
            online = self._api.online()
        except httpx.HTTPError:
            return set()
        return {
            name
            for name in self.silos
            if self.processes.alive(part_of(name)) and self._node(name) in online
        }

    def outside(self) -> set[str]:
        """Return an empty set: a silo that is back joins the run at once."""
        return set()

    # --- the run

    def submit(self) -> None:
        """Start the federation's run."""
        self._run = self._api.start(self.work / "app", {FEDERATION: str(self.federation)})
        self._going, self._looked = True, time.monotonic()

    def running(self) -> bool:
        """Return whether the last submitted run is running."""
        if self._run is None or not self.processes.alive(SERVER):
            return False
        if time.monotonic() - self._looked > _LOOK:
            try:
                self._going = not self._api.finished(self._run)
            except httpx.HTTPError:
                return False
            self._looked = time.monotonic()
        return self._going

    def abort(self) -> None:
        """End the run; the SuperLink and the SuperNodes keep running."""
        if self._run is not None and self.running():
            self._api.stop(self._run)
            self._looked = 0.0
        for process in self.processes.members(SERVER):
            with contextlib.suppress(psutil.Error):
                if "flwr-serverapp" in " ".join(process.cmdline()):
                    process.kill()

    def _start(self, part: str, command: list[str]) -> int:
        """Start a process with Flower's home in the part's folder and our programs and modules first in its paths."""
        programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        modules = [str(Path(scaffpd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        own = {
            "FLWR_HOME": str(self.work / part / "flwr"),
            "PATH": os.pathsep.join(filter(None, programs)),
            "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        }
        environment = os.environ | _SETTINGS | ({} if part == SERVER else _SILO_SETTINGS) | own
        return self.processes.start(part, command, self.log(part), environment)

    def _node(self, name: str) -> int | None:
        """Return the node id that the silo's SuperNode has reported."""
        log = self.log(part_of(name))
        found = re.search(rb"SuperNode ID: (\d+)", log.read_bytes() if log.exists() else b"")
        return int(found[1]) if found else None


def part_of(silo: str) -> str:
    """Return the name of a silo's part."""
    return f"silo-{silo}"


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)
