"""Run FLARE's server, or a site, with the startup kit beside its file.

The coordinator has made the server's kit itself, and FLARE runs on it. A silo's kit comes from
outside: FLARE runs on files that this package writes (`workspace`).

FLARE's modules are started directly: the kits' scripts would restart them for ever. Nothing here
loads torch or FLARE, so that watching a process costs little memory.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from scaffpd.deploy.flare.kit import STARTUP, SiteKit, address, certificate
from scaffpd.deploy.flare.workspace import private_folder, write_workspace
from scaffpd.deploy.processes import Processes
from scaffpd.errors import InputError, not_installed
from scaffpd.files import lock_folder

KIT = "kit"  # the folder beside federation.toml or silo.toml
ENGINE = "engine"  # and the one beside silo.toml that this package writes
SITE_FILE = "SCAFFPD_SILO"  # of the environment: the path of silo.toml
SERVER_FILE = "SCAFFPD_FEDERATION"  # and of federation.toml
CONSOLE = "console.txt"  # what FLARE prints; it logs to log.txt
SOON = timedelta(days=60)  # before certificates end, from when on to warn
# Settings that FLARE takes from the environment; an operator's own come first.
ENVIRONMENT = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",
    "NVFLARE_END_RUN_READINESS_TIMEOUT": "1",
    "NVFLARE_END_RUN_READINESS_CHECK_INTERVAL": "0.1",
    "NVFLARE_DEAD_CLIENT_GRACE_PERIOD": "5",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
OPTIONS = {"secure_train": "true", "org": "scaffpd", "config_folder": "config"}
LOG = "log.txt"  # FLARE's own name
BEAT = "2"  # seconds between a site's heartbeats; FLARE counts them in twos


def check_installed() -> None:
    if find_spec("nvflare") is None:
        raise not_installed("nvflare", "flare")


@contextmanager
def served(file: Path, site: str = "") -> Iterator[Processes]:
    """Run the server of a federation.toml, or the site of a silo.toml, as long as the block lasts.

    No process outlives it, and what an earlier one has left is ended first.
    """
    check_installed()
    kit = checked_kit(file)
    busy = f"Another process runs {str(kit)!r}: end that one first."
    environment = ENVIRONMENT | os.environ
    if site:
        own = SiteKit.read(kit, site)
        place = kit.with_name(ENGINE)
        workspace = place / "workspace"
        log = log_file(file, site)
        private_folder(place)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment |= {SITE_FILE: str(file.resolve()), "NVFL_LOG_ROOT": str(log.parents[1])}
    else:
        place = workspace = kit
        log = kit / LOG
        environment |= {SERVER_FILE: str(file.resolve())}
    with lock_folder(place, busy, seconds=2.0):
        processes = Processes(str(kit))
        processes.kill()
        if site:
            write_workspace(workspace, site, own)
        else:
            empty_store(kit)
            check_port(address(kit)[1])
        command = flare_command(workspace, site)
        processes.start(command, log.with_name(CONSOLE), environment, workspace)
        try:
            yield processes
        finally:
            processes.kill()


def log_file(file: Path, site: str) -> Path:
    """Return where FLARE writes its log at the site of a silo.toml; that of a job is below."""
    return file.resolve().parent / ENGINE / "logs" / site / LOG


def checked_kit(file: Path) -> Path:
    """Return the kit beside a file; refuse if there is none, or if its certificates do not hold."""
    kit = file.resolve().parent / KIT
    if not (kit / STARTUP).is_dir():
        raise InputError(
            "no-startup-kit",
            f"There is no startup kit in {str(kit)!r}: the coordinator's `scaffpd deploy "
            "provision` makes it.",
        )
    start, end = validity(kit)
    now = datetime.now(UTC)
    if not start <= now < end:
        raise InputError(
            "certificate-not-valid",
            f"The certificates in {str(kit)!r} are valid from {start:%Y-%m-%d %H:%M} to "
            f"{end:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M}: set the clock, or use a "
            "new kit (`scaffpd deploy provision --renew`).",
        )
    return kit


def validity(kit: Path) -> tuple[datetime, datetime]:
    server = (kit / STARTUP / "server.crt").exists()
    names = ("server.crt" if server else "client.crt", "rootCA.pem")
    found = [certificate(kit, name) for name in names]
    starts = [one.not_valid_before_utc for one in found]
    return max(starts), min(one.not_valid_after_utc for one in found)


def expiry_warning(file: Path) -> str:
    """Return a sentence from 60 days before the kit beside a file ends; empty before, or without
    a kit.
    """
    kit = file.resolve().parent / KIT
    if not (kit / STARTUP).is_dir():
        return ""
    end = validity(kit)[1]
    if end - datetime.now(UTC) > SOON:
        return ""
    return f"The federation's certificates end on {end:%Y-%m-%d}: renew the kits before."


def flare_command(workspace: Path, site: str) -> list[str]:
    options = OPTIONS | ({"uid": site, "heart_beat_interval": BEAT} if site else {})
    settings = [f"{key}={value}" for key, value in options.items()]
    module = "nvflare.private.fed.app.server.server_train"
    if site:
        module = "scaffpd.deploy.flare.site"
    document = "fed_client.json" if site else "fed_server.json"
    return [module, "-m", str(workspace), "-s", document, "--set", *settings]


def trouble(kit: Path) -> str:
    """Say why a site cannot connect to the server of its kit; empty if nothing is found."""
    host, port = address(kit)
    root = certificate(kit, "rootCA.pem").public_bytes(Encoding.PEM).decode()
    context = ssl.create_default_context(cadata=root)
    context.check_hostname = False
    try:
        with socket.create_connection((host, port), 5.0) as plain, context.wrap_socket(plain):
            return ""
    except ssl.SSLCertVerificationError as error:
        return (
            f"The server at {host}:{port} has other certificates than this kit "
            f"({error.verify_message}): they were renewed, or a proxy or another server answers "
            "there. If they were renewed, ask the coordinator for the new kit, replace "
            f"{str(kit)!r} by it, and start again."
        )
    except ssl.SSLError:
        return ""
    except OSError as error:
        return (
            f"Nobody answers at {host}:{port} ({error}): the coordinator's `scaffpd deploy run` "
            "does not run yet, or a firewall is between. This silo tries on."
        )


def check_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise InputError(
            "port-in-use",
            f"Port {port} cannot be used ({error.strerror}): end the other server, or give this "
            "federation another port and provision it again.",
        ) from None


def empty_store(kit: Path) -> None:
    """Let the server store its jobs in its own kit, and begin without any.

    FLARE's choice is the system's temporary folder, which two federations on one machine would
    share. A run goes on from its own folder, never from FLARE's jobs, of which a server that died
    leaves some that are running for ever.
    """
    store = kit / "store"
    shutil.rmtree(store, ignore_errors=True)
    file = kit / "local" / "resources.json"
    resources = json.loads(file.read_text(encoding="utf-8"))
    storage = resources["snapshot_persistor"]["args"]["storage"]
    storage["args"]["root_dir"] = str(store / "snapshots")
    for part in resources["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(store / "jobs")
    file.write_text(json.dumps(resources, indent=2), encoding="utf-8")
