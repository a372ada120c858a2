"""What a production deployment on FLARE consists of: its project file, its job, and the commands to run.

Certificates and startup kits are made by FLARE's own provisioner; nothing here touches a key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scaffpd.deploy.flare.job import write_job
from scaffpd.errors import InputError

SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


@dataclass(frozen=True)
class Project:
    """A federation as FLARE's provisioner has to know it.

    Args:
        name: of the federation; also of the job.
        silos: the sites' names, the same as in their silo files.
        host: the server's name on the network, as the sites see it.
        port: where the sites reach the server.
        admin_port: where administrators reach it.
        quorum: the job does not start with fewer sites.
        admin: the administrator who submits the job.
        rules: settings of `rules.SiteRules`.
    """

    name: str
    silos: Sequence[str]
    host: str
    port: int = 8002
    admin_port: int = 8003
    quorum: int = 1
    admin: str = "coordinator@scaffpd.org"
    rules: dict[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.name, *self.silos):
            if not SITE.fullmatch(name):
                raise InputError(f"FLARE cannot use the name {name!r}: use letters, digits, '-' and '_'.")
        if not HOST.fullmatch(self.host):
            raise InputError(f"FLARE cannot use the server name {self.host!r}: give one such as fl.example.org.")
        if not self.silos or len(set(self.silos)) < len(self.silos):
            raise InputError("A FLARE project needs at least one silo, each with a name of its own.")
        if {self.host, "server"} & set(self.silos):
            raise InputError("A silo on FLARE must not be called like the server: rename it.")

    def document(self) -> dict[str, Any]:
        """The content of FLARE's project.yml."""
        impl = "nvflare.lighter.impl"
        layout = {"config_folder": "config", "scheme": "grpc"}
        server = {"type": "server", "fed_learn_port": self.port, "admin_port": self.admin_port}
        people = [{"name": self.host, "org": "scaffpd"} | server]
        people += [{"name": silo, "org": "scaffpd", "type": "client"} for silo in self.silos]
        people += [{"name": self.admin, "org": "scaffpd", "type": "admin", "role": "project_admin"}]
        return {
            "api_version": 3,
            "name": self.name,
            "description": f"scaffpd federation {self.name}",
            "participants": people,
            "builders": [
                {"path": f"{impl}.workspace.WorkspaceBuilder"},
                {"path": f"{impl}.static_file.StaticFileBuilder", "args": layout},
                {"path": "scaffpd.deploy.flare.rules.SiteRules", "args": dict(self.rules)},
                {"path": f"{impl}.cert.CertBuilder"},
                {"path": f"{impl}.signature.SignatureBuilder"},
            ],
        }


@dataclass(frozen=True)
class Written:
    """What `write_project` left behind.

    Attributes:
        project: FLARE's project.yml.
        job: the job's folder.
        coordinator: the commands for the coordinator, in order; lines with '#' explain.
        silo: the commands for every silo's operator, with NAME for the silo's name.
    """

    project: Path
    job: Path
    coordinator: tuple[str, ...]
    silo: tuple[str, ...]


def write_project(project: Project, out: Path, federation: Path | None = None) -> Written:
    """Write project.yml and the job into `out`; the commands name the federation's file."""
    settings = federation or Path("federation.toml")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "project.yml"
    file.write_text(yaml.safe_dump(project.document(), sort_keys=False), encoding="utf-8")
    job = write_job(project.name, out / "job", project.quorum)
    kits = f"kits/{project.name}/prod_00"
    coordinator = (
        "pip install 'scaffpd[flare]'   # also on the server",
        f"cd {out}",
        "nvflare provision -p project.yml -w kits   # certificates and startup kits, made by FLARE",
        f"# Send every silo its folder {kits}/NAME over a channel that you trust: it holds a private key.",
        f"cp {settings} {kits}/{project.host}/local/federation.toml   # on the server",
        f"{kits}/{project.host}/startup/start.sh   # on the server {project.host}",
        f"# to stop it: touch {kits}/{project.host}/shutdown.fl",
        f"scaffpd deploy resume {kits}/{project.host}/local/federation.toml --kit {kits}/{project.admin} --job {job}",
    )
    silo = (
        "pip install 'scaffpd[flare]'",
        "scaffpd silo check silo.toml",
        "cp silo.toml NAME/local/silo.toml   # or: export SCAFFPD_SILO=/path/to/silo.toml",
        "NAME/startup/start.sh",
        "touch NAME/shutdown.fl   # to stop",
    )
    return Written(file, job, coordinator, silo)
