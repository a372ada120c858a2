"""Write all that FLARE reads at a site: our rules, and the four things a startup kit may say.

FLARE verifies a signature of these files only where there is one, and a kit of FLARE 2.9 has none.
What it reads here was written a moment ago, into a folder of this account's alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from scaffpd.deploy.flare.kit import SITE_PARTS, STARTUP, SiteKit

SITE = ("resources", "authorization", "log_config")  # what FLARE may do at a site, and its log


def document(name: str) -> str:
    """Return a document of FLARE as this package has it."""
    file = files("scaffpd.deploy.flare").joinpath("documents", f"{name}.json")
    return file.read_text(encoding="utf-8")


# What an operator allows a site to run: the package's object, and the part of FLARE that calls it.
SITE_CLASSES: list[str] = json.loads(document("resources"))["class_allow_list"]


def write_workspace(folder: Path, silo: str, kit: SiteKit) -> None:
    """Empty a folder, and write the workspace of a silo into it.

    A site waits five seconds for the reply to a heartbeat: one that a dead server never answers
    delays the next one, and so the reconnection. FLARE asks for one right in a run; what is not
    named is refused.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    local, startup = folder / "local", folder / STARTUP
    local.mkdir()
    startup.mkdir()
    for name in SITE:
        (local / f"{name}.json").write_text(document(name), "utf-8")
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
