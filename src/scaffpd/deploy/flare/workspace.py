"""Write all that FLARE reads at a site: our rules, and the four things a startup kit may say.

FLARE verifies a signature of these files only where there is one, and a kit of FLARE 2.9 has none.
What it reads here was written a moment ago, into a folder of this account's alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from scaffpd.deploy.flare.kit import SITE_PARTS, STARTUP, SiteKit

SITE_CLASSES = (
    "scaffpd.deploy.flare.client.SiloClient",
    "nvflare.collab.runtime.executor.CollabExecutor",
)
PATIENCE = 5.0  # seconds that a site waits for the server's reply to a heartbeat
COMMON = "nvflare.app_common"
RESOURCES = {
    "format_version": 2,
    "class_list_enforcement_mode": "enforce",
    "class_allow_list": SITE_CLASSES,
    "allow_log_streaming": False,
    # A heartbeat that a dead server never answers delays the next one, and so the reconnection.
    "client": {"retry_timeout": 30, "compression": "Gzip", "maint_msg_timeout": PATIENCE},
    "components": [
        {
            "id": "resource_manager",
            "path": f"{COMMON}.resource_managers.gpu_resource_manager.GPUResourceManager",
            "args": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300},
        },
        {
            "id": "resource_consumer",
            "path": f"{COMMON}.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
            "args": {},
        },
        {
            "id": "process_launcher",
            "path": f"{COMMON}.job_launcher.client_process_launcher.ClientProcessJobLauncher",
            "args": {},
        },
    ],
}
# The one right that FLARE asks for in a run; what is not named is refused.
RIGHTS = {"format_version": "1.0", "permissions": {"project_admin": {"submit_job": "any"}}}
LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s - %(name)s - %(levelname)s - %(message)s"}},
    "handlers": {
        "file": {
            "class": "logging.handlers.RotatingFileHandler",
            "formatter": "line",
            "filename": "log.txt",
            "maxBytes": 20 * 2**20,
            "backupCount": 10,
        }
    },
    "root": {"level": "INFO", "handlers": ["file"]},
}


def write_workspace(folder: Path, silo: str, kit: SiteKit) -> None:
    """Empty a folder, and write the workspace of a silo into it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    local, startup = folder / "local", folder / STARTUP
    local.mkdir()
    startup.mkdir()
    for name, document in (
        ("resources", RESOURCES),
        ("authorization", RIGHTS),
        ("log_config", LOG),
    ):
        (local / f"{name}.json").write_text(json.dumps(document, indent=2), "utf-8")
    key = kit.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    documents = (json.dumps(_client(silo, kit), indent=2).encode(), _pem(kit.certificate), key)
    for name, written in zip(SITE_PARTS, (*documents, _pem(kit.root)), strict=True):
        place = os.open(startup / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(place, "wb") as stream:
            stream.write(written)


def private_folder(folder: Path) -> None:
    """Make a folder this account's alone; drop links that may have come with a silo's folder."""
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    for path in [path for path in folder.rglob("*") if path.is_symlink()]:
        path.unlink()


def _client(silo: str, kit: SiteKit) -> Mapping[str, object]:
    """Return the content of FLARE's fed_client.json; a server has its host's name."""
    service = {"target": f"{kit.host}:{kit.port}", "scheme": "grpc"}
    return {
        "format_version": 2,
        "servers": [{"name": kit.federation, "service": service, "identity": kit.host}],
        "client": {
            "ssl_private_key": "client.key",
            "ssl_cert": "client.crt",
            "ssl_root_cert": "rootCA.pem",
            "fqsn": silo,
            "is_leaf": True,
            "connection_security": "mtls",
        },
    }


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)
