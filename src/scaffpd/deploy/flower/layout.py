"""Where a federation on one machine keeps its files, and the commands that start its parts."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

import scaffpd
from scaffpd.deploy.flower.certificates import write_certificates, write_node_key, write_private
from scaffpd.deploy.flower.client_app import SETTING
from scaffpd.deploy.flower.project import write_files
from scaffpd.deploy.processes import free_ports

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
        command = ["scaffpd.deploy.flower.warm", "--insecure", "--parent-pid", str(parent)]
        return [*command, "--runtime-api-address", f"127.0.0.1:{self.ports[part]}", *self._secret(part)]

    def _secret(self, part: str) -> list[str]:
        return ["--superexec-auth-secret-file", str(self.keys / f"{part}.secret")]


def part_of(silo: str) -> str:
    """A silo's name as a part."""
    return f"silo-{silo}"


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)
