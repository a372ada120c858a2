"""Write a runnable Flower app, certificates, keys and the operators' commands.

Flower 1.41's SuperLink serves three APIs on one port. The fleet API (/v1/fleet, for sites) has TLS and, with
--enable-supernode-auth, admits only sites with a registered public key. The control API (/v1/control: `flwr run`,
`flwr supernode register`) has no authentication at all in the open distribution, and the runtime API (/v1/runtime)
none before a task is taken. So the SuperLink must listen on loopback only, behind a proxy that lets nothing but
/v1/fleet through; `proxy.conf` is such a proxy for nginx.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from scaffpd.deploy.flower.apps import FEDERATION, SETTING

if TYPE_CHECKING:
    from scaffpd.run.settings.federation import FederationFile

_AUTHORITY = "scaffpd local CA"
_DAYS = 30  # validity of a certificate


def write_certificates(folder: Path) -> None:
    """Write ca.pem, server.pem and server.key for localhost; the CA's own key is never written."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP384R1())
    key = ec.generate_private_key(ec.SECP256R1())  # ten times faster than P-384 in every handshake
    local = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    for_authority = {
        x509.BasicConstraints(ca=True, path_length=0): True,
        x509.KeyUsage(False, False, False, False, False, True, True, False, False): True,
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()): False,
    }
    for_server = {
        x509.SubjectAlternativeName(local): False,
        x509.BasicConstraints(ca=False, path_length=None): True,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()): False,
    }
    (folder / "ca.pem").write_bytes(_certificate(_AUTHORITY, authority, authority, for_authority))
    (folder / "server.pem").write_bytes(_certificate("localhost", key, authority, for_server))
    write_private(folder / "server.key", _private(key, serialization.PrivateFormat.PKCS8))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    extensions: Mapping[x509.ExtensionType, bool],
) -> bytes:
    """Sign a certificate for the owner of `key`; `extensions` marks the critical ones."""
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, _AUTHORITY)
    )
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
    )
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(
        now - datetime.timedelta(hours=1)
    )
    builder = builder.not_valid_after(now + datetime.timedelta(days=_DAYS))
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical)
    return builder.sign(authority, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def write_node_key(folder: Path, name: str) -> None:
    """Write <name>.key and <name>.pub as OpenSSH files; a SuperNode signs its calls with them."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(folder / f"{name}.key", _private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    (folder / f"{name}.pub").write_bytes(public)


def write_private(path: Path, data: bytes) -> None:
    """Write a secret to a file that is readable only by its owner from the start."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(data)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


LOOPBACK_PORT = 8000
_OFFLINE = "FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"

_PYPROJECT = """\
[project]
name = "scaffpd-federation"
version = "1.0.0"
description = "Federated training with scaffpd."
license = "Apache-2.0"
dependencies = ["scaffpd[flower]"]

[tool.flwr.app]
publisher = "scaffpd"

[tool.flwr.app.components]
serverapp = "scaffpd_federation.server:app"
clientapp = "scaffpd_federation.client:app"

[tool.flwr.app.config]
{setting} = {federation}
"""

_CONNECTION = """\
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
root-certificates = "certificates/ca.pem"
"""

_PROXY = """\
# nginx: what silos reach. Only the fleet API goes through; everything else of the SuperLink stays on loopback.
events {{}}
pid proxy.pid;
http {{
    server {{
        listen {port} ssl;
        server_name {host};
        ssl_certificate     certificates/server.pem;
        ssl_certificate_key certificates/server.key;
        client_max_body_size 64m;  # Flower sends pieces of 5 MB
        location /v1/fleet/ {{
            proxy_pass https://127.0.0.1:{inner};
            proxy_ssl_trusted_certificate certificates/ca.pem;
            proxy_ssl_verify on;
            proxy_ssl_name localhost;  # server.pem has to name it as well
        }}
        location / {{ return 403; }}
    }}
}}
"""


class Commands(NamedTuple):
    """The operators' commands, to be run in the folder that was written."""

    server: tuple[str, ...]  # at the coordinator, once: bring up the SuperLink
    admit: dict[str, str]  # at the coordinator, for each silo: register the public key that it sent
    silos: dict[str, tuple[str, ...]]  # at each silo: its key, then its SuperNode
    run: str  # at the coordinator: start the federation, or resume it


def write_app(federation: FederationFile, out: Path) -> Commands:
    """Write a Flower app, its connection and a proxy's configuration into `out`; return the commands to use them."""
    write_files(out, federation.path.resolve())
    home = out / "flwr"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(_CONNECTION.format(port=LOOPBACK_PORT), encoding="utf-8")
    server = federation.server
    proxy = _PROXY.format(host=server.host, port=server.port, inner=LOOPBACK_PORT)
    (out / "proxy.conf").write_text(proxy, encoding="utf-8")
    return commands(federation)


def write_files(out: Path, federation: Path) -> None:
    """Write the app itself: two modules that import ours, and the project file that Flower reads."""
    package = out / "scaffpd_federation"
    package.mkdir(parents=True, exist_ok=True)
    project = _PYPROJECT.format(setting=FEDERATION, federation=json.dumps(str(federation)))
    (out / "pyproject.toml").write_text(project, encoding="utf-8")
    (package / "__init__.py").write_text('"""scaffpd as a Flower app."""\n', encoding="utf-8")
    for part in ("server", "client"):
        lines = [
            f'"""What runs at the {part}."""',
            "",
            f"from scaffpd.deploy.flower.apps import {part}_app as app",
            "",
        ]
        (package / f"{part}.py").write_text(
            "\n".join([*lines, '__all__ = ["app"]', ""]), encoding="utf-8"
        )


def commands(federation: FederationFile) -> Commands:
    """Return the commands for coordinator and silos."""
    certificates = "--ssl-ca-certfile certificates/ca.pem --ssl-certfile certificates/server.pem"
    superlink = (
        f"{_OFFLINE} flower-superlink --host 127.0.0.1 --port {LOOPBACK_PORT} {certificates} "
        "--ssl-keyfile certificates/server.key --enable-supernode-auth --database superlink.db "
        "--disable-runtime-dependency-installation"
    )
    flwr = f"FLWR_HOME=flwr {_OFFLINE} flwr"
    address = f"{federation.server.host}:{federation.server.port}"
    return Commands(
        server=(
            f"{superlink} &",
            'nginx -p "$PWD" -c proxy.conf   # or what is in there, in the nginx that you run',
        ),
        admit={
            name: f"{flwr} supernode register --name {name} keys/{name}.pub here"
            for name in federation.silos
        },
        silos={name: _silo(name, address) for name in federation.silos},
        run=f"{flwr} run . here",
    )


def _silo(name: str, address: str) -> tuple[str, ...]:
    """Return a silo's commands: make its key (and send the .pub to the coordinator), then start."""
    here = "127.0.0.1:9094"
    secret = "--superexec-auth-secret-file runtime.secret"
    node = (
        f"{_OFFLINE} flower-supernode --superlink {address} --root-certificates ca.pem "
        f"--auth-supernode-private-key {name}.key --node-config '{SETTING}=\"'\"$PWD\"'/silo.toml\"' "
        f"--host 127.0.0.1 --port 9094 --isolation process {secret} &"
    )
    executor = f"python -m scaffpd.deploy.flower.fork_executor --runtime-api-address {here} --insecure {secret}"
    return (
        f"ssh-keygen -t ecdsa -b 384 -N '' -C {name} -f {name}.key && mv {name}.key.pub {name}.pub",
        "head -c 32 /dev/urandom > runtime.secret && chmod 600 runtime.secret",
        node,
        f"{_OFFLINE} {executor}",
    )
