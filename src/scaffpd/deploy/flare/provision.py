"""Provision a federation on FLARE: the job, the server's rules, and a folder for every part.

The job names installed classes and carries neither code nor data. FLARE's own provisioner makes
certificates and startup kits; nothing here touches a key.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from nvflare.collab import CollabRecipe
from nvflare.lighter.spec import Builder

from scaffpd.deploy.flare.admin import ADMIN, JOB
from scaffpd.deploy.flare.client import SiloClient
from scaffpd.deploy.flare.kit import NAME, SITE_PARTS, STARTUP
from scaffpd.deploy.flare.server import Coordinator
from scaffpd.deploy.flare.serving import KIT
from scaffpd.deploy.flare.workspace import document as packaged
from scaffpd.errors import InputError
from scaffpd.fields import Json

SERVER_CLASSES = (
    "scaffpd.deploy.flare.server.Coordinator",
    "nvflare.collab.runtime.controller.CollabController",
)


def write_job(name: str, folder: Path, silos: int) -> Path:
    """Write the job under `folder`, for that many silos, and return its own folder.

    FLARE would send the source of our classes with it. Without that the job needs no right to bring
    its own code, and every site decides by its list of allowed classes.
    """
    built = CollabRecipe(
        job_name=name, server=Coordinator(), client=SiloClient(), min_clients=silos
    )
    built.add_server_config({"server": {"task_request_interval": 0.5}})
    built.add_client_config({"task_check_interval": 0.5, "get_task_timeout": 10.0})
    built._job.set_app_packages(["scaffpd"])  # installed at every site
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built.export(str(folder))
    job = (folder / name).resolve()
    for code in job.glob("*/custom"):
        shutil.rmtree(code)
    return job


DEAD_AFTER = 30.0  # seconds without a heartbeat after which the server counts a site as dead
SCHEDULE_EVERY = 0.5  # least seconds between two attempts to start a job


class ServerRules(Builder):  # type: ignore[misc]
    """Restrict what a server may run; project.yml names this after StaticFileBuilder.

    A site takes no rules from a kit: it has its own (`workspace`).
    """

    def build(self, project: Any, ctx: Any) -> None:
        local = Path(ctx.get_local_dir(project.get_server()))
        resources = json.loads((local / "resources.json.default").read_text())
        restrict(resources)
        (local / "resources.json").write_text(json.dumps(resources, indent=2))
        # rights of FLARE's users at the server: no code from outside, no shell commands
        (local / "authorization.json").write_text(packaged("server_authorization"))
        log = json.loads((local / "log_config.json.default").read_text())
        log["loggers"]["root"]["handlers"] = ["logFileHandler"]
        (local / "log_config.json").write_text(json.dumps(log, indent=2))


def restrict(resources: Json) -> None:
    """Change a server's resources, so that it runs two classes, and one job at a time."""
    resources["class_allow_list"] = list(SERVER_CLASSES)
    resources["servers"][0] |= {
        "heart_beat_timeout": DEAD_AFTER,
        "check_engine_frequency": 0.5,
    }
    parts = {part["id"]: part for part in resources["components"]}
    parts["job_scheduler"]["args"] |= {
        "max_jobs": 1,
        "max_schedule_count": 1000,
        "min_schedule_interval": SCHEDULE_EVERY,
        "max_schedule_interval": 10 * SCHEDULE_EVERY,
    }
    resources["components"] = [part for name, part in parts.items() if name != "log_receiver"]


@dataclass(frozen=True)
class FlareProject:
    """A federation as FLARE's provisioner describes it."""

    name: str  # of the federation; also of the job
    silos: Sequence[str]  # the sites' names, the same as in their silo files
    host: str  # the server's name on the network, as the sites see it
    port: int = 8002  # where the sites reach the server; administrators use the next one
    admin: str = "coordinator@scaffpd.org"  # the administrator who submits the job

    def __post_init__(self) -> None:
        for name in (self.name, *self.silos):
            if not NAME.fullmatch(name):
                raise InputError(
                    "name-not-for-flare",
                    f"FLARE cannot use the name {name!r}: use letters, digits, '-' and '_'.",
                )
        if taken := {self.host, *RESERVED} & set(self.silos):
            raise InputError(
                "silo-named-like-server",
                f"A silo on FLARE cannot have the name {min(taken)!r}: rename it.",
            )

    def document(self) -> Json:
        impl = "nvflare.lighter.impl"
        layout = {"config_folder": "config", "scheme": "grpc"}
        server = {"type": "server", "fed_learn_port": self.port, "admin_port": self.port + 1}
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
                {"path": "scaffpd.deploy.flare.provision.ServerRules"},
                {"path": f"{impl}.cert.CertBuilder"},
                {"path": f"{impl}.signature.SignatureBuilder"},
            ],
        }


AUTHORITY = "authority"  # FLARE's own folder, with the key of the root certificate
RESERVED = ("server", "run", KIT, AUTHORITY)


def provision(project: FlareProject, folder: Path) -> Path:
    """Write project.yml and the job, and let FLARE make certificates and startup kits.

    Return the folder of the kits, one for every participant by name.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # before any key, among them the root's, is written to it
    document = yaml.safe_dump(project.document(), sort_keys=False)
    (folder / "project.yml").write_text(document, encoding="utf-8")
    write_job(project.name, folder / JOB, len(project.silos))
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    (folder / "provision.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    kits = folder / "kits" / project.name / "prod_00"
    if done.returncode or not kits.is_dir():
        log = folder / "provision.log"
        raise InputError("provision-failed", f"FLARE could not be provisioned: {log} says why.")
    return kits


def write_parts(project: FlareProject, home: Path, renew: bool) -> None:
    """Provision, and put a kit into the coordinator's folder and into one for every silo.

    home/kit          of the server, with the administrator's kit and the job in it
    home/NAME/kit     of a silo: address, certificate, key, root; and a silo.toml to fill in
    home/authority    the key of the root certificate

    A new root is made every time. So renewing certificates, adding a silo and shutting one out are
    the same: all kits are replaced, and an old one is of no use.
    """
    parts = {home: project.host, **{home / name: name for name in project.silos}}
    there = [part / KIT for part in parts if (part / KIT).exists()]
    if there and not renew:
        raise InputError(
            "keys-already-exist",
            f"There are keys in {str(there[0])!r} already: --renew replaces all kits.",
        )
    shutil.rmtree(home / AUTHORITY, ignore_errors=True)
    kits = provision(project, home / AUTHORITY)
    shutil.move(kits / project.admin, kits / project.host / ADMIN)
    shutil.move(home / AUTHORITY / JOB, kits / project.host / JOB)
    template = files("scaffpd.settings").joinpath("silo.toml").read_text(encoding="utf-8")
    for part, name in parts.items():
        part.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(part / KIT, ignore_errors=True)
        if part == home:
            shutil.move(kits / name, part / KIT)
        else:
            (part / KIT / STARTUP).mkdir(mode=0o700, parents=True)
            for file in SITE_PARTS:
                shutil.move(kits / name / STARTUP / file, part / KIT / STARTUP / file)
        (part / KIT).chmod(0o700)
        if part != home and not (part / "silo.toml").exists():
            (part / "silo.toml").write_text(template.replace("my-hospital", name), "utf-8")
