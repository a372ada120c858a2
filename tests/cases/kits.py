"""Startup kits as FLARE's provisioner makes them, in milliseconds, and what must not be in one."""

import functools
import json
import sys
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@functools.cache
def new_key(_name):
    return rsa.generate_private_key(65537, 2048)


def signed(name, by, key, issuer, days=(-1, 300), role=""):
    """A certificate as FLARE's: its name, an administrator's role, whose issuer's key signs."""
    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    subject += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
    now = datetime.now(UTC)
    built = x509.CertificateBuilder(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]),
        x509.Name(subject),
        key.public_key(),
        x509.random_serial_number(),
        now + timedelta(days[0]),
        now + timedelta(days[1]),
    )
    built = built.add_extension(x509.BasicConstraints(ca=name == by, path_length=None), True)
    return built.sign(issuer, SHA256()).public_bytes(Encoding.PEM)


def write_kit(kit, name="va", port=8002, days=(-1, 300), role="", root="root", of="hospitals"):
    startup = kit / "startup"
    startup.mkdir(parents=True)
    key, authority = new_key(name), new_key(root)
    (startup / "client.crt").write_bytes(signed(name, of, key, authority, days, role))
    (startup / "rootCA.pem").write_bytes(signed(of, of, authority, authority))
    (startup / "client.key").write_bytes(secret(key))
    write_target(kit, f"localhost:{port}")
    return kit


def write_target(kit, target):
    service = {"target": target, "scheme": "grpc"}
    document = {"format_version": 2, "servers": [{"name": "hospitals", "service": service}]}
    (kit / "startup" / "fed_client.json").write_text(json.dumps(document))


def secret(key):
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())


def booby_trap(kit, marks):
    """Write into a kit what FLARE, Python or a shell would run; each leaves a file in `marks`."""
    local, startup = kit / "local", kit / "startup"
    (local / "custom").mkdir(parents=True)

    def touch(mark):
        return ["touch", str(marks / mark)]

    def component(mark):
        return {"id": mark, "path": "subprocess.Popen", "args": {"args": touch(mark)}}

    def code(mark):
        return f"open({str(marks / mark)!r}, 'w')\n"

    documents = {
        local / "resources.json": "resources",
        local / "resources.json.default": "default",
        local / "evil__resources.json": "more",
        startup / "evil__p_resources.json": "parent",
    }
    for path, mark in documents.items():
        resources = {"class_allow_list": ["*"], "client": {}, "components": [component(mark)]}
        path.write_text(json.dumps(resources))
    document = json.loads((startup / "fed_client.json").read_text())
    names = {"ssl_private_key": "client.key", "ssl_cert": "client.crt"}
    document["client"] = names | {"ssl_root_cert": "rootCA.pem", "connection_security": "mtls"}
    document["components"] = [component("client")]
    (startup / "fed_client.json").write_text(json.dumps(document))
    handler = {"()": "subprocess.Popen", "args": touch("log")}
    log = {"version": 1, "handlers": {"evil": handler}, "root": {"handlers": ["evil"]}}
    for name in ("log_config.json", "log_config.json.default"):
        (local / name).write_text(json.dumps(log))
    scope = {"name": "evil", "task_data_filters": [component("privacy")]}
    (local / "privacy.json").write_text(json.dumps({"scopes": [scope], "default_scope": "evil"}))
    rights = {"format_version": "1.0", "permissions": {"project_admin": "any"}}
    (local / "authorization.json").write_text(json.dumps(rights))
    for name in ("resources", "custom", "json", "nvflare", "runpy", "sitecustomize"):
        (kit / f"{name}.py").write_text(code(name))
        (local / "custom" / f"{name}.py").write_text(code(name))
    for name in ("start.sh", "sub_start.sh"):
        (startup / name).write_text(f"#!{sys.executable}\n{code(name)}")
        (startup / name).chmod(0o755)
